"""Sizes, durations and their spellings."""

import re

_SIZE_UNITS = {
    "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([A-Za-z]*)\s*")
_DURATION = re.compile(r"\s*(\d{1,12}(?:\.\d{1,6})?)\s*(ms|s|m|h|d)\s*")


def parse_size(text: str) -> int:
    """Bytes of `text`, such as `22GiB` or `500 MB`. Raises ValueError."""
    match = _SIZE.fullmatch(text)
    unit = match[2].upper() if match else ""
    if match is None or (unit or "B") not in _SIZE_UNITS:
        raise ValueError(f"{text!r} is not a size; write a number and KiB, MiB, GiB, KB, MB or GB")
    return int(float(match[1]) * _SIZE_UNITS[unit or "B"])


def format_size(num_bytes: int) -> str:
    """`num_bytes` in binary units with three significant digits: `26.2 MiB`, `1020 KiB`."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{_digits(size)} {unit}"
        size /= 1024
    return f"{size:.3g} TiB" if size < 1000 else f"{size:,.0f} TiB"


def _digits(value: float) -> str:
    """Three significant digits, never with an exponent: `1e+03` reads like an accident."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def parse_duration(text: str) -> float:
    """Seconds of `text`, such as `1h`, `30s` or `250ms`. Raises ValueError."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a duration; write a number and ms, s, m, h or d")
    return float(match[1]) * _DURATION_UNITS[match[2]]


def format_duration(seconds: float) -> str:
    """`seconds` in the unit that reads best: `6.5 us`, `3.2 ms`, `4.0 s`, `2.5 h`."""
    if 0 < seconds < 0.0001:
        return f"{_digits(seconds * 1e6)} us"
    if seconds < 1:
        return f"{_digits(seconds * 1000)} ms"
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{_digits(seconds / unit)} {name}"
    return f"{_digits(seconds / 86400)} d"


def format_span(seconds: float) -> str:
    """A duration to read in passing: whole seconds, minutes, hours or days."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"
