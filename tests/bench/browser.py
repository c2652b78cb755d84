"""Headless Chromium, asked through its debugging protocol what it shows of a file."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_START_S = 30.0
# Gives how many pixels of the picture have each colour.
_COLOURS = """
new Promise(resolve => {
  const image = new Image();
  image.onload = () => {
    const canvas = new OffscreenCanvas(image.width, image.height);
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0);
    const pixels = new Uint32Array(
      context.getImageData(0, 0, image.width, image.height).data.buffer);
    const counts = new Map();
    for (const pixel of pixels) counts.set(pixel, (counts.get(pixel) || 0) + 1);
    const name = p => "#" + [p, p >>> 8, p >>> 16].map(
      c => (c & 255).toString(16).padStart(2, "0")).join("");
    resolve(Object.fromEntries([...counts].map(([pixel, n]) => [name(pixel), n])));
  };
  image.src = "data:image/png;base64,%s";
})
"""


@dataclass(frozen=True)
class Box:
    """Where an element is on the page, in CSS pixels."""

    x: float
    y: float
    width: float
    height: float


class Tab:
    """One page; `counts` looks at pictures in a second one."""

    def __init__(self, page: "_Session", counter: "_Session") -> None:
        self._page = page
        self._counter = counter

    async def open(self, file: Path, *, width: int, dark: bool = False) -> None:
        """Show `file` on a screen of `width` pixels."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self._page.ask("Emulation.setEmulatedMedia", features=[scheme])
        await self._page.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        await self._page.ask("Page.navigate", url=file.as_uri())
        while await self.value("document.readyState") != "complete":
            await asyncio.sleep(0.05)

    async def value(self, script: str) -> Any:
        """What an expression gives in the page, as JSON."""
        return await self._page.value(script)

    async def colours(self, box: Box | None = None) -> dict[str, int]:
        """Pixels by colour (#rrggbb) in a picture of a part of the page, or of all of it."""
        part = {} if box is None else {"clip": {**vars(box), "scale": 1}}
        shot = await self._page.ask("Page.captureScreenshot", captureBeyondViewport=True, **part)
        found: dict[str, int] = await self._counter.value(_COLOURS % shot["data"])
        return found


class _Session:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = count(1)

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            answer = await self._socket.receive_json(timeout=60)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    async def value(self, script: str) -> Any:
        found = await self.ask(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")


@asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Tab]:
    """A browser of its own with an empty profile, closed at the end."""
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{await _port(profile / 'DevToolsActivePort')}"
        async with aiohttp.ClientSession() as http:
            sockets = []
            for _ in range(2):
                async with http.put(f"{url}/json/new?about:blank") as response:
                    address = (await response.json())["webSocketDebuggerUrl"]
                sockets.append(await http.ws_connect(address, max_msg_size=2**28))
            yield Tab(*map(_Session, sockets))
            for socket in sockets:
                await socket.close()
    finally:
        process.terminate()
        await process.wait()


async def _port(file: Path) -> int:
    """The port that the browser has chosen, from the file in which it says so."""
    async with asyncio.timeout(_START_S):
        while not file.is_file() or "\n" not in file.read_text():
            await asyncio.sleep(0.05)
    return int(file.read_text().split()[0])
