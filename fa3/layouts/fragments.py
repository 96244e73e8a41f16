"""Which thread of a warpgroup holds element (row, column) of a WGMMA operand, and in which register.

A warpgroup has 128 threads. With warp w = thread // 32, g = (thread % 32) // 4 and q = thread % 4, register r of an
m64nN fp32 accumulator is written r = v0 + 2 v1 + 4 n8, and holds

    row    = 16 w + g + 8 v1
    column = 8 n8 + 2 q + v0.

So a thread owns two rows, 8 apart, and shares each with the three other threads of its quad: a row is reduced over
registers and then over the quad. The maps are layouts from (thread, register) to row + 64 column, the form in which
CuTe writes "TV layouts". Source: PTX ISA, "Register Fragments for wgmma.mma_async".

`row_of` and `column_of` use only shifts, masks and sums, so they take Python integers and the DSL's alike.
"""

from __future__ import annotations

from fa3.layouts.algebra import Layout, right_inverse
from fa3.layouts.int_tuple import LayoutError

__all__ = [
    "ROWS",
    "THREADS",
    "a_operand_8",
    "a_operand_8_view",
    "a_operand_16",
    "a_operand_16_view",
    "accumulator",
    "column_of",
    "columns_of",
    "owner",
    "quad_column_of",
    "row_of",
    "rows_and_columns_view",
    "rows_of",
]

THREADS = 128
"""Threads of a warpgroup."""

ROWS = 64
"""Rows of one WGMMA tile."""


def accumulator(n: int) -> Layout:
    """(thread, register) -> row + 64 column of an m64nN fp32 accumulator. N is a multiple of 8 from 8 to 256."""
    _check(n, 8, "columns of an accumulator")
    return Layout(((4, 8, 4), (2, 2, n // 8)), ((128, 1, 16), (64, 8, 512)))


def a_operand_16(k: int) -> Layout:
    """(thread, register) -> row + 64 column of the 16-bit A operand: K/16 k-blocks of 8 elements. K % 16 == 0.

    It is the same function as `accumulator(k)`: an accumulator, converted in place, already is an A operand.
    """
    _check(k, 16, "columns of a 16-bit A operand")
    return Layout(((4, 8, 4), (2, 2, 2, k // 16)), ((128, 1, 16), (64, 8, 512, 1024)))


def a_operand_8(k: int) -> Layout:
    """(thread, register) -> row + 64 k-slot of the 8-bit A operand: K/32 k-blocks of 16 elements. K % 32 == 0.

    A thread's elements come in fours of neighbouring k-slots, where an accumulator's come in twos: `fp8_operand` says
    how the one becomes the other.
    """
    _check(k, 32, "columns of an 8-bit A operand")
    return Layout(((4, 8, 4), (4, 2, 2, k // 32)), ((256, 1, 16), (64, 8, 1024, 2048)))


def row_of(thread: int, register: int) -> int:
    """The row 0..63 of an accumulator register. `thread` counts within the warpgroup or from a multiple of 128."""
    return ((thread >> 5) & 3) * 16 + ((thread >> 2) & 7) + 8 * ((register >> 1) & 1)


def column_of(thread: int, register: int) -> int:
    """The column 0..N-1 of an accumulator register: `quad_column_of(thread)` plus what the register alone decides."""
    return quad_column_of(thread) + (8 * (register >> 2) + (register & 1))


def quad_column_of(thread: int) -> int:
    """The thread's first column, 2 (thread % 4): the only part of a column that differs between threads.

    A mask compares the register's static part 8 n8 + v0 with a limit from which this has been subtracted once.
    """
    return (thread & 3) * 2


def rows_of(thread: int) -> tuple[int, int]:
    """The two rows of a thread, in the order of `rows_and_columns_view`."""
    return row_of(thread, 0), row_of(thread, 2)


def columns_of(thread: int, n: int) -> list[int]:
    """The N/4 columns of a thread, in the order of `rows_and_columns_view`; the same in both of its rows."""
    view = rows_and_columns_view(n)[1]
    return [column_of(thread, view(i)) for i in range(view.size)]


def owner(row: int, column: int, n: int) -> tuple[int, int]:
    """(thread, register) that holds an element of an m64nN accumulator."""
    fragment = accumulator(n)
    if not (0 <= row < ROWS and 0 <= column < n):
        raise LayoutError(f"({row}, {column}) is outside a {ROWS} x {n} accumulator")
    position = right_inverse(fragment)(row + ROWS * column)
    return position % THREADS, position // THREADS


def rows_and_columns_view(n: int) -> Layout:
    """(row 0..1, column (2, N/8)) -> register: an accumulator as the small matrix that a thread sees of it."""
    return Layout((2, (2, n // 8)), (2, (1, 4)))


def a_operand_16_view(k: int) -> Layout:
    """The fragment ((2, 2, 2), 1, K/16) of the 16-bit A operand -> register. It is the identity: nothing moves."""
    return Layout(((2, 2, 2), 1, k // 16), ((1, 2, 4), 0, 8))


def a_operand_8_view(k: int) -> Layout:
    """The fragment ((4, 2, 2), 1, K/32) of the 8-bit A operand -> element in the thread's packed registers."""
    return Layout(((4, 2, 2), 1, k // 32), ((1, 4, 8), 0, 16))


def _check(extent: int, multiple: int, what: str) -> None:
    if extent < multiple or extent % multiple:
        raise LayoutError(f"the {what} must be a positive multiple of {multiple}, got {extent}")
