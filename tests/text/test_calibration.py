"""Calibration text: the one shipped here, files, JSON lines, and what is refused."""

from pathlib import Path

import pytest

from multilora_cli.errors import BadInput
from multilora_cli.text.calibration import WINDOW, WINDOWS_MAX, calibration_windows, read_text
from tests.signature import byte_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of one token a byte."""
    return byte_tokenizer(tmp_path_factory.mktemp("model"))


def test_the_shipped_text_is_long_and_varied(model: Path) -> None:
    """Prose, code, tables, dialogue, other languages and scripts' accents; no line repeats."""
    text = read_text(None, "")
    lines = [line for line in text.splitlines() if len(line) > 20]
    assert len(lines) == len(set(lines)) > 80
    for part in ("def ", "SELECT", "| --- |", "User:", "Assistant:", "ß", "é", "ó", "{", "Proof"):
        assert part in text
    windows = calibration_windows(model, None)
    assert len(windows) == len(text.encode()) // WINDOW
    assert all(len(window) == WINDOW for window in windows)


def test_windows_are_spread_over_a_long_text(model: Path, tmp_path: Path) -> None:
    """The first tokens and nearly the last, no overlap, at most 128 windows."""
    path = tmp_path / "long.txt"
    count = 5 * WINDOWS_MAX
    path.write_text("".join(chr(33 + index % 90) * WINDOW for index in range(count)))
    windows = calibration_windows(model, path)
    assert len(windows) == WINDOWS_MAX
    assert [window[0] for window in windows] == [33 + 5 * index % 90 for index in range(128)]
    assert all(len(set(window)) == 1 for window in windows)


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('"one"\n\n{"text": "two", "source": "x"}\n')
    assert read_text(path, "--calibration") == "one\n\ntwo"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("short.txt", b"too short", "has 9 tokens of this model, expected at least 2048"),
        ("bytes.txt", b"\xff\xfe", "bytes.txt: not readable as UTF-8"),
        ("text.jsonl", b'"fine"\n{"body": "x"}\n', 'line 2: expected a string, or an object'),
        ("text.jsonl", b"{", "line 1: not readable as JSON"),
        ("text.jsonl", b'{"text": 5}', "line 1: expected a string"),
    ],
)  # fmt: skip
def test_refusals(model: Path, tmp_path: Path, name: str, content: bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadInput, match=words):
        calibration_windows(model, path)
    with pytest.raises(BadInput, match="not readable"):
        calibration_windows(model, tmp_path / "nowhere.txt")
