"""A fleet's engine in this process, for `mlora bench --offline FLEET`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from multilora_cli.cli.console import Console

if TYPE_CHECKING:
    from multilora_cli.bench.engine_target import EngineTarget


@contextmanager
def own_engine(console: Console, fleet: Path | None) -> "Iterator[EngineTarget]":
    """The engine that `mlora serve FLEET` would start, stopped at the end. Raises MloraError."""
    from multilora_cli.bench.engine_target import BaseFacts, EngineTarget
    from multilora_cli.cli.startup import prepare
    from multilora_cli.engine.process import settled_interpreter

    with console.progress() as report:
        # What operators have changed belongs to their server, not to a measurement.
        startup = prepare(fleet, ["server.state_file=off"], report=report)
        report("import", 0, 1)
        from multilora_cli.engine.assemble import build_engine

        engine = build_engine(startup.engine, report)
    for note in (*startup.notes, *engine.parts.ready.notes):
        console.note(note)
    for name, error in startup.failures:
        console.error(f"adapter {name} is not measured: {error.about(name)}", error.hint)
    facts = BaseFacts(
        startup.server.base_name, engine.parts.max_model_len, startup.geometry.eos_token_ids
    )
    try:
        with settled_interpreter():
            yield EngineTarget(engine, startup.registry, facts)
    finally:
        engine.close()
