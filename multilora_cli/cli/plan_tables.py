"""How a plan looks to a person."""

import shutil
from collections.abc import Sequence

from multilora_cli.cli.console import Console
from multilora_cli.cli.listing import module_set
from multilora_cli.sizing.report import FleetPlan, PlannedAdapter
from multilora_cli.sizing.trace import TraceForecast
from multilora_cli.units import format_duration, format_size

MAX_ROWS = 20  # adapters shown; the rest are summed up, and --json has them all
_BAR = 24
_BARRED = ("weights", "pool")
_NOTES = {
    "workspace": "scratch of the largest step",
    "tables": "where the blocks of adapters lie",
    "graphs": "captured steps",
    "lists": "work lists of the LoRA kernels",
    "extras": "steps captured for DoRA and biases",
    "margin": "left over in torch's segments",
    "unused": "less than a page",
}
_NARROW = 100  # columns of a terminal below which keys are headed by their last part


def show_plan(console: Console, plan: FleetPlan) -> None:
    """Everything about one plan: where memory goes, what fits, what a step costs at least."""
    show_budget(console, plan)
    show_adapters(console, plan)
    show_ranks(console, plan)
    show_bounds(console, plan)
    for warning in plan.warnings:
        console.line(f"note: {warning}")
    show_verdict(console, plan)


def show_verdict(console: Console, plan: FleetPlan) -> None:
    """Whether it fits, which is what was asked: the last lines, where a terminal ends."""
    for problem in plan.problems:
        console.line(f"does not fit: {problem}")
    if plan.problems:
        return
    total, hot = len(plan.adapters), plan.hot_together
    which = f"all {total:,}" if hot == total else f"{hot:,} of {total:,}"
    adapters = f"{which} adapters on the device at once, and beside them " if total else ""
    console.line(
        f"fits: {adapters}{plan.kv_tokens:,} tokens of KV, which are {plan.sequences:,} sequences"
        f" of {plan.max_model_len:,} tokens"
    )


def show_budget(console: Console, plan: FleetPlan) -> None:
    """Device memory by part, as a bar and a table."""
    parts = {**plan.memory.parts(), "unused": _unused(plan)}
    card = f" of {format_size(plan.card_bytes)}" if plan.card_bytes else ""
    console.line(
        f"{plan.model} ({plan.storage}) on {plan.gpu}:"
        f" {format_size(plan.available_bytes)}{card} to use"
    )
    rows = list(parts.items())
    rows[1:1] = [
        ("  linears", plan.base.linears),
        ("  embedding and head", plan.base.embedding + plan.base.head),
    ]
    total = plan.available_bytes
    cells = [(name, format_size(size), f"{size / total:.1%}") for name, size in rows]
    columns: tuple[str, ...] = ("memory", "size", "share")
    if console.interactive:
        last = [
            "█" * round(_BAR * size / total) if name in _BARRED else _NOTES.get(name, "")
            for name, size in rows
        ]
        console.table((*columns, ""), [(*cell, bar) for cell, bar in zip(cells, last, strict=True)])
    else:
        console.table(columns, cells)
    pages = plan.memory.num_pages
    console.line(
        f"pool: {pages:,} pages of {format_size(plan.memory.page_bytes)} (KV of 16 tokens each);"
        f" adapters may take {plan.adapter_pages:,}"
    )
    if plan.card_bytes:
        left = plan.card_bytes - plan.available_bytes
        console.line(
            f"outside: {format_size(left)} are left alone; the CUDA context takes about"
            f" {format_size(plan.context_bytes)} of them"
        )


def show_adapters(console: Console, plan: FleetPlan) -> None:
    """Adapters by cost, and what they leave for KV."""
    if not plan.adapters:
        return
    alike: dict[tuple[object, ...], list[PlannedAdapter]] = {}
    for adapter in plan.adapters:
        cells = _adapter_cells(adapter)
        # A fleet larger than the table is told by kind: hundreds of adapters have few recipes.
        alike.setdefault(cells if len(plan.adapters) > MAX_ROWS else (adapter.name,), []).append(
            adapter
        )
    kinds = list(alike.values())
    rows: list[tuple[object, ...]] = [
        (
            kind[0].name if len(kind) == 1 else f"{kind[0].name} and {len(kind) - 1:,} like it",
            *_adapter_cells(kind[0]),
        )
        for kind in kinds[:MAX_ROWS]
    ]
    rest = [adapter for kind in kinds[MAX_ROWS:] for adapter in kind]
    if rest:
        total = sum(adapter.cost.weight_bytes for adapter in rest)
        pages = sum(adapter.cost.num_pages for adapter in rest)
        rows.append((f"and {len(rest):,} more, together", "", "", format_size(total), pages, ""))
    columns = ("adapter", "rank", "modules", "size", "pages", "waste")
    console.table(columns, rows, spare=("waste", "modules"))
    console.line(
        f"in host memory all adapters take {format_size(plan.warm_bytes)};"
        f" memory.host_adapters allows {format_size(plan.host_bytes)}"
    )


