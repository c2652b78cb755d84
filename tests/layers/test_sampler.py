"""The sampler against a slow, row-by-row reference and against the distributions it promises."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from multilora_cli.engine.messages import SamplingParams
from multilora_cli.layers.sampler import SamplingBatch, SamplingRow, sample, token_logprobs
from multilora_kernels.noise import exponential_ref, row_keys

CPU = torch.device("cpu")
VOCAB = 97


@dataclass(frozen=True)
class Params:
    """The fields the sampler reads; a stand-in that tests can fill freely."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None


def draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """One token a row."""
    return sample(logits, SamplingBatch.build(rows, logits.shape[1], CPU)).token_ids.tolist()


def draw_many(logits: torch.Tensor, params: Params, count: int, seed: int = 0) -> np.ndarray:
    """Token counts of `count` draws from one row of logits, at positions of many seeds."""
    rows = [
        SamplingRow(replace(params, seed=seed + i // 50), [], [0] * (i % 50)) for i in range(count)
    ]
    tokens = draw(logits.expand(count, -1).contiguous(), rows)
    return np.bincount(tokens, minlength=logits.shape[-1])


def reference_distribution(logits: Sequence[float], params: Params) -> np.ndarray:
    """Probabilities in float64, one step after another, as the documentation says."""
    x = np.asarray(logits, dtype=np.float64) / params.temperature
    order = np.argsort(-x, kind="stable")
    p = np.exp(x - x.max())
    if params.top_k:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    if params.top_p < 1:
        mass = 0.0
        for i in order:
            if mass >= params.top_p and mass > 0:
                p[i] = 0
            mass += p[i]
    p = np.where(p >= params.min_p * p.max(), p, 0)
    return p / p.sum()


def assert_distributed(counts: np.ndarray, expected: np.ndarray) -> None:
    """Nothing outside the support, and a chi-square within 5 sigma of its mean."""
    total = counts.sum()
    assert not counts[expected == 0].any()
    likely = expected * total >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    wanted = np.append(expected[likely], expected[~likely].sum()) * total
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    chi = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = max(len(wanted) - 1, 1)
    assert chi < freedom + 5 * math.sqrt(2 * freedom), (chi, freedom)


CASES = {
    "plain": Params(),
    "cold": Params(temperature=0.3),
    "hot": Params(temperature=3.0),
    "top_k": Params(top_k=5),
    "top_k beyond the vocabulary": Params(top_k=10_000),
    "top_p": Params(top_p=0.6),
    "tiny top_p": Params(top_p=1e-6),
    "min_p": Params(min_p=0.2),
    "top_k and top_p": Params(top_k=12, top_p=0.7, temperature=1.7),
    "all": Params(top_k=30, top_p=0.95, min_p=0.05, temperature=0.8),
    "top_k 1": Params(top_k=1),
}


@pytest.mark.parametrize("params", CASES.values(), ids=CASES)
def test_draws_follow_the_distribution(params: Params) -> None:
    """6,000 draws a case; seeds are fixed, so the outcome is too."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    counts = draw_many(logits, params, 6000)
    assert_distributed(counts, reference_distribution(logits.tolist(), params))


def test_a_wrong_distribution_is_noticed() -> None:
    """The bound of these tests is tight enough to tell temperature 1 from 1.1."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    counts = draw_many(logits, Params(temperature=1.1), 6000)
    with pytest.raises(AssertionError):
        assert_distributed(counts, reference_distribution(logits.tolist(), Params()))


def random_params(rng: random.Random) -> Params:
    """Any mix of parameters, each present in about half of the rows."""

    def maybe(value: float, otherwise: float) -> float:
        return value if rng.random() < 0.5 else otherwise

    return Params(
        temperature=maybe(rng.uniform(0.2, 2), 0.0),
        top_k=int(maybe(rng.randrange(1, 50), 0)),
        top_p=maybe(rng.uniform(0.1, 1), 1.0),
        min_p=maybe(rng.uniform(0, 0.3), 0.0),
        seed=rng.randrange(-(2**70), 2**70),
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        logit_bias={rng.randrange(VOCAB): rng.uniform(-5, 5)} if rng.random() < 0.5 else {},
        min_tokens=int(maybe(20, 0)),
        stop_token_ids=(1, 2),
        logprobs=rng.choice([None, 0, 5]),
    )


def random_rows(seed: int, count: int) -> list[SamplingRow]:
    rng = random.Random(seed)
    return [
        SamplingRow(
            random_params(rng),
            [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 60))],
            [rng.randrange(VOCAB) for _ in range(rng.randrange(0, 40))],
        )
        for _ in range(count)
    ]


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    """120 rows of mixed parameters: all together, shuffled, in parts and one by one."""
    rows = random_rows(7, 120)
    logits = torch.randn(120, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    together = draw(logits, rows)
    order = list(range(120))
    random.Random(1).shuffle(order)
    shuffled = draw(logits[order], [rows[i] for i in order])
    assert [together[i] for i in order] == shuffled
    assert together == [draw(logits[i : i + 1], [rows[i]])[0] for i in range(120)]
    parts = [draw(logits[i : i + 7], rows[i : i + 7]) for i in range(0, 120, 7)]
    assert together == [token for part in parts for token in part]


def test_adjusted_logits_equal_the_reference() -> None:
    """Bias, suppressed stop ids and penalties: the greedy choice and the whole distribution."""
    rows = random_rows(11, 200)
    logits = torch.randn(200, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    greedy = [row._replace(params=replace(row.params, temperature=0.0)) for row in rows]
    chosen = draw(logits, greedy)
    changed = 0
    for row, x, token in zip(greedy, logits.tolist(), chosen, strict=True):
        changed += token != int(np.argmax(x))
        for other, bias in row.params.logit_bias.items():
            x[other] += bias
        if len(row.output) < row.params.min_tokens:
            for stop in row.params.stop_token_ids:
                x[stop] = -math.inf
        for other in range(VOCAB):
            said, count = other in row.prompt or other in row.output, row.output.count(other)
            if said:
                r = row.params.repetition_penalty
                x[other] = x[other] / r if x[other] > 0 else x[other] * r
            x[other] -= row.params.frequency_penalty * count
            x[other] -= row.params.presence_penalty * (count > 0)
        assert x[token] >= max(x) - 1e-5
    assert changed > 30


@pytest.mark.parametrize(
    ("params", "output", "expected"),
    [
        (Params(temperature=0, frequency_penalty=1.0), [3, 3, 3], 4),  # 5 - 3 < 4
        (Params(temperature=0, presence_penalty=0.9), [3, 3, 3], 3),  # 5 - 0.9 > 4
        (Params(temperature=0, presence_penalty=1.1), [3, 3, 3], 4),
        (Params(temperature=0, repetition_penalty=1.3), [3], 4),  # 5 / 1.3 < 4
        (Params(temperature=0, logit_bias={0: 100.0}), [], 0),
        (Params(temperature=0, logit_bias={3: -100.0}), [], 4),
        (Params(temperature=0, min_tokens=2, stop_token_ids=(3,)), [9], 4),
        (Params(temperature=0, min_tokens=2, stop_token_ids=(3,)), [9, 9], 3),
        (Params(temperature=0, logit_bias={99: 5.0, -1: 5.0}), [], 3),  # beyond the vocabulary
    ],
)
def test_each_adjustment_by_hand(params: Params, output: list[int], expected: int) -> None:
    """Logits 5 for token 3, 4 for token 4, 0 elsewhere."""
    logits = torch.zeros(1, 10)
    logits[0, 3], logits[0, 4] = 5.0, 4.0
    before = logits.clone()
    assert draw(logits, [SamplingRow(params, [7], output)]) == [expected]
    assert torch.equal(logits, before)


def test_penalties_over_prompt_only_where_repetition() -> None:
    """Presence and frequency count the output alone; repetition counts the prompt as well."""
    logits = torch.tensor([[5.0, 4.0, 0.0]])
    for params, expected in (
        (Params(temperature=0, presence_penalty=2.0), 0),
        (Params(temperature=0, frequency_penalty=2.0), 0),
        (Params(temperature=0, repetition_penalty=2.0), 1),
    ):
        assert draw(logits, [SamplingRow(params, [0, 0], [])]) == [expected]


def test_greedy_batches_build_nothing() -> None:
    """The common path: no tensor is made, no token list is read."""

    class Unreadable(list[int]):
        def __iter__(self) -> None:  # type: ignore[override]
            raise AssertionError("read")

    rows = [SamplingRow(Params(temperature=0.0), Unreadable([1]), Unreadable([2]))] * 4
    batch = SamplingBatch.build(rows, VOCAB, CPU)
    assert (batch.draws, batch.bias, batch.histories, batch.num_top) == (None,) * 4
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(4))
    output = sample(logits, batch)
    assert output.token_ids.tolist() == logits.argmax(-1).tolist() and output.logprobs is None


def test_the_first_of_equal_tokens_wins_when_greedy() -> None:
    """bf16 logits tie often: the choice must not depend on the batch."""
    logits = torch.zeros(3, VOCAB)
    logits[:, [60, 12, 80]] = 7.0
    assert draw(logits, [SamplingRow(Params(temperature=0.0), [], [])] * 3) == [12, 12, 12]
    tiny = SamplingRow(Params(temperature=1e-9), [], [])
    assert draw(logits[:1], [tiny]) == [12]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("params", [Params(temperature=0.0), *CASES.values()])
def test_a_broken_row_is_flagged_and_harms_no_other(params: Params, poison: float) -> None:
    """One NaN or +inf in row 1; row 3 is -inf throughout; rows 0, 2 and 4 as they are alone."""
    params = replace(params, logprobs=2, logit_bias={5: 1.0}, frequency_penalty=0.5)
    rows = [SamplingRow(replace(params, seed=i), [1], [2, 3]) for i in range(5)]
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(5))
    logits[1, 9] = poison
    logits[3] = -math.inf
    output = sample(logits, SamplingBatch.build(rows, VOCAB, CPU))
    assert (output.told >= 0).tolist() == [True, False, True, False, True]
    assert output.token_ids[1] == output.token_ids[3] == 0
    assert output.logprobs is not None
    for i in (0, 2, 4):
        alone = sample(logits[i : i + 1], SamplingBatch.build([rows[i]], VOCAB, CPU))
        assert alone.token_ids[0] == output.token_ids[i]
        assert alone.logprobs is not None
        assert torch.equal(alone.logprobs.chosen[0], output.logprobs.chosen[i])
        assert torch.equal(alone.logprobs.top[0], output.logprobs.top[i])


