"""YAML 1.2 as a fleet file needs it: every value with its line and column, and no surprises.

PyYAML composes nodes; scalars are resolved here by YAML 1.2's core rules, so that `no` is a
string and `010` is not eight. Duplicate keys, aliases, tags and deep nesting are refused.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from multilora_cli.errors import FleetError

MAX_BYTES = 8 * 2**20
MAX_DEPTH = 32
MAX_SCALAR = 64 * 2**10
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]{1,308}(\.[0-9]*)?)([eE][-+]?[0-9]{1,3})?")
_TAG = "tag:yaml.org,2002:"
_TAGS = {_TAG + kind for kind in ("str", "int", "float", "bool", "null", "map", "seq",
                                  "timestamp", "merge", "value")}  # fmt: skip

KeyPath = tuple[str | int, ...]


class Position(NamedTuple):
    """Where something stands in the file, counted from 1."""

    line: int
    column: int


class Document(NamedTuple):
    """Plain data, and the position of every key path in it."""

    value: Any
    positions: dict[KeyPath, Position]


def read_yaml(path: Path) -> Document:
    """Parse the file at `path`. Raises FleetError with line and column."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise FleetError(
            f"{path}: no such fleet file", hint="README.md shows one; mlora schema says every key"
        ) from None
    except IsADirectoryError:
        raise FleetError(f"{path}: a folder, expected a fleet file", hint=_hint(path)) from None
    except OSError as error:
        raise FleetError(f"{path}: {error.strerror or error}") from None
    if len(raw) > MAX_BYTES:
        raise FleetError(f"{path}: larger than 8 MiB")
    return parse_yaml(raw, str(path))


def _hint(folder: Path) -> str:
    """What was probably meant by a folder where a fleet file is expected."""
    if (folder / "adapter_config.json").is_file():
        return f"this is an adapter: mlora verify {folder} --base MODEL checks it"
    files = sorted(folder.glob("*.yaml"))
    if files:
        return f"there is {files[0]}"
    return "README.md shows one; mlora schema says every key"


def parse_yaml(raw: bytes, where: str) -> Document:
    """Parse `raw`, naming it `where` in errors. Raises FleetError."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - raw.rfind(b"\n", 0, error.start)
        raise FleetError(f"{where}:{line}:{column}: not UTF-8") from None
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        node = yaml.compose(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = " ".join(str(part) for part in (error.context, error.problem) if part)
        source = "".join(text.splitlines()[mark.line : mark.line + 1]) if mark else ""
        if mark and source[mark.column : mark.column + 1] == "\t":
            problem = "found a tab; YAML is indented with spaces"
        raise FleetError(
            f"{where}{place}: {problem}", hint="a fleet file is YAML, as README.md shows one"
        ) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise FleetError(f"{where}: not YAML: {str(error).splitlines()[0]:.200}") from None
    if node is None:
        raise FleetError(f"{where}:1:1: the file is empty", hint="see fleet.example.yaml")
    return _Builder(where).document(node)


def scalar(text: str) -> str | int | float | bool | None:
    """The value of a plain scalar under YAML 1.2's core schema."""
    constants: dict[str, bool | None] = {
        "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
        "null": None, "Null": None, "NULL": None, "~": None, "": None,
    }  # fmt: skip
    if text in constants:
        return constants[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and not re.fullmatch(r"[-+]?[0-9]+", text):
        return float(text)
    return text


class _Builder:
    """Turns nodes into data, keeping positions and refusing what a fleet file never needs."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._positions: dict[KeyPath, Position] = {}
        self._seen: set[int] = set()

    def document(self, node: yaml.Node) -> Document:
        """The whole tree under `node`."""
        return Document(self._value(node, ()), self._positions)

    def _error(self, node: yaml.Node, problem: str) -> FleetError:
        mark = node.start_mark
        return FleetError(f"{self._where}:{mark.line + 1}:{mark.column + 1}: {problem}")

    def _value(self, node: yaml.Node, path: KeyPath) -> Any:
        if id(node) in self._seen:
            raise self._error(node, "aliases (*name) are not allowed")
        self._seen.add(id(node))
        if node.tag not in _TAGS:
            raise self._error(node, f"tags such as {node.tag[:60]!r} are not allowed")
        if len(path) > MAX_DEPTH:
            raise self._error(node, f"nested deeper than {MAX_DEPTH} levels")
        self._positions.setdefault(
            path, Position(node.start_mark.line + 1, node.start_mark.column + 1)
        )
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*path, i)) for i, item in enumerate(node.value)]
        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(key_node, "a key must be a plain word")
            key = str(key_node.value)
            here = (*path, key)
            if key in result:
                first = self._positions[here]
                raise self._error(
                    key_node, f"key {key[:80]!r} stands here and in line {first.line}"
                )
            if len(key) > MAX_SCALAR:
                raise self._error(key_node, "a key longer than 64 KiB")
            mark = key_node.start_mark
            self._positions[here] = Position(mark.line + 1, mark.column + 1)
            result[key] = self._value(value_node, here)
        return result

    def _scalar(self, node: yaml.Node) -> str | int | float | bool | None:
        text = str(node.value)
        if len(text) > MAX_SCALAR:
            raise self._error(node, "a value longer than 64 KiB")
        plain = isinstance(node, yaml.ScalarNode) and not node.style
        return scalar(text) if plain else text
