"""What reaches a terminal: only bytes the program chose itself."""

import io
import json
import logging
import subprocess
import sys

import pytest

from multilora_cli.cli.console import Console
from multilora_cli.logs import OneLine, clean
from multilora_cli.units import format_duration, format_size

HOSTILE = [
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "\x1b]52;c;Y2xpcA==\x07",
    "\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\",
    "\x9b31m",
    "a\rb",
    "a\nb",
    "bell\x07",
    "back\x08space",
    "del\x7f",
    "\u202eevil",
    "zero\u200bwidth",
    "\u2066isolate\u2069",
    "line\u2028separator",
    "nul\x00",
    "[/foo]",
    "[bold]markup[/bold]",
    "[link=http://x]y[/link]",
    "surrogate \udc80",
    "tag \U000e0041",
    "private \ue000",
]
HOSTILE += [f"c0 {chr(code)}" for code in range(32)] + [f"c1 {chr(c)}" for c in range(0x7F, 0xA0)]
HOSTILE += [f"{kind}{code}" for kind in ("\x1b[", "\x1b]", "\x1bP", "\x9d") for code in range(32)]


def written(*, tty: bool = False, **modes: bool) -> tuple[Console, io.StringIO]:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return tty

    stream = Stream()
    return Console(stdout=stream, stderr=stream, **modes), stream


def own_bytes_only(text: str) -> bool:
    """No control character but newline and tab, and rich's own colour codes."""
    import re

    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return all(
        char in "\n\t" or (ord(char) >= 32 and not 0x7F <= ord(char) < 0xA0) for char in text
    )


def test_there_are_two_hundred_hostile_strings() -> None:
    assert len(set(HOSTILE)) >= 200


@pytest.mark.parametrize("tty", [False, True])
def test_hostile_names_never_steer_the_terminal(tty: bool) -> None:
    """F100 and G22: 200 strings through every way of printing."""
    for text in HOSTILE:
        console, stream = written(tty=tty)
        console.line(text)
        console.note(text)
        console.error(text, hint=text)
        console.table(("name", text), [(text, 1)], title=text)
        console.panel(text, {"fact": text})
        console.text(text)
        shown = stream.getvalue()
        assert own_bytes_only(shown), repr(text)
        if not tty:
            assert "\x1b" not in shown
        assert not any(char in shown for char in "\u202e\u200b\u2066\u2028\ue000"), repr(text)


def test_one_event_stays_one_line() -> None:
    """F101: line breaks in a value are shown, not obeyed."""
    console, stream = written()
    console.line("a\r\nb")
    assert stream.getvalue() == "a\\x0d\\x0ab\n"


def test_model_output_keeps_its_lines_but_not_its_escapes() -> None:
    """F102: an answer with escape sequences is shown escaped."""
    console, stream = written()
    console.text("one\ntwo\t\x1b]52;c;eA==\x07 caf\u00e9 \U0001f600")
    assert stream.getvalue() == "one\ntwo\t\\x1b]52;c;eA==\\x07 caf\u00e9 \U0001f600"


def test_json_with_hostile_names_is_json() -> None:
    """F103: valid JSON, no colour, nothing else on stdout."""
    console, stream = written(as_json=True)
    console.line("people only")
    console.table(("a",), [("b",)])
    console.value([{"id": text} for text in HOSTILE if "\udc80" not in text])
    assert [row["id"] for row in json.loads(stream.getvalue())] == [
        text for text in HOSTILE if "\udc80" not in text
    ]
    assert "\x1b" not in stream.getvalue()


def test_clean_is_idempotent_and_leaves_ordinary_text() -> None:
    for text in HOSTILE:
        assert clean(clean(text)) == clean(text)
    for text in ("acme/legal", "日本語", "naïve", "emoji 😀", "Ω≈ç"):
        assert clean(text) == text


