"""Whose weights answer: the A-OUT cases on signature adapters, and numbers against PEFT."""

import hashlib
from itertools import permutations
from pathlib import Path

import pytest
import torch

from multilora_cli.engine.messages import AdapterRef
from tests.engine.conftest import SignatureFleet, TinyFleet
from tests.engine.engine_kit import Answer, Rig
from tests.signature import load_adapted, load_base

PROMPT = list(range(5, 65))
TINY_PAGE = 2 * 2 * 2 * 16 * 16 * 4


def counting(last: int, count: int) -> list[int]:
    """What the base says after `last`."""
    return [last + 1 + i for i in range(count)]


def tiny_rig(tiny: TinyFleet, **config: object) -> Rig:
    return Rig(tiny.base, pages=600, page=TINY_PAGE, **config)


def test_a_out_01_prefix_cache_is_not_shared_between_adapters(fleet: SignatureFleet) -> None:
    rig = Rig(fleet.base)
    a, b = fleet.adapter(20), fleet.adapter(150)
    assert rig.ask(PROMPT, a).tokens == [21] * 8
    answer_b = rig.ask(PROMPT, b)
    assert answer_b.tokens == [151] * 8 and answer_b.cached == 0
    base = rig.ask(PROMPT)
    assert base.tokens == counting(64, 8) and base.cached == 0
    for adapter, text in ((a, [21] * 8), (b, [151] * 8), (None, counting(64, 8))):
        again = rig.ask(PROMPT, adapter)
        assert again.tokens == text and again.cached == 48


def test_prefix_cache_is_shared_only_within_one_salt(fleet: SignatureFleet) -> None:
    rig = Rig(fleet.base)
    rig.ask(PROMPT, salt="one")
    assert rig.ask(PROMPT, salt="two").cached == 0
    assert rig.ask(PROMPT, salt="one").cached == 48


def test_a_out_02_new_version_under_one_name_reuses_no_kv(fleet: SignatureFleet) -> None:
    rig = Rig(fleet.base)
    old, new = (AdapterRef("tenant_a", r.digest, r.path, g) for g, r in
                enumerate((fleet.adapter(20), fleet.adapter(33))))  # fmt: skip
    assert rig.ask(PROMPT, old).tokens == [21] * 8
    answer = rig.ask(PROMPT, new)
    assert answer.tokens == [34] * 8 and answer.cached == 0


def test_a_out_03_running_requests_keep_the_version_they_began_with(fleet: SignatureFleet) -> None:
    rig = Rig(fleet.base, prefix_caching=False)
    old, new = fleet.adapter(20), fleet.adapter(33)
    first = rig.submit(PROMPT, old, max_tokens=30)
    while len(rig.answer(first).tokens) < 5:
        rig.step()
    unload = rig.evict(old.digest, to="cold", purge_cache=True)
    second = rig.submit(PROMPT, new, max_tokens=10)
    rig.run()
    assert rig.answer(first).tokens == [21] * 30
    assert rig.answer(second).tokens == [34] * 10
    assert rig.replies[unload].freed_pages == 1 and rig.replies[unload].freed_host_bytes > 0


@pytest.mark.parametrize("lengths", [(29, 29, 29), (3, 40, 17)])
def test_a_out_04_base_and_adapter_rows_in_one_batch(
    fleet: SignatureFleet, lengths: tuple[int, int, int]
) -> None:
    rig = Rig(fleet.base)
    members = [(None, counting), (fleet.adapter(95), None), (fleet.adapter(96), None)]
    for size in (2, 3):
        for order in permutations(range(3), size):
            asked = []
            for member, length in zip(order, lengths, strict=False):
                adapter, _ = members[member]
                prompt = list(range(100, 100 + length))
                asked.append((rig.submit(prompt, adapter), member, prompt[-1]))
            rig.run()
            for request, member, last in asked:
                want = counting(last, 8) if member == 0 else [95 + member] * 8
                assert rig.answer(request).tokens == want, (order, lengths)


def test_a_out_05_staggered_streams_of_eight_adapters(fleet: SignatureFleet) -> None:
    rig = Rig(fleet.base)
    signatures = [0, 20, 50, 95, 96, 130, 150, 191]
    requests = {}
    for i in range(16):
        signature = signatures[i % 8]
        prompt = list(range(i, i + 10 + i))
        requests[rig.submit(prompt, fleet.adapter(signature), max_tokens=25)] = signature
        rig.step()
    rig.run()
    for request, signature in requests.items():
        assert rig.answer(request).tokens == [signature + 1] * 25


def test_a_out_06_adapter_is_used_in_every_step(fleet: SignatureFleet) -> None:
    rig = Rig(fleet.base)
    assert rig.ask(PROMPT, fleet.adapter(191), max_tokens=50).tokens == [192] * 50


def logprobs_of(answer: Answer) -> list[float]:
    assert answer.prompt_logprobs is not None and answer.prompt_logprobs[0] is None
    prompt = [entry.logprob for entry in answer.prompt_logprobs[1:] if entry is not None]
    return prompt + [entry.logprob for entry in answer.logprobs]


