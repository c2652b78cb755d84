"""`mlora bench --offline FLEET`: the served form's loads on an engine of this process."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from multilora_cli.bench.engine_load import EngineSide, run_engine_load
from multilora_cli.bench.load import Load, LoadResult, PlannedRequest, Progress
from multilora_cli.bench.prompts import PromptMaker
from multilora_cli.cli.app import app
from multilora_cli.engine.messages import (
    Abort,
    AdapterRef,
    Delta,
    Fault,
    Reply,
    Snapshot,
    Submit,
    ToEngine,
)
from multilora_cli.errors import Refused

FLEET = Path(__file__).parents[2] / "fleet.example.yaml"
REFS = {name: AdapterRef(name, f"digest-{name}", f"/{name}", 1) for name in "ab"}


class Counting:
    """An engine that gives every answer a token a step, and does what a test says by adapter."""

    def __init__(self, faults: Sequence[str] = (), silent: Sequence[str] = ()) -> None:
        self.submitted: list[Submit] = []
        self.most = 0  # answers at once
        self.aborted: list[int] = []
        self._faults, self._silent = faults, silent
        self._running: dict[int, tuple[Submit, int]] = {}

    @property
    def idle_wait_s(self) -> float | None:
        return 0.0 if self._running else None

    def handle(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self.submitted.append(message)
            self._running[message.request_id] = (message, 0)
            self.most = max(self.most, len(self._running))
        elif isinstance(message, Abort):
            self.aborted.append(message.request_id)
            del self._running[message.request_id]

    def step(self) -> list[Delta]:
        deltas = []
        for request_id, (submit, made) in list(self._running.items()):
            name = submit.adapter.name if submit.adapter is not None else ""
            if name in self._silent:
                continue
            if name in self._faults:
                fault = Fault("adapter_unavailable", "gone")
                deltas.append(Delta(request_id, 0, [], finish_reason="error", fault=fault))
                del self._running[request_id]
                continue
            ends = made + 1 == submit.params.max_tokens
            self._running[request_id] = (submit, made + 1)
            if ends:
                del self._running[request_id]
            deltas.append(Delta(request_id, 0, [7], finish_reason="length" if ends else None))
        return deltas

    def take_events(self) -> list[Any]:
        return []

    def take_replies(self) -> list[Reply]:
        return []

    def snapshot(self) -> Snapshot:
        raise AssertionError("a load asks for no snapshot")


def ask(*names: str, tokens: int = 5, gap_s: float = 0.0) -> list[PlannedRequest]:
    return [
        PlannedRequest(name or "base", name or None, 12, tokens, index * gap_s)
        for index, name in enumerate(names)
    ]


def drive(
    engine: Counting, requests: list[PlannedRequest], load: Load | None = None, first: int = 1
) -> LoadResult:
    side = EngineSide(engine, REFS, lambda number: first, stop_ids=(2,))
    return asyncio.run(run_engine_load(side, requests, load or Load(PromptMaker())))


def test_every_request_is_a_record_with_its_own_tokens() -> None:
    engine = Counting()
    result = drive(engine, ask("a", "", "b"), Load(PromptMaker(), concurrency=2), first=40)
    assert engine.most == 2 == result.overhead.peak_in_flight
    assert [submit.request_id for submit in engine.submitted] == [40, 41, 42]
    assert [submit.adapter for submit in engine.submitted] == [REFS["a"], None, REFS["b"]]
    assert [len(submit.prompt) for submit in engine.submitted] == [12, 12, 12]
    assert len({tuple(submit.prompt) for submit in engine.submitted}) == 3
    assert {submit.params.stop_token_ids for submit in engine.submitted} == {()}
    for record, name in zip(result.records, ("a", None, "b"), strict=True):
        assert (record.adapter, record.output_tokens, record.error) == (name, 5, None)
        assert record.counted and len(record.times_s) == 5
        assert record.scheduled_s == record.sent_s <= record.times_s[0] <= record.end_s
    assert result.overhead.events == 15


def test_prompts_are_those_that_a_server_is_sent() -> None:
    """So that a served run and this one measure the same load."""
    engine = Counting()
    load = Load(PromptMaker(seed=3, ignore_eos=False), salt=2)
    drive(engine, ask("a", "a"), load)
    expected = [load.prompts.body("a", 12, 5, (2, index))["prompt"] for index in range(2)]
    assert [submit.prompt for submit in engine.submitted] == expected
    assert {submit.params.stop_token_ids for submit in engine.submitted} == {(2,)}


def test_requests_of_an_open_loop_come_when_they_are_due() -> None:
    result = drive(Counting(), ask("a", "b", "", gap_s=0.05), Load(PromptMaker(), open_loop=True))
    for index, record in enumerate(result.records):
        assert record.scheduled_s == pytest.approx(index * 0.05)
        assert record.scheduled_s <= record.sent_s < record.scheduled_s + 0.04
    assert result.overhead.cpu_share < 0.5  # it sleeps meanwhile


def test_a_request_that_fails_is_a_record() -> None:
    told: list[Progress] = []
    load = Load(PromptMaker(), tell=told.append)
    failed, fine = drive(Counting(faults=("a",)), ask("a", "b"), load).records
    assert (failed.error, failed.detail, failed.output_tokens) == ("adapter_unavailable", "gone", 0)
    assert failed.first_s is None and fine.error is None
    assert (told[-1].done, told[-1].total, told[-1].errors) == (2, 2, 1)


def test_a_load_ends_when_its_time_is_over_and_leaves_nothing_behind() -> None:
    engine = Counting(silent=("a",))
    load = Load(PromptMaker(), concurrency=2, limit_s=0.2)
    result = drive(engine, ask("a", *[""] * 5000, tokens=1000), load)
    assert 0.2 <= result.duration_s < 60  # all of it would take minutes
    assert result.duration_s == max(record.end_s for record in result.records)
    silent, *others = result.records
    assert silent.is_cut and silent.first_s is None and silent.error is None
    assert others[-1].is_cut and 0 < others[-1].output_tokens < 1000
    assert len(engine.aborted) == 2 and engine.idle_wait_s is None
    open_loop = Load(PromptMaker(), open_loop=True, limit_s=0.1)
    assert len(drive(Counting(), ask("", "", "", gap_s=0.08), open_loop).records) == 2


def test_an_engine_that_stops_is_noticed() -> None:
    engine = Counting(silent=("a",))
    engine.handle = lambda message: None  # type: ignore[method-assign]
    with pytest.raises(Refused, match="has stopped"):
        drive(engine, ask("a"))


def bench(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def test_a_fleets_engine_is_measured_as_its_server_is(tmp_path: Path) -> None:
    """The same loads, tables, ranks, tiers and rows; only the transport is missing."""
    rows = tmp_path / "rows.jsonl"
    result = bench(
        "--offline", str(FLEET), "--requests", "6", "--lengths", "8:3", "--rounds", "1",
        "--gpu", "h200", "--rows", str(rows), "--json",
    )  # fmt: skip
    value = json.loads(result.stdout)
    arms = {arm["label"]: arm["measures"] for arm in value["arms"]}
    assert list(arms) == ["base", "identical", "skewed", "uniform", "distinct"]
    for found in arms.values():
        assert (found["completed"], found["errors"], found["cached_tokens"]) == (6, {}, 0)
        assert found["output_length"]["total"] == 18 and found["usage_counted"]
    assert arms["distinct"]["adapters"] == 6 and arms["distinct"]["server_agrees"]
    assert arms["distinct"]["loads"] == 0  # the warm-up has loaded them
    assert sum(g["requests"] for g in arms["skewed"]["per_rank"]) == 6
    assert {g["name"] for g in arms["uniform"]["per_tier"]} == {"hot"}
    assert value["servers"][0]["url"] == "the engine alone"
    told = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["load"] for row in told] == list(arms)
    assert all(row["bound"]["share"] > 0 for row in told)


def test_what_only_a_server_has_is_refused_in_one_line() -> None:
    for arguments in (("--url", "http://h:1"), ("--preset", "churn"), ("--prompts", "chat")):
        result = bench(str(FLEET), "--offline", *arguments, code=2)
        assert f"{' '.join(arguments[:1])}" in result.stderr and "needs a server" in result.stderr


def test_offline_with_a_fleet_and_without_one_are_two_commands() -> None:
    """Flags of the other one are refused by name."""
    assert "--batch" in bench("--offline", str(FLEET), "--batch", "3", code=2).stderr
    assert "--for" in bench("--offline", "--for", "3", code=2).stderr
    assert "--settings" in bench("--offline", "--help").stdout
