"""Every size of step is run once, and nothing of it remains."""

from typing import Any

import pytest
import torch

from multilora_cli.models.warm_up import warm_up
from multilora_kernels.segments import Segments
from multilora_kernels.table import AdapterTable
from tests.models import tiny
from tests.models.harness import PagedRunner, Row, log_probability_gap, random_prompts


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> PagedRunner:
    folder = tmp_path_factory.mktemp("base")
    return PagedRunner(tiny.load(tiny.save_model(tiny.make_model("qwen3"), folder)))


@pytest.mark.parametrize(
    ("most", "expected"), [(1, [1]), (2, [1, 2]), (48, [1, 2, 4, 8, 16, 32, 48])]
)
def test_sizes_up_to_the_largest(
    runner: PagedRunner, monkeypatch: pytest.MonkeyPatch, most: int, expected: list[int]
) -> None:
    """A decode row, then one chunk; all tokens belong to a row."""
    seen: list[int] = []
    forward = runner.decoder.forward

    def spy(token_ids: torch.Tensor, positions: torch.Tensor, ctx: Any) -> torch.Tensor:
        starts = ctx.attention.query_start.tolist()
        assert starts[-1] == len(token_ids) == len(positions)
        assert ctx.attention.num_decodes == starts[1] == 1
        assert ctx.attention.num_sequences == (1 if len(token_ids) == 1 else 2)
        seen.append(len(token_ids))
        return forward(token_ids, positions, ctx)

    monkeypatch.setattr(runner.decoder, "forward", spy)
    told: list[tuple[int, int]] = []
    warm_up(runner.decoder, runner.pool, most, progress=lambda *done: told.append(done))
    assert seen == expected
    assert told == [(done, len(expected)) for done in range(len(expected) + 1)]


def test_nothing_is_written_and_steps_go_on(
    runner: PagedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool stays as it was, byte by byte; adapters' launches only in steps of decode size."""
    prompt = random_prompts([40], tiny.VOCAB)[0]
    before = runner.run([Row(prompt)])[0]
    runner.pool[0] = 0xFF  # the scratch page may hold anything
    pool, sized = runner.pool.clone(), []

    def prepare(
        self: Segments, table: AdapterTable, num_tokens: int, rank: int, *, extras: bool
    ) -> None:
        assert table is runner.table
        sized.append(num_tokens)
        self.build([0] * num_tokens)

    # On a CPU no launch is sized.
    monkeypatch.setattr(Segments, "prepare_capture", prepare)
    segments = Segments(600, "cpu")
    warm_up(runner.decoder, runner.pool, 600, (runner.table, segments))
    assert sized == [1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512]
    assert torch.equal(runner.pool, pool)
    assert segments.num_tokens == 1 and not segments.has_adapters
    assert log_probability_gap(runner.run([Row(prompt)])[0], before) < 1e-6
