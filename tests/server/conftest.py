"""A served fleet over a fake engine: in process by ASGI, and on a real socket."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from multilora_cli.server.app import create_app
from multilora_cli.server.client import EngineClient
from multilora_cli.server.front import Front
from multilora_cli.server.launch import Hooks, Served, Shutdown, bind, serve
from tests.fakes import Behaviour, Spawner, tiny_config, tiny_registry


class Server:
    """A server on a real socket, in a thread of its own."""

    def __init__(self, folder: Path, spawner: Any, **changes: Any) -> None:
        self.spawner = spawner
        self.folder = folder
        names = changes.pop("names", ("upper", "acme/legal"))
        self.changes = changes.pop("changes", None)
        registry = changes.pop("registry", None)
        self.config = tiny_config(folder, **changes)
        self.registry = registry or tiny_registry(folder, names)
        self.url = ""
        self.status: int | None = None
        self.error: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._shutdown: Shutdown | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> "Server":
        """Wait until the engine serves."""
        self._thread.start()
        assert self._ready.wait(20)
        if self.error is not None:
            raise self.error
        return self

    def signal(self, signum: int = 15) -> None:
        """As if the process had received a signal."""
        assert self._loop is not None
        assert self._shutdown is not None
        self._loop.call_soon_threadsafe(self._shutdown.request, signum)

    def stop(self) -> int | None:
        """Two signals and the exit status."""
        if self._thread.is_alive():
            self.signal()
            self.signal()
        return self.join()

    def join(self, timeout_s: float = 20) -> int | None:
        """The exit status, once the server has ended."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive()
        return self.status

    def _run(self) -> None:
        async def main() -> int:
            self._shutdown = Shutdown()
            self._loop = asyncio.get_running_loop()
            hooks = Hooks(listening=self._listening, ready=lambda *_: self._ready.set())
            with bind(self.config.host, self.config.port) as listener:
                served = Served(self.config, self.registry, self.spawner, self.changes)
                return await serve(served, listener, self._shutdown, hooks)

        try:
            self.status = asyncio.run(main())
        except BaseException as error:
            self.error = error
        finally:
            self._ready.set()

    def _listening(self, url: str) -> None:
        self.url = url


@pytest.fixture
def serve_fleet(tmp_path: Path) -> Iterator[Any]:
    """Starts servers: serve_fleet(Behaviour(...), ..., port=..., names=...)."""
    servers: list[Server] = []

    def start(*behaviours: Behaviour, spawner: Any = None, **changes: Any) -> Server:
        folder = tmp_path / f"server{len(servers)}"
        server = Server(folder, spawner or Spawner(*behaviours), **changes)
        servers.append(server)
        return server.start()

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the tests of a module."""
    running = Server(tmp_path_factory.mktemp("server"), Spawner(Behaviour(tokens_per_step=3)))
    running.start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    """An HTTP client of the module's server."""
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


class InProcess:
    """The application without a socket; `async with` it."""

    def __init__(self, folder: Path, *behaviours: Behaviour, **changes: Any) -> None:
        self.spawner = Spawner(*behaviours)
        names = changes.pop("names", ("upper", "acme/legal"))
        self.changes = changes.pop("changes", None)
        registry = changes.pop("registry", None)
        self.config = tiny_config(folder, **changes)
        self.registry = registry or tiny_registry(folder, names)

    def front_of(self, client: EngineClient) -> Front:
        """What the application is made of."""
        return Front(self.config, self.registry, client, self.changes)

    async def __aenter__(self) -> Self:
        self.client = EngineClient(self.spawner)
        self.front = self.front_of(self.client)
        self.app = create_app(self.front)
        self.client.start()
        await self.client.wait_ready()
        transport = httpx.ASGITransport(self.app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()
        await self.client.stop()
        self.front.close()


@contextmanager
def openai_client(url: str, key: str = "none") -> Iterator[Any]:
    """The official client without retries."""
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=20) as client:
        yield client
