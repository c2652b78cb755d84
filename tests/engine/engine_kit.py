"""An engine in this process, the adapters of a fleet, and answers by request."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from multilora_cli.adapters.digest import content_digest
from multilora_cli.adapters.peft import read_adapter
from multilora_cli.engine.assemble import build_engine
from multilora_cli.engine.config import EngineConfig
from multilora_cli.engine.messages import (
    AdapterRef,
    Delta,
    EvictAdapter,
    Fault,
    LoadAdapter,
    Reply,
    SamplingParams,
    Submit,
    TokenLogprobs,
)
from multilora_cli.memory.page_pool import PageUse
from multilora_cli.sizing.geometry import read_geometry

F2_PAGE = 24_576  # bytes: K and V of 16 tokens, 1 layer, 2 heads of 96, float32
MAX_STEPS = 20_000  # a run that takes more hangs


def adapter_ref(base: Path, folder: Path, name: str, generation: int = 1) -> AdapterRef:
    """The reference the front would send for the adapter in `folder`."""
    adapter = read_adapter(folder, read_geometry(base), max_rank=512, base_folder=base)
    return AdapterRef(name, content_digest(adapter), str(folder), generation)


@dataclass
class Answer:
    """What one sequence said, all deltas together."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish: str | None = None
    fault: Fault | None = None
    cached: int = 0


class ManualClock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


class Rig:
    """An engine with audits after every step and NaN in every page that nobody wrote."""

    def __init__(
        self, base: Path, *, pages: int = 256, page: int = F2_PAGE, **config: object
    ) -> None:
        settings: dict[str, object] = {
            "device": "cpu",  # on a machine with a card too: what is computed there is compared
            "max_num_seqs": 32,
            "max_num_batched_tokens": 256,
            "num_slots": 17,
            "debug": True,
            "steps_ahead": 1,  # what a CUDA device gets; the servers' tests run at 0
            "num_threads": 1,
            "host_adapter_bytes": 256 * 2**20,
        }
        self.clock = ManualClock()
        self.engine = build_engine(
            EngineConfig(
                model_path=str(base), pool_bytes=(pages + 1) * page, **(settings | config)
            ),
            now=self.clock,
        )
        self.answers: dict[tuple[int, int], Answer] = {}
        self.replies: dict[int, Reply] = {}
        self.steps = 0
        self._last_id = 0

    def submit(
        self,
        prompt: Sequence[int],
        adapter: AdapterRef | None = None,
        *,
        n: int = 1,
        salt: str = "",
        **params: object,
    ) -> int:
        """Send a request (greedy, 8 tokens unless told otherwise); its id."""
        self._last_id += 1
        settings = SamplingParams(**({"max_tokens": 8, "temperature": 0.0} | params))
        self.engine.handle(Submit(self._last_id, list(prompt), settings, adapter, n, salt))
        for index in range(n):
            self.answers[self._last_id, index] = Answer()
        return self._last_id

    def load(self, adapter: AdapterRef, **how: object) -> int:
        """Send a load call; its id."""
        self._last_id += 1
        self.engine.handle(LoadAdapter(self._last_id, adapter, **how))
        return self._last_id

    def evict(self, digest: str, **how: object) -> int:
        """Send an evict call; its id."""
        self._last_id += 1
        self.engine.handle(EvictAdapter(self._last_id, digest, **how))
        return self._last_id

    def step(self) -> list[Delta]:
        """One step of the engine, its deltas and replies taken in."""
        deltas = self.engine.step()
        self.steps += 1
        self.clock.time += 0.01
        if self.engine.parts.residency.busy():
            # Loaders are threads: a loop that spins hands them the interpreter only every 5 ms,
            # so a load of 100 short calls takes half a second while the rig's clock runs on.
            time.sleep(0.001)
        for delta in deltas:
            self._take(delta)
        for reply in self.engine.take_replies():
            assert reply.call_id not in self.replies, "a call was answered twice"
            self.replies[reply.call_id] = reply
        return deltas

    def run(self) -> "Rig":
        """Step until nothing is left to do."""
        for _ in range(MAX_STEPS):
            self.step()
            if self.engine.idle_wait_s is None:
                return self
        raise AssertionError("the engine does not come to rest")

    def steps_until(self, call_id: int) -> Iterator[list[Delta]]:
        """Steps until a call is answered."""
        for _ in range(MAX_STEPS):
            if call_id in self.replies:
                return
            yield self.step()
        raise AssertionError(f"call {call_id} is not answered")

    def answer(self, request_id: int, index: int = 0) -> Answer:
        """What a sequence said."""
        return self.answers[request_id, index]

    def ask(
        self, prompt: Sequence[int], adapter: AdapterRef | None = None, **params: object
    ) -> Answer:
        """One request from start to end."""
        request_id = self.submit(prompt, adapter, **params)
        self.run()
        return self.answer(request_id)

    def owned_pages(self) -> int:
        """Pages that sequences hold."""
        return self.engine.parts.pool.count(PageUse.KV)

    def references(self) -> int:
        """Leases on adapters."""
        return sum(
            standing.references for standing in self.engine.parts.residency.reports.standings()
        )

    def counters(self) -> dict[str, float]:
        """The snapshot's counters."""
        return self.engine.snapshot().counters

    def _take(self, delta: Delta) -> None:
        answer = self.answers[delta.request_id, delta.index]
        assert answer.finish is None, f"a delta after the end of {delta.request_id}"
        answer.tokens += delta.token_ids
        answer.logprobs += delta.logprobs or []
        if delta.prompt_logprobs is not None:
            assert answer.prompt_logprobs is None, "prompt log-probabilities sent twice"
            answer.prompt_logprobs = delta.prompt_logprobs
        answer.cached += delta.cached_tokens
        answer.finish, answer.fault = delta.finish_reason, delta.fault
