"""Asks an engine in this process what it thinks of prompts: log-probabilities of whole steps."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from multilora_cli.engine.assemble import build_engine
from multilora_cli.engine.config import EngineConfig
from multilora_cli.engine.messages import (
    AdapterRef,
    Delta,
    Ready,
    SamplingParams,
    Submit,
    TokenLogprobs,
)
from multilora_cli.engine.model_runner import ModelRunner
from multilora_cli.errors import MloraError
from multilora_cli.progress import Report

ANSWER_TOKENS = 4  # decoded after each prompt
TOP = 20  # log-probabilities kept of a decoded token's distribution


@dataclass
class Heard:
    """What the engine said to one prompt."""

    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)  # greedy, after the prompt
    decoded: list[TokenLogprobs] = field(default_factory=list)
    parts: dict[int, torch.Tensor] = field(default_factory=dict)  # by first position

    @property
    def logprobs(self) -> torch.Tensor:
        """fp32 [len(prompt) - 1, vocab]: what follows each prompt token but the last.

        Only of prompts of two tokens and more.
        """
        return torch.cat([self.parts[start] for start in sorted(self.parts)])


class Probe:
    """An engine that is asked and not served. Close it to give its memory back."""

    def __init__(self, config: EngineConfig, report: Report) -> None:
        self._engine = build_engine(config, report)
        self._heard: dict[int, Heard] = {}
        self._open: set[int] = set()
        self._last_id = 0
        runner = self._engine.parts.runner
        assert isinstance(runner, ModelRunner)
        runner.on_prompt_logits = self._take_logits

    @property
    def ready(self) -> Ready:
        """What the engine allocated, and on what device."""
        return self._engine.parts.ready

    def ask(self, requests: Sequence[tuple[Sequence[int], AdapterRef | None]]) -> list[Heard]:
        """All requests at once, so that their rows share steps. Raises MloraError for a fault."""
        ids = [self._submit(prompt, adapter) for prompt, adapter in requests]
        while self._open:
            for delta in self._engine.step():
                self._take(delta)
            if self._open and self._engine.idle_wait_s:
                time.sleep(min(self._engine.idle_wait_s, 0.001))
        return [self._heard.pop(request_id) for request_id in ids]

    def close(self) -> None:
        """End the loader threads and drop the engine."""
        self._engine.close()
        del self._engine
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _submit(self, prompt: Sequence[int], adapter: AdapterRef | None) -> int:
        self._last_id += 1
        params = SamplingParams(
            max_tokens=ANSWER_TOKENS, temperature=0.0, logprobs=TOP, prompt_logprobs=0
        )
        self._heard[self._last_id] = Heard(list(prompt))
        self._open.add(self._last_id)
        self._engine.handle(Submit(self._last_id, list(prompt), params, adapter))
        return self._last_id

    def _take_logits(self, request_id: int, start: int, logits: torch.Tensor) -> None:
        self._heard[request_id].parts[start] = logits.float().log_softmax(-1).cpu()

    def _take(self, delta: Delta) -> None:
        heard = self._heard[delta.request_id]
        heard.tokens += delta.token_ids
        heard.decoded += delta.logprobs or []
        if delta.fault is not None:
            raise MloraError(f"the engine could not answer: {delta.fault.message}")
        if delta.finish_reason is not None:
            self._open.discard(delta.request_id)
