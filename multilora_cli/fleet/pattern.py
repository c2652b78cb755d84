"""Name patterns: which adapter names a fleet allows without listing them, and where each is.

`{tenant}/{name}` with the source `s3://bucket/{tenant}/{name}/`: a part of a name holds at most one
placeholder, so that a name can be read in one way only. What a placeholder takes begins with a
letter or digit and holds no separator: no name leads out of the folder that the source names.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

MAX_PARTS = 2  # of a name, joined by /
_NAME_MAX = 257
_HOLE = re.compile(r"\{([a-z][a-z0-9_]{0,31})\}")
_VALUE = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


def is_folder(source: str) -> bool:
    """Whether a source is a folder of this machine: it names no scheme, such as hf: or demo:."""
    return _SCHEME.match(source) is None


@dataclass(frozen=True)
class NamePattern:
    """One pattern of a fleet. Raises ValueError where pattern and source do not fit together."""

    pattern: str
    source: str
    priority: int = 0
    ttl: float | None = None  # seconds

    def __post_init__(self) -> None:
        holes = _HOLE.findall(self.pattern)
        parts = self.pattern.split("/")
        samples = [_HOLE.sub("a", part) for part in parts]
        if len(parts) > MAX_PARTS or not all(re.fullmatch(_VALUE, part) for part in samples):
            raise ValueError(
                f"pattern {self.pattern!r} is not a name of at most two parts with placeholders"
                " such as {tenant}/{name}"
            )
        if not holes or any(len(_HOLE.findall(part)) > 1 for part in parts):
            raise ValueError(
                f"pattern {self.pattern!r} is not one placeholder a part, at least one"
            )
        if len(set(holes)) < len(holes) or set(_HOLE.findall(self.source)) != set(holes):
            raise ValueError(
                f"source {self.source!r} is not a place with each of the pattern's placeholders"
                f" ({', '.join('{' + hole + '}' for hole in dict.fromkeys(holes))})"
            )
        if re.search(r"[{}]", _HOLE.sub("", self.source)):
            raise ValueError(f"source {self.source!r} is not free of stray braces")
        if self.source.startswith(("demo:", "dummy:")):
            raise ValueError(f"source {self.source!r} is not a folder, hf:// or s3://")

    @property
    def is_local(self) -> bool:
        """Whether the source is a folder of this machine."""
        return is_folder(self.source)

    @property
    def root(self) -> str:
        """The part of the source before its first placeholder: a folder that no name leaves."""
        start = _HOLE.split(self.source, maxsplit=1)[0]
        return start[: start.rfind("/") + 1] or "."

    def source_of(self, name: str) -> str | None:
        """Where `name` is, if the pattern covers it."""
        match = self._regex.fullmatch(name)
        if match is None:
            return None
        return _HOLE.sub(lambda hole: match[hole[1]], self.source)

    def relative_to(self, folder: Path) -> "NamePattern":
        """The same with an absolute source, where it is a folder."""
        if not self.is_local:
            return self
        source = os.path.join(folder.absolute(), Path(self.source).expanduser())
        return NamePattern(self.pattern, source, self.priority, self.ttl)

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        return re.compile("".join(_regex_parts(self.pattern)))


def _regex_parts(pattern: str) -> Iterator[str]:
    end = 0
    for hole in _HOLE.finditer(pattern):
        yield re.escape(pattern[end : hole.start()])
        yield f"(?P<{hole[1]}>{_VALUE})"
        end = hole.end()
    yield re.escape(pattern[end:])


def covering(patterns: Sequence[NamePattern], name: str) -> tuple[NamePattern, str] | None:
    """The first pattern that covers a name, and where the name is by it."""
    if len(name) > _NAME_MAX:
        return None
    for pattern in patterns:
        source = pattern.source_of(name)
        if source is not None:
            return pattern, source
    return None
