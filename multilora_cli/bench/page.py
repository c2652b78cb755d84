"""The report as one HTML page that needs no network: tables, and plots as SVG inside it."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from multilora_cli.bench import svg
from multilora_cli.bench.tables import (
    Table,
    against_table,
    arm_name,
    describe_generator,
    describe_lengths,
    detail_table,
    error_table,
    group_table,
    main_table,
)
from multilora_cli.errors import BadInput

_STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --page: #fff; --line: #ddd; --code: #f4f4f4; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e4e4; --page: #16181b; --line: #3a3d41; --code: #24272b; }
}
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem;
       color: var(--text); background: var(--page); }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
/* Shadows at the edges beyond which a table goes on: a wide one is cut off without a word else. */
.wide { overflow-x: auto; background:
  linear-gradient(to right, var(--page) 1rem, transparent 2rem) 0 0 local,
  linear-gradient(to left, var(--page) 1rem, transparent 2rem) 100% 0 local,
  linear-gradient(to right, var(--line), transparent .8rem) 0 0 scroll,
  linear-gradient(to left, var(--line), transparent .8rem) 100% 0 scroll; }
table { border-collapse: collapse; font-size: .85rem; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .6rem; text-align: right;
         white-space: nowrap; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child, .word { text-align: left; }
.plots { display: grid; gap: 1.5rem;
         grid-template-columns: repeat(auto-fill, minmax(min(100%, 28rem), 1fr)); }
figure { margin: 0; } svg { display: block; width: 100%; height: auto; }
code, pre { background: var(--code); padding: .1rem .3rem; white-space: pre-wrap;
            overflow-wrap: anywhere; }
dt { font-weight: 600; } dd { margin: 0 0 .3rem 0; }
"""
_MAX_ROWS = 500  # a fleet of thousands belongs into the JSON
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_page(report: Mapping[str, Any], path: Path) -> None:
    """Write the page of a report. Raises BadInput where the file cannot be written."""
    try:
        path.write_text(render_page(report), encoding="utf-8")
    except OSError as error:
        raise BadInput(f"--report {path}: {error.strerror or error}") from None


def render_page(report: Mapping[str, Any]) -> str:
    """The whole page; nothing in it points outside."""
    title = f"mlora bench: {report['preset']}"
    sections = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(_moment(report['created']))}</p>",
        f"<pre>{escape(report['command'])}</pre>",
        _section("Result", main_table(report)),
        *_notes(report["notes"]),
        *_figures(report),
        _section("More of each load", detail_table(report)),
        _section("Ratios to the other server", against_table(report)),
        _section("Errors", error_table(report)),
        _section("By rank", group_table(report, "per_rank", "rank")),
        _section("By tier before the pass", group_table(report, "per_tier", "tier")),
        _section("By adapter", group_table(report, "per_adapter", "adapter")),
        _facts(report),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(section for section in sections if section)
        + "\n</body></html>\n"
    )


def _figures(report: Mapping[str, Any]) -> list[str]:
    plots = {
        "throughput": throughput_plot(report),
        "ttft-cdf": cdf_plot(report, "ttft_s", "Time to first token: share of requests"),
        "e2e-cdf": cdf_plot(report, "e2e_s", "Whole answer: share of requests"),
        "ttft-by-rank": rank_plot(report),
        **{f"timeline-{index}": timeline_plot(arm) for index, arm in enumerate(report["arms"])},
    }
    figures = [f'<figure id="{name}">{plot}</figure>' for name, plot in plots.items() if plot]
    return ["<h2>Plots</h2>", '<div class="plots">', *figures, "</div>"]


def throughput_plot(report: Mapping[str, Any]) -> str:
    """Output tokens/s of every arm, whiskers from the slowest to the fastest round."""
    groups: dict[str, dict[str, float]] = {}
    spreads = {}
    for arm in report["arms"]:
        side = arm["side"] or "output tok/s"
        groups.setdefault(arm["label"], {})[side] = arm["measures"]["output_tokens_per_s"]
        rates = [done["output_tokens_per_s"] for done in arm["rounds"]]
        spreads[(arm["label"], side)] = (min(rates), max(rates))
    law = "popularity" if report["preset"] in ("heterogeneous", "punica") else "workload"
    return svg.bars(f"Throughput by {law}", groups, (law, "tokens/s"), spreads)


