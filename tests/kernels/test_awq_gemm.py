"""awq_gemm against its reference: under the interpreter, and on a device against fp64."""

import pytest
import torch

from multilora_kernels import awq_gemm as op
from multilora_kernels import hopper_choice
from multilora_kernels.awq_gemm import (
    AwqWeight,
    awq_gemm,
    awq_gemm_ref,
    choose_launch,
    dequantise,
)
from multilora_kernels.awq_hopper import HopperLaunch, run_hopper, sum_planes
from multilora_kernels.awq_pack import pack
from multilora_kernels.int4_matrix import Int4Matrix
from multilora_kernels.launch import H200, RTX_4090, Chip, force_chip
from multilora_kernels.split_k import Tile, bucket_of, choose_split

SEED = 11
SHAPES_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))


def random_weight(n: int, k: int, group: int, device: str = "cpu") -> AwqWeight:
    generator = torch.Generator().manual_seed(SEED)
    groups = k // group if group > 0 else 1
    q = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    zero = torch.randint(0, 16, (n, groups), generator=generator, dtype=torch.uint8)
    scale = torch.rand((n, groups), generator=generator) * 0.02 + 0.001
    return pack(Int4Matrix(q, zero, scale.half())).to(device)


def random_x(m: int, k: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype).to(device)


def relative_error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("n", "k", "group", "m"),
    [(64, 128, 128, 1), (96, 384, 64, 3), (130, 192, 32, 17), (64, 576, 64, 9), (128, 640, -1, 8)],
)
@pytest.mark.parametrize("split_k", [1, 3])
def test_kernel_matches_reference(n: int, k: int, group: int, m: int, split_k: int) -> None:
    weight = random_weight(n, k, group)
    x = random_x(m, k, torch.bfloat16)
    tile = Tile(block_n=64, block_m=bucket_of(m), split_k=split_k)
    y = op.run_fused(x, weight, tile)
    exact = awq_gemm_ref(x.double(), weight)
    # The interpreter rounds fp32 to bf16 towards zero: one unit, not half.
    assert relative_error(y, exact) < 6e-3
    assert not weight.counters.any()


@pytest.mark.interpreter
def test_rows_do_not_depend_on_the_rows_beside_them() -> None:
    weight = random_weight(64, 384, 128)
    x = random_x(6, 384, torch.float16)
    whole = awq_gemm(x, weight)
    for row in range(6):
        assert torch.equal(awq_gemm(x[row : row + 1], weight)[0], whole[row])


@pytest.mark.interpreter
@pytest.mark.parametrize("k", [1024, 1152, 640])
def test_a_fine_split_and_a_split_of_two_parts_give_the_same_bits(k: int) -> None:
    weight = random_weight(64, k, 128)
    x = random_x(3, k, torch.float16)
    coarse = op.run_fused(x, weight, Tile(block_m=16, split_k=2, parts=2))
    fine = op.run_fused(x, weight, Tile(block_m=8, split_k=4, pairs=2))
    assert torch.equal(coarse, fine)
    assert relative_error(fine, awq_gemm_ref(x.double(), weight)) < 1e-3


