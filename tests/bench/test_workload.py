"""Workloads against the vectors computed from the released generators."""

import numpy as np
import pytest

from multilora_cli.bench.workload import (
    LENGTHS,
    SLora,
    arrivals,
    punica_trace,
    slora_trace,
)

FIRST_10 = [(388, 268, 0.050), (467, 357, 0.088), (14, 509, 0.104)]


@pytest.mark.parametrize(
    ("setting", "count", "distinct", "tokens", "last", "first"),
    [
        (SLora(200), 600, 187, (153_447, 155_474), 301.00,
         [(74, 12, 410, 0.160), (190, 473, 43, 3.086), (146, 99, 292, 3.363)]),
        (SLora(400, rate=6), 1800, 396, (466_980, 469_301), 293.72,
         [(149, 140, 491, 0.027), (380, 155, 468, 0.130), (292, 284, 142, 0.202)]),
        (SLora(5, rate=10, duration_s=120), 1200, 5, (314_805, 315_809), 124.99,
         [(a, *rest) for a, rest in zip((1, 4, 3), FIRST_10, strict=True)]),
        (SLora(100, rate=10, duration_s=120), 1200, 100, (314_805, 315_809), 124.99,
         [(a, *rest) for a, rest in zip((37, 95, 73), FIRST_10, strict=True)]),
        (SLora(1000, rate=10, duration_s=120), 1200, 704, (314_805, 315_809), 124.99,
         [(a, *rest) for a, rest in zip((374, 950, 731), FIRST_10, strict=True)]),
        (SLora(2000, rate=10, duration_s=120), 1200, 907, (314_805, 315_809), 124.99,
         [(a, *rest) for a, rest in zip((749, 1901, 1463), FIRST_10, strict=True)]),
    ],
)  # fmt: skip
def test_slora_traces(setting: SLora, count, distinct, tokens, last, first) -> None:
    trace = slora_trace(setting)
    assert len(trace) == count
    assert len({request.adapter for request in trace}) == distinct
    sums = sum(r.input_tokens for r in trace), sum(r.output_tokens for r in trace)
    assert sums == tokens
    assert trace[-1].arrival_s == pytest.approx(last, abs=0.01)
    for request, (adapter, inputs, outputs, time) in zip(trace, first, strict=False):
        assert (request.adapter, request.input_tokens, request.output_tokens) == (
            adapter, inputs, outputs,
        )  # fmt: skip
        assert request.arrival_s == pytest.approx(time, abs=0.0011)


@pytest.mark.parametrize(
    ("alpha", "top", "distinct"), [(0.1, 0.570, 107), (0.3, 0.225, 163), (0.6, 0.048, 188)]
)
def test_alpha_concentrates_when_small(alpha: float, top: float, distinct: int) -> None:
    trace = slora_trace(SLora(200, alpha=alpha))
    share = sum(request.adapter == 0 for request in trace) / len(trace)
    assert share == pytest.approx(top, abs=0.001)
    assert len({request.adapter for request in trace}) == distinct


@pytest.mark.parametrize(("cv", "last"), [(1, 301), (2, 285), (4, 354), (6, 343), (8, 433)])
def test_bursts_stretch_the_trace(cv: float, last: float) -> None:
    trace = slora_trace(SLora(200, cv=cv))
    assert trace[-1].arrival_s == pytest.approx(last, abs=0.6)


def test_punica_lengths() -> None:
    trace = punica_trace("distinct")
    assert [r.input_tokens for r in trace[:8]] == [24, 42, 8, 27, 3, 29, 18, 14]
    assert [r.output_tokens for r in trace[:8]] == [45, 1293, 936, 1796, 1502, 770, 1278, 754]
    assert sum(r.input_tokens for r in trace) == 24_190
    assert sum(r.output_tokens for r in trace) == 1_009_565
    prompts = np.array([r.input_tokens for r in trace])
    assert (np.median(prompts), prompts.max()) == (16, 506)


@pytest.mark.parametrize(
    ("popularity", "first", "in_a_row"),
    [
        ("uniform", [27, 30, 3, 5, 21, 19, 16, 23], 20.6),
        ("skewed", [5, 8, 0, 0, 3, 2, 2, 3], 8.3),
        ("identical", [0] * 8, 1.0),
        ("distinct", None, 32.0),
    ],
)
def test_punica_popularities(popularity: str, first, in_a_row: float) -> None:
    adapters = [request.adapter for request in punica_trace(popularity)]
    if first is not None:
        assert adapters[:8] == first
    distinct = [len(set(adapters[i : i + 32])) for i in range(0, 1024 - 31)]
    assert np.mean(distinct) == pytest.approx(in_a_row, abs=0.05)


@pytest.mark.parametrize(
    ("label", "means"),
    [("sharegpt-like", (246, 235)), ("sharegpt-like-2023", (161, 338)),
     ("arena-like", (85, 165)), ("alpaca-like", (19.3, 58.5))],
)  # fmt: skip
def test_length_laws_have_the_published_means(label: str, means: tuple[float, float]) -> None:
    rng = np.random.Generator(np.random.PCG64(1))
    law = LENGTHS[label]
    assert law.input.draw(rng, 200_000).mean() == pytest.approx(means[0], rel=0.01)
    assert law.output.draw(rng, 200_000).mean() == pytest.approx(means[1], rel=0.01)


def test_arrivals_have_their_rate_and_burstiness() -> None:
    rng = np.random.Generator(np.random.PCG64(2))
    for cv in (0.5, 1.0, 3.0):
        gaps = np.diff(arrivals(rng, 100_000, 4.0, cv))
        assert gaps.mean() == pytest.approx(0.25, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)
    assert not arrivals(rng, 5, None).any()
