"""Families of series, as prometheus_client wants them for a scrape."""

from collections.abc import Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


def counter(name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
    """A counter of one series."""
    return _family(CounterMetricFamily, name, text, tuple(labels or ()), {_values(labels): value})


def gauge(name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
    """A gauge of one series."""
    return _family(GaugeMetricFamily, name, text, tuple(labels or ()), {_values(labels): value})


def counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """A counter for every value of one label."""
    return _family(CounterMetricFamily, name, text, (label,), _by_one(values))


def gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """A gauge for every value of one label."""
    return _family(GaugeMetricFamily, name, text, (label,), _by_one(values))


def _values(labels: Mapping[str, str] | None) -> tuple[str, ...]:
    return tuple((labels or {}).values())


def _by_one(values: Mapping[str, float]) -> Mapping[tuple[str, ...], float]:
    return {(each,): value for each, value in values.items()}


def _family(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    text: str,
    labels: tuple[str, ...],
    values: Mapping[tuple[str, ...], float],
) -> Metric:
    family = kind(name, text, labels=labels)
    for each, value in values.items():
        family.add_metric(each, value)
    return family
