"""Packed rows to rows of a fixed stride: how a captured graph takes page tables of any width.

    table[r, c] = packed[r * width + c]    for c < width, which is read on the device

packed  int32 [at least rows * width]
width   int32 [1], from 0 to the table's columns
table   int32 [rows, columns], written in place; entries from `width` on are left as they are
"""

import torch
import triton
import triton.language as tl

from multilora_kernels.launch import on_host

_BLOCK = 256


@triton.jit
def spread_rows_kernel(packed_ptr, width_ptr, table_ptr, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    width = tl.load(width_ptr)
    # One column of programs walks all of a row's blocks: most rows have one.
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < width
        value = tl.load(packed_ptr + row * width + column, mask=mask)
        tl.store(table_ptr + row * stride + column, value, mask=mask)


def spread_rows(packed: torch.Tensor, width: torch.Tensor, table: torch.Tensor) -> None:
    """Write the rows of `packed` to `table`, in place and without waiting for the device."""
    for tensor in (packed, width, table):
        assert tensor.dtype == torch.int32 and tensor.device == table.device
    assert packed.is_contiguous() and table.stride(1) == 1 and width.numel() == 1
    if on_host(table.device):
        return spread_rows_ref(packed, width, table)
    spread_rows_kernel[(table.shape[0],)](
        packed, width, table, table.stride(0), BLOCK=_BLOCK, num_warps=2
    )


def spread_rows_ref(packed: torch.Tensor, width: torch.Tensor, table: torch.Tensor) -> None:
    """The same in torch, also the path on a CPU."""
    rows, columns = table.shape[0], int(width)
    table[:, :columns] = packed[: rows * columns].view(rows, columns)
