"""A report to look at, made by a whole run against a pretended server."""

import asyncio
from dataclasses import replace
from typing import Any

from multilora_cli.bench.arms import Room, Workload, make_program
from multilora_cli.bench.campaign import Settings, Side, run_program
from multilora_cli.bench.churn import Mark
from multilora_cli.bench.environment import environment
from multilora_cli.bench.loopback import Loopback, Script
from multilora_cli.bench.measure import Slo
from multilora_cli.bench.report import build_report
from multilora_cli.bench.target import Target

MODELS = ("base", "a", "b<script>", "c", "d")
_MARKS = (Mark("replace", "a", 0.02, 0.1), Mark("unload", "c", 0.05, 0.1))


def made_report() -> dict[str, Any]:
    """A report of two rounds of five loads, with ranks, errors and marks."""

    async def go() -> dict[str, Any]:
        script = Script(models=MODELS, first_s=0.02, gap_s=0.02)
        async with Loopback(script) as server, Target(server.url) as target:
            fleet = await target.fleet()
            program = make_program(
                "heterogeneous", Workload(requests=8, lengths="8:4", rounds=2), Room(4)
            )
            slo = Slo(ttft_s=5.0)
            settings = Settings(slo=slo, ranks={"a": 8, "b<script>": 8, "c": 64, "d": 128})
            side = Side("", target, fleet, fleet.adapters)
            passes, notes = await run_program([side], program, settings)
        marked = [
            done if done.arm != "distinct" else replace(done, marks=_MARKS) for done in passes
        ]
        facts = {
            "command": "mlora bench <fleet>", "commit": None, "seed": 3, "rounds": 2,
            "preset": "heterogeneous", "machine": environment(), "settings": {"rate": None},
            "servers": [{"label": "", "url": "http://h", "base": "base", "adapters": 4}],
        }  # fmt: skip
        return build_report(marked, facts, notes, slo)

    return asyncio.run(go())
