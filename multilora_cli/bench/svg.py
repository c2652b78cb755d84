"""Plots as SVG text, by hand: a report page needs nothing but itself.

Colours are those of Okabe and Ito, told apart by readers who do not see red and green as two. What
is black on white takes the page's own colour, so that a dark page has it light. A plot is narrow
and its legend is below it, so that a phone shows its words in a size that can be read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isfinite, log10

COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#888888",
    "currentColor",
)
_WIDTH, _HEIGHT = 480, 280  # without the legend
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 34, 46
# Pixels of a letter at most, in fonts that are wider than most: narrow ones, wide ones, others.
_NARROW, _WIDE, _LETTER = (frozenset("fijlrt.,:;|'()[] "), 5.2), (frozenset("mwMW@"), 12.5), 8.2
_LINE = 19


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic scale from data to pixels."""

    low: float
    high: float
    pixel_low: float
    pixel_high: float
    log: bool = False

    def at(self, value: float) -> float:
        """Pixel of `value`, kept inside the frame."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, value = log10(low), log10(high), log10(value)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.pixel_low + share * (self.pixel_high - self.pixel_low)

    def ticks(self) -> list[float]:
        """Round values inside the scale."""
        if self.log:
            return (
                self._powers((1, 2, 5)) if self.high > 4 * self.low else self._powers(range(1, 10))
            )
        if self.high <= self.low:
            return [self.low]
        step = _step(self.high - self.low)
        first = ceil(self.low / step)
        return [step * i for i in range(first, floor(self.high / step + 1e-9) + 1)]

    def _powers(self, factors: Sequence[int]) -> list[float]:
        """`factors` of all powers of ten inside the scale."""
        powers = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        found = [m * 10.0**p for p in powers for m in factors]
        return [tick for tick in found if self.low <= tick <= self.high]


def _step(span: float) -> float:
    """A round number that is in `span` six times at most."""
    step = 10.0 ** floor(log10(span / 4))
    return float(next((m * step for m in (1, 2, 5, 10) if span / (m * step) <= 6), 10 * step))


def _height(top: float) -> Axis:
    """From 0 to a round number above `top`."""
    top = top or 1.0
    step = _step(top)
    return Axis(0.0, ceil(top / step - 1e-9) * step, _HEIGHT - _BOTTOM, _TOP)


def lines(
    title: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    labels: tuple[str, str],
    *,
    log_x: bool = False,
    marks: Mapping[str, Sequence[float]] | None = None,
) -> str:
    """Lines over x; `marks` are dashed verticals, such as loads on a timeline."""
    points = [point for line in series.values() for point in line]
    xs = [x for x, _ in points if isfinite(x) and (x > 0 or not log_x)] or [1.0]
    low = min(xs) if log_x else 0.0
    high = max(max(xs), low * 1.1 if log_x else 1e-9)
    x = Axis(low, high, _LEFT, _WIDTH - _RIGHT, log_x)
    y = _height(max((y for _, y in points), default=1.0))
    parts, legend = [*_frame(x, y, labels)], [(name, index) for index, name in enumerate(series)]
    for index, line in enumerate(series.values()):
        path = " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in line if a > 0 or not log_x)
        parts.append(
            f'<polyline fill="none" stroke="{_colour(index)}" stroke-width="1.8" points="{path}"/>'
        )
    for index, (name, times) in enumerate((marks or {}).items(), len(series)):
        parts += [
            f'<line x1="{x.at(t):.1f}" x2="{x.at(t):.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"'
            f' stroke="{_colour(index)}" stroke-width="1.5" stroke-dasharray="4 3"/>'
            for t in times
        ]
        legend.append((name, index))
    return _document(title, parts, legend)


def bars(
    title: str,
    groups: Mapping[str, Mapping[str, float]],
    labels: tuple[str, str],
    spreads: Mapping[tuple[str, str], tuple[float, float]] | None = None,
    order: Sequence[str] = (),
) -> str:
    """A group of bars for each name; `spreads` (group, bar) are whiskers from low to high.

    `order` names bars of other plots too: each has the colour that it has there.
    """
    found = dict.fromkeys(name for group in groups.values() for name in group)
    everywhere = list(dict.fromkeys([*order, *found]))
    colours = {name: index for index, name in enumerate(everywhere)}
    names = [name for name in everywhere if name in found]
    whiskers = spreads or {}
    tops = [value for group in groups.values() for value in group.values()]
    tops += [high for _, high in whiskers.values()]
    y = _height(max(tops, default=1.0))
    x = Axis(0.0, float(max(len(groups), 1)), _LEFT, _WIDTH - _RIGHT)
    parts = [*_frame(None, y, labels)]
    room = x.at(1) - x.at(0)
    width = room * 0.8 / max(len(names), 1)
    for place, (group, values) in enumerate(groups.items()):
        start = x.at(place) + room * 0.1
        for name, value in values.items():
            index = names.index(name)
            left, top = start + index * width, y.at(value)
            parts.append(
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{max(width - 2, 1):.1f}"'
                f' height="{max(_HEIGHT - _BOTTOM - top, 0):.1f}" fill="{_colour(colours[name])}">'
                f"<title>{escape(group)} {escape(name)}: {value:.4g}</title></rect>"
            )
            if (group, name) in whiskers:
                parts.append(_whisker(left + width / 2 - 1, y, whiskers[(group, name)]))
        middle = (x.at(place) + x.at(place + 1)) / 2
        text = _short(group, max(int(room / _LETTER), 3))
        parts.append(_text(middle, _HEIGHT - _BOTTOM + 16, text, "middle"))
    return _document(title, parts, [(name, colours[name]) for name in names])


def _whisker(middle: float, y: Axis, limits: tuple[float, float]) -> str:
    low, high = (y.at(limit) for limit in limits)
    path = f"M{middle:.1f},{low:.1f} V{high:.1f}"
    path += "".join(f" M{middle - 4:.1f},{end:.1f} h8" for end in (low, high))
    return f'<path d="{path}" fill="none" stroke="currentColor" stroke-width="1.5"/>'


def _frame(x: Axis | None, y: Axis, labels: tuple[str, str]) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for tick in y.ticks():
        parts.append(
            f'<line x1="{_LEFT}" x2="{right}" y1="{y.at(tick):.1f}" y2="{y.at(tick):.1f}"'
            ' stroke="currentColor" stroke-opacity=".15"/>'
        )
        parts.append(_text(_LEFT - 6, y.at(tick) + 4, f"{tick:g}", "end"))
    for tick in x.ticks() if x is not None else ():
        place = x.at(tick) if x is not None else 0.0
        parts.append(
            f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{bottom}" y2="{bottom + 4}"'
            ' stroke="#888"/>'
        )
        parts.append(_text(place, bottom + 16, f"{tick:g}", "middle"))
    parts.append(f'<path d="M{_LEFT},{_TOP} V{bottom} H{right}" fill="none" stroke="#888"/>')
    parts.append(_text((_LEFT + right) / 2, _HEIGHT - 8, labels[0], "middle"))
    parts.append(
        f'<text transform="translate(16,{(_TOP + bottom) / 2:.0f}) rotate(-90)"'
        f' text-anchor="middle">{escape(labels[1])}</text>'
    )
    return parts


def _legend(entries: Sequence[tuple[str, int]]) -> tuple[list[str], int]:
    """Names with their colours in lines below the plot, and how many lines these are."""
    parts, left, line = [], float(_LEFT), 0
    for name, colour in entries:
        text = _short(name, 40)
        width = 18 + _text_width(text) + 14
        if left > _LEFT and left + width > _WIDTH:
            left, line = float(_LEFT), line + 1
        top = _HEIGHT + _LINE * line
        parts.append(
            f'<rect x="{left:.1f}" y="{top}" width="12" height="12" fill="{_colour(colour)}"/>'
        )
        parts.append(_text(left + 18, top + 10, text, "start"))
        left += width
    return parts, line + 1


def _document(title: str, parts: Sequence[str], legend: Sequence[tuple[str, int]]) -> str:
    heading = f'<text x="{_LEFT}" y="18" font-weight="bold">{escape(title)}</text>'
    names, num_lines = _legend(legend)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH}'
        f' {_HEIGHT + _LINE * num_lines}" role="img" aria-label="{escape(title, quote=True)}"'
        ' font-family="system-ui, sans-serif" font-size="13" fill="currentColor">'
        f"{heading}{''.join(parts)}{''.join(names)}</svg>"
    )


def _text_width(text: str) -> float:
    return sum(
        next((width for letters, width in (_NARROW, _WIDE) if letter in letters), _LETTER)
        for letter in text
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
