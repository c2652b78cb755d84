"""Start, signals, drain and stop of the front process.

The port is taken before the engine starts, and answers 503 while it does. The first SIGTERM or
SIGINT drains: admitted work goes on until the deadline, new work gets 503; then exit 0. The
second one ends every stream with an error event and exits with 128 + its number. SIGHUP has the
fleet file read again; in a terminal, which is closed then, it drains.
"""

import asyncio
import contextlib
import errno
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import uvicorn

from multilora_cli.adapters.registry import Registry
from multilora_cli.engine.messages import Progress, Ready
from multilora_cli.errors import AddressInUse, BadInput
from multilora_cli.server.access import Secrets
from multilora_cli.server.app import create_app
from multilora_cli.server.changes import RuntimeChanges
from multilora_cli.server.client import EngineClient, Spawn
from multilora_cli.server.config import ServerConfig, ServerLimits
from multilora_cli.server.connection import protocol_class
from multilora_cli.server.contract import unavailable
from multilora_cli.server.front import Front
from multilora_cli.server.reload import Reload, Reread

_log = logging.getLogger(__name__)
_BACKLOG = 2048
_OWN_FILES = 256  # adapters being read, origins being asked, the engine, logs
_CLOSE_S = 3  # for replies that are still being written after everything ended


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True)
class Hooks:
    """What the command line shows while a server lives. Called on the event loop: be quick.

    One that raises (its terminal is gone, the disk of its log is full) is logged and harms nothing.
    """

    listening: Callable[[str], None] = _nothing  # the URL; answers 503 until ready
    progress: Callable[[Progress], None] = _nothing
    ready: Callable[[Ready, str], None] = _nothing  # first start and every restart; the URL
    draining: Callable[[int], None] = _nothing  # sequences that are still in flight


@dataclass(frozen=True)
class Served:
    """What a server is made of."""

    config: ServerConfig
    registry: Registry
    spawn: Spawn
    changes: RuntimeChanges | None = None  # by operators, since the fleet file was written
    reread: Reread | None = None  # the fleet file as it is now, for SIGHUP
    secrets: Secrets | None = None  # where its keys are had; None: they cannot change


class Shutdown:
    """The signals received so far."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.reload = asyncio.Event()
        self.signum = 0

    def request(self, signum: int = signal.SIGTERM) -> None:
        """One more signal: the first drains, the second aborts."""
        self.signum = signum
        (self.second if self.first.is_set() else self.first).set()


class _Server(uvicorn.Server):
    """uvicorn without its signal handling: it would refuse connections instead of draining."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run_server(served: Served, hooks: Hooks | None = None) -> int:
    """Serve until a signal; the exit status.

    Raises AddressInUse before anything is started, ModelError for an unusable tokenizer or
    template, and what the engine said where it cannot start.
    """
    with bind(served.config.host, served.config.port) as listener:
        return asyncio.run(_main(served, hooks or Hooks(), listener))


def bind(host: str, port: int) -> socket.socket:
    """The one listening socket. Raises AddressInUse, or BadInput for a host that is not ours."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise BadInput(f"server.host: {host}: {error.strerror or error}") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)  # two binds can both succeed; only one of them listens
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"{_shown(host, port)} is in use",
                hint="another server listens there; choose another with --port",
            ) from None
        raise BadInput(f"cannot listen on {_shown(host, port)}: {error.strerror}") from None
    return listener


def with_files_for(limits: ServerLimits) -> ServerLimits:
    """The limits, with no more connections than this process may open files beside its own.

    Raises the soft limit as far as the hard one lets it. Above the number a connection is answered
    503; at the end of the files none could be accepted, and no adapter read.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections + _OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        room = soft - min(_OWN_FILES, soft // 2)
        if room < limits.max_connections:
            limits = replace(limits, max_connections=room)
            _log.warning("at most %d connections: the limit of open files is %d", room, soft)
    return limits


async def _main(served: Served, hooks: Hooks, listener: socket.socket) -> int:
    shutdown = Shutdown()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, shutdown.request, signum)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        if os.isatty(0):
            loop.add_signal_handler(signal.SIGHUP, shutdown.request, signal.SIGHUP)
        else:
            loop.add_signal_handler(signal.SIGHUP, shutdown.reload.set)
    return await serve(served, listener, shutdown, hooks)


