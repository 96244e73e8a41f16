"""Online softmax over the rows that a thread holds of a score tile (Milakov and Gimelshein, arXiv 1805.02867).

A thread of an m64nN accumulator holds two rows; the four threads of a quad share them. Everything is kept in base 2 and
in scaled units: P = 2^(scale_log2 * s - anchor) with scale_log2 = softmax_scale * log2(e), one FFMA and one MUFU per
score. The anchor of a row is the largest scaled score so far, rounded once and then used as it is everywhere, so that
its rounding error cancels between P, l, O and LSE.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from fa3.layouts.fragments_dsl import rows_and_columns

from .lanes import QUAD_OFFSETS, ROWS_OF_THREAD

LAZY_LIMIT = 8.0
"""How far, in log2, a score may lie above a `Lazy` anchor: P grows to 2^8 at most, far from overflow even in fp16."""


@dataclass(frozen=True)
class Extremum:
    """The score whose scaled value is the largest: the maximum, or with a negative scale the minimum.

    `hidden` is the score of a key that may not be seen: times the scale it is -inf.
    """

    pick: Callable[..., Float32]
    hidden: float

    @classmethod
    def of(cls, negative_scale: bool) -> "Extremum":
        return cls(cute.arch.fmin, math.inf) if negative_scale else cls(cute.arch.fmax, -math.inf)


@dataclass(frozen=True)
class Always:
    """Moves the anchor to every new maximum, and scales O every time."""

    @cute.jit
    def anchor(self, old: Float32, new: Float32):
        return new

    @cute.jit
    def rescale(self, acc_O: cute.Tensor, correction: cute.Tensor):
        scale_rows(acc_O, correction)


@dataclass(frozen=True)
class Rising:
    """As `Always`, to the bit, but leaves eight rows of a warp alone in a step that raised no maximum among them.

    The j-th block raises a row's maximum about once in j times, so that long sequences seldom scale O.
    """

    @cute.jit
    def anchor(self, old: Float32, new: Float32):
        return new

    def rescale(self, acc_O: cute.Tensor, correction: cute.Tensor):
        scale_rows_if_needed(acc_O, correction)


@dataclass(frozen=True)
class Lazy:
    """Keeps the old anchor while the new maximum lies at most 8 above it (in log2), and then leaves O alone.

    After a few blocks no step scales O: up to 6 % faster than `Rising` on an H200. But the error against float64
    grows by 2-4 %: with the maximum as its anchor the largest P of a row is exactly 1, and its rounding costs nothing.
    """

    @cute.jit
    def anchor(self, old: Float32, new: Float32):
        kept = new
        if new - old <= LAZY_LIMIT:
            kept = old
        return kept

    def rescale(self, acc_O: cute.Tensor, correction: cute.Tensor):
        scale_rows_if_needed(acc_O, correction)


RESCALE: dict[str, Any] = {"always": Always(), "rising": Rising(), "lazy": Lazy()}


@dataclass(frozen=True)
class OnlineSoftmax:
    """Statistics of the thread's two rows: `anchor` (m of the paper, in scaled base-2 units), `row_sum` (l), and the
    `correction` that the latest step asks of O.

    `row_sum` is this thread's part; the quad is joined once, in `finish`.
    """

    scale_log2: Float32
    anchor: cute.Tensor
    row_sum: cute.Tensor
    correction: cute.Tensor
    extremum: Extremum
    strategy: Any

    @classmethod
    def create(cls, scale_log2: Float32, extremum: Extremum, rescale: str) -> "OnlineSoftmax":
        anchor, row_sum, correction = (cute.make_rmem_tensor((ROWS_OF_THREAD,), Float32) for _ in range(3))
        return cls(scale_log2, anchor, row_sum, correction, extremum, RESCALE[rescale])

    def reset(self):
        """Before the first key of a tile: m = -inf, l = 0."""
        self.anchor.fill(-math.inf)
        self.row_sum.fill(0.0)

    @cute.jit
    def step(self, acc_S: cute.Tensor):
        """Turns scores into P in place and updates the statistics. `correction` gets the factors by which O, as summed
        up so far, must be scaled before this P is added.

        Two and four independent chains for maximum and sum gained nothing in the loop (H200, +-1.5 %).
        """
        scores = rows_and_columns(acc_S)
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            old = self.anchor[r]
            new = self.strategy.anchor(old, cute.arch.fmax(old, self._largest(scores, r)))
            self.anchor[r] = new
            # A row that has seen no key yet is measured from 0: its scores are -inf, and -inf - -inf would be NaN.
            finite = new
            if new == -math.inf:
                finite = Float32(0.0)
            self.correction[r] = cute.math.exp2(old - finite, fastmath=True)
            self.row_sum[r] = self.row_sum[r] * self.correction[r] + self._exponentiate(scores, r, finite)

    def rescale(self, acc_O: cute.Tensor):
        """O = diag(correction) O for the latest `step`, when the strategy asks for it."""
        self.strategy.rescale(acc_O, self.correction)

    @cute.jit
    def finish(self, acc_O: cute.Tensor):
        """O = diag(1/l) O; returns the natural-log LSE of the two rows. A row without a key: O = 0, LSE = -inf."""
        lse = cute.make_rmem_tensor((ROWS_OF_THREAD,), Float32)
        inverse = cute.make_rmem_tensor((ROWS_OF_THREAD,), Float32)
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            total = self.row_sum[r]
            for offset in QUAD_OFFSETS:
                total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
            inverse[r] = Float32(0.0)
            lse[r] = Float32(-math.inf)
            if total != 0.0:
                inverse[r] = cute.arch.rcp_approx(total)
                lse[r] = (self.anchor[r] + cute.math.log2(total, fastmath=True)) * math.log(2.0)
        scale_rows(acc_O, inverse)
        return lse

    @cute.jit
    def _largest(self, scores: cute.Tensor, r: cutlass.Constexpr):
        """The largest scaled score of row r in this tile, joined over the quad."""
        best = scores[r, 0]
        for c in cutlass.range_constexpr(1, cute.size(scores, mode=[1])):
            best = self.extremum.pick(best, scores[r, c])
        for offset in QUAD_OFFSETS:
            best = self.extremum.pick(best, cute.arch.shuffle_sync_bfly(best, offset=offset))
        return best * self.scale_log2

    @cute.jit
    def _exponentiate(self, scores: cute.Tensor, r: cutlass.Constexpr, anchor: Float32):
        """P of row r in place; returns the sum of this thread's columns."""
        total = Float32(0.0)
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            # Not cute.arch.exp2, which is marked as having side effects; without fastmath it would check its range.
            p = cute.math.exp2(scores[r, c] * self.scale_log2 - anchor, fastmath=True)
            scores[r, c] = p
            total = total + p
        return total


@cute.jit
def scale_rows_if_needed(acc_O: cute.Tensor, correction: cute.Tensor):
    """Multiplies the warp's upper eight rows unless all their factors are 1, and its lower eight likewise."""
    for r in cutlass.range_constexpr(ROWS_OF_THREAD):
        if cute.arch.vote_any_sync(correction[r] < 1.0):
            scale_row(acc_O, r, correction[r])


def scale_rows(acc: cute.Tensor, factors: cute.Tensor):
    """Multiplies each of the thread's two rows by its factor."""
    for r in range(ROWS_OF_THREAD):
        scale_row(acc, r, factors[r])


def scale_row(acc: cute.Tensor, r: int, factor: Float32):
    """Multiplies one of the thread's rows by its factor."""
    values = rows_and_columns(acc)
    for c in range(cute.size(values, mode=[1])):
        values[r, c] = values[r, c] * factor
