"""Figures against records whose answers can be worked out by hand."""

from array import array
from dataclasses import replace

import pytest

from multilora_cli.bench.load import RequestRecord
from multilora_cli.bench.measure import (
    BASE,
    Known,
    Slo,
    attainment,
    jain_index,
    measure,
    parse_slo,
    satisfaction,
    spread,
    strip_rate,
)
from multilora_cli.errors import BadInput


def record(
    adapter: str | None = "a",
    *,
    due: float = 0.0,
    first: float | None = 1.0,
    gap: float = 0.5,
    tokens: int = 5,
    error: str | None = None,
) -> RequestRecord:
    times = [] if first is None else [due + first + gap * i for i in range(tokens)]
    return RequestRecord(
        index=0,
        model=adapter or "base",
        adapter=adapter,
        scheduled_s=due,
        sent_s=due,
        first_s=None if first is None else due + first,
        end_s=times[-1] if times else due,
        times_s=array("d", times),
        last_s=times[-1] if times else None,
        input_tokens=10,
        output_tokens=len(times),
        cached_tokens=0,
        counted=True,
        error=error,
    )


def test_latencies_of_one_request() -> None:
    found = record(due=2.0, first=1.0, gap=0.5, tokens=5)
    assert (found.ttft_s, found.itl_s, found.e2e_s) == (1.0, 0.5, 3.0)


def test_an_answer_that_was_cut_counts_with_its_tokens_only() -> None:
    """Neither completed nor failed; late without a first token only when it surely was late."""
    whole = record(tokens=6)
    going = replace(record(tokens=4), is_cut=True, counted=False)
    found = measure([whole, going], 10.0, slo=Slo(ttft_s=2.0))
    assert (found.requests, found.completed, found.cut, dict(found.errors)) == (2, 1, 1, {})
    assert found.output_tokens_per_s == pytest.approx(1.0)  # 6 + 4
    assert (
        found.requests_per_s == pytest.approx(0.1) and found.goodput_per_s == found.requests_per_s
    )
    assert found.ttft is not None and found.ttft.count == 2
    assert found.e2e is not None and found.e2e.count == 1
    assert found.usage_counted and found.slo_attainment == 1.0
    assert [(g.requests, g.completed) for g in found.per_adapter] == [(2, 1)]
    silent = replace(record(first=None), is_cut=True)  # cut as it was sent: nobody knows
    late = replace(silent, end_s=6.0)
    assert measure([whole, silent], 10.0).slo_attainment == 1.0
    assert measure([whole, late], 10.0).slo_attainment == 0.5
    assert measure([whole, late], 10.0).satisfaction == measure([whole], 10.0).satisfaction / 2


def test_rates_count_answers_over_the_wall_with_drain() -> None:
    found = measure([record(), record(), record(None, error="timeout", first=None)], 10.0)
    assert (found.requests, found.completed, dict(found.errors)) == (3, 2, {"timeout": 1})
    assert found.requests_per_s == pytest.approx(0.2)
    assert found.output_tokens_per_s == pytest.approx(1.0)
    assert found.input_tokens_per_s == pytest.approx(2.0)
    assert found.offered_rate is None


def test_offered_rate_is_the_traces_own() -> None:
    rows = [record(due=0.5 * (i + 1)) for i in range(8)]
    assert measure(rows, 10.0, open_loop=True).offered_rate == pytest.approx(2.0)


def test_percentiles_interpolate() -> None:
    found = spread([None, *(float(i) for i in range(101))])
    assert found is not None and found.count == 101
    assert (found.mean, found.p50, found.p90, found.p95, found.p99, found.max) == (
        50, 50, 90, 95, 99, 100,
    )  # fmt: skip
    assert spread([None]) is None


def test_objectives_count_failures_as_misses() -> None:
    """SLO 6 s to the first token; satisfaction 1 - (t/6)^2."""
    rows = [
        record(first=0.0),
        record(first=3.0),
        record(first=6.0),
        record(first=1.0, error="cut_off"),
    ]
    assert attainment(rows) == pytest.approx(0.5)
    assert satisfaction(rows) == pytest.approx((1 + 0.75 + 0 + 0) / 4)
    assert attainment([]) == satisfaction([]) == 0.0


