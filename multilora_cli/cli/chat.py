"""`mlora chat`: a conversation in the terminal, or over a pipe."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from multilora_cli.cli.console import Console
from multilora_cli.cli.options import FleetOption, JsonOption, KeyOption, QuietOption, UrlOption
from multilora_cli.logs import clean

_COLUMN = 20  # columns of a terminal below which answers are not shown side by side

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings
    from rich.table import Table

    from multilora_cli.cli.chat_session import ChatSession, Settings


def chat(
    adapter: Annotated[str | None, typer.Option("--adapter", "-a", help="Who answers.")] = None,
    url: UrlOption = None,
    fleet: FleetOption = None,
    api_key: KeyOption = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Repeat a sampled answer.")] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Talk to an adapter of a running server, or of a fleet file.

    With --fleet and no --url the fleet is served for as long as you talk.

    Enter sends; Alt-Enter, or a backslash at the end, starts another line. /help lists commands.
    Over a pipe every line is one prompt.

    Example: mlora chat --adapter acme/legal
    """
    from multilora_cli.cli.api import server_url
    from multilora_cli.cli.background_server import background_server
    from multilora_cli.cli.chat_session import Settings

    console = Console(as_json=as_json, quiet=quiet)
    settings = Settings(max_tokens, temperature, seed)
    server: AbstractAsyncContextManager[str]
    if fleet is not None and url is None:
        server = background_server(fleet, console)
    else:
        server = nullcontext(server_url(url, fleet))
    asyncio.run(_converse(console, server, api_key, adapter, settings))


async def _converse(
    console: Console,
    server: AbstractAsyncContextManager[str],
    api_key: str | None,
    adapter: str | None,
    settings: "Settings",
) -> None:
    """Talk to the server whose address `server` gives, and which ends with the conversation."""
    from multilora_cli.cli.api import Api
    from multilora_cli.cli.chat_session import open_session

    async with server as url, Api(url, api_key) as api:
        talk = Talk(console, await open_session(api, adapter, settings))
        await talk.run(sys.stdin.isatty() and console.interactive)