def cdf_plot(report: Mapping[str, Any], key: str, title: str) -> str:
    """Share of requests that were done within a time, one line an arm."""
    series = {}
    for arm in report["arms"]:
        quantiles: Sequence[float] = arm["cdf"][key]
        if quantiles:
            last = len(quantiles) - 1
            series[arm_name(arm)] = [(max(q, 1e-6), i / last) for i, q in enumerate(quantiles)]
    return svg.lines(title, series, ("seconds", "share"), log_x=True) if series else ""


def rank_plot(report: Mapping[str, Any]) -> str:
    """Time to first token by rank, one bar an arm; empty where no rank is known."""
    groups: dict[str, dict[str, float]] = {}
    for arm in report["arms"]:
        for group in arm["measures"]["per_rank"]:
            if group["ttft"] is not None:
                rank = group["name"]
                groups.setdefault(rank, {})[arm_name(arm)] = 1000 * group["ttft"]["mean"]
    ordered = dict(sorted(groups.items(), key=lambda item: int(item[0])))
    if not ordered:
        return ""
    names = [arm_name(arm) for arm in report["arms"]]
    return svg.bars("Time to first token by rank", ordered, ("rank", "mean TTFT, ms"), order=names)


def timeline_plot(arm: Mapping[str, Any]) -> str:
    """Tokens/s over the first round of an arm, with what was done to adapters meanwhile."""
    found = arm["timeline"]
    width = found["bin_s"]
    top = max(found["tokens_per_s"], default=0.0)
    most = max(found["in_flight"], default=0)
    scale = top / most if most else 1.0
    series = {
        "output tok/s": [((i + 0.5) * width, v) for i, v in enumerate(found["tokens_per_s"])],
        f"in flight (most: {most})": [
            ((i + 0.5) * width, v * scale) for i, v in enumerate(found["in_flight"])
        ],
    }
    marks: dict[str, list[float]] = {}
    for mark in found["marks"]:
        marks.setdefault(mark["kind"], []).append(mark["time_s"])
    if found["errors_s"]:
        marks["error"] = found["errors_s"]
    title = f"Timeline of {arm_name(arm)}"
    return svg.lines(title, series, ("seconds", "tokens/s"), marks=marks)


def _moment(created: str) -> str:
    """`2026-11-30 23:18:41 UTC` of what the report has in ISO's form."""
    return created.replace("T", " ").replace("+00:00", " UTC")


def _section(title: str, table: Table) -> str:
    columns, rows = table
    if not rows:
        return ""
    shown = rows[:_MAX_ROWS]
    head = "".join(
        f"<th{_kind(*(row[place] for row in shown))}>{escape(column)}</th>"
        for place, column in enumerate(columns)
    )
    body = "".join(
        "<tr>" + "".join(f"<td{_kind(cell)}>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in shown
    )
    if len(rows) > _MAX_ROWS:
        body += f'<tr><td class="word">and {len(rows) - _MAX_ROWS} more in the JSON</td></tr>'
    return (
        f'<h2>{escape(title)}</h2><div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _kind(*cells: str) -> str:
    """Of a cell, or of the head of a column: words stand left, figures right."""
    is_figure = any(cell[:1].isdigit() for cell in cells) or all(cell == "-" for cell in cells)
    return "" if is_figure else ' class="word"'


def _notes(notes: Sequence[str]) -> list[str]:
    if not notes:
        return []
    return ["<ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>"]


def _facts(report: Mapping[str, Any]) -> str:
    machine = report["machine"]
    facts = {
        "servers": "; ".join(
            f"{s['url']}: {s['base']}, {s['adapters']} adapters" for s in report["servers"]
        ),
        "lengths": describe_lengths(report),
        "load generator": describe_generator(report),
        "measured from": f"{machine['host']}, {machine['cpu']}, {machine['cores']} cores",
        "GPUs of that machine": ", ".join(machine["gpus"]) or "none",
        "commit": report["commit"] or "not from a checkout",
        "seed": str(report["seed"]),
        "versions": ", ".join(f"{name} {v}" for name, v in machine["versions"].items()),
        "schema": report["schema"],
    }
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>" for name, fact in facts.items()
    )
    return f"<h2>How it was measured</h2><dl>{rows}</dl>"
