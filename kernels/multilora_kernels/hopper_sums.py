"""Programs of one Gluon kernel that share K add their sums without a second launch.

Two programs meet: who comes first leaves its sums in memory, the other takes them up, so each sum
is written and read once, and nobody waits for a program that may not have started. A sum of two
does not depend on their order, and four are added as two twos, so results repeat bit for bit.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["add_splits", "addresses_of"]


@gluon.jit
def addresses_of(ptr, acc):
    """Where a strip's sums lie beside y, an address for each."""
    n = gl.arange(0, 128, gl.SliceLayout(1, acc.type.layout))
    m = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    return ptr + gl.expand_dims(n * acc.shape[1], 1) + gl.expand_dims(m, 0)


@gluon.jit
def _meet(acc, second_acc, partial_ptr, counter_ptr, PARTS: gl.constexpr):
    """Add the sums of two programs: who comes first leaves them, the other takes them up.

    Returns (sums, second strip's sums, whether they are of both programs). A sum of two does not
    depend on their order. Nobody waits for a program that has not come as far as this.
    """
    second_ptr = partial_ptr + 128 * acc.shape[1]
    came = gl.atomic_add(counter_ptr, 1, sem="acq_rel")
    if came == 0:
        gl.store(addresses_of(partial_ptr, acc), acc)
        if PARTS == 2:
            gl.store(addresses_of(second_ptr, second_acc), second_acc)
        tl.debug_barrier()  # all warps' sums are written before the counter says so
        gl.atomic_add(counter_ptr, 1, sem="release")
    else:
        seen = gl.atomic_add(counter_ptr, 0, sem="acquire")
        while seen < 3:  # both came, and the first one's sums are there
            seen = gl.atomic_add(counter_ptr, 0, sem="acquire")
        tl.debug_barrier()
        # .cg: another multiprocessor's sums are read from the L2, never from a stale L1.
        acc += gl.load(addresses_of(partial_ptr, acc), cache_modifier=".cg")
        if PARTS == 2:
            second_acc += gl.load(addresses_of(second_ptr, second_acc), cache_modifier=".cg")
        gl.atomic_xchg(counter_ptr, 0, sem="relaxed")
    return acc, second_acc, came > 0


@gluon.jit
def add_splits(
    acc, second_acc, partial_ptr, counter_ptr, PARTS: gl.constexpr, SPLIT_K: gl.constexpr
):
    """Add the sums of the programs along grid axis 2, two by two; returns (sums, second sums,
    whether they are everybody's). PARTS 1: there are no second sums.

    partial_ptr  fp32, SPLIT_K - 1 times a program's sums for every tile along axes 0 and 1
    counter_ptr  int32, SPLIT_K - 1 for every tile, zero before and after
    """
    SUMS: gl.constexpr = acc.numel + (PARTS - 1) * second_acc.numel
    tile = (gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)).to(gl.int64)
    partial_ptr += tile * ((SPLIT_K - 1) * SUMS)
    counter_ptr += tile * (SPLIT_K - 1)
    split = gl.program_id(2)
    whole = split >= 0
    if SPLIT_K >= 2:
        pair = split // 2
        acc, second_acc, whole = _meet(
            acc, second_acc, partial_ptr + pair * SUMS, counter_ptr + pair, PARTS
        )
    if SPLIT_K >= 4:  # noqa: SIM102 - the compiler's, then the program's
        if whole:
            pair = SPLIT_K // 2 + split // 4
            acc, second_acc, whole = _meet(
                acc, second_acc, partial_ptr + pair * SUMS, counter_ptr + pair, PARTS
            )
    if SPLIT_K >= 8:  # noqa: SIM102 - the compiler's, then the program's
        if whole:
            pair = SPLIT_K // 2 + SPLIT_K // 4
            acc, second_acc, whole = _meet(
                acc, second_acc, partial_ptr + pair * SUMS, counter_ptr + pair, PARTS
            )
    return acc, second_acc, whole
