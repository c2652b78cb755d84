"""Raw bytes of a request to checked values: strict JSON, closed fields, no echo of input."""

import difflib
import functools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect

from multilora_cli.engine.messages import SamplingParams
from multilora_cli.errors import RequestError
from multilora_cli.fleet.schema import is_adapter_name
from multilora_cli.server.bodies import (
    HARMLESS,
    MAX_PROMPTS,
    NEUTRAL,
    ChatBody,
    CompletionBody,
    Generate,
    Message,
)
from multilora_cli.units import parse_duration

MAX_DEPTH = 64
MAX_DURATION_S = 1e8  # as in the fleet file
DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions, as everywhere
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*+"')
_PLACE = re.compile(r"(?P<problem>.*?)(?: - at `(?:key in )?\$(?P<path>.*)`)?", re.DOTALL)
_MESSAGE_FIELDS = frozenset(Message.__struct_fields__)

Body = TypeVar("Body", bound=msgspec.Struct)


def parse_body(raw: bytes, kind: type[Body]) -> Body:
    """A checked body. Raises RequestError (400) that names the field and never its content."""
    _check_depth(raw)
    try:
        body = msgspec.json.decode(raw, type=kind, strict=True)
    except msgspec.ValidationError as error:
        raise _invalid(error, kind) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise RequestError("the body is not valid JSON in UTF-8", code="invalid_json") from None
    fields = _scan(raw)
    _check_fields(fields, kind)
    return body


def _check_depth(raw: bytes) -> None:
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    for byte in re.findall(rb"[\[\]{}]", _STRINGS.sub(b"", raw)):
        depth += 1 if byte in b"[{" else -1
        if depth > MAX_DEPTH:
            raise RequestError(f"the body is nested deeper than {MAX_DEPTH}", code="invalid_json")


def _scan(raw: bytes) -> Mapping[str, Any]:
    """The body as plain values; refuses a key that is given twice."""
    try:
        plain = _MANY_DIGITS.search(raw) is None
        value = (_PLAIN if plain else _LONG).decode(raw.decode())
    except (ValueError, RecursionError):
        raise RequestError("the body is not valid JSON in UTF-8", code="invalid_json") from None
    return value if isinstance(value, dict) else {}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise RequestError("the body gives one key twice", code="duplicate_key")
    return found


def _digits(text: str) -> float:
    """Numbers are only compared here: long ones need no exact value."""
    return int(text) if len(text) < 20 else float(text)


# A function called for every token id of a prompt takes most of the scan.
_MANY_DIGITS = re.compile(rb"[0-9]{20}")
_PLAIN = json.JSONDecoder(object_pairs_hook=_unique)
_LONG = json.JSONDecoder(object_pairs_hook=_unique, parse_int=_digits)


def _check_fields(fields: Mapping[str, Any], kind: type[msgspec.Struct]) -> None:
    own = frozenset(kind.__struct_fields__)
    generates = issubclass(kind, Generate)
    for name, value in fields.items():
        if name in own:
            continue
        if not (generates and (name in NEUTRAL or name in HARMLESS)):  # a null one as well
            raise _unknown(name, own, generates)
        if value is None or name in HARMLESS:
            continue
        if not any(type(value) is type(ok) and value == ok for ok in NEUTRAL[name]):
            raise RequestError(
                f"{name}: not supported by this server", code="unsupported_parameter", param=name
            )
    for place, message in enumerate(fields.get("messages") or ()):
        unknown = sorted(set(message) - _MESSAGE_FIELDS)
        if unknown:
            raise _unknown(unknown[0], _MESSAGE_FIELDS, False, f"messages[{place}].")


def _unknown(name: str, own: Iterable[str], generates: bool, where: str = "") -> RequestError:
    known = [*own, *NEUTRAL, *HARMLESS] if generates else list(own)
    near = difflib.get_close_matches(name[:64], known, n=1, cutoff=0.7)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    shown = where + name if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name) else ""
    start = f"{shown}: " if shown else ""
    return RequestError(
        f"{start}unknown field{hint}", code="unknown_parameter", param=shown or None
    )


