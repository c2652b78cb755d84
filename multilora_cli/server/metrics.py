"""Metrics in Prometheus' text form: vLLM's names where routers read them, `mlora_` for the rest."""

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from multilora_cli.server.scrape import EngineView, Scrape
from multilora_cli.server.traffic import RequestMeter, Traffic

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    """All series of one server."""

    def __init__(self, base_name: str, named_adapters: int) -> None:
        # Without it every counter has a second series, which nobody reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.traffic = Traffic(named_adapters)
        self._labels = {"model_name": base_name, "engine": "0"}
        self.requests = Counter(
            "vllm:request_success",
            "Ended requests by reason.",
            (*self._labels, "finished_reason"),
            registry=self.registry,
        )
        self.replies = self._counter("http_replies", "HTTP replies by status.", "status")
        self.reloads = self._counter(
            "fleet_reloads", "Times the fleet file was read again by SIGHUP.", "outcome"
        )

    def ended(self, reason: str) -> None:
        """A request ended; `reason` is a finish reason, abort or error."""
        self.requests.labels(**self._labels, finished_reason=reason).inc()

    def meter(self, adapter: str | None, prompt_tokens: int) -> RequestMeter:
        """Begin to count a request; `adapter` is a registered name or None for the base."""
        return RequestMeter(self.traffic, adapter, prompt_tokens)

    def render(self, view: EngineView) -> bytes:
        """Everything, as Prometheus scrapes it."""
        registry = CollectorRegistry()
        registry.register(Scrape(self.traffic, view))
        return generate_latest(self.registry) + generate_latest(registry)

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"mlora_{name}", text, (label,), registry=self.registry)
