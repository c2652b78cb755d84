"""What a recorded load would do to a plan: distinct adapters, hits per tier, thrash.

A trace is JSON lines `{"time": s, "adapter": name|null, "input": tokens, "output": tokens}`.
Adapters are replayed through two least-recently-used tiers of the planned sizes. The engine's own
rule also weighs frequency and reload cost, so it does no worse than what is predicted here.
"""

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from multilora_cli.errors import BadInput

MAX_BYTES = 512 * 2**20
MAX_LINE = 64 * 2**10


@dataclass(frozen=True)
class Call:
    """One request of a trace."""

    time_s: float
    adapter: str | None
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class TraceForecast:
    """What the planned tiers would do with a trace."""

    requests: int
    seconds: float
    adapters: int  # different ones in the whole trace
    distinct_mean: float  # per window
    distinct_max: int
    hot_ratio: float  # requests whose adapter was on the device
    warm_ratio: float  # in host memory
    cold_ratio: float  # had to be read from its source
    reloads: int  # copies to the device of adapters that had been there before
    reloads_per_s: float
    pages_for_all: int  # pages that would keep every adapter of the trace hot
    advice: tuple[str, ...]


def read_trace(path: Path) -> list[Call]:
    """The calls of a trace file in time order. Raises BadInput naming the line."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BadInput(f"{path}: larger than 512 MiB")
        with path.open("rb") as file:
            calls = list(_calls(file, path))
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from None
    if not calls:
        raise BadInput(f"{path}: no requests in it")
    return sorted(calls, key=lambda call: call.time_s)


def _calls(lines: Iterable[bytes], path: Path) -> Iterator[Call]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            if len(line) > MAX_LINE:
                raise ValueError("line longer than 64 KiB")
            yield _call(json.loads(line))
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
            raise BadInput(
                f"{path}:{number}: not JSON, expected a line like"
                ' {"time": 0.5, "adapter": "acme", "input": 100, "output": 20}'
            ) from None
        except ValueError as error:
            raise BadInput(f"{path}:{number}: {error}") from None


def _call(row: object) -> Call:
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, found {type(row).__name__}")
    adapter = row.get("adapter")
    if adapter is not None and not isinstance(adapter, str):
        raise ValueError("adapter: expected a name or null")
    return Call(
        float(_number(row, "time", 10**12)),
        adapter,
        int(_number(row, "input", 10**9)),
        int(_number(row, "output", 10**9)),
    )


def _number(row: Mapping[str, object], key: str, limit: float) -> float:
    if key not in row:
        raise ValueError(f"{key!r} is missing; a request has time, adapter, input and output")
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= limit:
        raise ValueError(f"{key}: expected a number from 0 to {limit:g}")
    return value


class _Tier:
    """Least recently used entries within a budget."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._used = 0
        self._entries: OrderedDict[str, int] = OrderedDict()

    def touch(self, name: str, size: int) -> bool:
        """Whether `name` was there; it is afterwards, unless it is larger than the tier."""
        if name in self._entries:
            self._entries.move_to_end(name)
            return True
        if size > self._budget:
            return False
        while self._used + size > self._budget:
            self._used -= self._entries.popitem(last=False)[1]
        self._entries[name] = size
        self._used += size
        return False


def forecast(
    calls: Sequence[Call],
    pages: Mapping[str, int],
    *,
    hot_pages: int,
    warm_pages: int,
    window_s: float = 60.0,
) -> TraceForecast:
    """Replay `calls`; `pages` is what each adapter takes. Raises BadInput for an unknown one."""
    hot, warm = _Tier(hot_pages), _Tier(warm_pages)
    counts = {"hot": 0, "warm": 0, "cold": 0}
    seen: set[str] = set()
    reloads = 0
    adapted = [call for call in calls if call.adapter is not None]
    for call in adapted:
        name = str(call.adapter)
        if name not in pages:
            raise BadInput(
                f"the trace asks for {name!r}, which is not in the fleet",
                hint="add it to the fleet file, or take its lines out of the trace",
            )
        in_warm = warm.touch(name, pages[name])
        in_hot = hot.touch(name, pages[name])
        counts["hot" if in_hot else "warm" if in_warm else "cold"] += 1
        reloads += not in_hot and name in seen
        seen.add(name)
    seconds = max(calls[-1].time_s - calls[0].time_s, 1e-9)
    windows = _windows(adapted, window_s)
    everything = sum(pages[name] for name in seen)
    total = max(len(adapted), 1)
    rate = reloads / seconds
    return TraceForecast(
        requests=len(calls),
        seconds=seconds,
        adapters=len(seen),
        distinct_mean=sum(windows) / max(len(windows), 1),
        distinct_max=max(windows, default=0),
        hot_ratio=counts["hot"] / total,
        warm_ratio=counts["warm"] / total,
        cold_ratio=counts["cold"] / total,
        reloads=reloads,
        reloads_per_s=rate,
        pages_for_all=everything,
        advice=tuple(_advice(counts, total, everything, hot_pages, warm_pages)),
    )


def _windows(calls: Sequence[Call], window_s: float) -> list[int]:
    names: dict[int, set[str]] = {}
    for call in calls:
        names.setdefault(int(call.time_s // window_s), set()).add(str(call.adapter))
    return [len(group) for group in names.values()]


def _advice(
    counts: Mapping[str, int], total: int, everything: int, hot_pages: int, warm_pages: int
) -> Iterator[str]:
    if everything <= hot_pages:
        yield "every adapter of the trace stays on the device; nothing to change"
        return
    if counts["hot"] < 0.9 * total:
        yield (
            f"{everything} pages would keep all adapters on the device, {hot_pages} are there:"
            " lower memory.kv_reserve, quantise the base, or pin the most used ones"
        )
    if everything > warm_pages and counts["cold"] > 0.02 * total:
        yield f"raise memory.host_adapters: all adapters warm take {everything} pages"