def test_minus_infinity_is_never_drawn() -> None:
    """A mask upstream: only tokens 4 and 5 are finite, at any temperature."""
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 4], logits[0, 5] = 1.0, 1.0
    for temperature in (0.0, 1e-4, 1.0, 50.0):
        rows = [SamplingRow(Params(temperature=temperature, seed=i), [], []) for i in range(40)]
        tokens = set(draw(logits.expand(40, -1).contiguous(), rows))
        assert tokens <= {4, 5} and (temperature < 1 or len(tokens) == 2)


def test_logprobs_are_of_the_model_itself() -> None:
    """Before temperature, penalties and bias; the chosen token's and the best ones, sorted."""
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(6))
    params = Params(temperature=0.5, top_k=3, logit_bias={9: 100.0}, logprobs=4)
    rows = [SamplingRow(params, [1], [2]), SamplingRow(Params(temperature=0.0), [1], [2])]
    output = sample(logits, SamplingBatch.build(rows, VOCAB, CPU))
    expected = logits.double().log_softmax(-1)
    assert output.token_ids[0] == 9 and output.logprobs is not None
    assert abs(output.logprobs.chosen[0] - expected[0, 9]) < 1e-5
    best, ids = expected[:1].topk(4)  # of the row that wants them
    assert torch.equal(output.logprobs.top_ids, ids)
    assert torch.allclose(output.logprobs.top.double(), best, atol=1e-5)
    assert token_logprobs(logits, torch.tensor([0, 1]), 1000).top.shape == (2, VOCAB)
    assert token_logprobs(logits, torch.tensor([0, 1]), 0).top.shape == (2, 0)


