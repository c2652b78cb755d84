"""Every kind of adapter through the whole engine: pages, eviction, reload, one step ahead.

Prompt log-probabilities against PEFT on the very folder, with NaN in every page nobody wrote.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from multilora_cli.layers import linear
from multilora_kernels import add_lora
from tests.engine.engine_kit import Answer, Rig, adapter_ref
from tests.engine.test_decode_graphs import Repeated, with_graphs
from tests.models import tiny
from tests.models.harness import random_prompts
from tests.models.peft_adapters import ALL, make_adapters, peft_logits

PAGE = 3 * 2 * 2 * 16 * 16 * 4  # three layers, two KV heads of 16, float32
PLAIN: dict[str, Any] = {"r": 8, "target_modules": ALL}
KINDS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "dora": {**PLAIN, "use_dora": True},
    "bias all": {"r": 4, "target_modules": ["q_proj", "o_proj"], "bias": "all"},
    "dora and bias": {**PLAIN, "use_dora": True, "bias": "lora_only"},
    "lora_bias": {**PLAIN, "lora_bias": True},
    "embedding and head": {"r": 4, "target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "saved head, dora": {**PLAIN, "use_dora": True, "modules_to_save": ["lm_head"]},
}


class Case:
    """A base, an adapter of every kind, one prompt, and PEFT's log-probabilities of it."""

    def __init__(self, folder: Path) -> None:
        model = tiny.make_model("llama", seed=6, gain=1.0, attention_bias=True)
        self.base = tiny.save_model(model, folder / "base")
        folders = make_adapters(model, folder, tuple(KINDS.values()), size=0.6)
        self.adapters = [None, *(adapter_ref(self.base, f, f.name) for f in folders)]
        (self.prompt,) = random_prompts([30], tiny.VOCAB, seed=3)
        pairs = [(slot, self.prompt) for slot in range(len(self.adapters))]
        self.reference = [
            logits.log_softmax(-1)[torch.arange(29), self.prompt[1:]]
            for logits in peft_logits(model, folders, pairs)
        ]

    def check(self, which: int, answer: Answer) -> None:
        """Log-probabilities of the prompt as PEFT computes them."""
        found = torch.tensor([p.logprob for p in (answer.prompt_logprobs or [])[1:] if p])
        assert found.shape == (29,)
        gap = float((found - self.reference[which]).abs().max())
        assert gap < 1e-3, (which, gap)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("kinds"))


def ask_all(rig: Rig, case: Case, order: Sequence[int]) -> None:
    """All of `order` at once, each answer as PEFT's."""
    requests = [
        (which, rig.submit(case.prompt, case.adapters[which], prompt_logprobs=0, max_tokens=5))
        for which in order
    ]
    rig.run()
    for which, request in requests:
        case.check(which, rig.answer(request))


def test_mixed_in_one_batch(case: Case) -> None:
    """All kinds and the base side by side, in prefill pieces and in decode."""
    rig = Rig(case.base, pages=900, page=PAGE, max_num_batched_tokens=64)
    order = list(range(len(KINDS) + 1))
    ask_all(rig, case, order)
    ask_all(rig, case, order[::-1])


def test_evicted_and_loaded_again(case: Case) -> None:
    """A pool that holds few of them: pages and slots change owners, the answers do not."""
    rig = Rig(case.base, pages=200, page=PAGE, num_slots=3)
    for order in ([1, 2], [4, 6], [3, 7], [8, 0], [7, 6], [5, 8], [1]):
        ask_all(rig, case, order)
    assert rig.engine.parts.residency.evictions > 2


def test_base_and_adapters_answer_differently(case: Case) -> None:
    """Or the comparison above would show nothing."""
    for one in range(len(KINDS) + 1):
        for other in range(one):
            assert (case.reference[one] - case.reference[other]).abs().max() > 0.05, (one, other)


