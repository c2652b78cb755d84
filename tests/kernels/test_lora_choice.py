"""Launch choices of the LoRA kernels: pure, clamped, and one order of sums for all decode steps."""

from typing import Any

import pytest

from multilora_kernels import lora_choice
from multilora_kernels.bench import lora as bench
from multilora_kernels.launch import H200, RTX_4090, Chip
from multilora_kernels.lora_choice import GroupShape, LoraChoice, choose, clamp, with_tuned

QKV = GroupShape("qkv", 4096, (4096, 1024, 1024), 2, 8192)
TINY = GroupShape("o", 48, (48,), 4, 16)
DECODE = (1, 3, 4, 5, 16, 17, 64, 65, 256, 512)


def order(choice: LoraChoice) -> tuple[int, ...]:
    """What decides the order in which a row's products are added."""
    return choice.block_k, choice.k_steps, choice.shrink_warps, choice.expand_warps


@pytest.mark.parametrize("chip", [H200, RTX_4090])
@pytest.mark.parametrize("shape", [QKV, TINY])
def test_all_decode_steps_add_in_one_order(chip: Chip, shape: GroupShape) -> None:
    assert len({order(choose(shape, rows, chip)) for rows in DECODE}) == 1
    assert all(choose(shape, rows, chip).is_decode for rows in DECODE)
    assert not choose(shape, 513, chip).is_decode


def test_a_tuned_entry_for_some_rows_cannot_change_the_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table: dict[str, Any] = {
        f"{QKV.key} decode": {"block_k": 512, "k_steps": 2, "shrink_warps": 8, "expand_warps": 2},
        f"{QKV.key} decode 64": {"block_n": 64, "block_k": 256, "shrink_warps": 2},
    }
    monkeypatch.setattr(lora_choice, "tuned_table", lambda chip, op: table)
    tuned, other = choose(QKV, 64, H200), choose(QKV, 256, H200)
    assert order(tuned) == order(other) == (512, 2, 8, 2)
    assert (tuned.block_n, other.block_n) == (64, 256)


def test_tiles_never_cross_the_chunks_that_weights_are_cut_into() -> None:
    for shape in (QKV, TINY, GroupShape("down", 100, (48,), 2, 64)):
        for rows in (1, 64, 700, 8192):
            choice = choose(shape, rows, H200)
            assert choice.span <= shape.chunk and shape.chunk % choice.span == 0
            assert choice.block_n * choice.n_steps <= shape.chunk and choice.rows_n <= shape.chunk
            assert choice.splits(shape.d_in) * choice.span >= shape.d_in
            assert choice.dot_k <= choice.span


def test_early_launch_is_for_hopper_and_newer() -> None:
    assert choose(QKV, 1, H200).pdl and not choose(QKV, 1, RTX_4090).pdl


@pytest.mark.parametrize(
    ("group", "rows", "popularity", "ranks", "megabytes"),
    [
        ("qkv", 64, "distinct", "16", 39.8),
        ("down", 256, "distinct", "16", 162.5),
        ("gate_up", 1, "distinct", "16", 1.3),
        ("qkv", 64, "skewed", "16", 7.4),
        ("qkv", 256, "distinct", "mix", 348.1),
        ("down", 16, "distinct", "128", 76.2),
    ],
)
def test_bytes_that_nothing_can_avoid(
    group: str, rows: int, popularity: str, ranks: str, megabytes: float
) -> None:
    cell = bench.LoraCell(group, rows, popularity, ranks)
    assert cell.bytes / 1e6 == pytest.approx(megabytes, abs=0.05)


def test_every_case_of_the_benchmark_tunes_a_key_that_choose_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: set[str] = set()

    class Table(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            asked.add(key)
            return default

    monkeypatch.setattr(lora_choice, "tuned_table", lambda chip, op: Table())
    shapes = {
        group: GroupShape(group, d_in, d_outs, 2, 8192)
        for group, d_in, d_outs in (
            ("qkv", 4096, (4096, 1024, 1024)),
            ("o", 4096, (4096,)),
            ("gate_up", 4096, (14336, 14336)),
            ("down", 14336, (4096,)),
        )
    }
    for shape in shapes.values():
        for rows in (1, 4, 16, 32, 64, 128, 256, 2048, 8192):
            choose(shape, rows, H200)
    cases = bench.cases()
    assert {case.tune_key for case in cases if case.choices} <= asked
    assert len({(case.op, case.label) for case in cases}) == len(cases)
    for case in cases:
        for tuned in case.choices:
            shape = shapes[str(case.shape["group"])]
            choice = clamp(with_tuned(choose(shape, int(case.shape["T"]), H200), tuned), shape)
            assert choice.is_decode == (int(case.shape["T"]) <= 512)
