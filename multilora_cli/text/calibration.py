"""The text on which a quantiser watches a model: windows of token ids."""

import json
from importlib import resources
from pathlib import Path

from multilora_cli.errors import BadInput, reason_of
from multilora_cli.text.tokenizer import load_tokenizer

_DEFAULT = "calibration.txt"  # beside this module, written for it: prose, dialogue, code, tables
_WINDOWS_MIN = 8  # fewer say too little about the spread of activations
WINDOW = 256  # tokens
WINDOWS_MAX = 128


def calibration_windows(model: Path, text: Path | None) -> list[list[int]]:
    """Windows of `WINDOW` tokens of the model in `model`, spread over the whole text.

    `text` is plain text, or JSON lines that are strings or have a "text"; None: the text shipped
    here, about 4,000 tokens. Raises BadInput where it is unreadable or holds fewer than 8 windows.
    """
    tokens = load_tokenizer(model).encode(read_text(text, "--calibration"))
    count = len(tokens) // WINDOW
    if count < _WINDOWS_MIN:
        raise BadInput(
            f"--calibration: {text or 'the default text'} has {len(tokens)} tokens of this model,"
            f" expected at least {_WINDOWS_MIN * WINDOW}"
        )
    used = min(count, WINDOWS_MAX)
    starts = [index * count // used * WINDOW for index in range(used)]
    return [tokens[start : start + WINDOW] for start in starts]


def read_text(path: Path | None, option: str) -> str:
    """A text file or the texts of a JSON-lines file; None: the default. Raises BadInput."""
    if path is None:
        return resources.files(__package__ or "").joinpath(_DEFAULT).read_text(encoding="utf-8")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{option}: {path}: not readable as UTF-8: {reason_of(error)}") from None
    if path.suffix != ".jsonl":
        return text
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    return "\n\n".join(_text_of(line, f"{option}: {path}: line {number}") for number, line in lines)


def _text_of(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where}: not readable as JSON: {error}") from None
    found = value.get("text") if isinstance(value, dict) else value
    if not isinstance(found, str):
        raise BadInput(f'{where}: expected a string, or an object with a string "text"')
    return found