def test_noise_repeats_and_differs() -> None:
    """The same for the same (seed, position); unrelated for any other; no two rows alike."""
    seeds, positions = [0, 0, 1, 2**64, -1], [0, 1, 0, 0, 0]
    keys = torch.from_numpy(row_keys(seeds, positions))
    noise = exponential_ref(keys, 4096)
    assert torch.equal(noise[0], noise[3])  # a seed counts modulo 2^64
    assert torch.equal(noise[2:3], exponential_ref(keys[2:3], 4096))
    many = exponential_ref(
        torch.from_numpy(row_keys([7] * 64 + list(range(100, 164)), [*range(64), *[0] * 64])), 4096
    )
    correlation = torch.corrcoef(many.double()) - torch.eye(128)
    assert correlation.abs().max() < 6 / 4096**0.5


def test_noise_is_exponential() -> None:
    """Mean and variance 1, and quantiles of both tails, over a million numbers."""
    keys = torch.from_numpy(row_keys(range(16), [3] * 16))
    noise = exponential_ref(keys, 65536).double().flatten()
    assert noise.isfinite().all() and noise.min() > 0
    assert abs(noise.mean() - 1) < 0.005 and abs(noise.var() - 1) < 0.02
    for quantile in (1e-4, 0.01, 0.5, 0.99):
        share = float((noise < -math.log1p(-quantile)).double().mean())
        spread = math.sqrt(quantile * (1 - quantile) / len(noise))
        assert abs(share - quantile) < 5 * spread


