"""Checked bodies to jobs: templates, token ids, lengths. What is not quick runs in threads."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from multilora_cli.engine.messages import AdapterRef, Submit
from multilora_cli.errors import RequestError
from multilora_cli.server.auth import Caller
from multilora_cli.server.bodies import ChatBody, CompletionBody, Generate, Message, TokenizeBody
from multilora_cli.server.choice import TextRules
from multilora_cli.server.config import ServerConfig
from multilora_cli.server.protocol import (
    DEFAULT_COMPLETION_TOKENS,
    check_ids,
    prompts_of,
    sampling_params,
)
from multilora_cli.server.replies import Frame, Kind
from multilora_cli.server.run import Job
from multilora_cli.text.chat_template import ChatTemplate
from multilora_cli.text.tokenizer import Tokenizer

_RESERVED = frozenset(
    {
        "add_generation_prompt", "bos_token", "chat_template", "cls_token", "dict", "documents",
        "eos_token", "messages", "namespace", "pad_token", "raise_exception", "range",
        "sep_token", "strftime_now", "tools", "unk_token",
    }
)  # fmt: skip


_QUICK_BYTES = 1024  # of a body with text: at most 0.3 ms to tokenize
_QUICK_IDS_BYTES = 16 * 2**10  # of one with token ids


@dataclass(frozen=True)
class Admitted:
    """What was decided about a request before its text is looked at."""

    adapter: AdapterRef | None
    caller: Caller
    max_model_len: int
    weight: float = 1.0  # of the share that the request belongs to


@dataclass(frozen=True)
class Texts:
    """What turns requests into token ids: the base's, or those of one adapter version."""

    config: ServerConfig
    tokenizer: Tokenizer
    template: ChatTemplate | None
    eos_ids: tuple[int, ...]
    template_owner: str = "base"

    def is_quick(self, body: ChatBody | CompletionBody, num_bytes: int) -> bool:
        """Whether the job of a body of `num_bytes` is made about as soon as a thread is woken for
        it, which costs 0.1 ms: short text, and token ids.

        Not by an adapter's own template, or with a request's variables: those may do anything.
        """
        if isinstance(body, ChatBody):
            own = self.template_owner != "base" or body.chat_template_kwargs
            return not own and num_bytes <= _QUICK_BYTES
        is_text = (
            body.echo
            or isinstance(body.prompt, str)
            or not isinstance(next(iter(body.prompt or ()), None), int)
        )
        return num_bytes <= (_QUICK_BYTES if is_text else _QUICK_IDS_BYTES)

    def chat(self, body: ChatBody, admitted: Admitted) -> Job:
        """The job of a chat completion."""
        if body.messages is None:
            raise _missing("messages")
        length = sum(map(_length, body.messages))
        if body.truncate_prompt_tokens is None:
            self._check_length(length, admitted.max_model_len, "messages")
        ids = self.conversation(
            body.messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final=body.continue_final_message is True,
            variables=self._variables(body),
            add_special=body.add_special_tokens is True,
        )
        return self._job(_Request("chat", body, admitted), [_cut(ids, body, admitted)], None)

    def completion(self, body: CompletionBody, admitted: Admitted) -> Job:
        """The job of a text completion."""
        prompts: list[list[int]] = []
        texts: list[str] = []
        for prompt in prompts_of(body):
            if isinstance(prompt, str):
                if body.truncate_prompt_tokens is None:
                    self._check_length(len(prompt), admitted.max_model_len, "prompt")
                add_special = body.add_special_tokens is not False
                whole = self.tokenizer.encode(prompt, add_special=add_special)
            else:
                check_ids(prompt, self.config.vocab_size, "prompt")
                whole = prompt
            ids = _cut(whole, body, admitted)
            prompts.append(ids)
            if body.echo:
                is_whole_text = isinstance(prompt, str) and ids is whole
                texts.append(str(prompt) if is_whole_text else self.tokenizer.decode(ids))
        request = _Request("text", body, admitted)
        return self._job(request, prompts, texts if body.echo else None)

    def tokenize(self, body: TokenizeBody, max_model_len: int) -> list[int]:
        """Ids of a prompt or of messages."""
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("expected either prompt or messages", param="prompt")
        length = len(body.prompt or "") + sum(map(_length, body.messages or ()))
        self._check_length(length, max_model_len, "messages" if body.messages else "prompt")
        if body.prompt is not None:
            add_special = body.add_special_tokens is not False
            return self.tokenizer.encode(body.prompt, add_special=add_special)
        return self.conversation(
            body.messages or (),
            add_generation_prompt=body.add_generation_prompt,
            continue_final=body.continue_final_message,
            variables={},
            add_special=body.add_special_tokens is True,
        )

    def conversation(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        continue_final: bool,
        variables: dict[str, Any],
        add_special: bool,
    ) -> list[int]:
        """Ids of messages, through the chat template."""
        if self.template is None:
            raise RequestError(
                f"the base model {self.config.base_name} has no chat template; use /v1/completions",
                code="no_chat_template",
                param="messages",
            )
        if continue_final and add_generation_prompt:
            raise RequestError(
                "continue_final_message: needs add_generation_prompt to be false",
                code="conflict",
                param="continue_final_message",
            )
        plain = [_plain(message, place) for place, message in enumerate(messages)]
        segments = self.template.render(
            plain,
            add_generation_prompt=add_generation_prompt,
            continue_final=continue_final,
            variables=variables,
        )
        return self.tokenizer.encode_segments(segments, add_special=add_special)

    def _variables(self, body: ChatBody) -> dict[str, Any]:
        """What the request sets in the template; only what the template reads."""
        given: dict[str, Any] = dict(body.chat_template_kwargs or {})
        param = "chat_template_kwargs"
        if body.reasoning_effort is not None:
            given["reasoning_effort"] = body.reasoning_effort
            param = param if len(given) > 1 else "reasoning_effort"
        known = self.template.variables - _RESERVED if self.template else frozenset()
        if set(given) - known:
            reads = f"reads only {', '.join(sorted(known))}" if known else "reads no variables"
            raise RequestError(
                f"{param}: the {self.template_owner}'s chat template {reads}",
                code="unsupported_parameter",
                param=param,
            )
        return given

    def _check_length(self, num_chars: int, max_model_len: int, param: str) -> None:
        """Refuse what cannot fit before it is tokenized."""
        at_least = num_chars // self.tokenizer.pieces.longest
        if at_least > max_model_len:
            raise _too_long(f"at least {at_least}", max_model_len, param)

    def _job(self, request: "_Request", prompts: list[list[int]], echo: list[str] | None) -> Job:
        body, caller = request.body, request.admitted.caller
        salt = f"{caller.tenant}/{body.cache_salt or ''}"
        submits = []
        for prompt in prompts:
            room = self._room(prompt, request)
            params = sampling_params(
                body,
                room=room,
                vocab_size=self.config.vocab_size,
                eos_ids=self.eos_ids,
                seed=secrets.randbits(63),  # drawn for each prompt, unless the request has one
            )
            submits.append(
                Submit(
                    0,
                    prompt,
                    params,
                    request.admitted.adapter,
                    body.n or 1,
                    "" if salt == "/" else salt,
                    caller.tenant,
                    request.admitted.weight,
                )
            )
        params = submits[0].params
        options = body.stream_options
        return Job(
            frame=self._frame(request),
            submits=submits,
            rules=self._rules(body, params.min_tokens),
            tokenizer=self.tokenizer,
            num_top=params.logprobs,
            echo=echo,
            include_usage=options is not None and options.include_usage is True,
            continuous_usage=options is not None and options.continuous_usage_stats is True,
            return_ids=body.return_token_ids is True,
            ids_as_tokens=body.return_tokens_as_token_ids is True,
        )

    def _room(self, prompt: Sequence[int], request: "_Request") -> int:
        """How many tokens may follow a prompt. Raises RequestError where none may."""
        param = "messages" if request.kind == "chat" else "prompt"
        if not prompt:
            raise RequestError(f"{param}: found no tokens, expected at least one", param=param)
        room = request.admitted.max_model_len - len(prompt)
        if room < (0 if request.body.max_tokens == 0 else 1):
            raise _too_long(str(len(prompt)), request.admitted.max_model_len, param)
        return room

    def _rules(self, body: ChatBody | CompletionBody, min_tokens: int) -> TextRules:
        stops = [body.stop] if isinstance(body.stop, str) else list(body.stop or ())
        ends = set(body.stop_token_ids or ())
        if not body.ignore_eos:
            ends.update(self.eos_ids)
        return TextRules(
            stops=stops,
            include_stop=body.include_stop_str_in_output is True,
            skip_special=body.skip_special_tokens is not False,
            min_tokens=min_tokens,
            stop_ids=frozenset(ends),
            told_ids=frozenset(body.stop_token_ids or ()),
        )

    def _frame(self, request: "_Request") -> Frame:
        model = request.body.model or self.config.base_name
        if request.admitted.adapter is not None and model == self.config.base_name:
            model = request.admitted.adapter.name
        return Frame(request.kind, model, request.admitted.adapter, self.config.base_digest)


