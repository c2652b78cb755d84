"""The result of a run as one plain value, `mlora.bench/1`: JSON, table and page are made of it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from multilora_cli.bench.campaign import Pass
from multilora_cli.bench.measure import Known, Measures, Slo, measure
from multilora_cli.bench.series import cdf, timeline
from multilora_cli.bench.tables import arm_name
from multilora_cli.errors import BadInput

SCHEMA = "mlora.bench/1"
_MAX_REPORT_BYTES = 256 * 2**20


def build_report(
    passes: Sequence[Pass],
    facts: Mapping[str, Any],
    notes: Sequence[str],
    slo: Slo | None = None,
) -> dict[str, Any]:
    """The whole result; `facts` says where, with what and how it was made."""
    groups: dict[tuple[str, str], list[Pass]] = {}
    for done in passes:
        groups.setdefault((done.side, done.arm), []).append(done)
    arms = [_arm(group, slo) for group in groups.values()]
    return {
        "schema": SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
        "arms": arms,
        "ratios": _to_reference(groups),
        "against": _to_other_side(groups),
        "notes": [*notes, *_notes(arms)],
    }


def _arm(group: Sequence[Pass], slo: Slo | None) -> dict[str, Any]:
    merged = merge(group, slo)
    first = group[0]
    return {
        "side": first.side,
        "label": first.arm,
        "measures": asdict(merged),
        "rounds": [_round(done) for done in group],
        "cdf": {
            "ttft_s": cdf(r.ttft_s for p in group for r in p.result.records if r.error is None),
            "e2e_s": cdf(
                r.e2e_s for p in group for r in p.result.records if r.error is None and not r.is_cut
            ),
        },
        "timeline": {**timeline(first.result), "marks": [asdict(mark) for mark in first.marks]},
        "generator": [asdict(done.result.overhead) for done in group],
        "bound": bound_of(group),
    }


def bound_of(group: Sequence[Pass]) -> dict[str, Any] | None:
    """The bound of an arm's first round, and the mean share of its bound that a round reached."""
    pairs = [(done, done.bound) for done in group if done.bound is not None]
    if not pairs:
        return None
    share = fmean(
        done.measures.output_tokens_per_s / bound.output_tokens_per_s for done, bound in pairs
    )
    return {**asdict(pairs[0][1]), "share": share}


