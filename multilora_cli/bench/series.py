"""Curves of a pass, small enough to keep in its report."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from multilora_cli.bench.load import LoadResult

_POINTS = 101
_MAX_BINS, _MIN_BIN_S = 60, 0.25  # shorter bins would show single steps, not a rate


def cdf(values: Iterable[float | None]) -> list[float]:
    """The quantiles 0, 0.01 ... 1 of what is there, seconds; empty of nothing."""
    found = np.fromiter((value for value in values if value is not None), dtype=np.float64)
    if not len(found):
        return []
    return [round(float(q), 6) for q in np.quantile(found, np.linspace(0, 1, _POINTS))]


def timeline(result: LoadResult) -> dict[str, Any]:
    """Output tokens/s and requests in flight over time, in equal bins."""
    bins = int(min(max(result.duration_s / _MIN_BIN_S, 4), _MAX_BINS))
    edges = np.linspace(0.0, max(result.duration_s, 1e-9), bins + 1)
    width = float(edges[1])
    good = [record for record in result.records if record.times_s]
    times = np.concatenate([np.asarray(r.times_s) for r in good] or [np.empty(0)])
    weights = np.concatenate(
        [np.full(len(r.times_s), r.output_tokens / len(r.times_s)) for r in good] or [np.empty(0)]
    )
    tokens, _ = np.histogram(times, bins=edges, weights=weights)
    sent = np.sort([record.sent_s for record in result.records])
    ended = np.sort([record.end_s for record in result.records])
    middles = (edges[:-1] + edges[1:]) / 2
    in_flight = np.searchsorted(sent, middles) - np.searchsorted(ended, middles)
    return {
        "bin_s": width,
        "tokens_per_s": [round(float(rate), 3) for rate in tokens / width],
        "in_flight": [int(count) for count in in_flight],
        "errors_s": [round(r.end_s, 3) for r in result.records if r.error is not None],
    }