async def serve(served: Served, listener: socket.socket, shutdown: Shutdown, hooks: Hooks) -> int:
    """`run_server` on a running event loop, with the caller's shutdown."""
    config = served.config
    client = EngineClient(served.spawn, max_sequences=config.limits.max_sequences)
    client.start()
    await asyncio.sleep(0)  # its process begins to import while this one reads the tokenizer
    try:
        front = Front(config, served.registry, client, served.changes, served.secrets)
    except BaseException:
        await client.stop()
        raise
    url = f"http://{_shown(config.host, listener.getsockname()[1])}"
    shown = _shielded(hooks)
    client.on_progress.append(shown.progress)
    client.on_ready.append(lambda ready: shown.ready(ready, url))
    # What stands now stays: walking ten thousand adapters keeps all streams waiting for 70 ms.
    client.on_ready.append(lambda _: gc.freeze())
    server = _server(front)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    front.start()
    if served.reread is not None:
        reload = Reload(front.fleet, front.metrics, served.reread)
        front.adapters.background(reload.run(shutdown.reload))
    shown.listening(url)
    try:
        status = await _live(client, shutdown, config.drain_s, shown, serving)
    finally:
        await client.stop()
        server.should_exit = True
        await serving
        front.close()
        gc.unfreeze()
    return status


def _shielded(hooks: Hooks) -> Hooks:
    """The same hooks, with what they raise logged: nothing that is shown may end what is served."""

    def shield(hook: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            try:
                hook(*arguments)
            except Exception as error:
                _log.error("cannot show what happens: %s", error)

        return call

    return Hooks(*(shield(getattr(hooks, each.name)) for each in fields(Hooks)))


async def _live(
    client: EngineClient,
    shutdown: Shutdown,
    drain_s: float,
    hooks: Hooks,
    serving: "asyncio.Task[None]",
) -> int:
    """From start to the end of the drain."""
    ready = asyncio.create_task(client.wait_ready())
    stop = asyncio.create_task(shutdown.first.wait())
    again = asyncio.create_task(shutdown.second.wait())
    tasks = [ready, stop, again]
    try:
        await asyncio.wait([ready, stop, serving], return_when=asyncio.FIRST_COMPLETED)
        if not stop.done():
            await ready  # raises what the engine said where it cannot start
            await asyncio.wait([stop, serving], return_when=asyncio.FIRST_COMPLETED)
        elif not ready.done():
            return 128 + shutdown.signum  # interrupted while it started: nothing to drain
        return await _drain(client, shutdown, drain_s, hooks, again)
    finally:
        for task in tasks:
            task.cancel()


async def _drain(
    client: EngineClient,
    shutdown: Shutdown,
    drain_s: float,
    hooks: Hooks,
    again: "asyncio.Task[bool]",
) -> int:
    client.begin_drain()
    hooks.draining(client.num_sequences)
    idle = asyncio.create_task(client.wait_idle(drain_s))
    await asyncio.wait([idle, again], return_when=asyncio.FIRST_COMPLETED)
    idle.cancel()
    if not again.done():
        return 0
    client.fail_all(unavailable("server_shutting_down", "the server was stopped", 5))
    return 128 + shutdown.signum


def _server(front: Front) -> _Server:
    limits = with_files_for(front.config.limits)
    return _Server(
        uvicorn.Config(
            create_app(front),
            http=protocol_class(limits),
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=int(limits.idle_s),
            timeout_graceful_shutdown=_CLOSE_S,
            h11_max_incomplete_event_size=limits.max_header_bytes,
        )
    )


def _shown(host: str, port: int) -> str:
    return f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"
