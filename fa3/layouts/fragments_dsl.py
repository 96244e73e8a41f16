"""Register views of WGMMA fragments inside a kernel: the DSL twins of `fa3.layouts.fragments`.

Every function here re-views registers that a thread already holds. Nothing is moved, converted or copied, so a view
costs no instruction. `fragments.py` states the same maps as integers, and a test compares the two at every coordinate.

The environment variable CUTE_DSL_ARCH must say sm_90a before this module is imported (`fa3.compile` does that).
"""

from __future__ import annotations

import cutlass.cute as cute

__all__ = ["as_a_operand_16", "rows_and_columns"]


def rows_and_columns(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator as a small matrix: coordinate (row, column), shape (2, (2, N/8)).

    `acc` is the fp32 accumulator of one m64nN WGMMA, as `tiled_mma.partition_shape_C((64 * warpgroups, N))` shapes it:
    ((2, 2, N/8), 1, 1). Row 0 and 1 of the view are the thread's two rows, 8 apart in the tile; its N/4 columns come in
    pairs of neighbours. `fragments.row_of` and `fragments.column_of` say where each lies in the tile.

    Raises ValueError at trace time if `acc` has another shape (more than one WGMMA tile, or an operand's fragment).
    """
    octets = _octets_of(acc)
    return cute.make_tensor(acc.iterator, cute.make_layout((2, (2, octets)), stride=(2, (1, 4))))


def as_a_operand_16(p: cute.Tensor) -> cute.Tensor:
    """A 16-bit copy of an accumulator, seen as the A operand of the next WGMMA: shape ((2, 2, 2), 1, N/16).

    `p` has an accumulator's shape ((2, 2, N/8), 1, 1) and 16-bit elements. The accumulator of S and the A operand of
    P V keep the same elements in the same thread and the same order, so this is the identity on registers; only the
    grouping changes, from octets of columns to k-blocks of 16. Index one k-block with `view[None, None, kb]`.

    Raises ValueError at trace time for another shape, an element that has not 16 bits, or N not a multiple of 16.
    """
    octets = _octets_of(p)
    if p.element_type.width != 16:
        raise ValueError(f"as_a_operand_16 wants 16-bit elements, got {p.element_type}")
    if octets % 2:
        raise ValueError(f"as_a_operand_16 wants a multiple of 16 columns (one k-block), got {8 * octets}")
    return cute.make_tensor(p.iterator, cute.make_layout(((2, 2, 2), 1, octets // 2), stride=((1, 2, 4), 0, 8)))


def _octets_of(fragment: cute.Tensor) -> int:
    """The number of 8-column groups of an accumulator fragment ((2, 2, N/8), 1, 1), after checking that it is one."""
    shape = fragment.shape
    one_tile = (
        isinstance(shape, tuple) and isinstance(shape[0], tuple) and shape[0][:2] == (2, 2) and len(shape[0]) == 3
    )
    if not one_tile or cute.size(shape) != cute.size(shape[0]):
        raise ValueError(f"expected the accumulator fragment ((2, 2, N/8), 1, 1) of one m64nN WGMMA, got shape {shape}")
    if cute.cosize(fragment.layout) != cute.size(shape):
        raise ValueError(f"expected a contiguous accumulator fragment, got layout {fragment.layout}")
    return shape[0][2]
