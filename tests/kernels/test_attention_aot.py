"""Attention compiled for the cards that are not here, within their shared memory."""

from pathlib import Path

import pytest
import torch

from multilora_kernels.kv_pages import FP8, compute_type
from multilora_kernels.launch import H200, Chip
from multilora_kernels.paged_decode import decode_choice, decode_kernel
from multilora_kernels.paged_prefill import prefill_choice, prefill_kernel
from tests.kernels.aot import (
    ARCHITECTURES,
    assert_fits,
    assert_waits_first,
    compiled_for,
    registers_and_spills,
)

# (head_dim, query heads per KV head, dtype of queries, sliding window)
SHAPES = [
    (128, 4, torch.bfloat16, False),
    (64, 7, torch.float16, True),
    (80, 20, torch.bfloat16, False),
    (256, 8, torch.bfloat16, True),
    (256, 2, torch.float32, False),
]
# Every shape where shared memory is least, the commonest one everywhere.
CASES = [(shape, sm) for shape in SHAPES for sm in ARCHITECTURES if sm == 89 or shape is SHAPES[0]]
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# Pages of FP8: the commonest shape everywhere, the largest tiles where shared memory is least.
FP8_CASES = [*((SHAPES[0], sm) for sm in ARCHITECTURES), (SHAPES[3], 89)]


def power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def types_of(dtype: torch.dtype, pointers: tuple[str, ...], rest: str) -> dict[str, str]:
    """Signature: `pointers` to `dtype`, then "name:type" pairs."""
    pairs = dict(pair.split(":", 1) for pair in rest.split())
    return {**dict.fromkeys(pointers, f"*{NAMES[dtype]}"), **pairs}


def common(
    head_dim: int, group: int, dtype: torch.dtype, windowed: bool, fp8: bool
) -> dict[str, object]:
    return {
        "NUM_KV_HEADS": 8,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_D": power_of_2(head_dim),
        "TOKENS": 16,
        "WINDOWED": windowed,
        "COMPUTE": compute_type(dtype, FP8 if fp8 else dtype),
    }


def fp8_pages(sm: int) -> str:
    """Type of the pages of an FP8 cache: raw codes where Triton knows no e4m3."""
    return "*fp8e4nv" if Chip("", sm, 1).has_fp8 else "*u8"


def decode_build(
    shape: tuple[int, int, torch.dtype, bool], sm: int, fp8: bool
) -> tuple[dict[str, str], dict[str, object], int, int]:
    """Signature, constants, warps and stages of decode as `sm` would launch it."""
    head_dim, group, dtype, _ = shape
    pages = fp8_pages(sm) if fp8 else f"*{NAMES[dtype]}"
    signature = types_of(
        dtype,
        ("q_ptr", "out_ptr"),
        f"pages_ptr:{pages}"
        " partial_ptr:*fp32 state_ptr:*fp32 arrived_ptr:*i32 seq_lens_ptr:*i32 page_table_ptr:*i32"
        " stride_qt:i32:16 stride_table:i32 page_elements:i32:16 layer_start:i32:16 scale_log2:fp32"
        " window:i32 rows:i32 sharers:i32 min_split:i32",
    )
    chip = H200 if sm == 90 else Chip("", sm, 128)
    choice = decode_choice(chip, head_dim, group, 1 if fp8 else dtype.itemsize)
    warps, stages = choice["BLOCK_N"] // 16, choice.pop("num_stages")
    for field in ("slots", "min_split", "crowded"):
        choice.pop(field, None)
    constants = {
        **common(*shape, fp8),
        "BLOCK_G": max(8, power_of_2(group)),
        "BLOCK_B": 256,
        "BLOCK_C": power_of_2(group),
        "PDL": sm >= 90,
        **choice,
    }
    return signature, constants, warps, stages


def compile_decode(shape: tuple[int, int, torch.dtype, bool], sm: int, fp8: bool) -> None:
    signature, constants, warps, stages = decode_build(shape, sm, fp8)
    assert_fits(decode_kernel, signature, constants, sm, warps, stages)
    if sm == 90:
        assert_waits_first(decode_kernel, signature, constants, warps, stages, reads_before=True)


def compile_prefill(shape: tuple[int, int, torch.dtype, bool], sm: int, fp8: bool) -> None:
    head_dim, group, dtype, _ = shape
    pages = fp8_pages(sm) if fp8 else f"*{NAMES[dtype]}"
    signature = types_of(
        dtype,
        ("q_ptr", "out_ptr"),
        f"pages_ptr:{pages}"
        " query_start_ptr:*i32 seq_lens_ptr:*i32 page_table_ptr:*i32 stride_qt:i32:16"
        " stride_table:i32 page_elements:i32:16 layer_start:i32:16 scale_log2:fp32 window:i32"
        " first_row:i32",
    )
    kv_itemsize = 1 if fp8 else dtype.itemsize
    choice = prefill_choice(Chip("", sm, 128), head_dim, group, dtype.itemsize, kv_itemsize)
    warps, stages = choice.pop("num_warps"), choice.pop("num_stages")
    assert_fits(prefill_kernel, signature, {**common(*shape, fp8), **choice}, sm, warps, stages)


@pytest.mark.parametrize(("shape", "sm"), CASES, ids=str)
def test_decode_compiles(shape: tuple[int, int, torch.dtype, bool], sm: int) -> None:
    compile_decode(shape, sm, fp8=False)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_decode_keeps_tiles_in_flight(fp8: bool, tmp_path: Path) -> None:
    """On an H200: tiles of K and V are loaded asynchronously, two programs fit, nothing spills."""
    signature, constants, warps, stages = decode_build(SHAPES[0], 90, fp8)
    compiled = compiled_for(decode_kernel, signature, constants, 90, warps, stages)
    tile_bytes = 2 * int(str(constants["BLOCK_N"])) * 128 * (1 if fp8 else 2)
    shared = int(compiled.metadata.shared)
    assert (stages - 1) * tile_bytes < shared <= H200.shared_bytes // 2
    registers, spilled = registers_and_spills(compiled, tmp_path)
    assert registers * 32 * warps * 2 <= 65_536 and spilled == 0


def test_decode_has_four_programs_where_many_want_a_place(tmp_path: Path) -> None:
    """On an H200: registers and shared memory of a crowded launch."""
    crowded = decode_choice(H200, 128, 4, 2)["crowded"]
    signature, constants, warps, _ = decode_build(SHAPES[0], 90, fp8=False)
    compiled = compiled_for(
        decode_kernel, signature, constants, 90, warps, crowded["num_stages"],
        maxnreg=crowded["maxnreg"],
    )  # fmt: skip
    registers, spilled = registers_and_spills(compiled, tmp_path)
    assert registers * 32 * warps * 4 <= 65_536
    assert int(compiled.metadata.shared) + 1024 <= 228 * 1024 // 4
    assert spilled <= 96  # addresses, read once a tile


@pytest.mark.parametrize(("shape", "sm"), CASES, ids=str)
def test_prefill_compiles(shape: tuple[int, int, torch.dtype, bool], sm: int) -> None:
    compile_prefill(shape, sm, fp8=False)


@pytest.mark.parametrize(("shape", "sm"), FP8_CASES, ids=str)
def test_attention_on_fp8_pages_compiles(
    shape: tuple[int, int, torch.dtype, bool], sm: int
) -> None:
    compile_decode(shape, sm, fp8=True)
    compile_prefill(shape, sm, fp8=True)
