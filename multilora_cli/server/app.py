"""The routes and what they do. Each has a policy; `create_app` refuses to build one without."""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from multilora_cli.adapters.entry import AdapterEntry
from multilora_cli.adapters.registry import Registry
from multilora_cli.engine.messages import AdapterRef
from multilora_cli.errors import RequestError
from multilora_cli.server.access import LiveAccess, Secrets
from multilora_cli.server.adapters import Adapters
from multilora_cli.server.auth import Policy
from multilora_cli.server.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EvictBody,
    FleetBody,
    LoadBody,
    TokenizeBody,
    UnloadBody,
    WarmBody,
)
from multilora_cli.server.changes import RuntimeChanges
from multilora_cli.server.client import EngineClient
from multilora_cli.server.config import ServerConfig
from multilora_cli.server.contract import unavailable
from multilora_cli.server.docs import docs_page, openapi_document
from multilora_cli.server.fleet_apply import FleetApply
from multilora_cli.server.guard import Guard
from multilora_cli.server.metrics import CONTENT_TYPE, Metrics
from multilora_cli.server.prepare import Admitted, Texts, check_stream_options
from multilora_cli.server.protocol import (
    check_ids,
    model_not_found,
    parse_body,
    select_adapter,
    split_model,
)
from multilora_cli.server.quota import Quotas
from multilora_cli.server.recorder import TraceRecorder
from multilora_cli.server.routing import (
    RouteSpec,
    add_routes,
    caller_of,
    check_policies,
    error_response,
    json_response,
    read_body,
)
from multilora_cli.server.run import Job, Run
from multilora_cli.server.scrape import EngineView
from multilora_cli.server.sse import EventStream, whole_reply
from multilora_cli.server.texts import AdapterTexts
from multilora_cli.server.upkeep import Upkeep

_INLINE_BYTES = 64 * 2**10  # smaller bodies are parsed on the event loop
Body = TypeVar("Body", bound=msgspec.Struct)
Asked = TypeVar("Asked", ChatBody, CompletionBody)
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
        length = request.headers.get("content-length", "")
        if length.isdigit() and len(length) < 10 and int(length) <= _INLINE_BYTES:
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
            run.admit(self.client, request.receive, limits.request_s)
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
            entries=self.adapters.by_digest(),
            statuses=self.client.statuses,
            movements=self.adapters.movements,
            quotas=self.quotas,
            up=self.client.state == "ready",
            restarts=self.client.restarts,
        )


