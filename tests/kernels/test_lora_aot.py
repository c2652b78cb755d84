"""The LoRA kernels compiled for cards that are not here: types, and shared memory within limits."""

import re
from pathlib import Path
from typing import Any

import pytest
import triton.language as tl
from aot import ARCHITECTURES, assert_fits, compiled_for, registers_and_spills

from multilora_kernels.expand_prompts import expand_prefill_kernel
from multilora_kernels.launch import H200, RTX_4090, Chip
from multilora_kernels.lora_choice import SIDE_BY_SIDE, GroupShape, LoraChoice, choose, with_tuned
from multilora_kernels.sgmv_expand import (
    DECODE_STAGES,
    PREFILL_STAGES,
    expand_decode_kernel,
)
from multilora_kernels.sgmv_shrink import shrink_decode_kernel, shrink_prefill_kernel
from multilora_kernels.work_lists import RUN_FIELDS, write_lists_kernel

CHIPS = {80: Chip("NVIDIA A100", 80, 108), 89: RTX_4090, 90: H200, 120: Chip("RTX 5090", 120, 170)}
SHAPES = {
    "qkv": GroupShape("qkv", 4096, (4096, 1024, 1024), 2, 8192),
    "down": GroupShape("down", 14336, (4096,), 2, 8192),
    # An odd geometry in fp32: nothing is aligned, chunks are small.
    "odd": GroupShape("o", 1004, (1004,), 4, 256),
}
CASES = [(sm, "qkv", tokens) for sm in ARCHITECTURES for tokens in (16, 8192)]
CASES += [(89, "down", 16), (80, "odd", 16), (89, "odd", 8192)]
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


def shrink_arguments(sm: int, name: str, tokens: int) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """Kernel, types and constants of a shrink launch."""
    shape = SHAPES[name]
    choice = choose(shape, tokens, CHIPS[sm])
    pointer = dtype_of(shape)[0]
    aligned = ":16" if shape.d_in % 16 == 0 else ""
    signature = {**COMMON, "x_ptr": pointer, "weights_ptr": pointer, "d_in": f"i32{aligned}"}
    signature["stride_xm"] = f"i32{aligned}"
    fixed = {
        **constants(shape, choice),
        "BLOCK_K": choice.block_k,
        "K_STEPS": choice.k_steps,
        "ALIGNED": shape.d_in % 8 == 0,
    }
    if choice.is_decode:
        fixed |= {"DOT_K": choice.dot_k, "ROW_SPLITS": choice.row_splits}
        fixed["EVEN_K"] = shape.d_in % choice.span == 0
        return shrink_decode_kernel, {**signature, "counts_ptr": "*i32"}, fixed
    signature |= {"bands_ptr": "*i32", "counts_ptr": "*i32", "plane_rows": "i32"}
    return shrink_prefill_kernel, signature, {**fixed, "BAND": SIDE_BY_SIDE}


@pytest.mark.parametrize(("sm", "name", "tokens"), CASES)
def test_shrink_compiles_and_fits(sm: int, name: str, tokens: int) -> None:
    choice = choose(SHAPES[name], tokens, CHIPS[sm])
    assert choice.pdl == (sm >= 90)
    kernel, signature, fixed = shrink_arguments(sm, name, tokens)
    assert_fits(kernel, signature, fixed, sm, choice.shrink_warps, choice.shrink_stages)


@pytest.mark.parametrize(("sm", "name", "tokens"), CASES)
def test_expand_compiles_and_fits(sm: int, name: str, tokens: int) -> None:
    choice = choose(SHAPES[name], tokens, CHIPS[sm])
    kernel, signature, fixed = expand_arguments(sm, name, tokens)
    stages = DECODE_STAGES if choice.is_decode else PREFILL_STAGES
    assert_fits(kernel, signature, fixed, sm, choice.expand_warps, stages)


