"""The routes and what they do."""

from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from multilora_cli import __version__
from multilora_cli.adapters.entry import AdapterEntry
from multilora_cli.engine.messages import AdapterRef
from multilora_cli.errors import RequestError
from multilora_cli.server.auth import Policy
from multilora_cli.server.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EvictBody,
    FleetBody,
    LoadBody,
    SageMakerLoad,
    TokenizeBody,
    UnloadBody,
    WarmBody,
)
from multilora_cli.server.docs import docs_page, openapi_document
from multilora_cli.server.families import CONTENT_TYPE
from multilora_cli.server.front import Front
from multilora_cli.server.guard import Guard
from multilora_cli.server.long_replies import LongReply, in_turns, json_array, json_object
from multilora_cli.server.prepare import Admitted, Texts, check_stream_options
from multilora_cli.server.protocol import (
    check_ids,
    model_not_found,
    select_adapter,
    split_model,
)
from multilora_cli.server.routing import (
    JSON,
    RouteSpec,
    RouteTable,
    body_bytes,
    caller_of,
    json_response,
)
from multilora_cli.server.run import Job

Asked = TypeVar("Asked", ChatBody, CompletionBody)


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
            RouteSpec("POST", "/adapters", self.sagemaker_load, admin,
                      "The load call as SageMaker's clients make it.", SageMakerLoad,
                      "text/plain"),
            RouteSpec("DELETE", "/adapters/{name:path}", self.sagemaker_unload, admin,
                      "The unload call as they make it.", None, "text/plain"),
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
            RouteSpec("GET", "/ping", self.health, public, "The same, for SageMaker."),
            RouteSpec("GET", "/version", self.version, public, "Of this server."),
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
            num_bytes = body_bytes(request)
            if num_bytes is not None and texts.is_quick(body, num_bytes):
                job = prepare(texts, body, admitted)
            else:
                job = await front.in_thread(lambda: prepare(texts, body, admitted))
        return await front.answer(request, job, stream=body.stream is True)

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        grant = caller_of(request).grant
        base = self._front.config.base_name
        entries = self._front.adapters.registry.entries()
        servable = (entry for entry in entries if entry.state == "ready")
        shown = (
            entry
            for entry in chain((None,), servable)
            if grant.allows(base if entry is None else entry.name)
        )
        cards = await json_array(shown, self._card)
        return self._long_json(json_object({"object": "list"}, {"data": cards}))

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
            return self._long_json(await front.adapters.listing(counts, grant.allows))
        facts = {**front.adapters.fleet_facts(), "traffic": front.traffic.tiers.summary()}
        return self._long_json(await front.adapters.listing(counts, facts=facts))

    async def load(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter"""
        body = await self._front.read(request, LoadBody)
        return PlainTextResponse(await self._front.adapters.load(body))

    async def unload(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter"""
        return await self._unload(await self._front.read(request, UnloadBody))

    async def sagemaker_load(self, request: Request) -> Response:
        """POST /adapters"""
        body = await self._front.read(request, SageMakerLoad)
        load = LoadBody(
            lora_name=body.name,
            lora_path=body.src,
            load_inplace=body.load_inplace,
            is_3d_lora_weight=body.is_3d_lora_weight,
        )
        return PlainTextResponse(await self._front.adapters.load(load))

    async def sagemaker_unload(self, request: Request) -> Response:
        """DELETE /adapters/{name}"""
        return await self._unload(UnloadBody(lora_name=str(request.path_params["name"])))

    async def _unload(self, body: UnloadBody) -> Response:
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

    async def version(self, _: Request) -> Response:
        """GET /version"""
        return json_response({"version": __version__})

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
        families = front.metrics.families(front.view())
        parts = [family.encode() async for family in in_turns(families)]
        return LongReply(parts, CONTENT_TYPE, front.config.limits.write_stall_s)

    async def openapi(self, _: Request) -> Response:
        """GET /openapi.json"""
        return json_response(self._document)

    async def docs(self, _: Request) -> Response:
        """GET /docs"""
        policy = "default-src 'none'; style-src 'unsafe-inline'"
        return HTMLResponse(self._page, headers={"content-security-policy": policy})

    def _long_json(self, parts: list[bytes]) -> Response:
        return LongReply(parts, JSON, self._front.config.limits.write_stall_s)

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
    """The whole application."""
    table = RouteTable(Routes(front).table(), front.access)
    return Guard(table, front.config, front.metrics.replied)