def _invalid(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> RequestError:
    match = _PLACE.fullmatch(str(error))
    problem, path = (match["problem"], match["path"]) if match else ("invalid value", None)
    if problem.startswith("Object contains unknown field"):
        problem = "Unknown field"  # its name would be an echo
    if problem.startswith("Invalid enum value"):  # and so would that value
        known = _words(kind).get((path or "").rpartition(".")[2], ())
        problem = "Expected " + " or ".join(map(repr, known)) if known else "Invalid value"
    param = (path or "").lstrip(".")[:200] or None
    text = problem[:1].lower() + problem[1:200]
    return RequestError(
        f"{param}: {text}" if param else f"the body: {text}",
        code="invalid_type" if "got `" in problem else "invalid_value",
        param=param,
    )


@functools.cache
def _words(kind: type[msgspec.Struct]) -> dict[str, tuple[object, ...]]:
    """What fields of a body, nested ones included, may say, where that is a list of words."""
    found: dict[str, tuple[object, ...]] = {}

    def look(field: str, shape: object) -> None:
        match shape:
            case inspect.StructType(fields=fields):
                for each in fields:
                    look(each.name, each.type)
            case inspect.UnionType(types=types):
                for each_type in types:
                    look(field, each_type)
            case inspect.ListType(item_type=item) | inspect.Metadata(type=item):
                look(field, item)
            case inspect.LiteralType(values=values):
                found[field] = values

    look("", inspect.type_info(kind))
    return found


def select_adapter(body: Generate, base_name: str) -> str | None:
    """Name of the adapter that a request asks for; None is the base, only when asked for.

    `model` names an adapter, the base, or both as `base:adapter` or `base::adapter`. The fields
    of other servers may name the adapter beside the base's name. Two names must be the same.
    """
    if not body.model:
        raise RequestError("model: required", code="missing_required_parameter", param="model")
    wanted = {"model": split_model(body.model, base_name)}
    for field in ("lora_path", "adapter_id", "adapter"):
        value = getattr(body, field)
        if value is not None:
            if not value:
                raise RequestError(f"{field}: found an empty name", param=field)
            wanted[field] = split_model(value, base_name)
    if body.lora_request is not None:
        wanted["lora_request"] = split_model(body.lora_request.lora_name, base_name)
    if wanted["model"] is None and len(wanted) > 1:
        del wanted["model"]  # the base's name leaves the choice to the other fields
    if len(set(wanted.values())) > 1:
        fields = " and ".join(wanted)
        raise RequestError(f"{fields} name different adapters", code="conflict", param="model")
    return next(iter(wanted.values()))


def split_model(model: str, base_name: str) -> str | None:
    """The adapter in `model`; None where it is the base's own name. Raises RequestError 404."""
    if model == base_name:
        return None
    name = model.removeprefix(f"{base_name}::")
    if name == model:
        name = model.removeprefix(f"{base_name}:")
    if not is_adapter_name(name):
        raise model_not_found(model)
    return name


def model_not_found(model: str) -> RequestError:
    """The same 404 for adapters that do not exist and for those a caller may not use."""
    shown = f" `{model}`" if re.fullmatch(r"[A-Za-z0-9._:/-]{1,260}", model) else ""
    return RequestError(
        f"The model{shown} does not exist.", status=404, code="model_not_found", param="model"
    )


def duration(value: float | str | None, param: str) -> float | None:
    """Seconds of a field that takes a number or `1h`. Raises RequestError."""
    if value is None:
        return None
    try:
        seconds = parse_duration(value) if isinstance(value, str) else value
    except ValueError:
        raise RequestError(
            f"{param}: expected seconds, or a number with ms, s, m, h or d", param=param
        ) from None
    if not 0 < seconds <= MAX_DURATION_S:
        raise RequestError(f"{param}: expected more than 0 and at most 10^8 s", param=param)
    return seconds


def prompts_of(body: CompletionBody) -> list[str] | list[list[int]]:
    """The prompts of a completion request, all text or all token ids. Raises RequestError."""
    prompt = body.prompt
    if prompt is None:
        raise RequestError("prompt: required", code="missing_required_parameter", param="prompt")
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [cast(list[int], prompt)]
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(
            f"prompt: found {len(prompt)} prompts, expected at most {MAX_PROMPTS}", param="prompt"
        )
    if kinds == {str}:
        return cast(list[str], prompt)
    if kinds == {list}:
        return cast(list[list[int]], prompt)
    raise RequestError("prompt: expected all text or all token ids", param="prompt")


def sampling_params(
    body: ChatBody | CompletionBody,
    *,
    room: int,
    vocab_size: int,
    eos_ids: tuple[int, ...],
    seed: int,
) -> SamplingParams:
    """Checked sampling of one prompt; `room` is how many tokens the context leaves after it."""
    max_tokens = min(_wanted_tokens(body, room), room)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens: found {min_tokens}, expected at most max_tokens ({max_tokens})",
            param="min_tokens",
        )
    stop_ids = tuple(body.stop_token_ids or ())
    check_ids(stop_ids, vocab_size, "stop_token_ids")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_given(body.temperature, 1.0),
        top_k=min(max(_given(body.top_k, 0), 0), vocab_size),
        top_p=_given(body.top_p, 1.0),
        min_p=_given(body.min_p, 0.0),
        seed=seed if body.seed is None else body.seed % 2**63,
        repetition_penalty=_given(body.repetition_penalty, 1.0),
        presence_penalty=_given(body.presence_penalty, 0.0),
        frequency_penalty=_given(body.frequency_penalty, 0.0),
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
        stop_token_ids=stop_ids if body.ignore_eos else tuple(dict.fromkeys(stop_ids + eos_ids)),
        logprobs=_num_logprobs(body),
        prompt_logprobs=_prompt_logprobs(body),
    )


Number = TypeVar("Number", int, float)


def _given(value: Number | None, default: Number) -> Number:
    return default if value is None else value


def _wanted_tokens(body: ChatBody | CompletionBody, room: int) -> int:
    if isinstance(body, ChatBody):
        given = (body.max_completion_tokens, body.max_tokens)
        return next((value for value in given if value is not None), room)
    if body.max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens: 0 needs echo, expected at least 1", param="max_tokens")
    return DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens


def _num_logprobs(body: ChatBody | CompletionBody) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs: needs logprobs to be true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _prompt_logprobs(body: ChatBody | CompletionBody) -> int | None:
    return body.logprobs if isinstance(body, CompletionBody) and body.echo else None


def _logit_bias(given: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    biases = {}
    for key, value in given.items():
        if not re.fullmatch(r"[0-9]{1,10}", key):
            raise RequestError("logit_bias: expected token ids as keys", param="logit_bias")
        biases[int(key)] = value
    check_ids(biases, vocab_size, "logit_bias")
    return biases


def check_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Refuse token ids that the model does not have."""
    lowest, highest = min(ids, default=0), max(ids, default=0)
    if lowest < 0 or highest >= vocab_size:
        raise RequestError(f"{param}: found a token id outside 0 to {vocab_size - 1}", param=param)
