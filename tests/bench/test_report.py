"""The report: JSON that says everything, ratios by round, a page that needs nothing else."""

import asyncio
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from multilora_cli.bench.arms import Room, Workload, make_program
from multilora_cli.bench.campaign import Settings, Side, run_program
from multilora_cli.bench.environment import command_line, commit, environment
from multilora_cli.bench.loopback import Loopback, Script
from multilora_cli.bench.measure import measure
from multilora_cli.bench.page import render_page, write_page
from multilora_cli.bench.report import (
    SCHEMA,
    build_report,
    compare_reports,
    read_report,
    write_json,
)
from multilora_cli.bench.svg import Axis, bars, lines
from multilora_cli.bench.tables import compare_table, error_table, main_table, narrow_tables
from multilora_cli.bench.target import Target
from multilora_cli.errors import BadInput
from tests.bench.reports import made_report


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return made_report()


def test_the_value_is_versioned_json_and_round_trips(report, tmp_path: Path) -> None:
    write_json(report, tmp_path / "r.json")
    assert read_report(tmp_path / "r.json") == json.loads(json.dumps(report))
    assert report["schema"] == SCHEMA == "mlora.bench/1"
    labels = [arm["label"] for arm in report["arms"]]
    assert labels == ["base", "identical", "skewed", "uniform", "distinct"]


def test_rounds_are_merged_and_every_count_adds_up(report) -> None:
    """A-OUT-12: per-adapter counts of the report add up to what was asked for."""
    for arm in report["arms"]:
        found = arm["measures"]
        assert found["requests"] == 16 == sum(g["requests"] for g in found["per_adapter"])
        assert found["output_length"]["total"] == 64
        assert found["ttft"]["count"] == 16 and found["goodput_per_s"] > 0
        assert len(arm["rounds"]) == len(arm["generator"]) == 2
        rates = [r["output_tokens_per_s"] for r in arm["rounds"]]
        assert min(rates) <= found["output_tokens_per_s"] * 1.0001 <= max(rates) * 1.0002


def test_ratios_stand_against_the_base_with_their_spread(report) -> None:
    rows = [r for r in report["ratios"] if r["metric"] == "output_tokens_per_s"]
    assert [row["arm"] for row in rows] == ["identical", "skewed", "uniform", "distinct"]
    by_label = {arm["label"]: arm["rounds"] for arm in report["arms"]}
    for row in rows:
        ratios = [
            mine["output_tokens_per_s"] / base["output_tokens_per_s"]
            for mine, base in zip(by_label[row["arm"]], by_label["base"], strict=True)
        ]
        assert row["reference"] == "base" and row["rounds"] == 2
        assert (row["min"], row["max"]) == (min(ratios), max(ratios))
        assert row["mean"] == pytest.approx(sum(ratios) / 2)


def test_narrow_tables_fit_80_columns_and_lose_no_load(report) -> None:
    whole = main_table(report)
    much, fast = narrow_tables(whole)
    for columns, rows in (much, fast):
        assert columns[0] == "workload" and [row[0] for row in rows] == [r[0] for r in whole[1]]
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        assert sum(widths) + 3 * len(widths) + 1 <= 80
    place = whole[0].index("tok/s")
    assert [row[much[0].index("tok/s")] for row in much[1]] == [row[place] for row in whole[1]]


def test_curves_are_monotone_and_complete(report) -> None:
    for arm in report["arms"]:
        for quantiles in arm["cdf"].values():
            assert len(quantiles) == 101 and quantiles == sorted(quantiles)
        found = arm["timeline"]
        assert sum(found["tokens_per_s"]) * found["bin_s"] == pytest.approx(32, rel=0.01)
        assert max(found["in_flight"]) <= 8


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        if tag == "figure":
            self.ids.append(str(found["id"]))
        self.links += [str(found[k]) for k in ("src", "href", "action") if k in found]


