"""A report as rows of text for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from multilora_cli.units import format_duration

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
_NOTHING = "-"
_MUCH = frozenset({"requests", "errors", "req/s", "tok/s", "of bound"})
_FAST = frozenset({"TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "SLO", "Jain", "goodput/s"})


def main_table(report: Mapping[str, Any]) -> Table:
    """One row an arm: what was asked, how fast it went, and that beside the reference."""
    sides = len({arm["side"] for arm in report["arms"]}) > 1
    bound = any(arm["bound"] for arm in report["arms"])
    goodput = any(arm["measures"]["goodput_per_s"] is not None for arm in report["arms"])
    columns = (
        *(("server",) if sides else ()),
        "workload", "adapters", "requests", "errors", "req/s", "tok/s", "vs " + _reference(report),
        *(("of bound",) if bound else ()), "strip tok/s",
        "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "SLO", "Jain",
        *(("goodput/s",) if goodput else ()),
    )  # fmt: skip
    rows = []
    for arm in report["arms"]:
        found = arm["measures"]
        rows.append(
            (
                *((arm["side"],) if sides else ()),
                arm["label"],
                str(found["adapters"]),
                str(found["requests"]),
                str(sum(found["errors"].values())),
                f"{found['requests_per_s']:.2f}",
                f"{found['output_tokens_per_s']:.1f}",
                _ratio_cell(report["ratios"], arm),
                *((f"{arm['bound']['share']:.1%}" if arm["bound"] else _NOTHING,) if bound else ()),
                f"{found['strip_tokens_per_s']:.1f}",
                *(
                    duration(found[name], point)
                    for name in ("ttft", "itl")
                    for point in ("p50", "p99")
                ),
                f"{found['slo_attainment']:.1%}",
                _plain(found["jain"], ".3f"),
                *((_plain(found["goodput_per_s"], ".2f"),) if goodput else ()),
            )
        )
    return columns, rows


def narrow_tables(table: Table) -> list[Table]:
    """The main table as two that fit 80 columns: how much, and how fast; the rest is in JSON."""
    columns, _ = table
    head = [name for name in columns if name in ("server", "workload")]
    much = [name for name in columns if name in _MUCH or name.startswith("vs ")]
    dropped = "Jain" if "goodput/s" in columns else ""
    fast = [name for name in columns if name in _FAST and name != dropped]
    return [_only(table, [*head, *names]) for names in (much, fast)]


def _only(table: Table, names: Sequence[str]) -> Table:
    columns, rows = table
    places = [columns.index(name) for name in names]
    return tuple(names), [tuple(row[place] for place in places) for row in rows]


def arm_name(arm: Mapping[str, Any]) -> str:
    """The label of an arm, behind the side it ran on where a report has two."""
    return f"{arm['side']} {arm['label']}".strip()


def detail_table(report: Mapping[str, Any]) -> Table:
    """What the main table has no room for."""
    columns = (
        "workload", "offered req/s", "input tok/s", "cached tokens", "E2E p50", "E2E p99",
        "request ITL p50", "request ITL p99", "satisfaction", "slowest adapter", "hit ratio",
        "loads", "server agrees",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = []
    for arm in report["arms"]:
        found = arm["measures"]
        agrees = found["server_agrees"]
        rows.append(
            (
                arm_name(arm),
                _plain(found["offered_rate"], ".2f"),
                f"{found['input_tokens_per_s']:.1f}",
                str(found["cached_tokens"]),
                duration(found["e2e"], "p50"),
                duration(found["e2e"], "p99"),
                duration(found["request_itl"], "p50"),
                duration(found["request_itl"], "p99"),
                f"{found['satisfaction']:.3f}",
                found["worst_adapter"] or _NOTHING,
                _plain(found["hit_ratio"], ".1%"),
                _plain(found["loads"], "d"),
                _NOTHING if agrees is None else "yes" if agrees else "no",
            )
        )
    return columns, rows


_FIGURES = {"output_tokens_per_s": "tok/s", "ttft_mean_s": "TTFT mean", "itl_mean_s": "ITL mean"}


def against_table(report: Mapping[str, Any]) -> Table:
    """Ratios of one server to the other, with their spread over the rounds."""
    columns = ("workload", "figure", "ratio", "from", "to", "rounds")
    rows: list[tuple[str, ...]] = [
        (
            row["arm"], _FIGURES[row["metric"]], f"{row['mean']:.3f}", f"{row['min']:.3f}",
            f"{row['max']:.3f}", str(row["rounds"]),
        )
        for row in report["against"]
    ]  # fmt: skip
    return columns, rows


def group_table(report: Mapping[str, Any], key: str, title: str) -> Table:
    """Groups (`per_adapter`, `per_rank`, `per_tier`) of every arm that has more than the base."""
    columns = ("workload", title, "requests", "ok", "tokens", "TTFT p50", "TTFT p99", "ITL mean")
    rows: list[tuple[str, ...]] = [
        (
            arm_name(arm),
            group["name"],
            str(group["requests"]),
            str(group["completed"]),
            str(group["output_tokens"]),
            duration(group["ttft"], "p50"),
            duration(group["ttft"], "p99"),
            duration(group["itl"], "mean"),
        )
        for arm in report["arms"]
        for group in arm["measures"][key]
    ]
    return columns, rows


def error_table(report: Mapping[str, Any]) -> Table:
    """Errors by kind."""
    rows: list[tuple[str, ...]] = [
        (arm_name(arm), kind, str(count))
        for arm in report["arms"]
        for kind, count in arm["measures"]["errors"].items()
    ]
    return ("workload", "error", "requests"), rows


def compare_table(comparison: Mapping[str, Any]) -> Table:
    """Two reports side by side."""
    rows: list[tuple[str, ...]] = [
        (f"{row['side']} {row['arm']}".strip(), name, *_compared(name, figure))
        for row in comparison["arms"]
        for name, figure in row["figures"].items()
    ]
    return ("workload", "figure", "A", "B", "B/A"), rows


def describe_lengths(report: Mapping[str, Any]) -> str:
    """Realised lengths of the first arm that answered anything."""
    for arm in report["arms"]:
        found = arm["measures"]
        if found["output_length"]["total"]:
            inputs, outputs = found["input_length"], found["output_length"]
            return (
                f"input {inputs['mean']:.1f} ± {inputs['sd']:.1f} tokens"
                f" ({inputs['min']} to {inputs['max']}), output {outputs['mean']:.1f} ±"
                f" {outputs['sd']:.1f} ({outputs['min']} to {outputs['max']})"
            )
    return "no request had an answer"


def describe_generator(report: Mapping[str, Any]) -> str:
    """What the load generator itself cost, at its worst."""
    costs: Sequence[Mapping[str, float]] = [c for arm in report["arms"] for c in arm["generator"]]
    share, lag = max(c["cpu_share"] for c in costs), max(c["lag_p99_s"] for c in costs)
    return f"the load generator took at most {share:.0%} of a core, {lag * 1000:.1f} ms late (p99)"


def duration(spread: Mapping[str, float] | None, point: str) -> str:
    """One point of a distribution of seconds."""
    return _NOTHING if spread is None else format_duration(spread[point])


def _plain(value: float | None, form: str) -> str:
    return _NOTHING if value is None else format(value, form)


def _reference(report: Mapping[str, Any]) -> str:
    return str(report["ratios"][0]["reference"]) if report["ratios"] else "base"


def _ratio_cell(ratios: Sequence[Mapping[str, Any]], arm: Mapping[str, Any]) -> str:
    for row in ratios:
        mine = row["side"] == arm["side"] and row["arm"] == arm["label"]
        if mine and row["metric"] == "output_tokens_per_s":
            cell = f"{row['mean']:.2f}"
            if row["rounds"] > 1:
                cell += f" ({row['min']:.2f}-{row['max']:.2f})"
            return cell
    return _NOTHING


def _compared(name: str, figure: Mapping[str, float | None]) -> tuple[str, str, str]:
    """A, B and their ratio as they are shown."""
    seconds = name.startswith(("TTFT", "ITL", "E2E"))
    one, other = (
        _NOTHING if value is None else format_duration(value) if seconds else f"{value:.3g}"
        for value in (figure["a"], figure["b"])
    )
    return one, other, _plain(figure["ratio"], ".3f")