def _adapter_cells(adapter: PlannedAdapter) -> tuple[object, ...]:
    return (
        adapter.rank,
        module_set(adapter.modules),
        format_size(adapter.cost.weight_bytes),
        adapter.cost.num_pages,
        f"{adapter.cost.waste:.1%}",
    )


def show_ranks(console: Console, plan: FleetPlan) -> None:
    """What adapters of each rank would cost."""
    rows = [
        (
            row.rank,
            row.targets,
            format_size(row.cost.weight_bytes),
            f"{row.cost.num_pages:,}",
            f"{row.fit_hot:,}",
            f"{row.fit_warm:,}",
            "-" if row.load_ms is None else format_duration(row.load_ms / 1000),
        )
        for row in plan.per_rank
    ]
    columns = ("rank", "targets", "size", "pages", "fit on device", "fit in host", "load")
    title = "Adapters of one rank: how many fit, and how long one takes from host memory"
    console.table(columns, rows, title=title)


def show_bounds(console: Console, plan: FleetPlan) -> None:
    """The least time of a decode step."""
    if not plan.bounds or plan.prefill_ms is None:
        return
    rows = [
        (
            row.batch,
            format_step(row.base_ms),
            format_step(row.adapters_ms),
            f"{row.tokens_s:,.0f}",
            "no data" if row.expected_tokens_s is None else f"{row.expected_tokens_s:,.0f}",
        )
        for row in plan.bounds
    ]
    columns = ("batch", "base", "with distinct adapters", "tokens/s at most", "expected")
    console.table(columns, rows, title="Least time of a decode step at 1,024 tokens of context")
    told = {row.expected_from: row.expected_tokens_s is not None for row in plan.bounds}
    for source, is_measured in sorted(told.items()):
        how = "tokens/s at most x the share of it that this engine reached, " if is_measured else ""
        console.line(f"expected: {how}{source}")
    console.line(f"prefill of 1,024 tokens: {format_step(plan.prefill_ms)} at least")
    if plan.break_even:
        console.line(
            f"from {plan.break_even} distinct adapters in one step on, the adapters' bytes exceed"
            " the base's"
        )


def show_grid(
    console: Console, keys: Sequence[str], rows: Sequence[tuple[Sequence[str], FleetPlan | str]]
) -> None:
    """Several plans side by side; a string in place of a plan says why there is none."""
    columns = (*keys, "fits", "weights", "pool pages", "adapters hot", "KV tokens", "64 rows")
    cells = [(*values, *_grid_cells(plan)) for values, plan in rows]
    if console.interactive and shutil.get_terminal_size().columns < _NARROW:
        columns = (*(key.rpartition(".")[2] for key in keys), *columns[len(keys) :])
    console.table(columns, cells, spare=("pool pages", "weights"))


def show_forecast(console: Console, forecast: TraceForecast) -> None:
    """What a trace would do to the plan."""
    console.panel(
        "Trace",
        {
            "requests": f"{forecast.requests} over {format_duration(forecast.seconds)},"
            f" {forecast.adapters} adapters",
            "distinct a minute": f"{forecast.distinct_mean:.1f} on average,"
            f" {forecast.distinct_max} at most",
            "hits": f"device {forecast.hot_ratio:.1%}, host {forecast.warm_ratio:.1%},"
            f" source {forecast.cold_ratio:.1%}",
            "reloads": f"{forecast.reloads} ({forecast.reloads_per_s:.3g} a second)",
        },
    )
    for line in forecast.advice:
        console.line(f"advice: {line}")


def _grid_cells(plan: FleetPlan | str) -> tuple[str, ...]:
    if isinstance(plan, str):
        return (f"no: {plan.splitlines()[0]}", "-", "-", "-", "-", "-")
    step = next((format_step(row.adapters_ms) for row in plan.bounds if row.batch == 64), "-")
    return (
        "yes" if plan.fits else "no",
        format_size(plan.memory.weights),
        f"{plan.memory.num_pages:,}",
        f"{plan.hot_together}/{len(plan.adapters)}" if plan.adapters else "-",
        f"{plan.kv_tokens:,}",
        step,
    )


def _unused(plan: FleetPlan) -> int:
    return plan.available_bytes - sum(plan.memory.parts().values())


def format_step(milliseconds: float) -> str:
    """A time of a step: two places, and more where a small model would show as 0.00."""
    return f"{milliseconds:.2f} ms" if milliseconds >= 0.1 else f"{milliseconds:.2g} ms"
