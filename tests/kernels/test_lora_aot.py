"""The LoRA kernels compiled for cards that are not here: types, and shared memory within limits."""

import pytest
import triton.language as tl
from aot import ARCHITECTURES, assert_fits

from multilora_kernels.launch import H200, RTX_4090, Chip
from multilora_kernels.lora_choice import SIDE_BY_SIDE, GroupShape, LoraChoice, choose
from multilora_kernels.sgmv_expand import expand_decode_kernel, expand_prefill_kernel
from multilora_kernels.sgmv_shrink import shrink_decode_kernel, shrink_prefill_kernel
from multilora_kernels.work_lists import RUN_FIELDS, write_lists_kernel

CHIPS = {80: Chip("NVIDIA A100", 80, 108), 89: RTX_4090, 90: H200, 120: Chip("RTX 5090", 120, 170)}
SHAPES = {
    "qkv": GroupShape("qkv", 4096, (4096, 1024, 1024), 2, 8192),
    "down": GroupShape("down", 14336, (4096,), 2, 8192),
    # An odd geometry in fp32: nothing is aligned, chunks are small.
    "odd": GroupShape("o", 1004, (1004,), 4, 256),
}
COMMON = {
    "planes_ptr": "*fp32",
    "offsets_ptr": "*i64",
    "tiles_ptr": "*i32",
    "rows_ptr": "*i32",
    "layer_start": "i32",
}


def dtype_of(shape: GroupShape) -> tuple[str, tl.dtype]:
    return ("*bf16", tl.bfloat16) if shape.itemsize == 2 else ("*fp32", tl.float32)


def constants(shape: GroupShape, choice: LoraChoice) -> dict[str, object]:
    a_chunks = -(-shape.d_in // shape.chunk)
    return {
        "CELL": a_chunks + max(-(-d_out // shape.chunk) for d_out in shape.d_outs),
        "CHUNK": shape.chunk,
        "BLOCK_M": choice.block_m,
        "SPLIT_K": choice.splits(shape.d_in),
        "PDL": choice.pdl,
        "COMPUTE": dtype_of(shape)[1],
        "PRECISION": "ieee",
    }


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tokens", [16, 8192])
def test_shrink_compiles_and_fits(sm: int, name: str, tokens: int) -> None:
    shape = SHAPES[name]
    choice = choose(shape, tokens, CHIPS[sm])
    assert choice.pdl == (sm >= 90)
    pointer = dtype_of(shape)[0]
    signature = {**COMMON, "x_ptr": pointer, "weights_ptr": pointer, "d_in": "i32"}
    signature["stride_xm"] = "i32"
    fixed = {
        **constants(shape, choice),
        "BLOCK_K": choice.block_k,
        "K_STEPS": choice.k_steps,
        "ALIGNED": shape.d_in % 8 == 0,
    }
    if choice.is_decode:
        kernel, signature["counts_ptr"] = shrink_decode_kernel, "*i32"
        fixed |= {"DOT_K": min(256, choice.span), "EVEN_K": shape.d_in % choice.block_k == 0}
    else:
        kernel = shrink_prefill_kernel
        signature |= {"bands_ptr": "*i32", "plane_rows": "i32"}
        fixed |= {"BAND": SIDE_BY_SIDE}
    assert_fits(kernel, signature, fixed, sm, choice.shrink_warps, choice.shrink_stages)


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tokens", [16, 8192])
def test_expand_compiles_and_fits(sm: int, name: str, tokens: int) -> None:
    shape = SHAPES[name]
    choice = choose(shape, tokens, CHIPS[sm])
    pointer = dtype_of(shape)[0]
    signature = {**COMMON, "y_ptr": pointer, "weights_ptr": pointer, "tasks_ptr": "*i32"}
    signature["stride_ym"] = "i32"
    fixed = {
        **constants(shape, choice),
        "A_CHUNKS": -(-shape.d_in // shape.chunk),
        "BLOCK_N": choice.block_n,
    }
    if choice.is_decode:
        kernel, signature["counts_ptr"] = expand_decode_kernel, "*i32"
        splits = 1 << (choice.splits(shape.d_in) - 1).bit_length()
        fixed |= {"ROWS_N": choice.rows_n, "SPLITS": splits}
        fixed |= {"ALIGNED": all(d_out % 8 == 0 for d_out in shape.d_outs)}
    else:
        kernel, signature["plane_rows"] = expand_prefill_kernel, "i32"
    assert_fits(kernel, signature, fixed, sm, choice.expand_warps)


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_the_list_writer_compiles(sm: int) -> None:
    lists = ("runs", "cells", "source_rows", "source_counts", "tiles", "tasks", "bands", "rows")
    signature = {f"{name}_ptr": "*i32" for name in (*lists, "counts")}
    signature |= {"num_runs": "i32", "num_rows": "i32"}
    fixed = {"RUN_FIELDS": RUN_FIELDS, "BAND": SIDE_BY_SIDE, "WRITE": 32, "COPY": 1024}
    assert_fits(write_lists_kernel, signature, fixed, sm, 1)
