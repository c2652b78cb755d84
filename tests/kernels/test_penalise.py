"""penalise against float64 by hand, in torch, under the interpreter, ahead of time, on a device."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from multilora_cli.layers.sampler import SamplingBatch, sample
from multilora_kernels.penalise import (
    Histories,
    count_kernel,
    penalise,
    penalise_kernel,
    penalise_ref,
)
from tests.kernels.aot import ARCHITECTURES, assert_fits
from tests.layers.test_sampler import VOCAB, random_rows

VALUES = [(1.2, 0.0, 0.0), (1.0, 0.3, 0.0), (1.0, 0.0, -0.7), (0.8, 0.5, 0.5), (1.5, -0.2, 0.1)]


def histories_of(
    vocab: int, device: str
) -> tuple[Histories, list[tuple[int, list[int], list[int]]]]:
    """Five penalised rows of eight, and (row, prompt, output) of each; the last tokens of two are
    still on the device."""
    rng = random.Random(vocab)
    pending = [rng.randrange(vocab) for _ in range(9)]
    said, tokens = [], []
    fields = np.zeros((7, 5), dtype=np.int32)
    for column, row in enumerate((6, 0, 3, 1, 7)):
        few = rng.sample(range(vocab), 12)  # so that tokens repeat
        lengths = [(1300, 700), (1, 0), (0, 5), (40, 513), (3, 1)][column]
        prompt, output = ([rng.choice(few) for _ in range(length)] for length in lengths)
        fields[:4, column] = row, len(tokens), len(tokens) + len(prompt), 0
        tokens += prompt + output
        if column in (2, 3):
            tokens.append(-1 - column)
            output = [*output, pending[column]]
        fields[3, column] = len(tokens)
        said.append((row, prompt, output))
    fields[4:].view(np.float32)[:] = np.array(VALUES, dtype=np.float32).T
    histories = Histories(
        torch.from_numpy(fields).to(device),
        torch.tensor(tokens, dtype=torch.int32, device=device),
        torch.tensor(pending, device=device),
    )
    return histories, said


def check(vocab: int, device: str) -> None:
    histories, said = histories_of(vocab, device)
    before = torch.randn(8, vocab, generator=torch.Generator().manual_seed(1)) * 4
    before[2, 5], before[3, 7] = float("nan"), float("-inf")
    expected = before.double()
    for (row, prompt, output), (repetition, frequency, presence) in zip(said, VALUES, strict=True):
        counts = Counter(output)
        for token in {*prompt, *output}:
            x = float(expected[row, token])
            x = x / repetition if x > 0 else x * repetition
            expected[row, token] = x - frequency * counts[token] - presence * (counts[token] > 0)
    found = [before.to(device, copy=True) for _ in range(3)]
    penalise(found[0], histories)
    penalise(found[1], histories)
    penalise_ref(found[2], histories)
    assert torch.equal(found[0].nan_to_num(), found[1].nan_to_num())
    for each in (found[0], found[2]):
        torch.testing.assert_close(
            each.double().cpu(), expected, rtol=1e-5, atol=1e-5, equal_nan=True
        )


def test_reference_on_cpu() -> None:
    check(3000, "cpu")


@pytest.mark.interpreter
def test_kernel_interpreted() -> None:
    check(3000, "cpu")


@pytest.mark.gpu
def test_kernel_on_a_device() -> None:
    for vocab in (100, 3000, 128256):
        check(vocab, "cuda")


class NoLook(TorchDispatchMode):
    """Refuses what waits for a device: its values on the host, and shapes that depend on them."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        masked = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        looks = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "repeat_interleave")
        assert name not in looks and not masked, f"{name} looks at the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_sampling_never_looks() -> None:
    """Every parameter at once, through the kernels: no operator whose shape or whose next step
    depends on what is on the device."""
    rows = random_rows(21, 24)
    logits = torch.randn(24, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    batch = SamplingBatch.build(rows, VOCAB, torch.device("cpu"))
    assert None not in (batch.draws, batch.bias, batch.histories, batch.num_top)
    with NoLook():
        sampled = sample(logits, batch)
        with pytest.raises(AssertionError, match="nonzero"):
            (logits > 0).nonzero()
        with pytest.raises(AssertionError, match="looks"):
            logits[logits > 0]
    assert (sampled.told >= 0).all() and sampled.logprobs is not None


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_compiles(sm: int) -> None:
    signature = {
        "counts_ptr": "*i32", "vocab": "i32:16", "fields_ptr": "*i32", "rows": "i32",
        "tokens_ptr": "*i32", "pending_ptr": "*i64",
    }  # fmt: skip
    assert_fits(count_kernel, signature, {"BLOCK": 512}, sm)
    signature |= {"logits_ptr": "*fp32", "stride": "i32:16"}
    assert_fits(penalise_kernel, signature, {"BLOCK": 512}, sm)
