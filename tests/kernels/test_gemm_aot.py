"""Base multiplies compiled ahead of time for four chips, within each chip's shared memory."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton.language as tl

from multilora_kernels import (
    awq_gemm,
    awq_hopper,
    bf16_gemv,
    bf16_rows,
    fp8_gemm,
    fp8_quant,
    fp8_weight_only,
)
from multilora_kernels.launch import Chip
from multilora_kernels.split_k import Tile
from tests.kernels.aot import (
    ARCHITECTURES,
    assert_fits,
    assert_waits_first,
    compiled_for,
    machine_code,
    registers_and_spills,
)

CHIPS = {
    80: Chip("NVIDIA A100", 80, 108),
    89: Chip("NVIDIA GeForce RTX 4090", 89, 128),
    90: Chip("NVIDIA H200", 90, 132),
    120: Chip("NVIDIA GeForce RTX 5090", 120, 170),
}
FP8_ARCHITECTURES = tuple(sm for sm in ARCHITECTURES if CHIPS[sm].has_fp8)
N, K = 6144, 4096
INTEGERS = {"M": "i32", "N": "i32", "K": "i32"}


def split_constexprs(tile: Tile) -> dict[str, Any]:
    return {
        "BLOCK_N": tile.block_n,
        "BLOCK_M": tile.block_m,
        "SPLIT_K": tile.split_k,
        "STAGES": tile.num_stages,
        "PDL": tile.pdl,
        "PAIRS": tile.pairs,
    }


def check(
    kernel: Any, signature: dict[str, str], values: dict[str, Any], sm: int, tile: Tile
) -> None:
    constexprs = {**split_constexprs(tile), **values}
    assert_fits(kernel, signature, constexprs, sm, tile.num_warps, tile.num_stages)


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize(("m", "groups", "even"), [(1, 1, True), (64, 4, False)])
def test_awq_gemm(sm: int, m: int, groups: int, even: bool) -> None:
    tile = awq_gemm.choose_launch(m, N, K, CHIPS[sm]).tile
    assert tile is not None and tile.pdl == (sm >= 90)
    x, ct = ("*fp16", tl.float16) if m == 64 else ("*bf16", tl.bfloat16)
    signature = {
        "x_ptr": x,
        "words_ptr": "*i16",
        "meta_ptr": "*i32",
        "y_ptr": x,
        "partial_ptr": "*fp32",
        "counter_ptr": "*i32",
        "N_padded": "i32",
        "stride_xm": "i32",
        **INTEGERS,
    }
    values = {"GROUPS": groups, "EVEN_K": even, "SCALE": tl.float16, "CT": ct, "PARTS": tile.parts}
    check(awq_gemm.awq_gemm_kernel, signature, values, sm, tile)


HOPPER_SIGNATURE = {
    "x_ptr": "*bf16",
    "words_ptr": "*i16",
    "meta_ptr": "*i32",
    "y_ptr": "*bf16",
    "partial_ptr": "*fp32",
    "M": "i32",
    **dict.fromkeys(("N", "K", "N_padded", "stride_xm"), "i32:16"),
}


@pytest.mark.parametrize(
    ("launch", "groups", "x"),
    [
        (awq_hopper.HopperLaunch(), 1, "bf16"),
        (awq_hopper.HopperLaunch(split_k=4), 4, "fp16"),
        (awq_hopper.HopperLaunch(split_k=3), 2, "bf16"),
        (awq_hopper.HopperLaunch(block_n=128, num_stages=5, split_k=2), 1, "bf16"),
        (awq_hopper.HopperLaunch(block_n=448), 1, "bf16"),
    ],
)
def test_awq_hopper_widens_beside_its_multiplies(
    launch: awq_hopper.HopperLaunch, groups: int, x: str, tmp_path: Path
) -> None:
    constexprs = {
        "BLOCK_N": launch.block_n,
        "BLOCK_M": launch.block_m,
        "SPLIT_K": launch.split_k,
        "GROUPS": groups,
        "STAGES": launch.num_stages,
        "SCALE": tl.float16,
        "CT": tl.bfloat16 if x == "bf16" else tl.float16,
        "PDL": True,
    }
    signature = {**HOPPER_SIGNATURE, "x_ptr": f"*{x}", "y_ptr": f"*{x}"}
    kernel = awq_hopper.awq_hopper_kernel
    compiled = compiled_for(kernel, signature, constexprs, 90, num_warps=8)
    assert int(compiled.metadata.shared) <= CHIPS[90].shared_bytes
    assert_waits_first(kernel, signature, constexprs, num_warps=8)
    code = machine_code(compiled, tmp_path)
    # A wait for each quarter of a block, and one at the end; where the compiler finds registers of
    # a multiply under way touched, it waits for every single instruction instead.
    tiles, strips = (2 if launch.block_n == 448 else 1), (1 if launch.block_n == 128 else 2)
    assert code.count("HGMMA.") == tiles * 8 * strips
    assert code.count("WARPGROUP.DEPBAR") == tiles * (1 + 4 * strips)
    # Nothing is spilled where it multiplies; a few addresses may be before and after.
    assert registers_and_spills(compiled, tmp_path)[1] <= 64
    for loop in code.split("WARPGROUP.DEPBAR.LE gsb0, 0x0")[:-1]:
        multiplies = loop[loop.index("HGMMA.") : loop.rindex("HGMMA.")]
        assert "LDL" not in multiplies and "STL" not in multiplies
    # And widening does happen between the instructions of a multiply.
    between = re.findall(r"HGMMA\.(.*?)(?=HGMMA\.)", code, re.DOTALL)
    assert sum("HFMA2" in part for part in between) >= 3


@pytest.mark.parametrize("split_k", [2, 8])
def test_awq_hopper_sums_planes(split_k: int) -> None:
    signature = {"partial_ptr": "*fp32", "y_ptr": "*bf16", "M": "i32", "N": "i32:16"}
    launch = awq_hopper.HopperLaunch(split_k=split_k)
    constexprs = {
        "BLOCK_N": launch.block_n,
        "BLOCK_M": launch.block_m,
        "SPLIT_K": split_k,
        "PIECE_N": 64,
        "PIECE_M": 32,
        "PDL": True,
    }
    kernel = awq_hopper.sum_planes_kernel
    assert_waits_first(kernel, {**signature, "N_padded": "i32:16"}, constexprs)


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_bf16_rows(sm: int) -> None:
    launch = bf16_rows.choose_launch(17, N, K, CHIPS[90])
    assert launch is not None
    tile = replace(launch.tile, split_k=2, pdl=sm >= 90)
    signature = {
        "x_ptr": "*bf16",
        "w_ptr": "*bf16",
        "y_ptr": "*fp32",
        "partial_ptr": "*fp32",
        "counter_ptr": "*i32",
        "stride_xm": "i32",
        "stride_wn": "i32",
        **INTEGERS,
    }
    values = split_constexprs(tile)
    del values["PAIRS"]
    values |= {"BLOCK_K": launch.block_k, "EVEN_K": sm != 80, "CT": tl.bfloat16}
    stages = 4 if sm in (80, 90) else 3
    values["STAGES"] = stages
    kernel = bf16_rows.bf16_rows_kernel
    assert_fits(kernel, signature, values, sm, tile.num_warps, stages)
    if sm == 90:
        assert_waits_first(kernel, signature, values, tile.num_warps, stages)


def test_dequantise() -> None:
    signature = {
        "words_ptr": "*i16",
        "meta_ptr": "*i32",
        "w_ptr": "*bf16",
        "n_start": "i32",
        "n_stop": "i32",
        "K": "i32",
        "N_padded": "i32",
    }
    values = {"BLOCK_N": 32, "GROUPS": 2, "SCALE": tl.bfloat16}
    assert_fits(awq_gemm.dequantise_kernel, signature, values, 80)


@pytest.mark.parametrize("sm", FP8_ARCHITECTURES)
@pytest.mark.parametrize(("m", "blockwise"), [(1, False), (64, True)])
def test_fp8_gemm(sm: int, m: int, blockwise: bool) -> None:
    tile = fp8_gemm.choose_launch(m, N, K, CHIPS[sm], blockwise)
    assert isinstance(tile, Tile)
    signature = {
        "x_ptr": "*fp8e4nv",
        "sx_ptr": "*fp32",
        "w_ptr": "*fp8e4nv",
        "sw_ptr": "*fp32",
        "y_ptr": "*bf16",
        "partial_ptr": "*fp32",
        "counter_ptr": "*i32",
        "stride_sx": "i32",
        **INTEGERS,
    }
    values = {"BLOCKWISE": blockwise, "EVEN_K": True, "CT": tl.float8e4nv, "PARTS": tile.parts}
    values["PREFETCH"] = tile.prefetch
    check(fp8_gemm.fp8_gemm_kernel, signature, values, sm, tile)


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_fp8_weight_only(sm: int) -> None:
    # fp16 and blocks on the first and third chip, bf16 and channels on the others.
    m, blockwise = (1, True) if sm in (80, 90) else (64, False)
    tile, _ = fp8_weight_only.choose_launch(m, N, K, CHIPS[sm])
    assert tile is not None
    x, ct = ("*fp16", tl.float16) if m == 1 else ("*bf16", tl.bfloat16)
    signature = {
        "x_ptr": x,
        "words_ptr": "*i16",
        "sw_ptr": "*fp32",
        "y_ptr": x,
        "partial_ptr": "*fp32",
        "counter_ptr": "*i32",
        "stride_xm": "i32",
        **INTEGERS,
    }
    values = {"BLOCKWISE": blockwise, "EVEN_K": False, "CT": ct}
    check(fp8_weight_only.fp8_weight_only_kernel, signature, values, sm, tile)


def test_fp8_widen_and_scale() -> None:
    blocks = {"q_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "out_ptr": "*bf16"}
    values = {"SCALE_ROWS": 128, "BLOCK": 32}
    assert_fits(fp8_gemm.widen_blocks_kernel, {**blocks, "rows": "i32", "K": "i32"}, values, 89)
    names = {"words_ptr": "*i16", "sw_ptr": "*fp32", "w_ptr": "*bf16", "N": "i32", "K": "i32"}
    rows = {"n_start": "i32", "n_stop": "i32"}
    widen = {"BLOCK_N": 16, "BLOCKWISE": True}
    assert_fits(fp8_weight_only.widen_kernel, {**names, **rows}, widen, 80)
    pointers = {"raw_ptr": "*fp32", "sx_ptr": "*fp32", "sw_ptr": "*fp32", "y_ptr": "*bf16"}
    scale = {"BLOCK": 1024, "PDL": True}
    assert_fits(fp8_gemm.scale_kernel, {**pointers, "N": "i32", "stride_sx": "i32"}, scale, 90)


@pytest.mark.parametrize("sm", FP8_ARCHITECTURES)
def test_fp8_quant(sm: int) -> None:
    block, warps = fp8_quant.launch_choice(4096)
    pointers = {"q_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "static_ptr": "*fp32", "x_ptr": "*bf16"}
    common = {**pointers, "K": "i32", "stride_xm": "i32", "upper_bound": "fp32"}
    values: dict[str, Any] = {"BLOCK": block, "GROUP": 128, "STATIC": False, "INTERPRETED": False}
    values["PDL"] = sm >= 90
    assert_fits(fp8_quant.quantise_kernel, common, values, sm, warps)
    silu = {**values, "GROUP": 0, "HAS_OUT": True, "DT": tl.bfloat16}
    common["out_ptr"] = "*bf16"
    assert_fits(fp8_quant.silu_mul_quantise_kernel, common, silu, sm, warps)
    norm = {**common, "residual_ptr": "*bf16", "weight_ptr": "*bf16", "eps": "fp32"}
    values = {**silu, "HAS_RESIDUAL": True}
    assert_fits(fp8_quant.rms_norm_quantise_kernel, norm, values, sm, warps)
    if sm == 90:
        assert_waits_first(fp8_quant.silu_mul_quantise_kernel, common, silu, warps)
        assert_waits_first(fp8_quant.rms_norm_quantise_kernel, norm, values, warps)


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_bf16_gemv(sm: int) -> None:
    m, even = (1, True) if sm in (80, 90) else (4, False)
    launch = bf16_gemv.choose_launch(1, N, K, CHIPS[sm])
    assert launch is not None
    signature = {
        "x_ptr": "*bf16",
        "w_ptr": "*bf16",
        "y_ptr": "*bf16",
        "N": "i32",
        "K": "i32",
        "stride_xm": "i32",
        "stride_wn": "i32",
    }
    values = {
        "M": m,
        "BLOCK_N": launch.block_n,
        "BLOCK_K": launch.block_k,
        "EVEN_K": even,
        "UNROLL": launch.unroll,
        "PDL": launch.pdl,
        "PREFETCH": launch.prefetch,
    }
    assert_fits(bf16_gemv.bf16_gemv_kernel, signature, values, sm, launch.num_warps)
