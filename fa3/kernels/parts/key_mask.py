"""Masks as the backward sees them: a CTA owns keys and walks over blocks of queries.

It holds P^T, a key in each row (`hide`), or P, a query in each row (`hide_columns`).

Causal masks are aligned to the bottom right: query i sees key j iff j <= i + Sk - Sq, so key j is seen from query
j + Sq - Sk on. What is hidden becomes a P of 0, and with it a dS of 0.

Query rows past Sq need no mask: Q and dO are zeros there, and their LSE is +inf, so that P is 0.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa3.layouts.fragments_dsl import rows_and_columns

from .lanes import ROW_STEP, ROWS_OF_THREAD, place_in_quad, row_of_thread
from .mask import hide_from


@dataclass(frozen=True)
class AllQueries:
    """Every key is seen by every query. Only the block with the last key is cut."""

    seqlen_q: Int32
    seqlen_k: Int32
    tile_m: int
    tile_n: int

    def first_block(self, n_block: Int32):
        """The first query block of which some row sees some key of this key block."""
        return Int32(0)

    def rank(self, n_block: Int32, m_block: Int32):
        """How many of the key blocks that a query block sees come before this one in a fixed order of sums."""
        return n_block

    def of_pairs(self):
        """The same mask over pairs of key blocks."""
        return replace(self, tile_n=2 * self.tile_n)

    @cute.jit
    def cut_blocks(self, n_block: Int32, first: Int32):
        """How many query blocks, from block `first` on, need `hide`."""
        cut = Int32(0)
        if (n_block + 1) * self.tile_n > self.seqlen_k:
            cut = cute.ceil_div(self.seqlen_q, self.tile_m) - first
        return cut

    @cute.jit
    def hide(self, acc_P: cute.Tensor, first_key: Int32, m_block: Int32):
        """P = 0 for keys past Sk: their V and K are zeros, but exp(0 - LSE) may be infinite, and inf * 0 is no 0."""
        probabilities = rows_and_columns(acc_P)
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            if first_key + row_of_thread() + ROW_STEP * r >= self.seqlen_k:
                for c in cutlass.range_constexpr(cute.size(probabilities, mode=[1])):
                    probabilities[r, c] = Float32(0.0)

    @cute.jit
    def hide_columns(self, acc_P: cute.Tensor, first_key: Int32, m_block: Int32):
        """As `hide`, where the columns are the keys from `first_key` on."""
        limit = self.seqlen_k - first_key
        hide_from(acc_P, 0.0, limit, limit)


@dataclass(frozen=True)
class LaterQueries:
    """Causal: key j is seen from query j + Sq - Sk on. No query below Sq sees a key past Sk."""

    seqlen_q: Int32
    seqlen_k: Int32
    tile_m: int
    tile_n: int

    def _seen_from(self, key: Int32):
        return key + self.seqlen_q - self.seqlen_k

    def first_block(self, n_block: Int32):
        return cutlass.max(self._seen_from(n_block * self.tile_n), 0) // self.tile_m

    def rank(self, n_block: Int32, m_block: Int32):
        """From the diagonal to the first key: the order in which CTAs that start together come by."""
        last_row = cutlass.min((m_block + 1) * self.tile_m, self.seqlen_q) - 1
        last_key = last_row + self.seqlen_k - self.seqlen_q
        return last_key // self.tile_n - n_block

    def of_pairs(self):
        return replace(self, tile_n=2 * self.tile_n)

    @cute.jit
    def cut_blocks(self, n_block: Int32, first: Int32):
        clear_from = cutlass.max(self._seen_from((n_block + 1) * self.tile_n - 1), 0)
        clear = cutlass.min(cute.ceil_div(clear_from, self.tile_m), cute.ceil_div(self.seqlen_q, self.tile_m))
        return clear - first

    @cute.jit
    def hide(self, acc_P: cute.Tensor, first_key: Int32, m_block: Int32):
        """P = 0 left of the diagonal.

        A thread's columns are 8 (c / 2) + c % 2 + 2 q with q its place in the quad, so comparing with limit - 2 q
        leaves a constant on the other side.
        """
        probabilities = rows_and_columns(acc_P)
        limit = self._seen_from(first_key + row_of_thread()) - m_block * self.tile_m - 2 * place_in_quad()
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            for c in cutlass.range_constexpr(cute.size(probabilities, mode=[1])):
                if 8 * (c // 2) + c % 2 < limit + ROW_STEP * r:
                    probabilities[r, c] = Float32(0.0)

    @cute.jit
    def hide_columns(self, acc_P: cute.Tensor, first_key: Int32, m_block: Int32):
        """As `hide`, where the columns are the keys from `first_key` on."""
        row = m_block * self.tile_m + row_of_thread()
        limit = row + 1 + self.seqlen_k - self.seqlen_q - first_key
        hide_from(acc_P, 0.0, limit, limit + ROW_STEP)


KEY_MASKS: dict[bool, Any] = {False: AllQueries, True: LaterQueries}
