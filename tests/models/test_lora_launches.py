"""What adapters cost in launches: the kernels' launchers counted in place of a device."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import multilora_kernels.add_lora
from multilora_kernels.layout import GROUPS
from multilora_kernels.segments import Segments
from tests.models import tiny
from tests.models.harness import PagedRunner, Row, one_by_one, whole
from tests.models.peft_adapters import load_adapters, make_adapters


def test_launches_do_not_grow_with_the_number_of_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A-PERF-01: a shrink and an expand for each group of projections, for one adapter or five."""
    model = tiny.make_model("llama", seed=6)
    decoder = tiny.load(tiny.save_model(model, tmp_path / "base"))
    runner = PagedRunner(decoder, num_pages=600)
    load_adapters(runner, make_adapters(model, tmp_path))
    launches: Counter[str] = Counter()

    def count(name: str) -> Callable[..., torch.Tensor]:
        def launch(*_: Any) -> torch.Tensor:
            launches[name] += 1
            return torch.empty(0)

        return launch

    module = multilora_kernels.add_lora
    work = SimpleNamespace(groups={group: SimpleNamespace(num_tiles=1) for group in GROUPS})
    monkeypatch.setattr(module, "on_host", lambda device: False)
    monkeypatch.setattr(module, "sgmv_shrink", count("shrink"))
    monkeypatch.setattr(module, "sgmv_expand", count("expand"))
    monkeypatch.setattr(Segments, "lists", lambda *_: work)
    steps = decoder.geometry.num_layers * len(GROUPS)
    for slots in ([1], [1, 0, 1], [1, 2, 3, 4, 5, 0, 3]):
        for chunker in (whole, one_by_one):
            launches.clear()
            runner.run([Row([7, 9], slot=slot) for slot in slots], chunker)
            times = 1 if chunker is whole else 2
            assert launches == {"shrink": times * steps, "expand": times * steps}, slots