class Talk:
    """Reads prompts, shows answers; an error ends the turn, not the conversation."""

    def __init__(self, console: Console, session: "ChatSession") -> None:
        self._console = console
        self._session = session
        self._failed = False

    async def run(self, interactive: bool) -> None:
        """Until the end of input. Over a pipe a failed prompt makes the exit code 1."""
        lines = self._prompted() if interactive else _piped()
        async for line in lines:
            if line.strip() in ("/quit", "/exit"):
                break
            if line.strip():
                turn = asyncio.ensure_future(self._turn(line))
                await self._guarded(self._interruptible(turn) if interactive else turn)
        if self._failed and not interactive:
            raise typer.Exit(1)

    async def _guarded(self, turn: Awaitable[None]) -> None:
        from multilora_cli.errors import MloraError

        try:
            await turn
        except MloraError as error:
            self._failed = True
            self._console.error(error.message, error.hint)

    async def _interruptible(self, turn: asyncio.Future[None]) -> None:
        """Wait for a turn; Ctrl-C ends it, and with it the request, but not the conversation."""
        loop = asyncio.get_running_loop()
        before = signal.getsignal(signal.SIGINT)
        loop.add_signal_handler(signal.SIGINT, turn.cancel)
        try:
            await turn
        except asyncio.CancelledError:
            self._console.line()
            self._console.line("(stopped)")
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, before)

    async def _turn(self, line: str) -> None:
        if line.startswith("/"):
            shown = await self._session.command(line)
            for text in shown:
                self._console.line(text)
            self._console.value(shown)
        elif self._session.comparing:
            await self._compare(line)
        else:
            await self._answer(line)

    async def _answer(self, prompt: str) -> None:
        pieces = []
        async for piece in self._session.answer(prompt):
            pieces.append(piece)
            if not self._console.as_json:
                self._console.text(piece)
        self._console.line()
        self._console.value({"model": self._session.adapter, "content": "".join(pieces)})

    async def _compare(self, prompt: str) -> None:
        names = self._session.comparing
        texts = dict.fromkeys(names, "")

        def grow(name: str, piece: str) -> None:
            texts[name] += piece

        if self._console.interactive:
            with Columns(self._console, texts) as columns:

                def show(name: str, piece: str) -> None:
                    grow(name, piece)
                    columns.refresh()

                answers = await self._session.compare(prompt, show)
        else:
            answers = await self._session.compare(prompt, grow)
            for name, answer in answers.items():
                self._console.line(f"{name}: {answer}")
        for name, answer in answers.items():
            if not isinstance(answer, str):
                self._failed = True
                self._console.error(f"{name}: {answer.message}", answer.hint)
        self._console.value(
            [{"model": n, "content": a} for n, a in answers.items() if isinstance(a, str)]
        )

    async def _prompted(self) -> AsyncIterator[str]:
        """Prompts typed at a terminal, with history and several lines."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.formatted_text import FormattedText

        from multilora_cli.cli.chat_session import COMMANDS

        cards = await self._session.api.models()
        words = [*COMMANDS, *(str(card["id"]) for card in cards)]
        prompts: PromptSession[str] = PromptSession(
            completer=WordCompleter(words, sentence=False, WORD=True),
            complete_while_typing=False,
            multiline=False,
            prompt_continuation=lambda width, line, wrapped: "" if wrapped else "... ",
        )
        self._console.line("Enter sends, Alt-Enter starts a new line, /help lists commands.")
        if self._session.examples:
            self._console.line(
                "This is the demo: it knows simple sentences, not greetings or questions."
                " /adapters has one for each."
            )
        while True:
            label = FormattedText([("bold", f"{clean(self._session.adapter)}> ")])
            try:
                line = await prompts.prompt_async(label, key_bindings=_newline_on_alt_enter())
                while line.endswith("\\"):
                    line = line[:-1] + "\n" + await prompts.prompt_async("... ")
            except EOFError:
                return
            except KeyboardInterrupt:
                continue
            yield line


def _newline_on_alt_enter() -> "KeyBindings":
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("escape", "enter")
    def _(event) -> None:  # type: ignore[no-untyped-def]
        event.current_buffer.insert_text("\n")

    return bindings


async def _piped() -> AsyncIterator[str]:
    """One prompt a line of standard input; a backslash at the end joins the next line."""
    held = ""
    while line := await asyncio.to_thread(sys.stdin.readline):
        line = held + line.rstrip("\n")
        if line.endswith("\\"):
            held = line[:-1] + "\n"
            continue
        held = ""
        yield line
    if held:
        yield held.rstrip("\n")


class Columns:
    """Answers side by side while they grow."""

    def __init__(self, console: Console, texts: dict[str, str]) -> None:
        from rich.live import Live

        self._texts = texts
        rich = console.rich()
        self._width = rich.width
        self._live = Live(self._draw(), console=rich, refresh_per_second=12)

    def __enter__(self) -> "Columns":
        self._live.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.update(self._draw(), refresh=True)
        self._live.__exit__(None, None, None)

    def refresh(self) -> None:
        """Show what has come since."""
        self._live.update(self._draw())

    def _draw(self) -> "Table":
        from rich.cells import cell_len
        from rich.table import Table
        from rich.text import Text

        cells = {clean(name): Text(clean(text, keep="\n\t")) for name, text in self._texts.items()}
        room = self._width // len(cells) - 3  # a border and two blanks each
        if room < max(_COLUMN, *map(cell_len, cells)):  # too narrow: one below the other
            table = Table(show_header=False, show_lines=True)
            for name, answer in cells.items():
                table.add_row(Text(name), answer)
            return table
        table = Table(expand=True)
        for name in cells:
            table.add_column(Text(name), ratio=1)
        table.add_row(*cells.values())
        return table
