"""The load generator against a server that only pretends."""

import asyncio
import json
from dataclasses import replace

import pytest

from multilora_cli.bench.load import Load, LoadResult, PlannedRequest, Progress, Tally
from multilora_cli.bench.loadgen import run_load
from multilora_cli.bench.loopback import Loopback, Script
from multilora_cli.bench.prompts import ID_RANGE, PromptMaker
from multilora_cli.bench.selftest import self_test
from multilora_cli.bench.target import Target


def ask(*models: str, tokens: int = 5, arrivals: tuple[float, ...] = ()) -> list[PlannedRequest]:
    times = arrivals or (0.0,) * len(models)
    return [
        PlannedRequest(model, None if model == "base" else model, 12, tokens, time)
        for model, time in zip(models, times, strict=True)
    ]


def drive(
    requests: list[PlannedRequest],
    script: Script | None = None,
    load: Load | None = None,
    *,
    timeout_s: float = 60.0,
) -> tuple[LoadResult, Loopback]:
    async def go() -> tuple[LoadResult, Loopback]:
        async with Loopback(script) as server, Target(server.url, timeout_s=timeout_s) as target:
            return await run_load(target, requests, load or Load(PromptMaker())), server

    return asyncio.run(go())


def cut(*, concurrency: int | None = None, open_loop: bool = False) -> LoadResult:
    """0.45 s of twelve requests whose answers take 0.2 s, or of one that never ends."""
    requests = ask(
        *("a", "b", "c") * 4, tokens=5, arrivals=tuple(index * 0.1 for index in range(12))
    )
    load = Load(PromptMaker(), concurrency, open_loop, limit_s=0.45)
    return drive(requests, Script(gap_s=0.05), load)[0]


@pytest.mark.parametrize(("concurrency", "open_loop"), [(2, False), (None, True), (1, True)])
def test_a_load_ends_when_its_time_is_over(concurrency: int | None, open_loop: bool) -> None:
    result = cut(concurrency=concurrency, open_loop=open_loop)
    assert result.duration_s >= 0.45
    assert 2 <= len(result.records) < 12
    last = result.records[-1]
    assert last.is_cut and last.error is None and not last.counted
    assert last.output_tokens == len(last.times_s) < 5
    assert result.records[0].output_tokens == 5 and not result.records[0].is_cut
    assert [record.index for record in result.records] == list(range(len(result.records)))
    for record in result.records:
        assert record.error is None and record.sent_s < 0.45


def test_hanging_up_is_not_part_of_a_load() -> None:
    """A load that is over early took as long as it took; one that was cut, until it was."""
    done = drive(ask("a", tokens=1), load=Load(PromptMaker()))[0].records

    def lasted(limit_s: float | None, now_s: float, *ends: float) -> float:
        tally = Tally([], Load(PromptMaker(), limit_s=limit_s))
        for index, end in enumerate(ends):
            tally.end(replace(done[0], index=index, end_s=end))
        return tally.result(now_s, cpu_s=0.0).duration_s

    assert lasted(None, 3.0, 2.0) == 3.0
    assert lasted(5.0, 3.0, 2.9) == 3.0
    assert lasted(5.0, 5.4, 2.0, 5.01) == 5.01
    assert lasted(5.0, 5.4) == 5.0


def test_a_server_that_hangs_is_cut_and_not_to_blame() -> None:
    """No token came, and none is made up; without the end of the load it is a timeout."""
    script = Script(failures=(("a", "hang"),))
    result, _ = drive(ask("a", "b"), script, Load(PromptMaker(), limit_s=0.3))
    hung, other = result.records
    assert hung.is_cut and hung.first_s is None and hung.output_tokens == 0
    assert other.output_tokens == 5 and not other.is_cut
    late, _ = drive(ask("a"), script, Load(PromptMaker(), limit_s=30.0), timeout_s=0.2)
    assert late.records[0].error == "timeout" and not late.records[0].is_cut


def test_every_request_is_recorded_in_order_with_its_counts() -> None:
    result, server = drive(ask("base", "a", "b", "a"), load=Load(PromptMaker(), concurrency=2))
    assert [r.model for r in result.records] == ["base", "a", "b", "a"]
    assert [r.adapter for r in result.records] == [None, "a", "b", "a"]
    assert dict(server.asked) == {"base": 1, "a": 2, "b": 1}
    for record in result.records:
        assert record.error is None and record.counted
        assert (record.input_tokens, record.output_tokens) == (12, 5)
        assert len(record.times_s) == 5 and record.first_s == record.times_s[0]
        assert record.scheduled_s <= record.sent_s <= record.first_s <= record.end_s
        assert record.end_s <= result.duration_s
    assert result.overhead.events == 20
    assert result.overhead.peak_in_flight == 2


def test_times_are_the_servers() -> None:
    """A wait before the first token and between tokens is at least as long as it was made."""
    result, _ = drive(ask("a", tokens=4), Script(first_s=0.06, gap_s=0.03))
    (record,) = result.records
    assert record.ttft_s is not None and record.ttft_s >= 0.06
    assert record.itl_s is not None and record.itl_s >= 0.03
    assert record.e2e_s >= 0.06 + 3 * 0.03


