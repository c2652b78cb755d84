"""A server of our own beside a command, for as long as the command needs one."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from multilora_cli.cli.console import Console
from multilora_cli.errors import MloraError
from multilora_cli.fleet.load import load_fleet

_STOP_S = 10.0  # for what was admitted to end; then it is killed


@asynccontextmanager
async def background_server(fleet: Path | None, console: Console) -> AsyncIterator[str]:
    """`mlora serve FLEET` on a free port for as long as the context lives; gives its URL.

    Raises MloraError where the fleet file is wrong or the server does not start.
    """
    path = load_fleet(fleet).path  # a mistake in the file is told here, with its own exit code
    command = [sys.executable, "-m", "multilora_cli", "serve", str(path), "--port", "0", "--json"]
    command += ["--set", "server.state_file=off"]  # what is measured leaves nothing behind
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True
    )
    assert process.stdout is not None
    try:
        with console.progress() as report:
            report("starting a server of its own", 0, 0)
            url = await _told_url(process.stdout)
        if url is None:
            await process.wait()
            raise MloraError("the server did not start; what it said stands above")
        yield url
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), _STOP_S)
            except TimeoutError:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


async def _told_url(stdout: asyncio.StreamReader) -> str | None:
    """The address in the JSON value that a ready server prints over several lines; None: it ended
    before it was ready."""
    text = ""
    while line := (await stdout.readline()).decode("utf-8", "replace"):
        text += line
        with suppress(ValueError):
            return str(json.loads(text)["url"])
    return None
