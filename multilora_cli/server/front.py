"""What all routes of one server share."""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from multilora_cli.adapters.entry import AdapterEntry
from multilora_cli.adapters.registry import Registry
from multilora_cli.server.access import LiveAccess, Secrets
from multilora_cli.server.adapters import Adapters
from multilora_cli.server.changes import RuntimeChanges
from multilora_cli.server.client import EngineClient
from multilora_cli.server.config import ServerConfig
from multilora_cli.server.contract import unavailable
from multilora_cli.server.fleet_apply import FleetApply
from multilora_cli.server.metrics import Metrics
from multilora_cli.server.prepare import Texts
from multilora_cli.server.protocol import parse_body
from multilora_cli.server.quota import Quotas
from multilora_cli.server.recorder import TraceRecorder
from multilora_cli.server.routing import body_bytes, caller_of, json_response, read_body
from multilora_cli.server.run import Job, Run
from multilora_cli.server.scrape import EngineView
from multilora_cli.server.sse import EventStream, whole_reply
from multilora_cli.server.texts import AdapterTexts
from multilora_cli.server.upkeep import Upkeep

_INLINE_BYTES = 64 * 2**10  # smaller bodies are parsed on the event loop
Body = TypeVar("Body", bound=msgspec.Struct)
Result = TypeVar("Result")


class Front:
    """Everything the routes share."""

    def __init__(
        self,
        config: ServerConfig,
        registry: Registry,
        client: EngineClient,
        changes: RuntimeChanges | None = None,
        secrets: Secrets | None = None,
    ) -> None:
        self.config = config
        self.client = client
        self.texts = AdapterTexts(config)
        self.metrics = Metrics(config.base_name, config.limits.named_adapters)
        self.traffic = self.metrics.traffic
        self.quotas = Quotas(
            config.limits.max_sequences,
            len(config.tenants),
            num_shown=config.limits.named_tenants,
        )
        self.pool = ThreadPoolExecutor(config.limits.text_threads, thread_name_prefix="text")
        self.adapters = Adapters(registry, client, config, changes)
        self.access = LiveAccess(config, secrets)
        self.access.on_change.append(lambda access: self.quotas.regroup(access.tenants))
        self.fleet = FleetApply(self.adapters, self.access)
        self.adapters.on_unload.append(self.traffic.adapters.forget)
        self.adapters.on_retired.append(self._retire_texts)
        self.recorder = None if config.record is None else TraceRecorder(config.record)
        if self.recorder is not None:
            self.traffic.on_ended.append(self.recorder.ended)
        self.created = int(time.time())
        self._large_bodies = 0
        client.on_ready.append(lambda _: self.adapters.background(self.adapters.load_pinned()))

    def start(self) -> None:
        """Begin the upkeep of adapters, from the running event loop."""
        self.adapters.background(Upkeep(self.adapters).run())

    def close(self) -> None:
        """Nothing is served any more."""
        self.adapters.close()
        self.adapters.changes.close()
        self.pool.shutdown(wait=False, cancel_futures=True)
        if self.recorder is not None:
            self.recorder.close()

    def _retire_texts(self) -> None:
        """What only versions that are served no more have used goes."""
        if self.texts.num_kept:
            entries = self.adapters.registry.entries()
            self.texts.keep_only({entry.text for entry in entries if entry.text is not None})

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer; known once the engine serves. Raises RequestError."""
        if self.client.ready is None:
            self.client.check_admission()
            return 0
        return self.client.ready.max_model_len

    @contextmanager
    def room_for(self, request: Request) -> Iterator[None]:
        """Bounds what large bodies hold together, while they are read and tokenized."""
        length = body_bytes(request)
        if length is not None and length <= _INLINE_BYTES:
            yield
            return
        if self._large_bodies >= self.config.limits.max_large_bodies:
            raise unavailable("server_is_overloaded", "too many large requests at once", 1)
        self._large_bodies += 1
        try:
            yield
        finally:
            self._large_bodies -= 1

    async def parse(self, request: Request, kind: type[Body], max_bytes: int | None = None) -> Body:
        """The checked body of a request."""
        limits = self.config.limits
        raw = await read_body(request, limits, max_bytes or limits.max_body_bytes)
        if len(raw) <= _INLINE_BYTES:
            return parse_body(raw, kind)
        return await self.in_thread(lambda: parse_body(raw, kind))

    async def read(self, request: Request, kind: type[Body], max_bytes: int | None = None) -> Body:
        """`parse` for a body that nothing large is made of."""
        with self.room_for(request):
            return await self.parse(request, kind, max_bytes)

    async def in_thread(self, function: Callable[[], Result]) -> Result:
        """Run text work off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, function)

    async def texts_of(self, entry: AdapterEntry | None) -> Texts:
        """The text of a version; loaded where files are read, so that tokenizing goes on."""
        kept = self.texts.kept(entry)
        return await self.adapters.in_thread(self.texts.of, entry) if kept is None else kept

    async def answer(self, request: Request, job: Job, *, stream: bool) -> Response:
        """Admit a job and answer it, streamed or whole."""
        limits = self.config.limits
        sequences = len(job.submits) * job.n
        held = self.quotas.take(caller_of(request).grant, job.prompt_tokens, sequences)
        run = Run(job, self.metrics, held)
        handed_on = False
        try:
            run.admit(self.client, request.receive, limits.request_s, limits.load_s)
            first = await run.next()  # a failure before the first token is still an HTTP status
            if stream:
                handed_on = True
                return EventStream(run, first, limits.write_stall_s)
            return json_response(await whole_reply(run, first), run.headers)
        finally:
            if not handed_on:
                run.close()

    def view(self) -> EngineView:
        """What a scrape shows of the engine."""
        return EngineView(
            base_name=self.config.base_name,
            max_loras=self.config.max_loras,
            snapshot=self.client.snapshot,
            registry=self.adapters.registry,
            statuses=self.client.statuses,
            movements=self.adapters.movements,
            quotas=self.quotas,
            up=self.client.state == "ready",
            restarts=self.client.restarts,
        )
