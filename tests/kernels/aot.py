"""Compile a kernel for a GPU that is not here: type errors and shared memory without a device."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from multilora_kernels.launch import Chip

# A100, RTX 4090, H100/H200, RTX 5090: the cards named in the documentation.
ARCHITECTURES = (80, 89, 90, 120)


def shared_limit(sm: int) -> int:
    """Shared memory one block may use on compute capability `sm`, in bytes."""
    return Chip("", sm, 1).shared_bytes


def compiled_for(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    sm: int,
    num_warps: int = 4,
    num_stages: int = 2,
    **options: Any,
) -> Any:
    """`kernel` compiled down to a cubin for `sm`, as Triton gives it.

    `signature` names the type of every run-time argument ("*bf16", "i32", "i64", "fp32"), in any
    order; `constexprs` the value of every other. Pointers are taken to be 16-byte aligned, as
    torch's allocations are, and integers written "i32:16" to be multiples of 16, as a launch
    finds out for itself: without that, loads are narrower than on a device.
    """
    names = list(kernel.arg_names)
    missing = [name for name in names if name not in signature and name not in constexprs]
    unknown = [name for name in (*signature, *constexprs) if name not in names]
    assert not missing and not unknown, f"missing {missing}, unknown {unknown}"
    spelled = {name: "constexpr" if name in constexprs else signature[name] for name in names}
    attrs = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if spelled[name].startswith("*") or spelled[name].endswith(":16")
    }
    types = {name: text.removesuffix(":16") for name, text in spelled.items()}
    values = {(names.index(name),): value for name, value in constexprs.items()}
    made_of = GluonASTSource if kernel.is_gluon() else ASTSource
    source = made_of(kernel, types, values, attrs)
    return triton.compile(
        source,
        target=GPUTarget("cuda", sm, 32),
        options={"num_warps": num_warps, "num_stages": num_stages, **options},
    )


def machine_code(compiled: Any, folder: Path) -> str:
    """The instructions of the card itself, disassembled."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    command = [str(tool), "--print-code", str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def registers_and_spills(compiled: Any, folder: Path) -> tuple[int, int]:
    """Registers of a thread, and the bytes of its stack, where registers are spilled to."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [str(tool), "--dump-resource-usage", str(cubin)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


def assert_fits(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    sm: int,
    num_warps: int = 4,
    num_stages: int = 2,
    **options: Any,
) -> None:
    """Compile for `sm` and check that the kernel's shared memory fits that chip."""
    compiled = compiled_for(kernel, signature, constexprs, sm, num_warps, num_stages, **options)
    shared = int(compiled.metadata.shared)
    limit = shared_limit(sm)
    assert shared <= limit, f"sm_{sm}: {shared} bytes of shared memory, {limit} allowed"


def assert_waits_first(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    num_warps: int = 4,
    num_stages: int = 2,
    *,
    reads_before: bool = False,
) -> None:
    """Compiled for an H200 and started early, it touches no memory before its wait.

    `reads_before`: but may read words that no kernel right before it writes.
    """
    constexprs = {**constexprs, "PDL": True}
    compiled = compiled_for(kernel, signature, constexprs, 90, num_warps, num_stages)
    before, wait, _ = compiled.asm["ptx"].partition("griddepcontrol.wait")
    words = ["st.global", "cp.async", "launch_dep", "atom."]
    if not reads_before:
        words.append("ld.global")
    early = [word for word in words if word in before]
    assert wait and not early, f"before its wait: {early}"
