"""Which keys a query may see, as one limit per row: key j is visible while j < limit(row).

Causal masks are aligned to the bottom right: query i sees key j iff j <= i + Sk - Sq, so limit(i) = i + 1 + Sk - Sq.
Without a mask the limit is Sk in every row; it matters only in a last block that reaches past Sk.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa3.layouts.fragments_dsl import rows_and_columns

from .lanes import ROW_STEP, ROWS_OF_THREAD, place_in_quad, row_of_thread


@cute.jit
def ceil_div_clamped(value: Int32, divisor: cutlass.Constexpr):
    """ceil(value / divisor), and 0 where value is negative."""
    clamped = cutlass.max(value, 0)
    return (clamped + divisor - 1) // divisor


@dataclass(frozen=True)
class FullMask:
    """Every query sees every key."""

    cuts_one_block = True

    seqlen_q: Int32
    seqlen_k: Int32
    tile_n: int

    @cute.jit
    def blocks(self, first_row: Int32, rows: cutlass.Constexpr):
        """Key blocks that some of the `rows` query rows from `first_row` see."""
        blocks = ceil_div_clamped(self.seqlen_k, self.tile_n)
        if first_row >= self.seqlen_q:
            blocks = Int32(0)
        return blocks

    def clear_blocks(self, first_row: Int32):
        """Leading key blocks that all rows from `first_row` see whole; the rest needs `hide`."""
        return self.seqlen_k // self.tile_n

    @cute.jit
    def hide(self, acc_S: cute.Tensor, hidden: cutlass.Constexpr, first_row: Int32, n_block: Int32):
        """Sets the scores past the last key to `hidden`; nothing to do in a block that lies inside."""
        limit = self.seqlen_k - n_block * self.tile_n
        if limit < self.tile_n:
            hide_from(acc_S, hidden, limit, limit)


@dataclass(frozen=True)
class CausalMask:
    """Query i sees key j iff j <= i + Sk - Sq."""

    cuts_one_block = False

    seqlen_q: Int32
    seqlen_k: Int32
    tile_n: int

    def _limit(self, row: Int32):
        return row + 1 + self.seqlen_k - self.seqlen_q

    @cute.jit
    def blocks(self, first_row: Int32, rows: cutlass.Constexpr):
        last = cutlass.min(first_row + rows, self.seqlen_q) - 1
        blocks = ceil_div_clamped(self._limit(last), self.tile_n)
        if first_row >= self.seqlen_q:
            blocks = Int32(0)
        return blocks

    def clear_blocks(self, first_row: Int32):
        return cutlass.max(self._limit(first_row), 0) // self.tile_n

    @cute.jit
    def hide(self, acc_S: cute.Tensor, hidden: cutlass.Constexpr, first_row: Int32, n_block: Int32):
        """Sets the scores right of the diagonal to `hidden`. Rows past Sq may see past Sk; they are never stored."""
        limit = self._limit(first_row + row_of_thread()) - n_block * self.tile_n
        hide_from(acc_S, hidden, limit, limit + ROW_STEP)


MASKS: dict[bool, Any] = {False: FullMask, True: CausalMask}


@cute.jit
def hide_from(acc_S: cute.Tensor, hidden: cutlass.Constexpr, upper: Int32, lower: Int32):
    """Hides the columns from `upper` on in the thread's upper row and from `lower` on in its lower one.

    A thread's columns are 8 (c / 2) + c % 2 + 2 q with q its place in the quad, so comparing with limit - 2 q leaves a
    constant on the other side.
    """
    scores = rows_and_columns(acc_S)
    limits = tuple(limit - 2 * place_in_quad() for limit in (upper, lower))
    for r in cutlass.range_constexpr(ROWS_OF_THREAD):
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            if 8 * (c // 2) + c % 2 >= limits[r]:
                scores[r, c] = cutlass.Float32(hidden)
