"""Small and odd limits on a CUDA device: buffers, captured steps and launches are sized by them.

Tokens that the device decodes are as likely as an engine on the CPU finds them in a prompt.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from multilora_cli.engine.batch_plan import ScheduledRow
from multilora_cli.engine.messages import AdapterRef
from multilora_cli.engine.prompt_graphs import PromptGraphs
from tests.engine.engine_kit import Answer, Rig, adapter_ref
from tests.signature import peft_adapter, tiny_base

pytestmark = pytest.mark.gpu

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Fleet = tuple[Path, dict[str, AdapterRef | None]]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """Ranks from 1 to 512, on all modules and on single ones."""
    folder = tmp_path_factory.mktemp("limits")
    base = tiny_base(folder / "base", max_position_embeddings=4096)
    kinds: dict[str, dict[str, Any]] = {
        "1": {"r": 1, "target_modules": ["q_proj", "v_proj"]},
        "17": {"r": 17, "target_modules": ALL},
        "down": {"r": 3, "target_modules": ["down_proj"]},
        "k": {"r": 5, "target_modules": ["k_proj"]},
        "64": {"r": 64, "target_modules": ALL},
        "512": {"r": 512, "target_modules": ["q_proj", "down_proj"]},
        "dora": {"r": 2, "target_modules": ["o_proj", "gate_proj"], "use_dora": True},
    }
    adapters: dict[str, AdapterRef | None] = {"base": None}
    for seed, (name, how) in enumerate(kinds.items()):
        path = peft_adapter(base, folder / name, seed=seed, **how)
        adapters[name] = adapter_ref(base, path, name)
    return base, adapters


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "one": (
        "base 1",
        {"max_num_seqs": 1, "max_num_batched_tokens": 1, "num_slots": 2, "max_lora_rank": 1},
    ),
    "odd": (
        "base 1 17 down k 1 dora",
        {"max_num_seqs": 3, "max_num_batched_tokens": 37, "num_slots": 3, "max_lora_rank": 17},
    ),
    "single": ("down k down", {"max_num_seqs": 9, "max_num_batched_tokens": 300, "num_slots": 3}),
    "wide": (
        "512 1 64 base 512",
        {"max_num_seqs": 4, "max_num_batched_tokens": 264, "num_slots": 4, "pages": 2000},
    ),
    "none": ("base base", {"max_num_seqs": 2, "max_num_batched_tokens": 72, "num_slots": 2}),
}


def is_as_likely(found: Answer, said: Answer, length: int) -> None:
    """What was decoded behind a prompt of so many tokens is as `said`, the same as a prompt, has
    it."""
    wanted = [e.logprob for e in (said.prompt_logprobs or [])[length:] if e is not None]
    for decoded, expected in zip(found.logprobs, wanted, strict=True):
        assert abs(decoded.logprob - expected) < 1e-3


@pytest.mark.parametrize("case", CASES)
def test_answers_within_limits(fleet: Fleet, case: str) -> None:
    base, adapters = fleet
    order, how = CASES[case]
    names = order.split()
    rig = Rig(base, device="cuda:0", dtype="float32", max_model_len=256, **how)
    prompts = [[(7 * i + 3 * j) % 300 for j in range(1 + 13 * i)] for i in range(len(names))]
    requests = [
        rig.submit(prompt, adapters[name], max_tokens=9, logprobs=0)
        for prompt, name in zip(prompts, names, strict=True)
    ]
    rig.run()
    reference = Rig(base, pages=how.get("pages", 256), device="cpu")
    for prompt, name, request in zip(prompts, names, requests, strict=True):
        found = rig.answer(request)
        assert found.fault is None and len(found.tokens) == 9, name
        whole = [*prompt, *found.tokens]
        said = reference.ask(whole, adapters[name], prompt_logprobs=0, max_tokens=1)
        is_as_likely(found, said, len(prompt))


@pytest.mark.parametrize("capture_prompts", [True, False])
def test_long_prompts_beside_decode(
    fleet: Fleet, capture_prompts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of every captured size, of adapters of every rank, beside rows that decode."""
    base, adapters = fleet
    sizes: set[int] = set()
    run = PromptGraphs.run

    def watched(graphs: PromptGraphs, rows: Sequence[ScheduledRow]) -> object:
        step = graphs._step_for(rows)
        sizes.add(0 if step is None else step.tokens)
        return run(graphs, rows)

    monkeypatch.setattr(PromptGraphs, "run", watched)
    rig = Rig(
        base, device="cuda:0", dtype="float32", max_model_len=2048, max_num_seqs=9, pages=4000,
        num_slots=9, max_num_batched_tokens=2048, capture_prompts=capture_prompts,
    )  # fmt: skip
    asked = {}
    for index, name in enumerate(["17", "down", "64", "base", "1", "512", "k", "64", "base"]):
        length = 40 if index < 3 else 190 + 230 * index
        prompt = [(7 * index + 3 * j * j) % 300 for j in range(length)]
        request = rig.submit(prompt, adapters[name], max_tokens=40 - 4 * index, logprobs=0)
        asked[request] = (name, prompt)
        rig.step()
    rig.run()
    assert sizes >= ({64, 512, 1024} if capture_prompts else set())
    reference = Rig(base, pages=4000, device="cpu", max_model_len=2048)
    for request, (name, prompt) in asked.items():
        found = rig.answer(request)
        assert found.fault is None, name
        said = reference.ask(
            [*prompt, *found.tokens], adapters[name], prompt_logprobs=0, max_tokens=1
        )
        is_as_likely(found, said, len(prompt))