@pytest.mark.interpreter
def test_a_nan_row_stays_alone() -> None:
    weight = random_weight(64, 256, 64)
    x = random_x(4, 256, torch.float16)
    clean = awq_gemm(x, weight)
    x[2] = float("nan")
    poisoned = awq_gemm(x, weight)
    assert bool(poisoned[2].isnan().all())
    assert torch.equal(poisoned[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("m", "n", "n_padded", "launch"),
    [
        (130, 600, 640, HopperLaunch(256, split_k=3)),
        (70, 200, 256, HopperLaunch(128, block_m=64, split_k=2)),
    ],
)
def test_partials_are_summed_where_they_belong(
    m: int, n: int, n_padded: int, launch: HopperLaunch
) -> None:
    """The last tile may reach past the end of the weights: it repeats their last outputs."""
    n_tiles, m_tiles = -(-n_padded // launch.block_n), -(-m // launch.block_m)
    parts = torch.randn(launch.split_k, m_tiles * launch.block_m, n_padded)
    partials = torch.full(
        (launch.split_k, n_tiles, m_tiles, launch.block_n, launch.block_m), float("nan")
    )
    for tile in range(n_tiles):
        first = tile * launch.block_n
        columns = parts[:, :, first : first + launch.block_n].transpose(1, 2)
        split = columns.reshape(launch.split_k, -1, m_tiles, launch.block_m)
        partials[:, tile, :, : split.shape[1]] = split.transpose(1, 2)
    y = torch.empty(m, n)
    sum_planes(partials, y, n_padded, launch, pdl=False)
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    assert torch.equal(y, expected[:m, :n])


@pytest.mark.interpreter
@pytest.mark.parametrize(("n", "k", "group"), [(40, 192, 64), (64, 160, 32)])
def test_dequantise_kernel_is_exact(n: int, k: int, group: int) -> None:
    weight = random_weight(n, k, group)
    expected = op.dequantise_ref(weight, torch.float32)
    assert torch.equal(dequantise(weight, torch.float32), expected)


@pytest.mark.interpreter
def test_sliced_path_covers_every_column() -> None:
    weight = random_weight(300, 256, 128)
    x = random_x(5, 256, torch.float16)
    y = op.run_sliced(x, weight, slice_n=128)
    assert relative_error(y, awq_gemm_ref(x.double(), weight)) < 2e-3


@pytest.mark.parametrize("chip", [H200, RTX_4090, Chip("NVIDIA A100", 80, 108)])
@pytest.mark.parametrize(("n", "k"), [*SHAPES_8B, (576, 576), (128, 64)])
def test_the_split_never_depends_on_the_batch(n: int, k: int, chip: Chip) -> None:
    tiles = [choose_launch(m, n, k, chip).tile for m in range(1, 65)]
    orders = {(tile.split_k * tile.parts, tile.pairs * tile.parts) for tile in tiles if tile}
    assert len(orders) == 1
    for m, tile in enumerate(tiles, start=1):
        assert tile is not None and tile.block_m >= m
        assert tile.split_k * tile.parts <= max(1, -(-k // 128))


def test_large_batches_dequantise_bounded_slices() -> None:
    launch = choose_launch(8192, 28672, 4096, RTX_4090)
    assert launch.tile is None
    assert launch.slice_n % 128 == 0 and launch.slice_n * 4096 * 2 <= 64 << 20


def test_large_batches_take_what_was_measured_fastest() -> None:
    def way(m: int, n: int, k: int, chip: Chip = H200, aligned: bool = True) -> str:
        launch = choose_launch(m, n, k, chip, aligned)
        return "fused" if launch.tile else "hopper" if launch.hopper else "sliced"

    for n, k in (*SHAPES_8B, (256, 576), (130, 128)):
        ways = [way(m, n, k) for m in (64, 65, 128, 256)]
        expected = "fused" if k % 128 else "hopper"
        assert ways[:3] == ["fused", expected, expected]
    assert [way(m, 28672, 4096) for m in (512, 513)] == ["hopper", "sliced"]
    assert [way(m, 6144, 4096) for m in (256, 257)] == ["hopper", "sliced"]
    assert way(256, 28672, 4096, aligned=False) != "hopper"
    assert way(256, 28672, 4096, RTX_4090) == "sliced" and way(65, 128, 4096) == "fused"


@pytest.mark.parametrize(("n", "k"), SHAPES_8B)
def test_a_hopper_launch_gives_every_multiprocessor_work_once(n: int, k: int) -> None:
    for m in (65, 128, 256):
        launch = hopper_choice.choose_launch(m, n, k, H200)
        assert launch is not None
        rows, outputs, split = launch.grid(m, n)
        programs = rows * outputs * split
        turns = -(-programs // H200.num_sms)
        assert programs >= 0.7 * turns * H200.num_sms
        assert split == 1 or turns == 1


def test_split_fills_the_multiprocessors() -> None:
    for n, k in SHAPES_8B:
        split = choose_split(n // 64, k // 128, 132)
        assert n // 64 * split >= 132 and 1 <= split <= 16


DEVICE_CASES = [
    (n, k, group, m)
    for n, k, group in ((6144, 4096, 128), (576, 576, 64), (200, 352, 32), (4096, 14336, 128))
    for m in (1, 2, 7, 8, 9, 16, 31, 33, 64, 65, 128, 300)
]


@pytest.mark.gpu
@pytest.mark.parametrize("chip", [None, RTX_4090])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k", "group", "m"), DEVICE_CASES)
def test_device_matches_fp64(
    n: int, k: int, group: int, m: int, dtype: torch.dtype, chip: Chip | None
) -> None:
    weight = random_weight(n, k, group, "cuda")
    x = random_x(m, k, dtype, "cuda")
    force_chip(chip)
    try:
        y = awq_gemm(x, weight)
        again = awq_gemm(x, weight)
    finally:
        force_chip(None)
    limit = 4e-3 if dtype == torch.bfloat16 else 6e-4
    assert relative_error(y, awq_gemm_ref(x.double(), weight)) < limit
    assert torch.equal(y, again)
    assert not weight.counters.any()


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k", "group"), [(6144, 4096, 128), (576, 576, 64)])
def test_device_rows_are_independent_of_the_batch(n: int, k: int, group: int) -> None:
    weight = random_weight(n, k, group, "cuda")
    x = random_x(64, k, torch.bfloat16, "cuda")
    whole = awq_gemm(x, weight)
    for m in (1, 2, 5, 8, 9, 16, 17, 32, 40):
        assert torch.equal(awq_gemm(x[:m], weight), whole[:m]), f"M={m}"
    x[3] = float("nan")
    poisoned = awq_gemm(x, weight)
    keep = [row for row in range(64) if row != 3]
    assert torch.equal(poisoned[keep], whole[keep]) and bool(poisoned[3].isnan().all())


HOPPER = (
    HopperLaunch(),
    HopperLaunch(split_k=3),
    HopperLaunch(split_k=8),
    HopperLaunch(block_n=128, num_stages=5),
    HopperLaunch(block_n=128, num_stages=5, split_k=2),
    HopperLaunch(block_n=448),
)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="its multiplies are Hopper's",
)
@pytest.mark.parametrize("launch", HOPPER, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("n", "k", "group"), [(6144, 4096, 128), (576, 640, 64), (200, 384, 32), (4096, 14336, 128)]
)
def test_device_hopper_kernel(
    n: int, k: int, group: int, dtype: torch.dtype, launch: HopperLaunch
) -> None:
    weight = random_weight(n, k, group, "cuda")
    limit = 4e-3 if dtype == torch.bfloat16 else 6e-4
    for m in (65, 128, 192, 300):
        # Rows lie apart, as the queries do among what one multiply gives for q, k and v.
        x = random_x(m, k + 64, dtype, "cuda")[:, :k]
        y = run_hopper(x, weight, launch)
        assert relative_error(y, awq_gemm_ref(x.double(), weight)) < limit, f"M={m}"
        for _ in range(3):
            assert torch.equal(y, run_hopper(x, weight, launch)), f"M={m}"
        x[m - 1] = float("nan")
        poisoned = run_hopper(x, weight, launch)
        assert torch.equal(poisoned[:-1], y[:-1]) and bool(poisoned[-1].isnan().all())
    # Rows of the identity bring out the weights: dequantised ones, rounded once.
    unit = torch.eye(k, dtype=dtype, device="cuda")[: min(k, 300)]
    expected = dequantise(weight, dtype)[:, : len(unit)].t()
    assert torch.equal(run_hopper(unit, weight, launch), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), SHAPES_8B)
def test_device_large_batches(n: int, k: int) -> None:
    """What is chosen by rows and shape, the library's part too."""
    weight = random_weight(n, k, 128, "cuda")
    for m in (65, 96, 128, 192, 200, 256, 384, 512, 600):
        x = random_x(m, k, torch.bfloat16, "cuda")
        y = awq_gemm(x, weight)
        assert relative_error(y, awq_gemm_ref(x.double(), weight)) < 4e-3, f"M={m}"
        assert torch.equal(y, awq_gemm(x, weight)), f"M={m}"