def merge(group: Sequence[Pass], slo: Slo | None) -> Measures:
    """All rounds of one arm as one: latencies over all requests, rates as means of the rounds."""
    if len(group) == 1:
        return group[0].measures
    records = [record for done in group for record in done.result.records]
    total_s = sum(done.result.duration_s for done in group)
    known = Known(
        {k: v for done in group for k, v in done.known.ranks.items()},
        group[0].known.tiers,
    )
    merged = measure(records, total_s, known=known, slo=slo)
    parts = [done.measures for done in group]
    told = [part.server_agrees for part in parts if part.server_agrees is not None]
    return replace(
        merged,
        offered_rate=_mean([part.offered_rate for part in parts]),
        strip_tokens_per_s=fmean(part.strip_tokens_per_s for part in parts),
        hit_ratio=_mean([part.hit_ratio for part in parts]),
        loads=None if parts[0].loads is None else sum(part.loads or 0 for part in parts),
        server_agrees=all(told) if told else None,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _round(done: Pass) -> dict[str, Any]:
    found = done.measures
    return {
        "round": done.round,
        "duration_s": found.duration_s,
        "requests_per_s": found.requests_per_s,
        "output_tokens_per_s": found.output_tokens_per_s,
        "strip_tokens_per_s": found.strip_tokens_per_s,
        "ttft_mean_s": None if found.ttft is None else found.ttft.mean,
        "itl_mean_s": None if found.itl is None else found.itl.mean,
        "errors": sum(found.errors.values()),
        "hit_ratio": found.hit_ratio,
        "loads": found.loads,
    }


_METRICS: Mapping[str, Callable[[Measures], float | None]] = {
    "output_tokens_per_s": lambda found: found.output_tokens_per_s,
    "ttft_mean_s": lambda found: None if found.ttft is None else found.ttft.mean,
    "itl_mean_s": lambda found: None if found.itl is None else found.itl.mean,
}


def _ratio(ours: Sequence[Pass], theirs: Sequence[Pass], metric: str) -> dict[str, Any] | None:
    """Ratio round by round, so that what drifts between rounds cancels."""
    read = _METRICS[metric]
    values = []
    for one, other in zip(ours, theirs, strict=False):
        above, below = read(one.measures), read(other.measures)
        if above is not None and below:
            values.append(above / below)
    if not values:
        return None
    return {
        "metric": metric,
        "mean": fmean(values),
        "min": min(values),
        "max": max(values),
        "rounds": len(values),
    }


def _to_reference(groups: Mapping[tuple[str, str], Sequence[Pass]]) -> list[dict[str, Any]]:
    """Every arm against the base arm of its side, else against the side's first arm."""
    rows = []
    for (side, label), group in groups.items():
        labels = [arm for other, arm in groups if other == side]
        reference = "base" if "base" in labels else labels[0]
        reference = "n=0" if "n=0" in labels else reference
        if label == reference:
            continue
        for metric in _METRICS:
            ratio = _ratio(group, groups[(side, reference)], metric)
            if ratio is not None:
                rows.append({"side": side, "arm": label, "reference": reference, **ratio})
    return rows


def _to_other_side(groups: Mapping[tuple[str, str], Sequence[Pass]]) -> list[dict[str, Any]]:
    """Every arm of the first side against the same arm of the second one."""
    sides = list(dict.fromkeys(side for side, _ in groups))
    if len(sides) < 2:
        return []
    rows = []
    for (side, label), group in groups.items():
        if side != sides[0] or (sides[1], label) not in groups:
            continue
        for metric in _METRICS:
            ratio = _ratio(group, groups[(sides[1], label)], metric)
            if ratio is not None:
                rows.append({"arm": label, "side": side, "reference": sides[1], **ratio})
    return rows


def _notes(arms: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader must know before believing a figure."""
    notes = []
    cut = {arm["label"]: arm["measures"]["cut"] for arm in arms if arm["measures"]["cut"]}
    if cut:
        counts = ", ".join(f"{count} of {label}" for label, count in cut.items())
        notes.append(
            f"answers in flight when a load ended ({counts}): their tokens count, but they are not"
            " completed"
        )
    for arm in arms:
        name = arm_name(arm)
        found = arm["measures"]
        if not found["usage_counted"]:
            notes.append(f"{name}: the server tells no usage; pieces of text count as tokens")
        if found["server_agrees"] is False:
            notes.append(
                f"{name}: the server counts other numbers of requests per adapter than were sent:"
                " other traffic, or requests that went astray"
            )
        lag = max(cost["lag_p99_s"] for cost in arm["generator"])
        if lag > 0.05:
            notes.append(
                f"{name}: the load generator itself was late by {lag * 1000:.0f} ms (p99): the"
                " machine is too busy for figures this small"
            )
        if found["cached_tokens"] > 0.01 * found["input_length"]["total"]:
            notes.append(f"{name}: the server had {found['cached_tokens']} prompt tokens cached")
        tokens = found["output_length"]["total"]
        if tokens > 1.05 * found["pieces"]:
            notes.append(
                f"{name}: {tokens} tokens came in {found['pieces']} pieces of text: ITL is between"
                " pieces, and a first token without text counts from the first text"
            )
    return notes


def write_json(report: Mapping[str, Any], path: Path) -> None:
    """Write a report where `compare` can read it. Raises BadInput."""
    try:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from None


def read_report(path: Path) -> dict[str, Any]:
    """A report from a file. Raises BadInput."""
    try:
        if path.stat().st_size > _MAX_REPORT_BYTES:
            raise BadInput(f"{path}: larger than 256 MiB, not a report")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise BadInput(
            f"{path}: not JSON", hint="make one with: mlora bench ... --json > FILE.json"
        ) from None
    found = value.get("schema") if isinstance(value, dict) else None
    if found != SCHEMA or not _has_arms(value):
        raise BadInput(f"{path}: expected a report of schema {SCHEMA}, found {found!r}")
    return dict(value)


def _has_arms(value: Mapping[str, Any]) -> bool:
    arms = value.get("arms")
    keys = ("side", "label", "measures")
    return isinstance(arms, list) and all(
        isinstance(arm, dict) and all(key in arm for key in keys) for arm in arms
    )


COMPARED: Mapping[str, tuple[str, ...]] = {
    "req/s": ("requests_per_s",),
    "tok/s": ("output_tokens_per_s",),
    "TTFT mean": ("ttft", "mean"),
    "TTFT p99": ("ttft", "p99"),
    "ITL mean": ("itl", "mean"),
    "E2E p50": ("e2e", "p50"),
    "SLO": ("slo_attainment",),
}


def compare_reports(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of the arms that both reports have, and second over first."""
    rows = []
    other = {(arm["side"], arm["label"]): arm for arm in second["arms"]}
    for arm in first["arms"]:
        twin = other.get((arm["side"], arm["label"]))
        if twin is None:
            continue
        figures = {}
        for name, path in COMPARED.items():
            a, b = _dig(arm["measures"], path), _dig(twin["measures"], path)
            figures[name] = {"a": a, "b": b, "ratio": b / a if a and b is not None else None}
        rows.append({"side": arm["side"], "arm": arm["label"], "figures": figures})
    if not rows:
        raise BadInput("the two reports have no workload in common")
    keys = ("preset", "seed", "settings", "machine")
    differing = [key for key in keys if first.get(key) != second.get(key)]
    return {"schema": "mlora.bench.compare/1", "differing": differing, "arms": rows}


def _dig(value: Any, path: Sequence[str]) -> float | None:
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return float(value) if isinstance(value, int | float) else None
