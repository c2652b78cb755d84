"""Cases for picking tokens from the logits of Llama-3's vocabulary."""

import math
from collections.abc import Mapping

import numpy as np
import torch

from multilora_kernels.bench.timing import Built, Case, sets_needed
from multilora_kernels.noise import row_keys
from multilora_kernels.pick_tokens import Draws, pick_tokens

VOCAB = 128_256
ROWS = (1, 64, 256)

# 1 / temperature, log of min_p, top_p; top_k.
HOWS: Mapping[str, tuple[float, float, float, int] | None] = {
    "greedy": None,
    "temperature": (1.0, -math.inf, 1.0, 0),
    "top_p=0.95": (1.0, -math.inf, 0.95, 0),
    "top_k=50": (1.0, -math.inf, 1.0, 50),
    "top_k=20,top_p=0.95": (1.0, -math.inf, 0.95, 20),
    "min_p=0.05": (1.0, math.log(0.05), 1.0, 0),
}


# The likeliest of 40 tokens that stand out of a normal distribution of standard deviation 2. At 20
# about 7 tokens hold 0.95 of the mass, as a trained model's; at 12 about 20,000.
SHAPES = {"peaked": 20.0, "broad": 12.0, "flat": 0.0}


def make_logits(shape: str, rows: int, device: torch.device) -> torch.Tensor:
    """float32 [rows, VOCAB]; those of "flat" are about equally likely, as random weights'."""
    top = SHAPES[shape]
    if not top:
        return torch.randn(rows, VOCAB, device=device)
    x = torch.randn(rows, VOCAB, device=device) * 2
    places = torch.randint(VOCAB, (rows, 40), device=device)
    ahead = torch.linspace(top, top / 3, 40, device=device)
    return x.scatter_add_(1, places, ahead.expand(rows, -1))


def draws_of(
    how: tuple[float, float, float, int] | None, rows: int, device: torch.device
) -> Draws | None:
    """The same parameters for each of `rows`, every seed another."""
    if how is None:
        return None
    packed = np.zeros((6, rows), dtype=np.int32)
    packed[:3].view(np.float32)[:] = np.array(how[:3], dtype=np.float32)[:, None]
    packed[3] = how[3]
    packed[4:] = row_keys(range(rows), [5] * rows).T
    is_truncated = how[1:] != (-math.inf, 1.0, 0)
    return Draws(torch.from_numpy(packed).to(device), is_truncated)


def _case(rows: int, name: str, shape: str) -> Case:
    work = 4.0 * rows * VOCAB

    def build(device: torch.device) -> Built:
        sets = sets_needed(work)
        logits = [make_logits(shape, rows, device) for _ in range(sets)]
        draws = draws_of(HOWS[name], rows, device)
        variants = {"ours": lambda index: pick_tokens(logits[index], draws)}
        if draws is None:
            variants["torch.max"] = lambda index: logits[index].max(-1)
        return Built(sets, variants)

    return Case("pick_tokens", {"B": rows, "V": VOCAB, "how": name, "logits": shape}, work, build)


def cases() -> list[Case]:
    """Each way to draw over peaked logits; what depends on their shape over the others too."""
    peaked_cases = [_case(rows, name, "peaked") for name in HOWS for rows in ROWS]
    return peaked_cases + [
        _case(rows, name, shape)
        for shape in ("broad", "flat")
        for name in ("top_p=0.95", "top_k=50")
        for rows in ROWS
    ]
