"""`mlora bench front`: what the front process can stream and take in, whatever the engine."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from multilora_cli.cli import bench_flags as flags
from multilora_cli.cli.console import Console
from multilora_cli.cli.options import JsonOption, QuietOption


def front(
    streams: Annotated[int, typer.Option(help="Clients at once.", min=1, max=1280)] = 256,
    tokens: Annotated[int, typer.Option(help="Tokens of each.", min=2, max=100_000)] = 400,
    requests: Annotated[
        int | None, typer.Option(help="Requests in all; one a client by default.", min=1)
    ] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 16,
    gap: Annotated[float, typer.Option(help="Seconds between steps of the engine.", min=0)] = 0.01,
    style: flags.Prompts = "ids",
    vocabulary: Annotated[int, typer.Option(min=1000, help="Tokens of the tokenizer.")] = 128_256,
    profile: Annotated[
        Path | None, typer.Option(help="Write cProfile's figures of the front to a file.")
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure our front process alone: an engine that only pretends, real clients over HTTP.

    The tokens per second of the front's own CPU time are its limit on a core of its own. With short
    answers it is what a request costs: --streams 64 --requests 5000 --prompt 200 --tokens 2.

    Example: mlora bench front --streams 256
    """
    from dataclasses import asdict

    from multilora_cli.bench.front import FrontLoad, measure_front
    from multilora_cli.cli.bench_view import show_figures

    console = Console(as_json=as_json, quiet=quiet)
    command = [sys.executable, "-m", __name__]
    load = FrontLoad(
        streams=streams,
        requests=streams if requests is None else requests,
        prompt_tokens=prompt,
        tokens=tokens,
        style=style,
        gap_s=gap,
        vocab_size=vocabulary,
        profile=str(profile) if profile else None,
    )
    value = asdict(asyncio.run(measure_front(command, load)))
    show_figures(console, value)
    console.value(value)


def serve_pretended(base: Path, vocab_size: int, gap_s: float, profile: str | None) -> None:
    """The front process over a pretended engine; writes its port to standard output."""
    from multilora_cli.adapters.entry import ServedBase
    from multilora_cli.adapters.registry import Registry
    from multilora_cli.bench.pretend_engine import pretend_spawn
    from multilora_cli.server.config import ServerConfig
    from multilora_cli.server.launch import Hooks, Served, run_server
    from multilora_cli.sizing.geometry import read_geometry

    config = ServerConfig(base_name="base", base_path=base, vocab_size=vocab_size, port=0)
    registry = Registry(ServedBase(read_geometry(base), "base"))
    hooks = Hooks(ready=lambda ready, url: print(url, flush=True))

    def serve() -> None:
        run_server(Served(config, registry, pretend_spawn(gap_s, vocab_size)), hooks)

    if profile is None:
        serve()
        return
    import cProfile

    with cProfile.Profile() as profiler:
        serve()
    profiler.dump_stats(profile)


def _child(arguments: list[str]) -> None:
    import json

    options: dict[str, Any] = json.loads(arguments[0])
    serve_pretended(Path(options.pop("base")), **options)


if __name__ == "__main__":
    _child(sys.argv[1:])