def test_a_closed_reader_does_not_end_the_work() -> None:
    """F09: a closed pipe is noticed and ignored."""
    console, stream = written()
    stream.close()
    console.line("nobody reads this")


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_a_terminal_that_cannot_move_its_cursor(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets a line for every phase, and tables as wide as it is: rich says nothing, and folds
    every cell of a table that was laid out for 140 columns into 80."""
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", "140")
    console, stream = written(tty=True)
    assert console.animates == (term != "dumb")
    if term == "dumb":
        with console.progress() as report:
            report("import", 0, 1)
        assert stream.getvalue() == "starting PyTorch ...\n"
    console.table(("name", "text"), [("a", "x" * 100)])
    assert "x" * 100 in stream.getvalue()


def test_a_result_that_cannot_be_written_is_an_error_and_a_note_is_none() -> None:
    """F50: a full disk behind `mlora plan > file` is told once and leaves nothing for the end of
    the interpreter to fail over; of standard error nobody is left to be told."""
    command = [sys.executable, "-m", "multilora_cli", "schema"]
    with open("/dev/full", "wb") as full:
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (
        1,
        "error: cannot write the result: No space left on device\n",
    )
    with open("/dev/full", "w") as full:
        Console(stdout=io.StringIO(), stderr=full).note("told to nobody")


def test_logged_events_are_single_lines_without_control_characters() -> None:
    """F100, F101: also where names and errors come from outside, also with a traceback."""
    stream = io.StringIO()
    log = logging.Logger("hostile")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(OneLine("%(levelname)s %(name)s: %(message)s"))
    log.addHandler(handler)
    for text in HOSTILE:
        log.error("adapter %s", text)
    lines = stream.getvalue().splitlines()
    assert len(lines) == len(HOSTILE) and own_bytes_only(stream.getvalue())
    try:
        raise ValueError("a\x1b[31m\nb")
    except ValueError:
        log.exception("failed\nover")
    assert own_bytes_only(stream.getvalue())
    assert "ERROR hostile: failed\\x0aover\n" in stream.getvalue()
    assert "Traceback" in stream.getvalue()


def test_a_terminal_that_cannot_show_a_character_gets_its_escape() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(stdout=stream, stderr=stream).line("caf\u00e9")
    stream.seek(0)
    assert stream.read() == "caf\\xe9\n"


def test_tables_are_tab_separated_over_a_pipe() -> None:
    console, stream = written()
    console.table(("name", "pages"), [("a", 1), ("b", 22)])
    assert stream.getvalue() == "name\tpages\na\t1\nb\t22\n"
    quiet, stream = written(quiet=True)
    quiet.table(("name",), [("a",)])
    assert stream.getvalue() == "a\n"


def test_a_terminal_breaks_lines_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = "8 of 8 adapters fit on the device at once; then 390016 tokens of KV are left"
    console, stream = written(tty=True)
    console.line(text)
    console.error(text, text)
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) < 40 and len(lines) == 2 + 3 + 3
    assert " ".join(lines) == f"{text} error: {text} hint: {text}"
    console, stream = written()
    console.line(text)
    assert stream.getvalue() == text + "\n"


def test_a_narrow_terminal_cuts_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an operator copies from a table is whole."""
    monkeypatch.setenv("COLUMNS", "60")
    console, stream = written(tty=True)
    modules = "q k v o gate up down"
    console.table(
        ("adapter", "tier", "modules"), [("shipping-glossary-of-acme", "hot", modules)] * 2
    )
    assert stream.getvalue().count("shipping-glossary-of-acme") == 2
    assert "\u2026" not in stream.getvalue()


def test_sizes_and_durations_have_no_exponents() -> None:
    assert format_size(1020 * 1024) == "1020 KiB"
    assert format_size(26 * 2**20 + 2**18) == "26.2 MiB"
    assert format_size(1023 * 2**30) == "1023 GiB"
    assert format_duration(0.9999) == "1000 ms"
    assert format_duration(0.0067) == "6.7 ms"
    assert format_duration(6.55e-6) == "6.55 us" and format_duration(0.0) == "0 ms"


def test_progress_over_a_pipe_is_one_line_a_phase() -> None:
    console, stream = written()
    with console.progress() as report:
        for done in range(5):
            report("weights", done, 4)
        report("warming", 1, 1)
    assert stream.getvalue() == "loading weights ...\nwarming ...\n"


def test_narrow_terminals_get_fewer_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is folded to pieces: the least needed columns go, the name stays, and so it does
    where no terminal draws."""
    columns, row = ("adapter", "tier", "modules", "digest"), ("acme/legal", "hot", "all", "0" * 12)
    seen = {}
    for width in (60, 44, 30):
        monkeypatch.setenv("COLUMNS", str(width))
        console, stream = written(tty=True)
        console.table(columns, [row], spare=("digest", "modules"))
        seen[width] = [name for name in columns if name in stream.getvalue()]
        assert len(stream.getvalue().splitlines()) == 5
    assert seen == {
        60: list(columns), 44: ["adapter", "tier", "modules"], 30: ["adapter", "tier"],
    }  # fmt: skip
    console, stream = written()
    console.table(columns, [row], spare=("digest", "modules"))
    assert stream.getvalue().splitlines()[0] == "\t".join(columns)
