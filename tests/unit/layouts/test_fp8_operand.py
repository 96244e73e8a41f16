"""The FP8 permutation pair: bijections that cancel, and that ask no other lane for anything."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa3.layouts import fp8_operand, fragments
from fa3.layouts.int_tuple import LayoutError

BLOCKS = st.integers(1, 8).map(lambda blocks: 32 * blocks)


@given(BLOCKS)
def test_the_permutation_is_a_bijection(n):
    columns = fp8_operand.slot_columns(n)
    assert sorted(columns) == list(range(n))
    assert columns == [fp8_operand.column_of_slot(slot) for slot in range(n)]
    assert [fp8_operand.slot_of_column(column) for column in columns] == list(range(n))


@given(st.integers(0, 100), st.integers(0, 3), st.integers(0, 3))
def test_the_permutation_as_a_formula(h, q, j):
    assert fp8_operand.column_of_slot(16 * h + 4 * q + j) == 16 * h + 8 * (j >> 1) + 2 * q + (j & 1)


@given(BLOCKS, st.integers(1, 20), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_the_two_permutations_cancel(n, rows, dims, seed):
    """P with permuted columns times V with permuted rows is P V, exactly, on integers."""
    dice = np.random.default_rng(seed)
    p, v = dice.integers(-1000, 1000, (rows, n)), dice.integers(-1000, 1000, (n, dims))
    columns = fp8_operand.slot_columns(n)
    permuted_v = np.array(fp8_operand.permute_rows(list(v)))
    assert np.array_equal(permuted_v, v[columns])
    assert np.array_equal(p[:, columns] @ permuted_v, p @ v)


@given(BLOCKS)
def test_the_registers_of_the_paper(n):
    order = fp8_operand.operand_registers(n).indices()
    assert order[:8] == [0, 1, 4, 5, 2, 3, 6, 7]
    assert order == [8 * (i // 8) + order[i % 8] for i in range(n // 2)]


@given(BLOCKS, st.integers(0, 127))
def test_no_lane_needs_another(n, thread):
    """Every byte a thread must supply as operand is one of its own accumulator registers, in that order."""
    accumulator, operand = fragments.accumulator(n), fragments.a_operand_8(n)
    registers = fp8_operand.operand_registers(n)
    for element in range(n // 2):
        row, slot = operand(thread, element) % 64, operand(thread, element) // 64
        wanted = row + 64 * fp8_operand.column_of_slot(slot)
        assert accumulator(thread, registers(element)) == wanted


@given(BLOCKS)
def test_words_are_operand_registers_told_apart(n):
    """Word (r, h, b), byte j is element j + 4 r + 8 h + 16 b of the operand fragment."""
    words, registers = fp8_operand.accumulator_words_view(n), fp8_operand.operand_registers(n)
    operand = fragments.a_operand_8_view(n)
    for j, r, h, b in np.ndindex(4, 2, 2, n // 32):
        element = operand((j, r, h), 0, b)
        assert words(j, r, h, b) == registers(element)


@pytest.mark.parametrize(
    "call",
    [
        lambda: fp8_operand.slots(24),
        lambda: fp8_operand.operand_registers(8),
        lambda: fp8_operand.accumulator_words_view(48),
        lambda: fp8_operand.permute_rows([1, 2, 3]),
    ],
)
def test_impossible_widths(call):
    with pytest.raises(LayoutError):
        call()
