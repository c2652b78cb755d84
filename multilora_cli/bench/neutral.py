"""The neutral workload of the engine benchmark: what any engine can be asked to do.

B requests are submitted at once, greedily, end of sequence ignored, and no two prompts share a
prefix. A setting says which adapters they ask for: request i asks for adapter i mod n.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from multilora_cli.bench.workload import SLORA_RANKS
from multilora_cli.engine.messages import AdapterRef, SamplingParams, Submit
from multilora_cli.errors import BadInput

ADAPTERS = 64


@dataclass(frozen=True)
class Setting:
    """Which adapters a batch asks for. `sources` are `dummy:` texts, one an adapter."""

    name: str
    title: str
    sources: tuple[str, ...] = ()
    is_tight: bool = False  # one small pool for adapters and KV together


def make_settings(
    names: Sequence[str],
    count: int = ADAPTERS,
    *,
    flag: str = "--settings",
    layers: int | None = None,
) -> tuple[Setting, ...]:
    """Settings by name, with `count` adapters where they are distinct; only the first `layers` of
    these have numbers, None: all. Raises BadInput."""
    known = {setting.name: setting for setting in _all_settings(count, layers)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BadInput(f"{flag} {','.join(unknown)}: expected some of {','.join(known)}")
    return tuple(known[name] for name in dict.fromkeys(names))


def _all_settings(count: int, layers: int | None) -> tuple[Setting, ...]:
    def sources(targets: str, *ranks: int, first_seed: int = 0) -> tuple[str, ...]:
        """Of `count` adapters, ranks dealt in turn."""
        pairs = zip(range(first_seed, first_seed + count), cycle(ranks), strict=False)
        return tuple(_source(rank, targets, seed, layers) for seed, rank in pairs)

    return (
        Setting("base", "base only"),
        Setting("one", "1 adapter r16 on all seven, shared", (_source(16, "all", 0, layers),)),
        Setting("distinct", f"{count} distinct r16 on all seven", sources("all", 16)),
        Setting(
            "mixed",
            f"{count} distinct r8/16/32/64 on attention",
            sources("attention", 8, 16, 32, 64),
        ),
        Setting(
            "pool",
            f"{count} distinct r16 on attention, one pool",
            sources("attention", 16),
            is_tight=True,
        ),
        *(
            Setting(
                name.lower(),
                f"{count} distinct of S-LoRA's {name}: {'/'.join(map(str, ranks))} on attention",
                # Other seeds, so that one fleet can have several settings without the same adapter.
                sources("attention", *ranks, first_seed=100_000 * place),
            )
            for place, (name, ranks) in enumerate(SLORA_RANKS.items(), start=1)
        ),
    )


def loading_setting(count: int) -> Setting:
    """Adapters of 27 MB for a Llama-3-8B that no other setting has loaded."""
    sources = tuple(_source(16, "attention", 10_000 + seed) for seed in range(count))
    return Setting("loads", f"{count} distinct r16 on attention, loaded one by one", sources)


def _source(rank: int, targets: str, seed: int, layers: int | None = None) -> str:
    text = f"dummy:rank={rank},targets={targets},seed={seed}"
    return text if layers is None else f"{text},layers={layers}"


@dataclass(frozen=True)
class Shape:
    """Lengths in tokens of every request, and how often each batch is measured."""

    input_tokens: int = 128
    output_tokens: int = 128
    rounds: int = 1
    seed: int = 0


def make_submits(
    shape: Shape, batch: int, adapters: Sequence[AdapterRef], vocab_size: int, first_id: int
) -> list[Submit]:
    """One batch with prompts of its own; request ids from `first_id` on, which no other has."""
    params = SamplingParams(max_tokens=shape.output_tokens, temperature=0.0)
    rng = np.random.Generator(np.random.PCG64([shape.seed, first_id]))
    prompts = rng.integers(0, vocab_size, size=(batch, shape.input_tokens)).tolist()
    return [
        Submit(
            first_id + index,
            prompt,
            params,
            adapters[index % len(adapters)] if adapters else None,
        )
        for index, prompt in enumerate(prompts)
    ]