def noise_in_integers(seed: int, position: int, token: int) -> float:
    """The documented formula in Python's integers."""

    def mix(x: int, bits: int, steps: list[tuple[int, int]]) -> int:
        for shift, factor in steps:
            x = ((x ^ (x >> shift)) * factor) % 2**bits
        return x

    def mix64(x: int) -> int:
        x = mix(x % 2**64, 64, [(30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)])
        return x ^ (x >> 31)

    def mix32(x: int) -> int:
        x = mix(x % 2**32, 32, [(16, 0x7FEB352D), (15, 0x846CA68B)])
        return x ^ (x >> 16)

    key = mix64(mix64(seed) + position * 0x9E3779B97F4A7C15)
    bits = mix32((mix32(token) ^ key % 2**32) * (key >> 32 | 1)) % 2**31
    return -math.log1p(-min((bits + 0.5) / 2**31, 1 - 2**-24))


def test_noise_equals_its_formula() -> None:
    """A seed keeps its tokens from one release and device to the next."""
    rng = random.Random(3)
    seeds = [rng.randrange(2**64) for _ in range(20)] + [0, 42]
    positions = [rng.randrange(2**20) for _ in range(20)] + [0, 7]
    noise = exponential_ref(torch.from_numpy(row_keys(seeds, positions)), 152_000)
    for row, seed, position in zip(noise, seeds, positions, strict=True):
        for token in (0, 1, 2, *(rng.randrange(152_000) for _ in range(30))):
            # At most 1e-4 off: fp32 holds 24 of the 31 bits.
            expected = noise_in_integers(seed, position, token)
            assert float(row[token]) == pytest.approx(expected, rel=1e-4)
    assert math.log(noise[-1, 0]) == pytest.approx(1.39995, abs=1e-5)


def test_engine_messages_fit() -> None:
    """engine.messages.SamplingParams is what the sampler reads."""
    row = SamplingRow(SamplingParams(max_tokens=1, seed=5, top_p=0.9, logprobs=1), [1, 2], [3])
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(8))
    output = sample(logits, SamplingBatch.build([row], VOCAB, CPU))
    assert 0 <= int(output.token_ids[0]) < VOCAB and output.told[0] == output.token_ids[0]


def test_no_rows() -> None:
    """An empty step samples nothing."""
    assert draw(torch.empty(0, VOCAB), []) == []
