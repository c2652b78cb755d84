"""Metrics in Prometheus' text form: vLLM's names where routers read them, `mlora_` for the rest."""

from collections import Counter
from collections.abc import Iterator

from multilora_cli.server.families import counters, labelled
from multilora_cli.server.scrape import EngineView, Scrape
from multilora_cli.server.traffic import RequestMeter, Traffic


class Metrics:
    """All series of one server."""

    def __init__(self, base_name: str, named_adapters: int) -> None:
        self.traffic = Traffic(named_adapters)
        self._labels = {"model_name": base_name, "engine": "0"}
        self._ended: Counter[str] = Counter()  # requests by finish reason, abort or error
        self._replies: Counter[int] = Counter()  # by status
        self._reloads: Counter[str] = Counter()  # by outcome

    def ended(self, reason: str) -> None:
        """A request ended; `reason` is a finish reason, abort or error."""
        self._ended[reason] += 1

    def replied(self, status: int) -> None:
        """A reply began, with this HTTP status."""
        self._replies[status] += 1

    def reloaded(self, outcome: str) -> None:
        """The fleet file was read again by SIGHUP."""
        self._reloads[outcome] += 1

    def meter(self, adapter: str | None, prompt_tokens: int) -> RequestMeter:
        """Begin to count a request; `adapter` is a registered name or None for the base."""
        return RequestMeter(self.traffic, adapter, prompt_tokens)

    def families(self, view: EngineView) -> Iterator[str]:
        """Everything, as Prometheus scrapes it; a family at a time, each of one moment."""
        yield labelled(
            "vllm:request_success_total",
            "counter",
            "Ended requests by reason.",
            [(self._labels | {"finished_reason": each}, n) for each, n in self._ended.items()],
        )
        replies = {str(status): count for status, count in self._replies.items()}
        yield counters("mlora_http_replies", "HTTP replies by status.", "status", replies)
        text = "Times the fleet file was read again by SIGHUP."
        yield counters("mlora_fleet_reloads", text, "outcome", self._reloads)
        yield from Scrape(self.traffic, view).collect()
