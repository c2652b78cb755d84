"""The adapters as the listing shows them."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from multilora_cli.adapters.entry import AdapterEntry
from multilora_cli.engine.messages import AdapterStatus
from multilora_cli.server.long_replies import json_array, json_object

_COLD = AdapterStatus("", "cold", 0, 0, 0, False, 0, 0, -1.0)
_STORED = AdapterStatus("", "stored", 0, 0, 0, False, 0, 0, -1.0)


def status_of(entry: AdapterEntry, statuses: Mapping[str, AdapterStatus]) -> AdapterStatus:
    """What the engine says of the version; where it says nothing, whether a copy is here."""
    # A digest is known once every byte was read: then a verified copy is on this machine.
    unheld = _COLD if entry.digest is None else _STORED
    return statuses.get(entry.digest or "") or unheld


def adapter_row(
    entry: AdapterEntry, status: AdapterStatus, idle_s: float | None, requests: int
) -> dict[str, Any]:
    """One row. `idle_s`: since somebody used the name, None if nobody did."""
    failed = entry.state == "failed"
    ttl = entry.request.ttl
    retry_s = entry.retry_at - time.monotonic() if failed and entry.retry_at is not None else None
    return {
        "id": entry.name,
        "object": "lora_adapter",
        "generation": entry.generation,
        "rank": entry.rank,
        "modules": list(entry.modules),
        "bytes": entry.num_bytes,
        "source": entry.source,
        "via": entry.request.via,
        "revision": entry.revision,
        "digest": f"sha256:{entry.digest}" if entry.digest else None,
        "tokenizer": "adapter" if entry.request.uses_own_tokenizer else "base",
        "chat_template": entry.request.template_file
        or ("adapter" if entry.request.uses_own_template else "base"),
        "tier": "failed" if failed else status.tier,
        "detail": entry.detail if failed else status.detail,
        "attempts": entry.attempts,
        "retry_in_s": None if retry_s is None else max(round(retry_s, 1), 0.0),
        "notes": list(entry.notes),
        "pages": status.pages,
        "host_bytes": status.host_bytes,
        "pin": entry.pin,
        "priority": entry.priority,
        "pinned": status.pinned,
        "ttl_s": ttl,
        "expires_in_s": expires_in_s(entry, status, idle_s),
        "in_flight": status.references,
        "last_used_s": idle_s,
        "requests": requests,
        "hits": status.hits,
        "loads": status.loads,
    }


def expires_in_s(entry: AdapterEntry, status: AdapterStatus, idle_s: float | None) -> float | None:
    """Seconds until it goes back to cold if nobody uses it; None: it stays, or is there already."""
    ttl = entry.request.ttl
    held = status.tier in ("warm", "hot") or entry.pin is not None
    if ttl is None or not held or entry.state == "failed":
        return None
    return ttl if status.references or idle_s is None else max(ttl - idle_s, 0.0)


async def listing(
    rows: list[bytes],
    held: Iterable[tuple[AdapterStatus, Sequence[AdapterEntry]]],
    facts: Mapping[str, Any],
) -> list[bytes]:
    """The whole reply in pieces, of `rows` as JSON and of the versions that the engine holds, each
    with the names that stand for it."""
    totals = {"resident_generations": 0, "retired_generations": 0, "resident_bytes": 0}

    def row(pair: tuple[AdapterStatus, Sequence[AdapterEntry]]) -> dict[str, Any]:
        status, entries = pair
        totals["resident_generations"] += 1
        totals["retired_generations"] += not entries
        totals["resident_bytes"] += status.host_bytes
        return _generation(status, entries)

    generations = await json_array(held, row)
    arrays = {"data": rows, "generations": generations}
    return json_object({"object": "list", **totals, **facts}, arrays)


def _generation(status: AdapterStatus, entries: Sequence[AdapterEntry]) -> dict[str, Any]:
    """A version that the engine holds, and the names that stand for it. Without a name it is
    retired, and goes when its last request ends."""
    return {
        "generation": max((entry.generation for entry in entries), default=None),
        "digest": f"sha256:{status.digest}",
        "aliases": [entry.name for entry in entries],
        "rank": max((entry.rank for entry in entries), default=None),
        "bytes": status.host_bytes,
        "retired": not entries,
        "active_leases": status.references,
    }
