"""pick_tokens against float64, in torch, under the interpreter, ahead of time and on a device."""

import math
from dataclasses import replace

import pytest
import torch

from multilora_kernels import truncation
from multilora_kernels.noise import exponential_ref, row_keys
from multilora_kernels.pick_tokens import (
    LISTED,
    RUN,
    TILE,
    Draws,
    launch_choice,
    pick_tokens,
    pick_tokens_ref,
    scan_kernel,
    settle_kernel,
)
from tests.kernels.aot import ARCHITECTURES, assert_fits, assert_waits_first
from tests.kernels.pick_cases import HOWS, How, assert_picked, draws_of, peaked, row_kinds


def cases(vocab: int, seeds: int, device: str, every: int = 1) -> tuple[torch.Tensor, list[How]]:
    """Every kind of row under every parameter, or one of `every`, for some seeds each."""
    logits, rows = [], []
    for kind, x in enumerate(row_kinds(vocab).values()):
        for how in HOWS[kind % every :: every]:
            for seed in range(seeds):
                logits.append(x)
                rows.append(replace(how, seed=seed * 97 + len(rows)))
    return torch.stack(logits).to(device), rows


def check_broken_rows(vocab: int, device: str, hows: list[How] = HOWS) -> None:
    """NaN, +inf and nothing finite are told; rows beside them keep their tokens, bit for bit."""
    rows = [replace(how, seed=i) for i, how in enumerate(hows)] * 2
    logits = torch.stack([peaked(vocab, i % 7) for i in range(len(rows))]).to(device)
    whole = pick_tokens(logits, draws_of(rows, device)).told
    broken = list(range(0, len(rows), 2))
    for i, poison in zip(broken, (math.nan, math.inf, -math.inf) * len(rows), strict=False):
        if poison == -math.inf:
            logits[i] = poison
        logits[i, (i * 131) % vocab] = poison
    found = pick_tokens(logits, draws_of(rows, device)).told
    assert (found[::2] == -1).all()
    assert torch.equal(found[1::2], whole[1::2])
    for i in range(1, len(rows), 8):
        alone = pick_tokens(logits[i : i + 1], draws_of(rows[i : i + 1], device)).told
        assert torch.equal(alone, found[i : i + 1])


def check_equal_tokens(vocab: int, device: str) -> None:
    """Of equal tokens a cut keeps those with the smallest ids, exactly as many as it says."""
    x = torch.full((vocab,), -1.0)
    high = torch.arange(3, vocab, vocab // 5)[:4]
    x[high] = 4.0
    for how, wanted in (
        (How(top_k=3), high[:3]),
        (How(top_k=1), high[:1]),
        (How(temperature=0.1, top_p=0.5), high[:2]),
        (How(temperature=0.1, top_p=0.51), high[:3]),
        (How(temperature=0.1, top_k=3, top_p=0.5), high[:2]),
        (How(temperature=0.1, top_k=2, top_p=0.5), high[:1]),
        (How(temperature=0.1, min_p=0.9), high),
        # top_p is a share of what top_k keeps, below min_p too: 0.5 of 4 + 4 / e is 2.7.
        (How(temperature=5.0, top_k=8, top_p=0.5, min_p=0.9), high[:3]),
    ):
        rows = [replace(how, seed=i) for i in range(24)]
        picked = pick_tokens(x.expand(24, -1).contiguous().to(device), draws_of(rows, device))
        assert set(picked.told.tolist()) == set(wanted.tolist()), how


@pytest.mark.parametrize("vocab", [300, 5000])
def test_reference_on_cpu(vocab: int) -> None:
    logits, rows = cases(vocab, 3, "cpu")
    assert_picked(logits, rows, pick_tokens(logits, draws_of(rows)))


def test_reference_of_broken_and_equal_on_cpu() -> None:
    check_broken_rows(2000, "cpu")
    check_equal_tokens(2000, "cpu")


def test_only_rows_beyond_the_head_are_sorted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peaked row is settled by its 1,024 likeliest tokens, a flat one is not; both are right."""
    sorted_rows = []
    original = truncation._cut_ref

    def counted(x: torch.Tensor, *args: object) -> object:
        sorted_rows.append(tuple(x.shape))
        return original(x, *args)

    monkeypatch.setattr(truncation, "_cut_ref", counted)
    x = torch.stack([torch.linspace(0, -40, 3000), torch.linspace(0, -0.01, 3000)])
    cuts = truncation.Cuts(torch.zeros(2).int(), torch.tensor([0.9, 0.9]), -torch.tensor(math.inf))
    cuts = cuts._replace(log_min_p=torch.full((2,), -math.inf))
    keep = truncation.keep_ref(x, x, x.exp(), cuts)
    assert sorted_rows == [(2, 3000), (1, 3000)]
    assert abs(int(keep[1].sum()) - 2698) < 5  # 0.9 of 3,000 nearly equal tokens
    assert 100 < int(keep[0].sum()) < 250


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on NaN and infinities
def test_kernel_interpreted() -> None:
    logits, rows = cases(5000, 1, "cpu", every=4)
    draws = draws_of(rows)
    picked = pick_tokens(logits, draws)
    assert_picked(logits, rows, picked)
    # What rounding decides is rare: nearly all tokens are those of the reference.
    assert int((picked.told != pick_tokens_ref(logits, draws)[1]).sum()) <= 1


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_broken_and_equal_interpreted() -> None:
    check_broken_rows(4100, "cpu", HOWS[::5])
    check_equal_tokens(600, "cpu")


@pytest.mark.interpreter
def test_noise_interpreted() -> None:
    """One kept token in 3,000 drawn by noise alone is the reference's: the hash is the same."""
    x = torch.zeros(16, 3000)
    rows = [How(seed=i) for i in range(16)]
    picked = pick_tokens(x, draws_of(rows))
    noise = exponential_ref(torch.from_numpy(row_keys(range(16), [3] * 16)), 3000)
    assert torch.equal(picked.told, noise.argmin(-1))


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [300, 5000, 50257, 128256, 262144])
def test_kernel_on_a_device(vocab: int) -> None:
    """float64's tokens, the same in every run and for every row alone."""
    logits, rows = cases(vocab, 2 if vocab < 10**5 else 1, "cuda")
    draws = draws_of(rows, "cuda")
    picked = pick_tokens(logits, draws)
    assert_picked(logits.cpu(), rows, picked)
    greedy = [How(temperature=0.0)] * len(rows)
    assert_picked(logits.cpu(), greedy, pick_tokens(logits, None))
    for _ in range(20):
        assert torch.equal(pick_tokens(logits, draws).told, picked.told)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    shuffled = Draws(draws.packed[:, order.cuda()].contiguous(), True)
    assert torch.equal(pick_tokens(logits[order.cuda()], shuffled).told, picked.told[order.cuda()])
    for i in range(0, len(rows), 3):
        alone = pick_tokens(logits[i : i + 1], draws_of(rows[i : i + 1], "cuda"))
        assert int(alone.told) == int(picked.told[i])


