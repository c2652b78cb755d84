"""Adapters in local folders, and which folders a request may name."""

import os
from collections.abc import Sequence
from pathlib import Path

from multilora_cli.adapters.source.base import SourceContext
from multilora_cli.adapters.strict_json import quoted
from multilora_cli.errors import AdapterError
from multilora_cli.fleet.pattern import is_folder

_PATH_MAX = 4096


class LocalSource:
    """A folder, read in place."""

    def resolve(self, text: str, context: SourceContext) -> Path:
        """`text` with ~ expanded, relative to the context's folder; existence is not checked."""
        _check_text(text, "source")
        try:
            path = Path(text).expanduser()
        except RuntimeError:
            raise AdapterError(f"source {quoted(text)}: no such user", reason="source") from None
        return Path(os.path.normpath(context.relative_to.absolute() / path))


def allowed_folder(text: str, roots: Sequence[Path], beside: Path | None = None) -> Path:
    """The real folder behind `text` if it lies below one of `roots`, after all symlinks.

    A relative `text` means in `beside`, the fleet file's folder, what it means in the file; where
    that is outside the roots or not there it is looked up below each root in turn. Raises
    AdapterError; the message is the same whether a path outside the roots exists or not.
    """
    _check_text(text, "lora_path")
    if not is_folder(text) or text.startswith("~"):
        raise AdapterError(
            f"lora_path {quoted(text)}: expected a folder on the server's machine",
            reason="not_a_folder",
            field="lora_path",
            hint="other sources are named in the fleet file: mlora apply brings them in",
        )
    real_roots = [Path(os.path.realpath(root)) for root in roots]
    candidates = [Path(os.path.realpath(root / text)) for root in real_roots]
    if beside is not None:
        named = Path(os.path.realpath(beside / text))
        if any(named.is_relative_to(root) for root in real_roots):
            candidates.insert(0, named)
    inside = [any(path.is_relative_to(root) for root in real_roots) for path in candidates]
    for path, allowed in zip(candidates, inside, strict=True):
        if allowed and path.is_dir():
            return path
    if not candidates or not all(inside):
        raise AdapterError(
            f"lora_path {quoted(text)}: not below a folder that adapters may be loaded from",
            reason="outside_roots",
            field="lora_path",
            hint="list the folder under server.adapter_roots in the fleet file",
        )
    return candidates[0]


def _check_text(text: str, field: str) -> None:
    if not text or len(text) > _PATH_MAX or not text.isprintable():
        raise AdapterError(
            f"{field} {quoted(text)}: expected a path of 1 to {_PATH_MAX} printable characters",
            reason="path",
            field=field,
        )
