"""A conversation without a terminal: who answers, what is remembered, what is compared."""

import asyncio
import io
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from multilora_cli.cli.api import UnknownName, path_segment
from multilora_cli.cli.chat import Columns, Talk
from multilora_cli.cli.chat_session import COMMANDS, ChatSession, Settings, open_session
from multilora_cli.cli.console import Console
from multilora_cli.demo import DEMO_PROMPTS
from multilora_cli.errors import BadInput, MloraError, Unreachable


class FakeApi:
    """Answers `MODEL:last prompt`; fails for the model `broken`, cuts off for `cut`."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.at_once = self.most_at_once = 0

    async def models(self) -> list[dict[str, Any]]:
        names = ("acme", "zeta", "broken", "cut")
        return [{"id": "demo", "parent": None}, *({"id": n, "parent": "demo"} for n in names)]

    async def model(self, name: str) -> dict[str, Any]:
        for card in await self.models():
            if card["id"] == name:
                return card
        raise UnknownName(f"no model {name}")

    async def chat(self, body: dict[str, Any]) -> AsyncIterator[str]:
        self.bodies.append(body)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            for piece in (body["model"], ":", body["messages"][-1]["content"]):
                await asyncio.sleep(0.001)
                if body["model"] == "broken":
                    raise MloraError("it broke")
                yield piece
                if body["model"] == "cut":
                    raise Unreachable("cut off")
        finally:
            self.at_once -= 1


def opened(adapter: str | None = None) -> tuple[ChatSession, FakeApi]:
    api = FakeApi()
    return asyncio.run(open_session(api, adapter, Settings(seed=3))), api  # type: ignore[arg-type]


async def said(session: ChatSession, prompt: str) -> str:
    return "".join([piece async for piece in session.answer(prompt)])


def test_history_system_prompt_and_settings_are_sent() -> None:
    session, api = opened("acme")

    async def talk() -> None:
        await session.command("/system be brief")
        assert await said(session, "one") == "acme:one"
        assert await said(session, "two") == "acme:two"

    asyncio.run(talk())
    assert [m["content"] for m in api.bodies[1]["messages"]] == [
        "be brief", "one", "acme:one", "two",
    ]  # fmt: skip
    assert api.bodies[1]["model"] == "acme"
    assert (api.bodies[1]["temperature"], api.bodies[1]["seed"]) == (0.0, 3)


def test_base_answers_by_default_and_adapter_switches() -> None:
    session, _ = opened()

    async def talk() -> None:
        assert await said(session, "x") == "demo:x"
        await session.command("/adapter zeta")
        assert await said(session, "x") == "zeta:x"
        await session.command("/adapter")
        assert session.adapter == "demo"

    asyncio.run(talk())


def test_an_unknown_adapter_is_refused_and_changes_nothing() -> None:
    """A-API-03 at the command line: never the base by accident."""
    with pytest.raises(BadInput):
        opened("nobody")
    session, _ = opened("acme")
    with pytest.raises(BadInput):
        asyncio.run(session.command("/adapter nobody"))
    assert session.adapter == "acme"


def test_a_cut_answer_is_not_remembered() -> None:
    session, _ = opened("cut")
    with pytest.raises(Unreachable):
        asyncio.run(said(session, "x"))
    assert session.turns == []


def test_compare_asks_all_at_once_and_one_failure_is_its_own() -> None:
    session, api = opened()
    seen: dict[str, str] = {}

    async def talk() -> dict[str, str | MloraError]:
        await session.command("/compare acme broken zeta acme")
        return await session.compare("p", lambda n, t: seen.update({n: seen.get(n, "") + t}))

    answers = asyncio.run(talk())
    assert list(answers) == ["acme", "broken", "zeta"]
    assert answers["acme"] == "acme:p" == seen["acme"]
    assert isinstance(answers["broken"], MloraError)
    assert api.most_at_once == 3
    assert session.comparing == () and session.turns == []


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("/compare acme", "/adapters lists them"),
        ("/compare acme nobody", "/adapters lists the names"),
        ("/adapter nobody", "/adapters lists the names"),
        ("/compare acme zeta the prompt", "the prompt goes on a line of its own; /adapters lists"),
    ],
)
def test_compare_needs_two_known_names(line: str, hint: str) -> None:
    session, _ = opened()
    with pytest.raises(BadInput) as caught:
        asyncio.run(session.command(line))
    assert session.comparing == ()
    assert str(caught.value.hint).startswith(hint)


def test_the_demo_says_what_to_ask_whom() -> None:
    session, api = opened()
    assert session.examples == {}
    assert asyncio.run(session.command("/adapters"))[:2] == ["demo", "acme"]

    async def models() -> list[dict[str, Any]]:
        root = "/elsewhere/site-packages/multilora_cli/demo/base"
        return [{"id": "demo", "parent": None, "root": root}, {"id": "roman", "parent": "demo"}]

    api.models = models  # type: ignore[method-assign]
    session = asyncio.run(open_session(api, None, Settings()))  # type: ignore[arg-type]
    told = asyncio.run(session.command("/adapters"))
    assert told == ["demo", f"roman: {DEMO_PROMPTS['roman']}"]


@pytest.mark.parametrize(("width", "beside"), [(120, True), (80, False)])
def test_compared_answers_are_never_cut_off(
    width: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six columns of a narrow terminal are twelve letters each: one below the other instead."""
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    names = [f"{trade}-glossary" for trade in ("shipping", "law", "tax", "medicine", "food")]
    drawn = Columns(Console(stdout=stream), dict.fromkeys(names, "the port was late"))._draw()
    Console(stdout=stream).render(drawn)
    text = stream.getvalue()
    assert all(name in text for name in names) and "\u2026" not in text
    rows = [line for line in text.splitlines() if "the port was late" in line]
    assert len(rows) == (1 if beside else len(names))


def test_reset_help_and_a_mistyped_command() -> None:
    session, _ = opened()

    async def talk() -> None:
        await said(session, "x")
        await session.command("/reset")
        assert session.turns == []
        assert len(await session.command("/help")) == len(COMMANDS)
        assert "acme" in await session.command("/adapters")

    asyncio.run(talk())
    with pytest.raises(BadInput, match="did you mean /compare"):
        asyncio.run(session.command("/compre a b"))


def test_ctrl_c_ends_the_answer_and_not_the_conversation() -> None:
    """The request goes with the turn, and the turn is not remembered."""
    session, api = opened("acme")
    stream = io.StringIO()
    talk = Talk(Console(stdout=stream, stderr=stream), session)

    async def main() -> None:
        before = signal.getsignal(signal.SIGINT)
        turn = asyncio.ensure_future(talk._turn("a long " * 2000))
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)
        await talk._interruptible(turn)
        assert turn.cancelled() and signal.getsignal(signal.SIGINT) is before
        await talk._interruptible(asyncio.ensure_future(talk._turn("again")))

    asyncio.run(main())
    assert stream.getvalue() == "\n(stopped)\nacme:again\n"
    assert api.at_once == 0
    assert [turn["content"] for turn in session.turns] == ["again", "acme:again"]


def test_a_name_is_one_part_of_a_path() -> None:
    """A-SEC-01: no name leads to another route."""
    assert path_segment("../../v1/unload_lora_adapter") == "..%2F..%2Fv1%2Funload_lora_adapter"
    assert path_segment("acme/legal?x#y") == "acme%2Flegal%3Fx%23y"