def test_the_page_is_self_contained_and_has_every_plot(report, tmp_path: Path) -> None:
    write_page(report, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    page = _Page()
    page.feed(text)
    timelines = [f"timeline-{i}" for i in range(5)]
    assert page.ids == ["throughput", "ttft-cdf", "e2e-cdf", "ttft-by-rank", *timelines]
    assert page.links == [] and not {"script", "link", "img", "iframe"} & set(page.tags)
    shown = text.replace('xmlns="http://www.w3.org/2000/svg"', "").replace("http://h:", "")
    assert re.findall(r"https?://\S+|url\(|@import", shown.replace("http://h", "")) == []
    assert "b&lt;script&gt;" in text and "mlora bench &lt;fleet&gt;" in text


def test_a_fleet_of_thousands_does_not_swamp_the_page(report) -> None:
    many = json.loads(json.dumps(report))
    groups = many["arms"][0]["measures"]["per_adapter"]
    many["arms"][0]["measures"]["per_adapter"] = [
        {**groups[0], "name": f"adapter-{index:04}"} for index in range(2000)
    ]
    text = render_page(many)
    assert text.count('<td class="word">adapter-') == 500 and "more in the JSON" in text


def test_plots_are_well_formed_and_show_what_they_should(report) -> None:
    plots = re.findall(r'<figure id="([^"]+)">(<svg.*?</svg>)</figure>', render_page(report))
    assert len(plots) == 9
    tag = "{http://www.w3.org/2000/svg}"
    for name, text in plots:
        root = ElementTree.fromstring(text)
        numbers = re.findall(r"-?\d+\.?\d*", " ".join(e.get("points", "") for e in root.iter()))
        assert all(0 <= float(number) <= 720 for number in numbers)
        if name == "throughput":
            assert len(root.findall(f".//{tag}title")) == 5
        if name == "ttft-cdf":
            assert len(root.findall(f"{tag}polyline")) == 5
        if name == "timeline-4":
            dashed = [e for e in root.iter(f"{tag}line") if e.get("stroke-dasharray")]
            assert len(dashed) == 2  # the marks of the churn
    assert "nan" not in render_page(report).replace("finance", "").lower().split("<body>")[1]


def test_a_load_has_one_colour_in_every_plot(report) -> None:
    """The base asks no adapter: it has no bar by rank, and leaves its colour to nobody."""

    def legend(name: str) -> dict[str, str]:
        plots = re.findall(r'<figure id="([^"]+)">(<svg.*?</svg>)</figure>', render_page(report))
        tag = "{http://www.w3.org/2000/svg}"
        shapes = list(ElementTree.fromstring(dict(plots)[name]))
        pairs = pairwise(shapes)
        return {
            str(text.text): str(box.get("fill"))
            for box, text in pairs
            if box.tag == f"{tag}rect" and text.tag == f"{tag}text" and box.get("width") == "12"
        }

    everywhere, by_rank = legend("ttft-cdf"), legend("ttft-by-rank")
    labels = [arm["label"] for arm in report["arms"]]
    assert list(everywhere) == labels and len(set(everywhere.values())) == 5
    assert list(by_rank) == labels[1:]  # in the same order
    assert by_rank.items() <= everywhere.items()


def test_a_report_in_which_nothing_succeeded_can_still_be_read() -> None:
    async def go() -> dict[str, Any]:
        script = Script(models=("base", "a"))
        async with Loopback(script) as server, Target(server.url) as target:
            fleet = await target.fleet()
            program = make_program("smoke", Workload(requests=2, lengths="8:2"), Room(0))
            side = Side("", target, fleet, fleet.adapters)
            settings = Settings(ended=lambda done: None)
            passes, notes = await run_program([side], program, settings)
            bad = passes[0].result.records[0]
            none = bad.times_s[:0]
            broken = [replace(bad, first_s=None, times_s=none, output_tokens=0, error="http_500")]
        done = replace(
            passes[0],
            result=replace(passes[0].result, records=tuple(broken)),
            measures=measure(broken, 1.0),
        )
        facts = {
            "command": "c", "commit": "abc", "seed": 0, "rounds": 1, "preset": "smoke",
            "machine": environment(), "settings": {}, "servers": [],
        }  # fmt: skip
        return build_report([done], facts, notes, None)

    value = asyncio.run(go())
    json.dumps(value, allow_nan=False)
    assert error_table(value)[1] == [("base", "http_500", "1")]
    assert main_table(value)[1][0][4] == "0.00"
    assert "http_500" in render_page(value)


def test_compare_puts_b_over_a_and_says_what_differs(report) -> None:
    faster = json.loads(json.dumps(report))
    faster["seed"] = 4
    for arm in faster["arms"]:
        arm["measures"]["output_tokens_per_s"] *= 2
        arm["measures"]["ttft"] = None
    faster["arms"].pop()
    value = compare_reports(report, faster)
    assert value["differing"] == ["seed"] and len(value["arms"]) == 4
    figures = value["arms"][0]["figures"]
    assert figures["tok/s"]["ratio"] == pytest.approx(2) and figures["req/s"]["ratio"] == 1
    assert figures["TTFT mean"]["ratio"] is None
    columns, rows = compare_table(value)
    assert len(rows) == 4 * len(figures) and all(len(row) == len(columns) for row in rows)
    with pytest.raises(BadInput, match="no workload in common"):
        compare_reports(report, {**report, "arms": []})


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": "mlora.bench/2", "arms": []}', "[" * 5000,
             '{"schema": "mlora.bench/1", "arms": [{}]}', '{"schema": "mlora.bench/1"}'],
)  # fmt: skip
def test_other_files_are_no_reports(text: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(BadInput, match=r"x\.json"):
        read_report(file)
    with pytest.raises(BadInput, match="none"):
        read_report(tmp_path / "none")


def test_the_command_is_kept_without_its_secrets() -> None:
    words = ["bench", "--url", "http://u:pw@h:1/v1", "--api-key", "s3cret", "--against-api-key=k2"]
    line = command_line([*words, "--against=http://u:pw@g:2", "--seed", "1"])
    assert line.startswith("mlora bench --url http://h:1/v1 --api-key ")
    assert line.endswith("--against=http://g:2 --seed 1")
    assert not any(secret in line for secret in ("s3cret", "k2", "pw", "u:"))


def test_the_command_is_kept_without_where_its_record_went() -> None:
    words = ["bench", "--output", "/home/me/a.json", "--seed", "1", "--report=b.html", "f.yaml"]
    assert command_line([*words, "--commit", "abc"]) == "mlora bench --seed 1 f.yaml"


def test_the_environment_is_plain_and_the_commit_is_this_checkouts() -> None:
    found = environment()
    json.dumps(found)
    assert found["versions"]["aiohttp"] and found["cores"] >= 1
    assert isinstance(found["gpus"], list)
    known = commit()
    assert known is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", known)


def test_axes_stay_inside_their_frame() -> None:
    linear, log = Axis(0, 10, 100, 200), Axis(0.01, 10, 0, 300, log=True)
    assert (linear.at(-5), linear.at(5), linear.at(50)) == (100, 150, 200)
    assert log.at(0.1) == pytest.approx(100) and log.at(0.0001) == 0
    assert linear.ticks() == [0, 2, 4, 6, 8, 10]
    assert log.ticks() == pytest.approx([0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10])
    assert Axis(1, 1, 0, 9).ticks() == [1] and Axis(1, 1, 0, 9).at(1) == 4.5
    for text in (lines("t", {}, ("x", "y")), bars("t", {}, ("x", "y")),
                 lines("t", {"s": [(1.0, 0.0)]}, ("x", "y"), log_x=True)):  # fmt: skip
        ElementTree.fromstring(text)
