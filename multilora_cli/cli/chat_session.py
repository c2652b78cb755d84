"""A conversation with one adapter, and the commands that steer it. Knows no terminal."""

import asyncio
import difflib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from multilora_cli.cli.api import Api, UnknownName
from multilora_cli.demo import DEMO_PROMPTS, is_demo_base
from multilora_cli.errors import BadInput, MloraError

COMMANDS = {
    "/adapter": "/adapter NAME: answer as this adapter; without a name, as the base",
    "/adapters": "/adapters: list what can answer",
    "/compare": "/compare A B ...: answer the next prompt by each of them in one batch",
    "/system": "/system TEXT: set the system prompt; without text, remove it",
    "/reset": "/reset: forget the conversation",
    "/help": "/help: this list",
    "/quit": "/quit: leave (also Ctrl-D)",
}


@dataclass
class Settings:
    """How answers are sampled."""

    max_tokens: int = 512
    temperature: float = 0.0
    seed: int | None = None

    def fields(self) -> dict[str, Any]:
        """The request fields."""
        fields: dict[str, Any] = {
            "max_completion_tokens": self.max_tokens,
            "temperature": self.temperature,
        }
        return fields if self.seed is None else {**fields, "seed": self.seed}


@dataclass
class ChatSession:
    """Who answers, what was said so far, and what the next prompt is compared over."""

    api: Api
    base: str
    adapter: str
    settings: Settings = field(default_factory=Settings)
    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)
    comparing: tuple[str, ...] = ()
    examples: Mapping[str, str] = field(default_factory=dict)  # by adapter, of the demo

    async def answer(self, prompt: str) -> AsyncIterator[str]:
        """Stream the answer; the turn is remembered only when the answer came whole."""
        messages = self._messages(prompt)
        pieces = []
        async for piece in self.api.chat(self._body(self.adapter, messages)):
            pieces.append(piece)
            yield piece
        self.turns += [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": "".join(pieces)},
        ]

    async def compare(
        self, prompt: str, on_piece: Callable[[str, str], None]
    ) -> dict[str, str | MloraError]:
        """Answer `prompt` by every compared adapter at once; the conversation is left as it was.

        `on_piece(name, text)` sees each piece as it comes. One that fails leaves the others be.
        """
        messages = self._messages(prompt)

        async def one(name: str) -> str | MloraError:
            pieces = []
            try:
                async for piece in self.api.chat(self._body(name, messages)):
                    pieces.append(piece)
                    on_piece(name, piece)
            except MloraError as error:
                return error
            return "".join(pieces)

        names, self.comparing = self.comparing, ()
        answers = await asyncio.gather(*(one(name) for name in names))
        return dict(zip(names, answers, strict=True))

    async def command(self, line: str) -> list[str]:
        """Carry out a slash command; the lines to show. Raises BadInput."""
        word, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if word == "/adapter":
            return [await self._switch(rest)]
        if word == "/adapters":
            return [self._named(str(card["id"])) for card in await self.api.models()]
        if word == "/compare":
            return [await self._compare_over(rest.split())]
        if word == "/system":
            self.system = rest
            return ["system prompt set" if rest else "system prompt removed"]
        if word == "/reset":
            self.turns.clear()
            return ["conversation forgotten"]
        if word == "/help":
            return list(COMMANDS.values())
        near = difflib.get_close_matches(word, COMMANDS, n=1, cutoff=0.65)
        raise BadInput(
            f"unknown command {word}" + (f"; did you mean {near[0]}?" if near else ""),
            hint="/help lists the commands",
        )

    def _named(self, name: str) -> str:
        example = self.examples.get(name)
        return f"{name}: {example}" if example else name

    async def _known(self, name: str, hint: str = "/adapters lists the names") -> None:
        """Raise UnknownName where there is no such name, with what to do about it here."""
        try:
            await self.api.model(name)
        except UnknownName as error:
            raise UnknownName(error.message, hint=hint) from None

    async def _switch(self, name: str) -> str:
        target = name or self.base
        await self._known(target)
        self.adapter = target
        return f"answering as {target}; the conversation goes on (/reset forgets it)"

    async def _compare_over(self, names: list[str]) -> str:
        if len(names) < 2:
            raise BadInput("/compare needs at least two names", hint="/adapters lists them")
        for index, name in enumerate(names):
            hint = "the prompt goes on a line of its own; " if index > 1 else ""
            await self._known(name, hint + "/adapters lists the names")
        self.comparing = tuple(dict.fromkeys(names))
        return "the next prompt is answered by " + ", ".join(self.comparing)

    def _messages(self, prompt: str) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns, {"role": "user", "content": prompt}]

    def _body(self, model: str, messages: list[dict[str, str]]) -> dict[str, Any]:
        return {"model": model, "messages": messages, **self.settings.fields()}


async def open_session(api: Api, adapter: str | None, settings: Settings) -> ChatSession:
    """A session as `adapter` (or the base). Raises MloraError where the name is unknown."""
    cards = await api.models()
    base = next(str(card["id"]) for card in cards if not card.get("parent"))
    if adapter is not None:
        await api.model(adapter)
    demo = any(is_demo_base(str(card.get("root") or "")) for card in cards if card["id"] == base)
    examples = DEMO_PROMPTS if demo else {}
    return ChatSession(api, base, adapter or base, settings, examples=examples)
