"""The pictures show the numbers of the layouts: drawn without a display, and read back from the figure."""

import pytest

from fa3.layouts import accumulator, draw, owner, slot_columns
from fa3.layouts.smem import k_major

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def close_figures():
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


def labels(ax):
    """(column, row) -> text of every label in a table."""
    return {tuple(map(round, text.get_position())): text.get_text() for text in ax.texts}


def test_bank_groups_of_a_column_differ_only_with_the_swizzle():
    swizzled, plain = draw.bank_groups(k_major(64, 64, 16)), draw.bank_groups(k_major(64, 64, 16), swizzled=False)
    for piece in range(8):
        assert len({labels(swizzled)[piece, row] for row in range(8)}) == 8
        assert len({labels(plain)[piece, row] for row in range(8)}) == 1


def test_holders_and_registers_are_the_fragment():
    fragment = accumulator(16)
    threads, thread_5 = labels(draw.holders(fragment)), labels(draw.registers(fragment, 5, 16))
    for row in range(16):
        for column in range(16):
            thread, register = owner(row, column, 16)
            assert threads[column, row] == str(thread)
            assert thread_5.get((column, row)) == (str(register) if thread == 5 else None)


def test_a_permutation_has_a_strand_for_each_slot():
    ax = draw.permutation(slot_columns(16))
    assert [list(map(int, line.get_xdata())) for line in ax.lines] == [[c, s] for s, c in enumerate(slot_columns(16))]
