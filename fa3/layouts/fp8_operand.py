"""The permutation between an fp32 accumulator and an 8-bit A operand, and its twin on the other operand's rows.

In an accumulator a thread holds pairs of neighbouring columns; in the 8-bit A operand of the next WGMMA it holds
fours of neighbouring k-slots. Of every eight accumulator registers {d0 .. d7} of a thread, the operand wants

    {d0 d1 d4 d5   d2 d3 d6 d7}

in its two words: d0 d1 d4 d5 lie in the thread's first row, d2 d3 d6 d7 in its second. Packing them so costs no
exchange between lanes, but it puts the columns of P out of order: k-slot 16 h + 4 q + j gets column
16 h + 8 (j >> 1) + 2 q + (j & 1). A product sums over k, so its value does not change if the rows of V are put into the
same order: the two permutations cancel, and the output is not permuted at all.

Source: FlashAttention-3 (arXiv 2407.08608), section 3.3; PTX ISA, fragments of wgmma .m64nNk32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from fa3.layouts.algebra import Layout, right_inverse
from fa3.layouts.int_tuple import LayoutError

__all__ = [
    "accumulator_words_view",
    "column_of_slot",
    "operand_registers",
    "permute_rows",
    "slot_columns",
    "slot_of_column",
    "slots",
]

Item = TypeVar("Item")


def slots(n: int) -> Layout:
    """k-slot (j & 1, j >> 1, q, h) -> column, for N columns: the permutation as a layout. N is a multiple of 16."""
    if n < 16 or n % 16:
        raise LayoutError(f"the permutation acts on blocks of 16 columns, got {n}")
    return Layout((2, 2, 4, n // 16), (1, 8, 2, 16))


def column_of_slot(slot: int) -> int:
    """The accumulator column that is packed into a k-slot."""
    h, q, j = slot // 16, slot % 16 // 4, slot % 4
    return 16 * h + 8 * (j >> 1) + 2 * q + (j & 1)


def slot_of_column(column: int) -> int:
    """The k-slot into which an accumulator column is packed; the inverse of `column_of_slot`."""
    return right_inverse(slots(16 * (column // 16 + 1)))(column)


def slot_columns(n: int) -> list[int]:
    """The columns of all N k-slots in order: [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15, 16, ...]."""
    return slots(n).indices()


def permute_rows(rows: Sequence[Item]) -> list[Item]:
    """The twin on V: its rows (keys) in the order of the k-slots. `rows[slot_columns(n)]` does it to an array."""
    return [rows[column] for column in slot_columns(len(rows))]


def operand_registers(n: int) -> Layout:
    """Element of the thread's packed 8-bit operand -> accumulator register: {0 1 4 5 2 3 6 7}, then 8 more, and so on.

    This is the same permutation seen by one thread; that it needs no thread number is why no lane asks another.
    """
    if n < 16 or n % 16:
        raise LayoutError(f"the permutation acts on blocks of 16 columns, got {n}")
    return Layout((2, 2, 2, n // 16), (1, 4, 2, 8))


def accumulator_words_view(n: int) -> Layout:
    """(byte (2, 2), row 0..1, half 0..1, k-block) -> accumulator register, for N columns, N a multiple of 32.

    Coordinate (j, r, h, b) names the four registers that become word (r, h) of k-block b; it is `operand_registers`
    with the words told apart.
    """
    if n < 32 or n % 32:
        raise LayoutError(f"an 8-bit A operand has k-blocks of 32, got {n} columns")
    return Layout(((2, 2), 2, 2, n // 32), ((1, 4), 2, 8, 16))
