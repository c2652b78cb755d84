"""Families of series in Prometheus' text form, version 0.0.4, written as they are read.

Objects for every sample, as prometheus_client makes them, cost a scrape ten times as much:
24 ms of the event loop for a hundred adapters with series of their own.
"""

from collections.abc import Iterable, Mapping

from multilora_cli.server.buckets import Buckets

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def counter(name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> str:
    """A counter of one series; `name` is without `_total`."""
    return labelled(f"{name}_total", "counter", text, ((labels or {}, value),))


def gauge(name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> str:
    """A gauge of one series."""
    return labelled(name, "gauge", text, ((labels or {}, value),))


def counters(name: str, text: str, label: str, values: Mapping[str, float]) -> str:
    """A counter for every value of one label; `name` is without `_total`."""
    return _by_one(f"{name}_total", "counter", text, label, values)


def gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> str:
    """A gauge for every value of one label."""
    return _by_one(name, "gauge", text, label, values)


def labelled(
    name: str, kind: str, text: str, rows: Iterable[tuple[Mapping[str, str], float]]
) -> str:
    """A family of series with any labels."""
    lines = [_head(name, kind, text)]
    for labels, value in rows:
        shown = _labels(labels)
        around = f"{{{shown}}}" if shown else ""
        lines.append(f"{name}{around} {float(value)}\n")
    return "".join(lines)


def histogram(name: str, text: str, rows: Iterable[tuple[Mapping[str, str], Buckets]]) -> str:
    """A histogram for each set of labels."""
    parts = [_head(name, "histogram", text)]
    for labels, buckets in rows:
        shown = _labels(labels)
        start = f'{name}_bucket{{{shown}{"," if shown else ""}le="'
        count = 0
        for bound, count in buckets.rows():
            parts.append(f'{start}{bound}"}} {count}.0\n')
        around = f"{{{shown}}}" if shown else ""
        parts.append(f"{name}_count{around} {count}.0\n{name}_sum{around} {buckets.total}\n")
    return "".join(parts)


def _by_one(name: str, kind: str, text: str, label: str, values: Mapping[str, float]) -> str:
    start = f'{name}{{{label}="'
    lines = [f'{start}{_escaped(each)}"}} {float(value)}\n' for each, value in values.items()]
    return _head(name, kind, text) + "".join(lines)


def _head(name: str, kind: str, text: str) -> str:
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join([f'{name}="{_escaped(labels[name])}"' for name in sorted(labels)])


def _escaped(value: str) -> str:
    return value.translate(_ESCAPES) if '"' in value or "\\" in value or "\n" in value else value
