"""A whole engine on interpreted kernels: what they do to each other, in captured steps too.

Every page that nobody wrote, every tensor that is taken and every lane that is masked holds NaN,
and nothing beyond a tensor may be touched (checked_interpreter).
"""

from typing import Any

import pytest

from multilora_cli.sizing.budget import PromptStep
from tests.engine.conftest import SignatureFleet
from tests.engine.engine_kit import Rig
from tests.engine.test_decode_graphs import with_graphs

pytestmark = pytest.mark.interpreter


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> SignatureFleet:
    """F2."""
    return SignatureFleet(tmp_path_factory.mktemp("signature"))


LEAST: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "num_slots": 2}
SMALL: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "num_slots": 3}


@pytest.mark.parametrize(
    ("limits", "rows", "prompts"),
    [(LEAST, (1,), ()), (SMALL, (1, 2, 4), (PromptStep(2, 8), PromptStep(4, 16)))],
    ids=["least", "small"],
)
def test_adapters_over_too_few_slots(
    fleet: SignatureFleet, limits: dict[str, Any], rows: tuple[int, ...], prompts: Any
) -> None:
    rig = Rig(fleet.base, max_lora_rank=4, max_model_len=64, pages=20, **limits)
    recorded = with_graphs(rig, rows, max_rank=4, prompts=prompts)
    wanted = {}
    for place, k in enumerate((None, 20, 95, 150)[: 2 + limits["max_num_seqs"]]):
        adapter = None if k is None else fleet.adapter(k)
        request = rig.submit([place] * (3 + 2 * place), adapter, max_tokens=4)
        wanted[request] = [place + 1 + i for i in range(4)] if k is None else [k + 1] * 4
    how = {"temperature": 1.2, "seed": 3, "top_p": 0.9, "presence_penalty": 0.5, "logprobs": 1}
    drawn = rig.submit([7], max_tokens=4, **how)
    rig.run()
    for request, tokens in wanted.items():
        assert rig.answer(request).tokens == tokens
    assert rig.answer(drawn).fault is None and len(rig.answer(drawn).tokens) == 4
    assert sum(work.replays > 0 for work in recorded) >= 2
    assert rig.counters()["adapter_evictions"] > 0