def test_without_usage_pieces_of_text_are_counted() -> None:
    result, _ = drive(ask("a", tokens=6), Script(usage=False))
    (record,) = result.records
    assert (record.output_tokens, record.counted) == (6, False)
    assert record.input_tokens == 12  # what was asked for


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        ("http_500", "http_500"),
        ("http_400", "http_400"),
        ("cut", "cut_off"),
        ("error", "stream_error"),
        ("hang", "timeout"),
        ("other", "wrong_model"),
    ],
)
def test_each_failure_has_its_kind_and_harms_no_other(failure: str, kind: str) -> None:
    script = Script(failures=(("b", failure),))
    result, _ = drive(ask("a", "b", "c"), script, timeout_s=1.0 if failure == "hang" else 60.0)
    assert [r.error for r in result.records] == [None, kind, None]


def test_an_unknown_model_and_a_dead_server_are_records() -> None:
    result, _ = drive(ask("nobody"))
    assert result.records[0].error == "http_404"
    assert "does not exist" in result.records[0].detail

    async def dead() -> LoadResult:
        async with Loopback() as server:
            url = server.url
        async with Target(url) as target:
            return await run_load(target, ask("a", "a"), Load(PromptMaker()))

    assert {r.error for r in asyncio.run(dead()).records} == {"unreachable"}


def test_closed_loop_never_has_more_in_flight() -> None:
    result, _ = drive(
        ask(*"abcabcabc", tokens=3), Script(gap_s=0.005), Load(PromptMaker(), concurrency=3)
    )
    assert result.overhead.peak_in_flight == 3
    events = [(r.sent_s, 1) for r in result.records] + [(r.end_s, -1) for r in result.records]
    level = 0
    for _, step in sorted(events):
        level += step
        assert level <= 3


def test_open_loop_waits_for_arrivals_and_counts_from_them() -> None:
    arrivals = (0.1, 0.0, 0.05)
    result, _ = drive(ask("a", "b", "c", arrivals=arrivals), load=Load(PromptMaker(),
                                                                      open_loop=True))  # fmt: skip
    assert tuple(r.scheduled_s for r in result.records) == arrivals
    for record, due in zip(result.records, arrivals, strict=True):
        assert record.sent_s >= due


def test_an_open_loop_with_a_cap_charges_the_wait_to_the_latency() -> None:
    result, _ = drive(
        ask("a", "b", tokens=2),
        Script(first_s=0.08),
        Load(PromptMaker(), concurrency=1, open_loop=True),
    )
    slow = max(result.records, key=lambda record: record.sent_s)
    assert slow.sent_s >= 0.08 and slow.ttft_s is not None and slow.ttft_s >= 0.16


def test_bodies_ask_for_what_was_planned_and_never_repeat_a_prompt() -> None:
    _, server = drive(ask("a", "a", "b"), load=Load(PromptMaker(seed=4), salt=2))
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(set(prompts)) == 3
    for body in server.bodies:
        assert len(body["prompt"]) == 12 and body["max_tokens"] == 5
        assert all(ID_RANGE[0] <= token < ID_RANGE[1] for token in body["prompt"])
        assert body["stream_options"] == {"include_usage": True}
        assert body["ignore_eos"] is True and body["stream"] is True


def test_prompts_repeat_by_seed_salt_and_index_only() -> None:
    def body(seed: int, salt: int, index: int) -> str:
        return json.dumps(PromptMaker(seed=seed).body("a", 8, 1, (salt, index)))

    assert body(1, 2, 3) == body(1, 2, 3)
    assert len({body(1, 2, 3), body(0, 2, 3), body(1, 3, 3), body(1, 2, 4)}) == 4


@pytest.mark.parametrize("style", ["text", "chat"])
def test_text_and_chat_prompts(style: str) -> None:
    maker = PromptMaker(style=style, ignore_eos=False)  # type: ignore[arg-type]
    result, server = drive(ask("a"), load=Load(maker))
    assert result.records[0].error is None and len(result.records[0].times_s) == 5
    body = server.bodies[0]
    assert "ignore_eos" not in body
    text = body["prompt"] if style == "text" else body["messages"][0]["content"]
    assert len(text.split()) == 12


def test_progress_is_told_and_ends_complete() -> None:
    told: list[Progress] = []
    drive(ask(*"abc", tokens=20), Script(gap_s=0.03), Load(PromptMaker(), tell=told.append))
    assert len(told) >= 2
    assert (told[-1].done, told[-1].total, told[-1].in_flight) == (3, 3, 0)
    assert told[-1].ttft_s is not None


def test_the_self_test_drives_a_process_of_its_own() -> None:
    result = asyncio.run(self_test(streams=20, tokens=10, gap_s=0.002))
    assert (result.tokens, result.errors, result.peak_in_flight) == (200, 0, 20)
    assert result.tokens_per_cpu_s > 0


@pytest.mark.slow
def test_two_thousand_streams_at_once() -> None:
    """Issue 9: all of them are open together and no token is lost."""
    result = asyncio.run(self_test(streams=2000, tokens=50, gap_s=0.2))
    assert (result.peak_in_flight, result.errors) == (2000, 0)
    assert result.tokens == 100_000
