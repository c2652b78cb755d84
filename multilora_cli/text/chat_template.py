"""Chat templates: messages to the text a model was trained on.

The template is the base's or an adapter's, as the operator says, never a request's. What users
write cannot become a special token: such text is marked before rendering and comes back as a
literal segment.
"""

import json
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import meta
from jinja2.exceptions import TemplateError

from multilora_cli.adapters.text_files import BYTES_MAX, TEMPLATE_NAME
from multilora_cli.adapters.text_files import TOKENIZER_CONFIG_NAME as CONFIG_NAME
from multilora_cli.errors import ModelError, RequestError
from multilora_cli.text.sandbox import OverBudget, RaisedByTemplate, Sandbox, start_budget

_log = logging.getLogger(__name__)

MAX_LITERALS = 4096
_FAILURES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
TEMPLATE_BYTES_MAX = BYTES_MAX[TEMPLATE_NAME]
_MARK = re.compile("\ue0f0([0-9]+)x([0-9]+)\ue0f1")


class Segment(NamedTuple):
    """Part of a prompt; in a literal part special tokens are only text."""

    text: str
    literal: bool = False


class ChatTemplate:
    """A compiled template. `render` is bounded in time and size; call it off the event loop."""

    def __init__(self, source: str, tokens: Mapping[str, str], special: Sequence[str]) -> None:
        """`tokens`: bos_token and the like by name; `special`: text of every special token."""
        self._tokens = dict(tokens)
        names = sorted((text for text in special if text), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names))) if names else None
        environment = Sandbox({"tojson": _tojson})
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            self.variables = meta.find_undeclared_variables(environment.parse(source))
        except (TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            raise ModelError(f"chat template: {type(error).__name__}: {error}"[:400]) from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[Segment]:
        """The prompt of a conversation; `continue_final`: it ends with the last message's text.

        Raises RequestError where the template refuses it.
        """
        marks = _Marks(self._special)
        if continue_final:
            messages = marks.with_end(messages)
        values = {
            **self._tokens,
            **(variables or {}),
            "messages": marks.protect(list(messages)),
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._text(values)
        return marks.split(marks.before_end(text) if continue_final else text)

    def _text(self, values: Mapping[str, Any]) -> str:
        start_budget()
        try:
            return self._template.render(values)
        except (RaisedByTemplate, OverBudget) as error:
            raise _refusal(str(error)) from None
        except (TemplateError, RecursionError, *_FAILURES) as error:
            _log.info("chat template: %s: %s", type(error).__name__, error)
            raise _refusal("it cannot render these messages") from None


class _Marks:
    """Replaces the text of special tokens in user strings and finds it again."""

    def __init__(self, special: "re.Pattern[str] | None") -> None:
        self._special = special
        self._nonce = str(secrets.randbits(60))
        self._end = f"\ue0f0{self._nonce}end\ue0f1"
        self._found: list[str] = []

    def protect(self, value: Any) -> Any:
        """`value` with every string in it free of special tokens."""
        if isinstance(value, str):
            return self._special.sub(self._mark, value) if self._special else value
        if isinstance(value, list):
            return [self.protect(item) for item in value]
        if isinstance(value, Mapping):
            return {key: self.protect(item) for key, item in value.items()}
        return value

    def with_end(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The messages with a mark behind the text of the last one."""
        *before, last = messages
        return [*before, {**last, "content": f"{last['content']}{self._end}"}]

    def before_end(self, text: str) -> str:
        """What stands before that mark."""
        head, mark, _ = text.partition(self._end)
        if not mark:
            raise _refusal("it does not show the last message, which is to be continued")
        return head

    def split(self, text: str) -> list[Segment]:
        """Rendered text as segments, in order."""
        segments, start = [], 0
        for match in _MARK.finditer(text):
            index = int(match[2])
            if match[1] != self._nonce or index >= len(self._found):
                continue
            segments += [Segment(text[start : match.start()]), Segment(self._found[index], True)]
            start = match.end()
        return [part for part in (*segments, Segment(text[start:])) if part.text]

    def _mark(self, match: "re.Match[str]") -> str:
        if len(self._found) == MAX_LITERALS:  # each is a call of the tokenizer
            raise _refusal(f"they hold more than {MAX_LITERALS} special tokens as text")
        self._found.append(match[0])
        return f"\ue0f0{self._nonce}x{len(self._found) - 1}\ue0f1"


def read_template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The text of a folder's template; `config` is its tokenizer_config. Raises ModelError."""
    path = folder / TEMPLATE_NAME
    if not path.is_file():
        return template_source(config, None, str(folder))
    if path.stat().st_size > TEMPLATE_BYTES_MAX:
        raise ModelError(f"{path}: {path.stat().st_size} bytes, expected at most 256 KiB")
    return template_source(config, path.read_bytes(), str(folder))


def template_source(config: Mapping[str, Any], file: bytes | None, where: str) -> str | None:
    """The text of a template: `file` (chat_template.jinja) before the config's; None: neither.

    `where` names the folder in errors. Raises ModelError.
    """
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {
            item.get("name"): item.get("template") for item in source if isinstance(item, dict)
        }
        source = named.get("default")
    if file is not None:
        try:
            source = file.decode()
        except UnicodeDecodeError:
            raise ModelError(f"{where}/{TEMPLATE_NAME}: not UTF-8") from None
    if source is None:
        return None
    if not isinstance(source, str) or len(source.encode()) > TEMPLATE_BYTES_MAX:
        raise ModelError(f"{where}: chat_template: expected text of at most 256 KiB")
    return source


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json as it stands; empty without one. Raises ModelError."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        return {}
    if path.stat().st_size > BYTES_MAX[CONFIG_NAME]:
        raise ModelError(f"{path}: {path.stat().st_size} bytes, expected at most 16 MiB")
    return json_object(path.read_bytes(), str(path))


def json_object(raw: bytes, where: str) -> dict[str, Any]:
    """A JSON file that holds an object. Raises ModelError, which names it as `where`."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{where}: found {type(value).__name__}, expected an object")
    return value


def special_names(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the other named tokens of a tokenizer_config, as text."""
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token"):
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and not 0 <= indent <= 16:
        raise ValueError("tojson: indent from 0 to 16")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(form: str) -> str:
    if len(form) > 64:
        raise ValueError("strftime_now: the format is too long")
    return datetime.now().strftime(form)


def _refusal(reason: str) -> RequestError:
    return RequestError(
        f"the chat template refuses the messages: {reason}",
        param="messages",
        code="invalid_messages",
    )
