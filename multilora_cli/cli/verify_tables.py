"""How a verification looks to a person, and as JSON."""

from dataclasses import asdict
from typing import Any

from multilora_cli.cli.console import Console
from multilora_cli.cli.verify_run import SCHEMA, AdapterReport, VerifyReport
from multilora_cli.engine.agreement import Agreement
from multilora_cli.units import format_size


def show_adapters(console: Console, result: VerifyReport) -> None:
    """A row for each adapter, then what is to be said of some."""
    rows: list[tuple[object, ...]] = []
    for adapter in result.adapters:
        found, parity = adapter.examined, adapter.parity
        rows.append(
            (
                adapter.name,
                adapter.verdict,
                max((row.rank for row in found.rows), default=0) if found else "-",
                f"{found.num_modules} ({found.num_tensors} tensors)" if found else "-",
                format_size(found.num_bytes) if found else "-",
                found.num_pages if found else "-",
                f"{parity.effect:.2g}" if parity else "-",
                f"{parity.agreement.largest:.1g}" if parity else "-",
            )
        )
    columns: tuple[str, ...] = (
        "adapter", "verdict", "rank", "modules", "size", "pages", "changes", "off by",
    )  # fmt: skip
    if console.interactive and not any(adapter.parity for adapter in result.adapters):
        columns, rows = columns[:-2], [row[:-2] for row in rows]  # answers were not compared
    console.table(columns, rows, spare=("modules", "pages", "size"))
    for adapter in result.adapters:
        if adapter.reason:
            for line in adapter.reason.splitlines():
                console.line(f"{adapter.name}: refused: {line}")
        if adapter.hint:
            console.line(f"{adapter.name}: hint: {adapter.hint}")
        for text in adapter.warnings:
            console.line(f"{adapter.name}: warning: {text}")
        for text in adapter.examined.notes if adapter.examined else ():
            console.line(f"{adapter.name}: note: {text}")
    _show_parity(console, result)


def _show_parity(console: Console, result: VerifyReport) -> None:
    """What the last two columns are."""
    parities = [adapter.parity for adapter in result.adapters if adapter.parity]
    if parities:
        first = parities[0]
        console.line(
            f"log-probabilities over {first.agreement.positions} positions: the base changed by"
            " the adapter, and the served answers off the reference (fp32, adapters merged);"
            f" tolerance {max(p.tolerance for p in parities):.2g} at most, the bare base is off by"
            f" {first.base.largest:.1g}"
        )


def show_details(console: Console, adapter: AdapterReport) -> None:
    """Base, scale and rank of every module: for one adapter alone."""
    found = adapter.examined
    if found is None:
        return
    console.line(f"base: {found.base.text}")
    console.line(f"content: sha256:{found.digest}")
    rows = [(r.module, r.layers, r.rank, f"{r.scale:g}", r.rule) for r in found.rows]
    console.table(("module", "layers", "rank", "scale", "rule"), rows)


def show_drift(console: Console, result: VerifyReport) -> None:
    """Top-1 agreement and mean KL of the bare base and of every adapter."""
    if result.base_drift is None:
        return
    named = [("(base)", result.base_drift)]
    named += [(a.name, a.drift) for a in result.adapters if a.drift is not None]
    rows = [(name, f"{d.top1:.1%}", f"{d.mean_kl:.4f}", d.positions) for name, d in named]
    columns = ("adapter", "same likeliest token", "mean KL (nats)", "positions")
    console.table(columns, rows, title="Against the 16-bit base")
    console.line(f"verify.max_drift is {result.max_drift:g} nats of mean KL")


def as_value(result: VerifyReport) -> dict[str, Any]:
    """Plain data under a versioned schema."""
    return {
        "schema": SCHEMA,
        "ok": result.refused == 0 and not result.drifts,
        "base": {
            "model": result.model,
            "revision": result.revision,
            "folder": result.folder,
            "digest": f"sha256:{result.digest}",
            "storage": result.storage,
            "device": result.device,
            "dtype": result.dtype,
            "drift": _agreement(result.base_drift),
        },
        "max_drift": result.max_drift,
        "notes": list(result.notes),
        "adapters": [_adapter(adapter) for adapter in result.adapters],
    }


def _adapter(adapter: AdapterReport) -> dict[str, Any]:
    value: dict[str, Any] = {
        "name": adapter.name,
        "source": adapter.source,
        "verdict": adapter.verdict,
        "reason": adapter.reason or None,
        "hint": adapter.hint,
        "warnings": adapter.warnings,
    }
    found, parity = adapter.examined, adapter.parity
    if found is not None:
        value |= {
            "notes": list(found.notes),
            "digest": f"sha256:{found.digest}",
            "base": {"match": found.base.kind, "text": found.base.text},
            "tensors": found.num_tensors,
            "modules": found.num_modules,
            "idle_modules": list(found.idle),
            "scales": [asdict(row) for row in found.rows],
            "bytes": found.num_bytes,
            "pages": found.num_pages,
            "pool_bytes": found.pool_bytes,
        }
    if parity is not None:
        value["parity"] = {
            "largest": parity.agreement.largest,
            "mean_kl": parity.agreement.mean_kl,
            "top1": parity.agreement.top1,
            "positions": parity.agreement.positions,
            "effect": parity.effect,
            "rounding": parity.rounding,
            "tolerance": parity.tolerance,
            "base_largest": parity.base.largest,
        }
    if adapter.drift is not None:
        value["drift"] = _agreement(adapter.drift)
    return value


def _agreement(found: Agreement | None) -> dict[str, float] | None:
    if found is None:
        return None
    return {"top1": found.top1, "mean_kl": found.mean_kl, "positions": found.positions}