@pytest.mark.gpu
def test_broken_and_equal_on_a_device() -> None:
    for vocab in (600, 50257, 128256):
        check_broken_rows(vocab, "cuda")
        check_equal_tokens(vocab, "cuda")


@pytest.mark.gpu
def test_no_look_at_the_device() -> None:
    logits, rows = cases(5000, 1, "cuda")
    draws = draws_of(rows, "cuda")
    pick_tokens(logits, draws)
    torch.cuda.set_sync_debug_mode("error")
    try:
        pick_tokens(logits, draws)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_rows() -> None:
    assert pick_tokens(torch.empty(0, 9), None).told.shape == (0,)


def arguments(draws: bool, truncates: bool, vocab: int) -> list[tuple[object, dict, dict, int]]:
    """Both launches as pick_tokens makes them: kernel, signature, constants, warps."""
    choice = launch_choice(vocab)
    signature = {
        "logits_ptr": "*fp32", "stride": "i32:16", "vocab": "i32:16", "numbers_ptr": "*fp32",
        "integers_ptr": "*i32", "rows": "i32", "best_ptr": "*fp32", "token_ptr": "*i32",
        "score_ptr": "*fp32", "mass_ptr": "*i64", "peaks_ptr": "*fp32",
    }  # fmt: skip
    settled = signature | {
        "tiles": "i32:16", "picked_runs_ptr": "*i32", "values_ptr": "*fp32", "ids_ptr": "*i32",
        "out_ptr": "*i64", "told_ptr": "*i64",
    }  # fmt: skip
    constants = {"TILE": TILE, "RUN": RUN, "DRAWS": draws}
    finish = constants | {
        "LISTED": LISTED,
        "TRUNCATES": truncates,
        **{name: choice[name] for name in ("LIST_BLOCK", "ROW_BLOCK", "TILES_PAD")},
    }
    return [
        (scan_kernel, signature, constants, choice["scan_warps"]),
        (settle_kernel, settled, finish, choice["warps"] if truncates else 1),
    ]


VARIANTS = [(False, False), (True, False), (True, True)]


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize(("draws", "truncates"), VARIANTS)
def test_compiles(draws: bool, truncates: bool, sm: int) -> None:
    for kernel, signature, constants, warps in arguments(draws, truncates, 128256):
        assert_fits(kernel, signature, {**constants, "PDL": sm >= 90}, sm, warps)


def test_early_launches_wait_before_they_read() -> None:
    for draws, truncates in VARIANTS:
        for kernel, signature, constants, warps in arguments(draws, truncates, 128256):
            assert_waits_first(kernel, signature, constants, warps)
