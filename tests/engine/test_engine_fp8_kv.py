"""base.kv_cache_dtype: fp8 through the engine: adapters, prefix cache, chunks, quantised bases."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from multilora_cli.engine import device_memory
from multilora_cli.engine.messages import AdapterRef
from tests.engine.conftest import SignatureFleet
from tests.engine.engine_kit import F2_PAGE, Rig, adapter_ref
from tests.engine.test_engine_quantized import Bases, check_mixed_batch, placed_packed
from tests.signature import BOS, deep_adapter, deep_base, signature_adapter

PROMPT = list(range(3, 43))


def rig(base: Path, **config: object) -> Rig:
    """An engine whose pages are a quarter of those of float32."""
    page = int(config.pop("page", F2_PAGE // 4))
    return Rig(base, page=page, kv_cache_dtype="fp8", **config)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    return Bases(tmp_path_factory.mktemp("kv"))


def test_pages_are_a_quarter_of_float32(fleet: SignatureFleet) -> None:
    ready = rig(fleet.base).engine.parts.ready
    assert ready.page_bytes == F2_PAGE // 4 and ready.planned["pool"] == ready.allocated["pool"]


@pytest.mark.parametrize("name", ["plain", "awq-128", "fp8-static", "w8a8-dynamic"])
def test_mixed_batch_equals_solo(bases: Bases, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """BF16 adapters, quantised weights and FP8 KV in one pool."""
    monkeypatch.setattr(device_memory, "placed", placed_packed)
    base = bases.plain if name == "plain" else bases.base(name)
    check_mixed_batch(rig(base, max_num_batched_tokens=96), bases, 8)


def test_every_projection_of_every_layer(tmp_path: Path) -> None:
    """Adapter blocks in smaller pages: losing one would make the text the base's."""
    path = deep_base(tmp_path / "deep")
    engine = rig(path, pages=2048, page=3 * 2 * 2 * 16 * 32)
    wanted = {engine.submit([BOS, 5, 9, 11]): list(range(12, 20))}
    for k in (3, 50, 191):
        adapter = adapter_ref(path, deep_adapter(tmp_path / f"d{k}", k), f"d{k}")
        wanted[engine.submit([BOS, 5, 9, 11], adapter)] = [k + 1] * 8
    engine.run()
    assert {request: engine.answer(request).tokens for request in wanted} == wanted


def test_cached_prefix_and_chunks_say_the_same(fleet: SignatureFleet) -> None:
    """A key is rounded when it is written, so whoever reads it later reads the same."""
    adapter = fleet.adapter(50, r=4)
    whole = rig(fleet.base).ask(PROMPT, adapter, logprobs=2)
    cut = rig(fleet.base, max_num_batched_tokens=32, max_num_seqs=4)
    first = cut.ask(PROMPT, adapter, logprobs=2)
    again = cut.ask(PROMPT, adapter, logprobs=2)
    assert first.cached == 0 and again.cached == 32
    for answer in (first, again):
        assert answer.tokens == whole.tokens == [51] * 8
        for ours, theirs in zip(answer.logprobs, whole.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)


def sick_adapter(base: Path, folder: Path, signature: int) -> AdapterRef:
    """An adapter whose every weight is NaN."""
    path = signature_adapter(folder / "sick", signature, r=4)
    weights = path / "adapter_model.safetensors"
    save_file({k: torch.full_like(t, torch.nan) for k, t in load_file(weights).items()}, weights)
    return adapter_ref(base, path, "sick")


@pytest.mark.parametrize("name", ["awq-128", "fp8-static", "w8a8-dynamic", "fp8-block"])
@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_a_row_of_nan_leaves_the_others_as_they_were(
    bases: Bases, tmp_path: Path, name: str, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: log-probabilities of the same batch without and with the sick row."""
    monkeypatch.setattr(device_memory, "placed", placed_packed)
    base = bases.base(name)
    sick = sick_adapter(bases.plain, tmp_path, 20)
    answers = []
    for odd in (bases.adapter(20), sick):
        page = F2_PAGE if kv == "auto" else F2_PAGE // 4
        engine = Rig(base, page=page, kv_cache_dtype=kv, check_adapter_values=False)
        others = [bases.adapter(50), None, bases.adapter(95), bases.adapter(150)]
        requests = [engine.submit(PROMPT[i:], ref, logprobs=3) for i, ref in enumerate(others)]
        row = engine.submit(PROMPT, odd, logprobs=3)
        engine.run()
        answers.append([(a.tokens, a.logprobs) for a in map(engine.answer, requests)])
        fault = engine.answer(row).fault
        assert (fault is None) == (odd is not sick)
        assert fault is None or "not finite" in fault.message
    assert answers[0] == answers[1]
    assert answers[0][0][0] == [51] * 8


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["plain", "awq-128", "fp8-static", "w8a8-dynamic"])
def test_mixed_batch_on_the_device(bases: Bases, name: str) -> None:
    """The kernels' own conversions, BF16 compute: pages are half as large."""
    base = bases.plain if name == "plain" else bases.base(name)
    config = {"device": "cuda:0", "dtype": "bfloat16", "max_num_batched_tokens": 96}
    check_mixed_batch(rig(base, **config), bases, 32)
