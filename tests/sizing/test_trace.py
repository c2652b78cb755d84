"""A recorded load replayed through the planned tiers."""

import json
from pathlib import Path

import pytest

from multilora_cli.errors import BadInput
from multilora_cli.sizing.trace import Call, forecast, read_trace

PAGES = dict.fromkeys("abcdef", 13)


def calls(names: str, gap_s: float = 1.0) -> list[Call]:
    return [Call(i * gap_s, None if n == "-" else n, 10, 10) for i, n in enumerate(names)]


def test_everything_fits_after_the_first_touch() -> None:
    result = forecast(calls("abcabcabc"), PAGES, hot_pages=39, warm_pages=100)
    assert (result.hot_ratio, result.cold_ratio, result.reloads) == (6 / 9, 3 / 9, 0)
    assert result.pages_for_all == 39
    assert "stays on the device" in result.advice[0]


def test_a_cycle_one_larger_than_the_pool_thrashes() -> None:
    """F43: least recently used over a cycle of n + 1 never hits."""
    result = forecast(calls("abcd" * 10), PAGES, hot_pages=39, warm_pages=52)
    assert result.hot_ratio == 0.0
    assert (result.cold_ratio, result.warm_ratio) == (0.1, 0.9)
    assert result.reloads == 36
    assert result.reloads_per_s == pytest.approx(36 / 39)
    assert "52 pages would keep all" in result.advice[0]


def test_base_calls_touch_no_adapter_and_windows_count_distinct() -> None:
    result = forecast(calls("a-b-a-c-"), PAGES, hot_pages=100, warm_pages=100, window_s=4.0)
    assert result.requests == 8
    assert result.adapters == 3
    assert (result.distinct_mean, result.distinct_max) == (2.0, 2)


def test_an_adapter_larger_than_the_tier_is_always_missed() -> None:
    result = forecast(calls("aaa"), PAGES, hot_pages=12, warm_pages=12)
    assert result.cold_ratio == 1.0


def test_a_file_is_read_in_time_order(tmp_path: Path) -> None:
    rows = [
        {"time": 2.0, "adapter": "b", "input": 1, "output": 2},
        {"time": 1, "adapter": None, "input": 3, "output": 4},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    assert read_trace(path) == [Call(1.0, None, 3, 4), Call(2.0, "b", 1, 2)]


@pytest.mark.parametrize(
    "line",
    [
        "{", "[]", "{}", '{"time": -1, "input": 1, "output": 1}',
        '{"time": NaN, "input": 1, "output": 1}', '{"time": 1e999, "input": 1, "output": 1}',
        '{"time": true, "input": 1, "output": 1}', '{"time": 1, "input": "1", "output": 1}',
        '{"time": 1, "adapter": 5, "input": 1, "output": 1}', "[" * 20000,
    ],
)  # fmt: skip
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"time": 0, "adapter": "a", "input": 1, "output": 1}\n' + line + "\n")
    with pytest.raises(BadInput, match=r"trace\.jsonl:2: "):
        read_trace(path)


def test_unknown_adapter_empty_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not in the fleet"):
        forecast(calls("z"), PAGES, hot_pages=1, warm_pages=1)
    (tmp_path / "empty").write_text("\n")
    for name in ("empty", "missing"):
        with pytest.raises(BadInput):
            read_trace(tmp_path / name)


def test_what_is_wrong_with_a_line_is_said(tmp_path: Path) -> None:
    """In words of the trace: `Expecting value: line 1 column 1 (char 0)` is json's."""
    path = tmp_path / "trace.jsonl"
    for line, said in (
        ("time,adapter,input", 'trace.jsonl:1: not JSON, expected a line like {"time": 0.5'),
        ('{"time": 1, "output": 1}', "trace.jsonl:1: 'input' is missing; a request has time"),
    ):
        path.write_text(line + "\n")
        with pytest.raises(BadInput) as caught:
            read_trace(path)
        assert said in caught.value.message
