"""Fragments of WGMMA operands against the PTX ISA's tables, written here a second time from its text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa3.layouts import fragments
from fa3.layouts.algebra import equivalent
from fa3.layouts.int_tuple import LayoutError

THREADS = st.integers(0, 127)
WIDTHS = st.integers(1, 32).map(lambda octets: 8 * octets)


def ptx_d(thread, i):
    """PTX ISA, wgmma .m64nNk16, matrix D: element d_i of a thread."""
    group, in_group = (thread % 32) >> 2, thread % 4
    row = group if i % 4 < 2 else group + 8
    return (thread // 32) * 16 + row, (i // 4) * 8 + in_group * 2 + (i % 2)


def ptx_a16(thread, i):
    """PTX ISA, wgmma .m64nNk16, A in registers: a0 a1 | a2 a3 one row block below | a4 .. a7 eight columns right."""
    group, in_group = (thread % 32) >> 2, thread % 4
    block, i = divmod(i, 8)
    row = group + 8 if i in (2, 3, 6, 7) else group
    return (thread // 32) * 16 + row, 16 * block + in_group * 2 + (i & 1) + (8 if i >= 4 else 0)


def ptx_a8(thread, i):
    """PTX ISA, wgmma .m64nNk32, A in registers: four neighbours | eight rows below | the same, 16 columns right."""
    group, in_group = (thread % 32) >> 2, thread % 4
    block, i = divmod(i, 16)
    row = group if i < 4 or 8 <= i < 12 else group + 8
    return (thread // 32) * 16 + row, 32 * block + in_group * 4 + (i & 3) + (16 if i >= 8 else 0)


@pytest.mark.parametrize(
    ("layout", "ptx", "width"),
    [
        (fragments.accumulator, ptx_d, 8),
        (fragments.accumulator, ptx_d, 176),
        (fragments.accumulator, ptx_d, 256),
        (fragments.a_operand_16, ptx_a16, 16),
        (fragments.a_operand_16, ptx_a16, 176),
        (fragments.a_operand_8, ptx_a8, 32),
        (fragments.a_operand_8, ptx_a8, 224),
    ],
)
def test_fragments_are_those_of_the_ptx_isa(layout, ptx, width):
    tv = layout(width)
    for thread in range(128):
        for register in range(width // 2):
            row, column = ptx(thread, register)
            assert tv(thread, register) == row + 64 * column
    assert sorted(tv.indices()) == list(range(64 * width)), "every element has one owner"


@given(THREADS, st.integers(0, 127))
def test_rows_and_columns_by_formula(thread, register):
    assert (fragments.row_of(thread, register), fragments.column_of(thread, register)) == ptx_d(thread, register)
    assert fragments.row_of(thread + 256, register) == fragments.row_of(thread, register)


@given(WIDTHS, st.data())
def test_the_owner_is_found(n, data):
    row, column = data.draw(st.integers(0, 63)), data.draw(st.integers(0, n - 1))
    thread, register = fragments.owner(row, column, n)
    assert 0 <= register < n // 2
    assert ptx_d(thread, register) == (row, column)


@given(WIDTHS, THREADS)
def test_the_matrix_view_is_two_rows_of_a_thread(n, thread):
    view = fragments.rows_and_columns_view(n)
    assert sorted(view.indices()) == list(range(n // 2))
    rows, columns = fragments.rows_of(thread), fragments.columns_of(thread, n)
    assert rows[1] == rows[0] + 8 and columns == sorted(columns) and len(columns) == n // 4
    for row in range(2):
        for column in range(n // 4):
            assert ptx_d(thread, view(row, column)) == (rows[row], columns[column])


@given(WIDTHS, THREADS)
def test_a_quad_shares_its_rows(n, thread):
    """Reducing over a thread's registers and then over lanes xor 1, xor 2 reduces whole rows."""
    quad = [thread, thread ^ 1, thread ^ 2, thread ^ 3]
    assert {fragments.rows_of(t) for t in quad} == {fragments.rows_of(thread)}
    assert sorted(column for t in quad for column in fragments.columns_of(t, n)) == list(range(n))


@given(THREADS, st.integers(0, 127))
def test_only_a_constant_of_the_quad_separates_columns(thread, register):
    static = fragments.column_of(0, register)
    assert fragments.column_of(thread, register) == static + fragments.quad_column_of(thread)


@pytest.mark.parametrize("n", range(16, 257, 48))
def test_an_accumulator_is_a_16_bit_operand(n):
    """The same function of (thread, register), and the operand's view leaves registers in place."""
    assert equivalent(fragments.accumulator(n), fragments.a_operand_16(n))
    assert fragments.a_operand_16_view(n).indices() == list(range(n // 2))


def test_an_accumulator_is_no_8_bit_operand():
    assert not equivalent(fragments.accumulator(32), fragments.a_operand_8(32))
    assert fragments.a_operand_8_view(64).indices() == list(range(32))


@pytest.mark.parametrize(
    "call",
    [
        lambda: fragments.accumulator(12),
        lambda: fragments.accumulator(0),
        lambda: fragments.a_operand_16(24),
        lambda: fragments.a_operand_8(48),
        lambda: fragments.owner(64, 0, 16),
        lambda: fragments.owner(0, 16, 16),
    ],
)
def test_impossible_fragments(call):
    with pytest.raises(LayoutError):
        call()
