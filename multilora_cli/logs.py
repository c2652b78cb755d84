"""What is said beside results: one line an event, and no byte that could steer a terminal."""

import logging
import unicodedata
from typing import Any

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# Cc: control, Cf: format (bidi overrides, zero width), Co/Cs: private and surrogate,
# Zl/Zp: line and paragraph separators, which some terminals obey.
_UNSAFE = frozenset({"Cc", "Cf", "Co", "Cs", "Zl", "Zp"})


def clean(text: object, *, keep: str = "") -> str:
    """`text` with every character that could steer a terminal shown as its escape.

    Idempotent. Characters in `keep` (such as newline and tab for a model's answer) stay.
    """
    source = str(text)
    if source.isascii() and source.isprintable():
        return source
    return "".join(
        char if char in keep or unicodedata.category(char) not in _UNSAFE else _visible(char)
        for char in source
    )


def _visible(char: str) -> str:
    point = ord(char)
    if point < 0x100:
        return f"\\x{point:02x}"
    return f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"


class OneLine(logging.Formatter):
    """One line an event, whatever names and messages hold; a traceback has the lines it needs."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """logging: the event's own line."""
        return clean(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """logging: the traceback below it."""
        return clean(super().formatException(ei), keep="\n\t")


def log_to_stderr(level: int) -> None:
    """Events of this process from `level` on, as lines of standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine(FORMAT))
    logging.basicConfig(level=level, handlers=[handler], force=True)
