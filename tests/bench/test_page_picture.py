"""The report page as a browser shows it: every plot is on the picture, not only in the text."""

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multilora_cli.bench.page import render_page, write_page
from multilora_cli.bench.svg import COLOURS
from tests.bench.browser import CHROMIUM, Box, Tab, browser
from tests.bench.reports import made_report

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt install chromium)")

_BOXES = """
[...document.querySelectorAll("figure")].map(figure => {
  const box = figure.querySelector("svg").getBoundingClientRect();
  return [figure.id, box.x + scrollX, box.y + scrollY, box.width, box.height,
          parseFloat(getComputedStyle(figure.querySelector("svg text")).fontSize)
            * box.width / figure.querySelector("svg").viewBox.baseVal.width];
})
"""
_CROOKED = """
[...document.querySelectorAll("table")].flatMap(table => [...table.tHead.rows[0].cells]
  .filter((head, at) => [...table.tBodies[0].rows].some(row =>
     row.cells[at].textContent != "-" &&
     getComputedStyle(row.cells[at]).textAlign != getComputedStyle(head).textAlign))
  .map(head => head.textContent))
"""
_GAPS = """
[...document.querySelectorAll("figure svg > rect[width='12'][height='12']")].flatMap(mark => {
  const name = mark.nextElementSibling, next = name.nextElementSibling, box = name.getBBox();
  return next && next.getBBox().y == mark.getBBox().y ? [next.getBBox().x - box.x - box.width] : [];
})
"""
_PLOTS = ["throughput", "ttft-cdf", "e2e-cdf", "ttft-by-rank", *(f"timeline-{i}" for i in range(5))]
WITHOUT_LEGEND = 275 / 480  # of a plot's width: its height down to the legend
_PAGES = {False: "#ffffff", True: "#16181b"}  # background, by whether it is dark


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """With times of a law in place of this machine's: lines that nearly meet hide one another."""
    found = made_report()
    for place, arm in enumerate(found["arms"]):
        for key, least in (("ttft_s", 0.02), ("e2e_s", 0.1)):
            arm["cdf"][key] = [least * 1.5 ** (place + share / 100) for share in range(101)]
        arm["timeline"] |= {
            "bin_s": 0.25, "tokens_per_s": [80.0, 160.0, 120.0, 40.0], "in_flight": [1, 3, 4, 2],
        }  # fmt: skip
    return found


def seen(page: Path, profile: Path, look: Any) -> Any:
    async def go() -> Any:
        async with browser(profile) as tab:
            return await look(tab, page)

    return asyncio.run(go())


async def plots(tab: Tab) -> dict[str, tuple[Box, float]]:
    """Where each plot is, and how large its words are, in pixels."""
    found = await tab.value(_BOXES)
    return {name: (Box(*box), size) for name, *box, size in found}


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_every_plot_is_on_the_picture(
    report: dict[str, Any], tmp_path: Path, width: int, dark: bool
) -> None:
    """In its own colours, inside the page, beside no other plot's pixels, in words of 9 pixels."""

    async def look(tab: Tab, page: Path) -> None:
        await tab.open(page, width=width, dark=dark)
        assert await tab.value("document.documentElement.scrollWidth") <= width
        assert await tab.value(_CROOKED) == []
        gaps = await tab.value(_GAPS)
        assert len(gaps) > 10 and min(gaps) >= 4 and max(gaps) - min(gaps) <= 24, gaps
        found = await plots(tab)
        assert list(found) == _PLOTS
        boxes = [box for box, _ in found.values()]
        for place, one in enumerate(boxes):
            assert one.x >= 0 and one.x + one.width <= width
            for other in boxes[place + 1 :]:
                assert (
                    one.x + one.width <= other.x
                    or other.x + other.width <= one.x
                    or one.y + one.height <= other.y
                )
        expected = colours_of_plots(report)
        for name, (box, size) in found.items():
            assert size >= 9
            pixels = await tab.colours(box)
            background = pixels.pop(_PAGES[dark])
            assert sum(pixels.values()) > 0.01 * background, f"{name} is blank"
            for colour in expected[name]:
                assert pixels.get(colour, 0) >= 50, f"{name}: no {colour} in the legend"
            drawn = await tab.colours(Box(box.x, box.y, box.width, box.width * WITHOUT_LEGEND))
            for colour in expected[name]:
                assert drawn_in(drawn, colour, _PAGES[dark]) >= 20, (
                    f"{name}: nothing is drawn in {colour}"
                )
            for colour in set(COLOURS[:6]) - expected[name]:
                assert colour not in pixels, f"{name}: {colour} of another plot"

    page = tmp_path / "page.html"
    write_page(report, page)
    seen(page, tmp_path / "profile", look)


def drawn_in(pixels: dict[str, int], colour: str, background: str) -> int:
    """Pixels of that colour, or of at least 40 % of it on the background, as thin lines have."""
    behind, wanted = _parts(background), _parts(colour) - _parts(background)
    total = 0
    for name, number in pixels.items():
        found = _parts(name) - behind
        share = float(found @ wanted / (wanted @ wanted))
        total += number * (0.4 <= share <= 1.1 and abs(found - share * wanted).max() <= 12)
    return total


def _parts(colour: str) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    return np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)], dtype=np.float64)


def colours_of_plots(report: dict[str, Any]) -> dict[str, set[str]]:
    """Colours that a plot must show: one a load, of the ranks one a load that asked adapters."""
    loads = COLOURS[: len(report["arms"])]
    timelines = {f"timeline-{index}": set(COLOURS[:2]) for index in range(5)}
    timelines["timeline-4"] = set(COLOURS[:4])  # with the two kinds of marks
    return {
        "throughput": {COLOURS[0]},
        "ttft-cdf": set(loads),
        "e2e-cdf": set(loads),
        "ttft-by-rank": set(loads[1:]),
        **timelines,
    }


def test_a_blank_plot_would_be_seen(report: dict[str, Any], tmp_path: Path) -> None:
    """The test above can fail: without its lines a plot is not on the picture."""

    async def look(tab: Tab, page: Path) -> dict[str, int]:
        await tab.open(page, width=1280)
        box, _ = (await plots(tab))["ttft-cdf"]
        return await tab.colours(Box(box.x, box.y, box.width, box.width * WITHOUT_LEGEND))

    page = tmp_path / "page.html"
    page.write_text(re.sub("<polyline[^>]*/>", "", render_page(report)))
    pixels = seen(page, tmp_path / "profile", look)
    assert all(drawn_in(pixels, colour, _PAGES[False]) == 0 for colour in COLOURS[:5])