def test_goodput_needs_every_objective() -> None:
    slo = Slo(ttft_s=1.0, itl_s=0.5)
    rows = [record(), record(first=1.1), record(gap=0.6), record(error="timeout")]
    assert [slo.kept(row) for row in rows] == [True, False, False, False]
    assert measure(rows, 2.0, slo=slo).goodput_per_s == pytest.approx(0.5)
    assert measure(rows, 2.0).goodput_per_s is None


def test_strip_leaves_ramp_and_drain_out() -> None:
    steady = record(first=0.0, gap=0.1, tokens=101)  # 10 tokens/s for 10 s
    assert strip_rate([steady]) == pytest.approx(10.0, rel=0.02)
    straggler = record(first=0.0, gap=10.0, tokens=11)  # 0.1 tokens/s for 100 s
    whole = (101 + 11) / 100
    assert strip_rate([steady, straggler]) < whole / 5
    assert strip_rate([]) == strip_rate([record(tokens=1)]) == 0.0


def test_a_piece_of_several_tokens_counts_for_all_of_them() -> None:
    one = record(first=0.0, gap=0.1, tokens=101)
    packed = RequestRecord(
        0, "a", "a", 0.0, 0.0, 0.0, 10.0, one.times_s, 10.0, 10, 404, 0, True
    )  # fmt: skip
    assert strip_rate([packed]) == pytest.approx(4 * strip_rate([one]))


def test_groups_add_up() -> None:
    """A-OUT-12: requests per adapter are those that were sent, the base among them."""
    rows = [record("a"), record("b"), record("a", error="http_500"), record(None)]
    found = measure(rows, 1.0, known=Known({"a": 8, "b": 64}, {"a": "hot"}))
    assert {g.name: (g.requests, g.completed) for g in found.per_adapter} == {
        "a": (2, 1), "b": (1, 1), BASE: (1, 1),
    }  # fmt: skip
    assert sum(g.requests for g in found.per_adapter) == found.requests
    assert sum(g.completed for g in found.per_adapter) == found.completed
    assert [(g.name, g.requests) for g in found.per_rank] == [("8", 2), ("64", 1)]
    assert [(g.name, g.requests) for g in found.per_tier] == [("hot", 2)]
    assert found.adapters == 2


def test_fairness_is_over_speeds_not_over_demand() -> None:
    assert jain_index([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain_index([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain_index([0.0]) is None
    popular = measure([record("a")] * 9 + [record("b")], 1.0)
    assert popular.jain == pytest.approx(1.0)
    starved = measure([record("a"), record("b", first=20.0)], 1.0)
    assert starved.worst_adapter == "b" and starved.jain is not None and starved.jain < 0.8


def test_lengths_are_the_realised_ones() -> None:
    found = measure([record(tokens=2), record(tokens=6)], 1.0)
    assert (found.output_length.mean, found.output_length.sd) == (4, 2)
    assert (found.output_length.min, found.output_length.max) == (2, 6)
    assert found.input_length.total == 20


def test_a_load_that_failed_whole_has_no_latencies() -> None:
    found = measure([record(first=None, error="http_500")] * 3, 1.0)
    assert found.ttft is found.itl is found.e2e is None
    assert (found.requests_per_s, found.slo_attainment, found.jain) == (0, 0, None)


def test_objectives_are_parsed_or_refused() -> None:
    assert parse_slo("ttft=1s,itl=50ms") == Slo(1.0, 0.05, None)
    assert parse_slo("e2e=2m") == Slo(None, None, 120.0)
    for bad in ("ttft", "ttft=1", "tbt=1s", ""):
        with pytest.raises(BadInput, match="--slo"):
            parse_slo(bad)


def test_trailing_tokens_without_text_do_not_make_an_answer_look_faster() -> None:
    """The mean ITL of an answer runs to its end, not to its last piece of text."""
    whole = record(first=1.0, gap=0.5, tokens=5)
    silent = replace(whole, times_s=whole.times_s[:2])  # the last three tokens had no text
    assert silent.itl_s == whole.itl_s == 0.5
