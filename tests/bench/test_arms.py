"""Presets: what is asked of whom, and what is refused."""

from collections import Counter

import pytest

from multilora_cli.bench.arms import (
    PRESETS,
    Program,
    Room,
    Workload,
    make_program,
    parse_lengths,
)
from multilora_cli.bench.workload import punica_trace
from multilora_cli.errors import BadInput

ROOM = Room(8, (16, 24, 4, 8, 8, 4, 64, 64), 1024)


def lengths(program: Program) -> set[tuple[tuple[int, int], ...]]:
    return {tuple((r.input_tokens, r.output_tokens) for r in arm.requests) for arm in program.arms}


@pytest.mark.parametrize("preset", PRESETS)
def test_arms_of_a_preset_have_the_same_lengths(preset) -> None:
    """Only who is asked may differ, or nothing could be said about it."""
    program = make_program(preset, Workload(requests=16, seed=5), ROOM)
    assert len(lengths(program)) == 1
    assert len({arm.label for arm in program.arms}) == len(program.arms) >= 2
    assert all(len(arm.requests) in (8, 16) for arm in program.arms)
    assert all((r.adapter or 0) < 8 for arm in program.arms for r in arm.requests)
    assert program == make_program(preset, Workload(requests=16, seed=5), ROOM)


def test_heterogeneous_asks_what_the_laws_say() -> None:
    program = make_program("heterogeneous", Workload(requests=32), Room(100))
    counts = {
        arm.label: sorted(Counter(r.adapter for r in arm.requests).values(), reverse=True)
        for arm in program.arms
    }
    assert counts == {
        "base": [32],
        "identical": [32],
        "skewed": [11, 7, 5, 3, 2, 2, 1, 1],
        "uniform": [6, 6, 5, 5, 5, 5],
        "distinct": [1] * 32,
    }
    assert {r.adapter for r in program.arms[0].requests} == {None}
    assert program.notes == () and program.rounds == 2


def test_few_adapters_are_dealt_in_turn_and_that_is_said() -> None:
    program = make_program("heterogeneous", Workload(requests=32), ROOM)
    distinct = program.arms[-1]
    assert Counter(r.adapter for r in distinct.requests) == dict.fromkeys(range(8), 4)
    assert "8 that the server has" in program.notes[0]


@pytest.mark.parametrize(
    ("workload", "open_loop", "concurrency"),
    [
        (Workload(requests=4), False, 16),
        (Workload(requests=4, concurrency=3), False, 3),
        (Workload(requests=4, rate=float("inf")), False, None),
        (Workload(requests=4, rate=float("inf"), concurrency=2), False, 2),
        (Workload(requests=4, rate=5.0), True, None),
        (Workload(requests=4, rate=5.0, concurrency=2), True, 2),
    ],
)
def test_rate_and_concurrency_choose_the_loop(workload, open_loop, concurrency) -> None:
    for arm in make_program("heterogeneous", workload, ROOM).arms:
        assert (arm.open_loop, arm.concurrency) == (open_loop, concurrency)
        assert any(r.arrival_s > 0 for r in arm.requests) == open_loop


def test_punica_is_the_published_set() -> None:
    program = make_program("punica", Workload(), Room(2000, (), 4096))
    skewed = next(arm for arm in program.arms if arm.label == "skewed")
    assert list(skewed.requests) == punica_trace("skewed")
    assert skewed.concurrency == 32 and program.notes == ()
    short = make_program("punica", Workload(requests=64), ROOM)
    assert "context of 1024" in short.notes[0]
    assert all(r.input_tokens + r.output_tokens <= 1024 for a in short.arms for r in a.requests)


def test_table3_has_the_rows_that_the_server_can_fill() -> None:
    program = make_program("s-lora-table3", Workload(), Room(100, (), 4096))
    assert [arm.label for arm in program.arms] == ["n=0", "n=1", "n=5", "n=100"]
    assert "1000, 2000" in program.notes[0]
    hundred = program.arms[-1]
    assert len(hundred.requests) == 1200 and hundred.open_loop
    first = [(r.adapter, r.input_tokens, r.output_tokens) for r in hundred.requests[:3]]
    assert first == [(37, 388, 268), (95, 467, 357), (73, 14, 509)]
    assert {r.adapter for r in program.arms[0].requests} == {None}
    assert make_program("s-lora-table3", Workload(), ROOM).arms[-1].label == "n=8"
    saturated = make_program("s-lora-table3", Workload(rate=float("inf")), ROOM)
    assert not any(arm.open_loop for arm in saturated.arms)


def test_rank_mix_gives_every_rank_the_same_share() -> None:
    program = make_program("rank-mix", Workload(requests=50), ROOM)
    together = program.arms[-1]
    by_rank = Counter(ROOM.ranks[r.adapter or 0] for r in together.requests)
    assert by_rank == {4: 10, 8: 10, 16: 10, 24: 10, 64: 10}
    alone = {arm.label: arm for arm in program.arms if arm.label.endswith("alone")}
    assert set(alone) == {"rank 4 alone", "rank 64 alone"}
    assert {r.adapter for r in alone["rank 4 alone"].requests} == {2, 5}
    with pytest.raises(BadInput, match="ranks"):
        make_program("rank-mix", Workload(), Room(8))


def test_cold_start_asks_each_adapter_once_without_a_warm_up() -> None:
    program = make_program("cold-start", Workload(), ROOM)
    assert not program.warm_up and program.rounds == 1
    for arm in program.arms[:-1]:
        assert [r.adapter for r in arm.requests] == list(range(8))
        assert arm.concurrency == 1
    assert [arm.action for arm in program.arms] == [
        "none", "none", "to warm", "to cold", "reload", "none",
    ]  # fmt: skip


def test_churn_never_asks_what_is_unloaded() -> None:
    program = make_program("churn", Workload(), ROOM)
    assert [arm.action for arm in program.arms] == ["none", "churn"]
    assert {r.adapter for arm in program.arms for r in arm.requests} == {0, 1, 2, 3}
    with pytest.raises(BadInput, match="two adapters"):
        make_program("churn", Workload(), Room(1))


def test_smoke_needs_no_adapter_and_others_do() -> None:
    assert [a.label for a in make_program("smoke", Workload(), Room(0)).arms] == ["base"]
    with pytest.raises(BadInput, match="lists no adapters"):
        make_program("heterogeneous", Workload(), Room(0))


def test_lengths_are_laws_or_ranges() -> None:
    inputs, outputs = parse_lengths("5-9:3", 200, 1)
    assert (min(inputs), max(inputs), set(outputs)) == (5, 9, {3})
    assert parse_lengths("alpaca-like", 10, 1) == parse_lengths("alpaca-like", 10, 1)
    for bad in ("5", "5:6:7", "0:3", "9-5:3", "a:b", "5:", "sharegpt"):
        with pytest.raises(BadInput, match="--lengths"):
            parse_lengths(bad, 4, 1)


@pytest.mark.parametrize("preset", ["punica", "s-lora-table3"])
def test_published_lengths_are_not_changed_in_silence(preset) -> None:
    with pytest.raises(BadInput, match="published lengths"):
        make_program(preset, Workload(lengths="8:8"), ROOM)


def test_what_the_context_cannot_hold_is_refused_before_it_is_sent() -> None:
    with pytest.raises(BadInput, match="context of 1024"):
        make_program("heterogeneous", Workload(lengths="1000:100"), ROOM)
    make_program("heterogeneous", Workload(lengths="1000:100"), Room(8))  # unknown context