@dataclass(frozen=True)
class _Request:
    kind: Kind
    body: ChatBody | CompletionBody
    admitted: Admitted


def check_stream_options(body: Generate) -> None:
    """Stream options without a stream are a mistake."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options: needs stream to be true", param="stream_options")


def _cut(ids: list[int], body: ChatBody | CompletionBody, admitted: Admitted) -> list[int]:
    """The last tokens of a prompt, as many as the request wants to keep."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return ids
    if keep == 0:
        raise RequestError(
            "truncate_prompt_tokens: found 0, expected at least 1, or -1",
            param="truncate_prompt_tokens",
        )
    if keep < 0:
        answer = body.max_tokens
        if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
            answer = body.max_completion_tokens
        default = 1 if isinstance(body, ChatBody) else DEFAULT_COMPLETION_TOKENS
        keep = max(admitted.max_model_len - (default if answer is None else answer), 1)
    return ids if len(ids) <= keep else ids[-keep:]


def _plain(message: Message, place: int) -> dict[str, Any]:
    """A message as templates know it: text parts joined, developer as system."""
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise _missing(f"messages[{place}].content")
        content = ""
    elif not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    if message.reasoning_content is not None:
        plain["reasoning_content"] = message.reasoning_content
    return plain


def _length(message: Message) -> int:
    if isinstance(message.content, str):
        return len(message.content)
    return sum(len(part.text) for part in message.content or ())


def _missing(param: str) -> RequestError:
    return RequestError(f"{param}: required", code="missing_required_parameter", param=param)


def _too_long(found: str, max_model_len: int, param: str) -> RequestError:
    return RequestError(
        f"This model's maximum context length is {max_model_len} tokens, prompt and answer"
        f" together; the prompt has {found} tokens.",
        code="context_length_exceeded",
        param=param,
    )