class Routes:
    """The endpoints."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._page = ""
        self._document: dict[str, Any] = {}

    def table(self) -> list[RouteSpec]:
        """Every route of the server."""
        public, tenant, admin = Policy.PUBLIC, Policy.TENANT, Policy.ADMIN
        specs = [
            RouteSpec("POST", "/v1/chat/completions", self.chat, tenant,
                      "Answer a conversation.", ChatBody),
            RouteSpec("POST", "/v1/completions", self.completions, tenant,
                      "Continue a text or token ids.", CompletionBody),
            RouteSpec("GET", "/v1/models", self.models, tenant, "The base and every adapter."),
            RouteSpec("GET", "/v1/models/{model_id:path}", self.model, tenant,
                      "One model by name."),
            RouteSpec("GET", "/v1/lora_adapters", self.lora_adapters, tenant,
                      "Every adapter: tier, pages, pins, use."),
            RouteSpec("POST", "/v1/load_lora_adapter", self.load, admin,
                      "Register and load an adapter from a local folder.", LoadBody, "text/plain"),
            RouteSpec("POST", "/v1/unload_lora_adapter", self.unload, admin,
                      "Forget an adapter and free what it holds.", UnloadBody, "text/plain"),
            RouteSpec("POST", "/v1/adapters/{name:path}/warm", self.warm, admin,
                      "Bring an adapter to host memory or to the device.", WarmBody),
            RouteSpec("POST", "/v1/adapters/{name:path}/evict", self.evict, admin,
                      "Free an adapter's pages, or its host memory too.", EvictBody),
            RouteSpec("POST", "/v1/fleet", self.fleet, admin,
                      "Serve a changed fleet file, or say what it would change.", FleetBody),
            RouteSpec("POST", "/tokenize", self.tokenize, tenant,
                      "Token ids of a prompt or a conversation.", TokenizeBody),
            RouteSpec("POST", "/detokenize", self.detokenize, tenant,
                      "Text of token ids.", DetokenizeBody),
            RouteSpec("GET", "/health", self.health, public, "Whether the server serves."),
            RouteSpec("GET", "/readyz", self.readyz, public, "Whether requests are admitted."),
            RouteSpec("GET", "/metrics", self.scrape, tenant, "Metrics for Prometheus.",
                      None, "text/plain"),
            RouteSpec("GET", "/openapi.json", self.openapi, public, "This contract."),
            RouteSpec("GET", "/docs", self.docs, public, "This contract, to read.",
                      None, "text/html"),
        ]  # fmt: skip
        title = f"mlora: {self._front.config.base_name}"
        self._document = openapi_document(title, specs)
        self._page = docs_page(self._document)
        return specs

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        return await self._generate(request, ChatBody, Texts.chat)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        return await self._generate(request, CompletionBody, Texts.completion)

    async def _generate(
        self,
        request: Request,
        kind: type[Asked],
        prepare: Callable[[Texts, Asked, Admitted], Job],
    ) -> Response:
        front = self._front
        with front.room_for(request):
            body = await front.parse(request, kind)
            check_stream_options(body)
            name = select_adapter(body, front.config.base_name)
            self._check_allowed(request, name)
            entry = None if name is None else await front.adapters.resolve(name)
            front.client.check_admission()
            ref = None if entry is None else AdapterRef.of(entry)
            caller = caller_of(request)
            weight = front.access.now.weight(caller.tenant, name)
            admitted = Admitted(ref, caller, front.max_model_len, weight)
            texts = await front.texts_of(entry)
            job = await front.in_thread(lambda: prepare(texts, body, admitted))
        return await front.answer(request, job, stream=body.stream is True)

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        grant = caller_of(request).grant
        entries = self._front.adapters.registry.entries()
        servable = (entry for entry in entries if entry.state == "ready")
        cards = map(self._card, (None, *servable))
        allowed = [card for card in cards if grant.allows(card["id"])]
        return json_response({"object": "list", "data": allowed})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{model_id}"""
        model = str(request.path_params["model_id"])
        return json_response(self._card(await self._entry(request, model)))

    async def lora_adapters(self, request: Request) -> Response:
        """GET /v1/lora_adapters"""
        front = self._front
        await front.client.query()
        grant = caller_of(request).grant
        counts = front.traffic.adapters.traffic
        if grant.is_limited:  # what the fleet as a whole does is not its concern
            return json_response(front.adapters.listing(counts, grant.allows))
        listing = front.adapters.listing(counts) | front.adapters.fleet_facts()
        return json_response({**listing, "traffic": front.traffic.tiers.summary()})

    async def load(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter"""
        body = await self._front.read(request, LoadBody)
        return PlainTextResponse(await self._front.adapters.load(body))

    async def unload(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter"""
        body = await self._front.read(request, UnloadBody)
        text, freed = await self._front.adapters.unload(body)
        headers = {}
        if freed is not None:
            headers["x-mlora-freed-pages"] = str(freed.freed_pages)
            headers["x-mlora-freed-host-bytes"] = str(freed.freed_host_bytes)
        return PlainTextResponse(text, headers=headers)

    async def warm(self, request: Request) -> Response:
        """POST /v1/adapters/{name}/warm"""
        body = await self._front.read(request, WarmBody)
        name = str(request.path_params["name"])
        counts = self._front.traffic.adapters.traffic
        return json_response(await self._front.adapters.warm(name, body, counts))

    async def evict(self, request: Request) -> Response:
        """POST /v1/adapters/{name}/evict"""
        body = await self._front.read(request, EvictBody)
        name = str(request.path_params["name"])
        counts = self._front.traffic.adapters.traffic
        return json_response(await self._front.adapters.evict(name, body, counts))

    async def fleet(self, request: Request) -> Response:
        """POST /v1/fleet"""
        front = self._front
        body = await front.read(request, FleetBody, front.config.limits.max_fleet_bytes)
        return json_response(await front.fleet.apply(body))

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize"""
        front = self._front
        with front.room_for(request):
            body = await front.parse(request, TokenizeBody)
            entry = await self._entry(request, body.model)
            length = front.max_model_len
            texts = await front.texts_of(entry)
            ids = await front.in_thread(lambda: texts.tokenize(body, length))
        reply: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": length,
            "tokens": ids,
            "token_strs": None,
        }
        if body.return_token_strs:
            reply["token_strs"] = [texts.tokenizer.pieces.label(i) for i in ids]
        return json_response(reply)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize"""
        front = self._front
        with front.room_for(request):
            body = await front.parse(request, DetokenizeBody)
            entry = await self._entry(request, body.model)
            ids = body.tokens
            if ids is None:
                raise RequestError("tokens: required", param="tokens")
            check_ids(ids, front.config.vocab_size, "tokens")
            texts = await front.texts_of(entry)
            text = await front.in_thread(lambda: texts.tokenizer.decode(ids))
        return json_response({"prompt": text})

    async def health(self, _: Request) -> Response:
        """GET /health"""
        client = self._front.client
        status = "degraded" if client.stalled else client.state
        good = client.state in ("ready", "draining")
        return self._state(status, good)

    async def readyz(self, _: Request) -> Response:
        """GET /readyz"""
        client = self._front.client
        return self._state(client.state, client.state == "ready" and not client.stalled)

    async def scrape(self, request: Request) -> Response:
        """GET /metrics"""
        front = self._front
        if caller_of(request).grant.is_limited:
            raise RequestError(
                "this key is limited to some models, and metrics are about all of them",
                status=403,
                code="permission_denied",
                kind="permission_error",
            )
        await front.client.query(0.5)
        return Response(front.metrics.render(front.view()), media_type=CONTENT_TYPE)

    async def openapi(self, _: Request) -> Response:
        """GET /openapi.json"""
        return json_response(self._document)

    async def docs(self, _: Request) -> Response:
        """GET /docs"""
        policy = "default-src 'none'; style-src 'unsafe-inline'"
        return HTMLResponse(self._page, headers={"content-security-policy": policy})

    def _state(self, status: str, good: bool) -> Response:
        reason = self._front.client.reason
        if self._front.client.stalled:
            reason = "the engine has not answered for some seconds"
        body = {"status": status, "reason": reason or None}
        response = json_response(body, {} if good else {"retry-after": "2"})
        response.status_code = 200 if good else 503
        return response

    def _check_allowed(self, request: Request, name: str | None) -> None:
        """Raises the 404 of an unknown name where the caller may not ask for the adapter."""
        model = name or self._front.config.base_name
        if not caller_of(request).grant.allows(model):
            raise model_not_found(model)

    async def _entry(self, request: Request, model: str | None) -> AdapterEntry | None:
        """The adapter that a model names; None: the base. Raises RequestError 404."""
        name = split_model(model, self._front.config.base_name) if model is not None else None
        self._check_allowed(request, name)
        return None if name is None else await self._front.adapters.names.find(name)

    def _card(self, entry: AdapterEntry | None) -> dict[str, Any]:
        front = self._front
        base = front.config.base_name
        ready = front.client.ready
        return {
            "id": base if entry is None else entry.name,
            "object": "model",
            "created": front.created if entry is None else int(entry.registered_at),
            "owned_by": "mlora",
            "root": str(front.config.base_path) if entry is None else entry.path,
            "parent": None if entry is None else base,
            "max_model_len": ready.max_model_len if ready is not None else None,
            "permission": [],
        }


def create_app(front: Front) -> ASGIApp:
    """The whole application. Raises RuntimeError where a route has no policy."""
    config = front.config
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.access = front.access
    app.add_exception_handler(HTTPException, _http_error)
    add_routes(app, Routes(front).table())
    check_policies(app)
    count = front.metrics.replies
    return Guard(app, config, lambda status: count.labels(status=str(status)).inc())


async def _http_error(_: Request, error: Exception) -> Response:
    """404 and 405 of the router, in the error contract's shape."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    codes = {404: "not_found", 405: "method_not_allowed"}
    texts = {404: "no such route", 405: "this route has another method"}
    response = error_response(
        RequestError(
            texts.get(status, "the request cannot be served"),
            status=status,
            code=codes.get(status, "invalid_request"),
        )
    )
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)
    return response