def check_decoding(rig: Rig, reference: Rig, case: Case) -> None:
    """Tokens that `rig` decodes are as likely as `reference` finds them in a prompt: near ties may
    fall either way, probabilities may not."""
    for which, adapter in enumerate(case.adapters):
        found = rig.ask(case.prompt, adapter, max_tokens=12, logprobs=0)
        whole = [*case.prompt, *found.tokens]
        said = reference.ask(whole, adapter, prompt_logprobs=0, max_tokens=1).prompt_logprobs or []
        wanted = [entry.logprob for entry in said[len(case.prompt) :] if entry is not None]
        assert len(wanted) == 12
        for decoded, expected in zip(found.logprobs, wanted, strict=True):
            assert abs(decoded.logprob - expected) < 1e-3, which


def test_recorded_decode_steps(case: Case) -> None:
    """Steps for adapters with extras are recorded when first needed, alone and side by side."""
    rig = Rig(case.base, pages=900, page=PAGE)
    recorded = with_graphs(rig, (1, 2, 4, 8))
    at_start = len(recorded)
    order = [0, 1, 2, 6, 7, 0, 8, 3]
    for i, which in enumerate(order):
        rig.submit(case.prompt[: 4 + i], case.adapters[which], max_tokens=6 + 2 * i)
    rig.run()
    assert len(recorded) > at_start and all(work.replays for work in recorded[at_start:])
    check_decoding(rig, Rig(case.base, pages=900, page=PAGE), case)


@pytest.mark.parametrize("order", [(0, 2, 6), (2,)])
def test_a_step_that_cannot_be_recorded_while_serving_runs_eagerly(
    case: Case, order: tuple[int, ...]
) -> None:
    """No room for one more captured step: no request fails for it, not even one that runs alone,
    and none is tried again."""
    rig = Rig(case.base, pages=900, page=PAGE)
    with_graphs(rig, (1, 2, 4))
    graphs = rig.engine.parts.runner._graphs
    tried: list[object] = []

    def no_room(work: object) -> Repeated:
        tried.append(work)
        raise torch.OutOfMemoryError("CUDA out of memory")

    graphs._record = no_room
    plain = sum(work.replays for work in graphs._graphs.values())
    requests = [
        rig.submit(case.prompt[: 4 + i], case.adapters[which], max_tokens=9)
        for i, which in enumerate(order)
    ]
    rig.run()
    assert [rig.answer(request).finish for request in requests] == ["length"] * len(order)
    assert len(tried) == 1
    rig.ask(case.prompt, case.adapters[1], max_tokens=5)
    assert sum(work.replays for work in graphs._graphs.values()) > plain, "others have theirs"


@pytest.mark.gpu
def test_on_the_device(case: Case) -> None:
    """Kernels and captured steps: prompts as PEFT's, decoded tokens as the CPU finds them."""
    how = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_lora_rank": 16}
    rig = Rig(case.base, pages=900, page=PAGE, device="cuda:0", dtype="float32", **how)
    assert rig.engine.parts.runner._graphs is not None
    ask_all(rig, case, list(range(len(KINDS) + 1)))
    ask_all(rig, case, [8, 2, 6])
    check_decoding(rig, Rig(case.base, pages=900, page=PAGE, device="cpu"), case)


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["beside the multiply", "behind it"])
def test_a_capture_that_fails_on_the_device_leaves_the_others(
    case: Case, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a second stream is forked off, and after it was joined: what was captured at the start
    replays, what was not is launched eagerly, and every stream goes on."""
    how = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_lora_rank": 16}
    rig = Rig(case.base, pages=900, page=PAGE, device="cuda:0", dtype="float32", **how)
    failed: list[str] = []
    module, name = (
        (add_lora, "sgmv_shrink") if place.startswith("beside") else (linear, "scale_shift")
    )
    launch = getattr(module, name)

    def fails(*args: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            failed.append(name)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return launch(*args)

    monkeypatch.setattr(module, name, fails)
    reference = Rig(case.base, pages=900, page=PAGE, device="cpu")
    check_decoding(rig, reference, case)
    assert failed == [name]
    check_decoding(rig, reference, case)
    ask_all(rig, case, [8, 2, 6, 0])
