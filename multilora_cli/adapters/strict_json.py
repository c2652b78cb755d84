"""JSON as the standard has it: UTF-8, no duplicate keys, no NaN, no endless nesting."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

_SURROGATE = re.compile(rb"\\u[dD]")
_BYTE_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf")


class JsonError(ValueError):
    """Why some bytes are not JSON; `key` is the key that appears twice, if that is the reason."""

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key


def quoted(value: object) -> str:
    """`value` for an error message: escaped, and cut to 120 characters."""
    text = ascii(value) if isinstance(value, str) else ascii(str(value))[1:-1]
    return text if len(text) <= 120 else text[:117] + "..."


def parse_json(raw: bytes, *, parse_int: Callable[[str], int] | None = None) -> Any:
    """The value that `raw` spells. Raises JsonError."""
    if raw.startswith(_BYTE_ORDER_MARKS):
        raise JsonError("starts with a byte order mark, expected plain UTF-8")
    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_int=parse_int,
        )
        if _SURROGATE.search(raw):
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # fails on half a pair
    except UnicodeDecodeError as error:
        raise JsonError(f"not UTF-8 at byte {error.start}") from None
    except UnicodeEncodeError:
        raise JsonError("holds half of a surrogate pair") from None
    except RecursionError:
        raise JsonError("nested too deeply") from None
    except JsonError:
        raise
    except ValueError as error:
        raise JsonError(f"not JSON: {error}") from None
    return value


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise JsonError(f"{quoted(key)} appears twice", key=key)
            seen.add(key)
    return fields


def _no_constant(text: str) -> NoReturn:
    raise JsonError(f"not JSON: {text} is not a number")