def expand_arguments(sm: int, name: str, tokens: int) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """Kernel, types and constants of an expand launch."""
    shape = SHAPES[name]
    choice = choose(shape, tokens, CHIPS[sm])
    pointer = dtype_of(shape)[0]
    signature = {**COMMON, "y_ptr": pointer, "weights_ptr": pointer, "tasks_ptr": "*i32"}
    signature["stride_ym"] = "i32"
    fixed = {
        **constants(shape, choice),
        "A_CHUNKS": -(-shape.d_in // shape.chunk),
        "BLOCK_N": choice.block_n,
        "Y_UNIT": shape.y_unit,
    }
    if choice.is_decode:
        fixed |= {"ROWS_N": choice.rows_n, "ROW_SPLITS": choice.row_splits}
        fixed |= {"BLOCKS": choice.n_steps > 1, "STAGES": choice.expand_stages}
        return expand_decode_kernel, {**signature, "counts_ptr": "*i32"}, fixed
    fixed |= {"N_STEPS": choice.n_steps, "STAGES": choice.expand_stages}
    signature |= {"counts_ptr": "*i32", "plane_rows": "i32"}
    return expand_prefill_kernel, signature, fixed


@pytest.mark.parametrize(("name", "tokens"), [("qkv", 4), ("down", 64)])
def test_decode_kernels_keep_loads_in_flight(name: str, tokens: int, tmp_path: Path) -> None:
    """Registers for 128 KiB of weights under way on a multiprocessor; at most 16 words spilled."""
    choice = choose(SHAPES[name], tokens, H200)
    kernel, signature, fixed = shrink_arguments(90, name, tokens)
    shrink = compiled_for(
        kernel, signature, fixed, 90, choice.shrink_warps, choice.shrink_stages,
        maxnreg=choice.shrink_registers,
    )  # fmt: skip
    registers, spilled = registers_and_spills(shrink, tmp_path)
    programs = 65536 // (registers * 32 * choice.shrink_warps)
    assert spilled <= 64 and programs * 16 * choice.span * 2 >= 128 * 1024, registers
    kernel, signature, fixed = expand_arguments(90, name, tokens)
    expand = compiled_for(
        kernel, signature | {"stride_ym": "i32:16"}, fixed, 90, choice.expand_warps, DECODE_STAGES,
        maxnreg=choice.expand_registers, enable_fp_fusion=False,
    )  # fmt: skip
    registers, spilled = registers_and_spills(expand, tmp_path)
    programs = 65536 // (registers * 32 * choice.expand_warps)
    assert spilled <= 64 and programs >= 4, registers


@pytest.mark.parametrize(("blocks", "waits"), [({}, 5), ({"n_steps": 4}, 8)])
def test_planes_and_y_are_not_touched_before_the_wait(
    blocks: dict[str, int], waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Software pipelining once hoisted loads of the planes above it: wrong sums, now and then.

    Beside the shrink runs the multiply that writes y.
    """
    chosen = with_tuned(choose(SHAPES["qkv"], 16, H200), blocks)
    monkeypatch.setitem(globals(), "choose", lambda *given: chosen)
    kernel, signature, fixed = expand_arguments(90, "qkv", 16)
    compiled = compiled_for(kernel, signature, fixed, 90, 4, DECODE_STAGES, enable_fp_fusion=False)
    ptx = compiled.asm["ptx"]
    assert "fma.rn.f32" not in ptx  # see sgmv_expand
    # A wait for each path: one, two, more rank tiles, of a row alone and of shared rows in several
    # blocks; shared rows in one block, or of many tiles; nothing to do at all. Planes and y are
    # read past the L1, y of several blocks and their B by asynchronous copies.
    assert ptx.count("griddepcontrol.wait") == waits
    assert ptx.count("ld.global.cg") > 8 and ("cp.async.cg" in ptx) == bool(blocks)
    touches = ("ld.global.cg", "st.global", "cp.async")
    assert reached_before_the_wait(ptx, touches) == []
    assert reached_before_the_wait(ptx.replace("griddepcontrol.wait", ""), ("st.global",)) != []


def reached_before_the_wait(ptx: str, words: tuple[str, ...]) -> list[str]:
    """Instructions with one of `words` on any way from the start of the kernel, or of a function
    that it calls, that has passed no wait yet."""
    bodies = re.split(r"\.(?:func|entry)\b", ptx)[1:]
    return [line for body in bodies if "\n{" in body for line in early_lines(body, words)]


def early_lines(body: str, words: tuple[str, ...]) -> list[str]:
    """The same in one of them."""
    blocks: list[list[str]] = [[]]
    labels: dict[str, int] = {}
    for line in (line.strip() for line in body[body.index("\n{") :].splitlines()):
        label = re.match(r"(\$\w+):", line)
        if label is not None:
            labels[label[1]] = len(blocks)
            blocks.append([])
        else:
            blocks[-1].append(line)
            if re.search(r"\bbra\b", line):
                blocks.append([])
    found, seen, ways = [], set(), [0]
    while ways:
        at = ways.pop()
        if at in seen or at >= len(blocks):
            continue
        seen.add(at)
        goes_on = True
        for line in blocks[at]:
            if "griddepcontrol.wait" in line or line.startswith("ret"):
                goes_on = False
                break
            found += [line for word in words if word in line]
            target = re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", line)
            if target is not None:
                ways.append(labels[target[1]])
                goes_on = line.startswith("@")
        if goes_on:
            ways.append(at + 1)
    return found


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_the_list_writer_compiles(sm: int) -> None:
    lists = ("runs", "cells", "source_rows", "source_counts", "tiles", "tasks", "bands", "rows")
    signature = {f"{name}_ptr": "*i32" for name in (*lists, "counts")}
    signature |= {"num_runs": "i32", "num_rows": "i32"}
    fixed = {"RUN_FIELDS": RUN_FIELDS, "BAND": SIDE_BY_SIDE, "WRITE": 32, "COPY": 1024}
    assert_fits(write_lists_kernel, signature, fixed, sm, 1)
