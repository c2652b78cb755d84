"""A server process over a fake engine process: `serve_fake.py FOLDER PORT BEHAVIOUR [DRAIN_S]`.

Prints one line a hook: listening URL, ready URL PID, draining N.
"""

import sys
from pathlib import Path
from typing import Any

import msgspec

from multilora_cli.errors import MloraError
from multilora_cli.server.launch import Hooks, Served, run_server
from tests.fakes import Behaviour, spawn_process, tiny_config, tiny_registry


def main() -> int:
    """Serve until a signal."""
    folder, port = Path(sys.argv[1]), int(sys.argv[2])
    spawn = spawn_process(msgspec.json.decode(sys.argv[3], type=Behaviour))
    pids: list[int] = []

    def remember() -> tuple[Any, Any]:
        process, connection = spawn()
        pids.append(process.pid)
        return process, connection

    def say(*words: object) -> None:
        sys.stdout.write(" ".join(map(str, words)) + "\n")
        sys.stdout.flush()

    hooks = Hooks(
        listening=lambda url: say("listening", url),
        ready=lambda _, url: say("ready", url, pids[-1]),
        draining=lambda count: say("draining", count),
    )
    drain_s = float(sys.argv[4]) if len(sys.argv) > 4 else 10.0
    config = tiny_config(folder, port=port, drain_s=drain_s)
    try:
        return run_server(Served(config, tiny_registry(folder), remember), hooks)
    except MloraError as error:
        sys.stderr.write(error.message + "\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
