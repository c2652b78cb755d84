"""Widths of page tables; and a captured step's page tables, kept from step to step."""

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from multilora_cli.engine.batch_plan import ScheduledRow
from multilora_cli.sizing.pages import pages_for_tokens

_WIDTH = 16  # page tables grow in these steps, so that few shapes exist


def padded_columns(num_pages: int) -> int:
    """Columns of a page table whose longest row has `num_pages` pages."""
    return -(-num_pages // _WIDTH) * _WIDTH


def table_columns(max_context: int) -> int:
    """Columns of a page table for sequences of up to `max_context` tokens."""
    return padded_columns(pages_for_tokens(max_context))


class PageRows:
    """The page tables of the last step's rows, of which the next step's rows change little.

    A sequence's page table only grows; where a page is exchanged it is a new array (KVCache).
    """

    def __init__(self, most: int, columns: int) -> None:
        self._table = np.zeros((most, columns), dtype=np.int32)
        self._held: list[array[int]] = [array("i")] * most
        self._known = [0] * most  # entries of each that are in the table

    def update(
        self, rows: Sequence[ScheduledRow], places: Sequence[int], padded: int
    ) -> npt.NDArray[np.int32]:
        """int32 [padded, width]: page tables of `rows` at `places`; the rest means nothing."""
        table, held, known, width = self._table, self._held, self._known, 1
        for index, row in zip(places, rows, strict=True):
            pages = row.pages
            count = len(pages)
            if known[index] != count or held[index] is not pages:
                start = known[index] if held[index] is pages else 0
                table[index, start:count] = np.frombuffer(pages, dtype=np.int32)[start:]
                held[index], known[index] = pages, count
            if count > width:
                width = count
        return table[:padded, : min(padded_columns(width), table.shape[1])]