def oracle(tiny: TinyFleet, adapter: AdapterRef | None, tokens: list[int]) -> list[float]:
    """Log-probabilities of tokens[1:] by transformers and PEFT."""
    model = load_base(tiny.base)
    if adapter is not None:
        model = load_adapted(tiny.base, Path(adapter.path))
    with torch.no_grad():
        rows = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return [float(rows[i, token]) for i, token in enumerate(tokens[1:])]


@pytest.mark.parametrize("chunk", [8, 33, 512])
def test_a_out_07_prefill_in_pieces(tiny: TinyFleet, chunk: int) -> None:
    rig = tiny_rig(tiny, max_num_batched_tokens=chunk, max_num_seqs=min(8, chunk))
    torch.manual_seed(0)
    asked = []
    for adapter in (*tiny.adapters, None):
        prompt = torch.randint(0, 256, (100,)).tolist()
        how = {"max_tokens": 6, "logprobs": 2, "prompt_logprobs": 1}
        asked.append((rig.submit(prompt, adapter, **how), adapter, prompt))
        for _ in range(5):
            rig.step()
    rig.run()
    for request, adapter, prompt in asked:
        answer = rig.answer(request)
        want = oracle(tiny, adapter, prompt + answer.tokens)
        assert logprobs_of(answer) == pytest.approx(want, abs=1e-3)


def test_a_out_08_long_prompt(tiny: TinyFleet) -> None:
    rig = tiny_rig(tiny, max_num_batched_tokens=1024)
    torch.manual_seed(1)
    prompt = torch.randint(0, 256, (4000,)).tolist()
    for adapter in (None, tiny.adapters[2]):
        answer = rig.ask(prompt, adapter, max_tokens=2, logprobs=0)
        want = oracle(tiny, adapter, prompt + answer.tokens)[-2:]
        got = [entry.logprob for entry in answer.logprobs]
        assert got == pytest.approx(want, abs=1e-3)


def test_a_out_10_base_answers_bit_equal_whatever_is_registered(tiny: TinyFleet) -> None:
    torch.manual_seed(2)
    prompt = torch.randint(0, 256, (70,)).tolist()
    found = []
    for count in (0, 1, 3):
        rig = tiny_rig(tiny, num_slots=9)
        for adapter in tiny.adapters[:count]:
            rig.load(adapter, hot=True)
        rig.run()
        found.append(logprobs_of(rig.ask(prompt, max_tokens=5, logprobs=0, prompt_logprobs=0)))
    assert found[0] == found[1] == found[2]


def test_a_out_11_base_weights_are_never_changed(fleet: SignatureFleet) -> None:
    rig = Rig(fleet.base, num_slots=4)
    decoder = rig.engine.parts.runner._decoder

    def digest() -> str:
        data = b"".join(t.numpy().tobytes() for _, t in sorted(decoder.tensors.items()))
        return hashlib.sha256(data).hexdigest()

    before = digest()
    for i in range(100):
        rig.submit(PROMPT[: 5 + i % 7], fleet.adapter(20 + i % 8), max_tokens=2)
    rig.run()
    assert digest() == before
    assert rig.ask(PROMPT).tokens == counting(64, 8)


def test_a_out_15_several_answers_to_one_prompt(tiny: TinyFleet, fleet: SignatureFleet) -> None:
    rig = tiny_rig(tiny)
    prompt = list(range(30, 70))
    request = rig.submit(prompt, tiny.adapters[0], n=4, temperature=1.0, seed=7)
    rig.run()
    texts = {tuple(rig.answer(request, index).tokens) for index in range(4)}
    assert len(texts) == 4
    assert rig.counters()["prompt_tokens"] == len(prompt), "the prompt was computed more than once"
    alone = rig.submit(prompt, tiny.adapters[0], temperature=1.0, seed=9)
    rig.run()
    assert rig.answer(alone).tokens == rig.answer(request, 2).tokens, "answer i has seed + i"

    rig = Rig(fleet.base)
    for length in (32, 33, 47):  # whole pages, a page just begun, a page almost full
        request = rig.submit(range(length), fleet.adapter(20), n=4)
        rig.run()
        assert all(rig.answer(request, index).tokens == [21] * 8 for index in range(4))


def test_more_answers_than_places(fleet: SignatureFleet) -> None:
    rig = Rig(fleet.base, max_num_seqs=3, prefix_caching=False)
    request = rig.submit(PROMPT, fleet.adapter(33), n=8)
    rig.run()
    assert all(rig.answer(request, index).tokens == [34] * 8 for index in range(8))


def test_sampling_does_not_depend_on_the_batch(tiny: TinyFleet) -> None:
    how = {"temperature": 1.0, "seed": 3, "max_tokens": 12}
    rig = tiny_rig(tiny)
    alone = rig.ask(PROMPT, tiny.adapters[1], **how).tokens
    requests = [rig.submit(PROMPT[i:], a, temperature=1.0, seed=i) for i, a in
                enumerate((None, tiny.adapters[0], tiny.adapters[2]))]  # fmt: skip
    mixed = rig.submit(PROMPT, tiny.adapters[1], **how)
    rig.run()
    assert rig.answer(mixed).tokens == alone and len(requests) == 3
