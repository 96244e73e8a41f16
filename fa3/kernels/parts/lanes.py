"""Where a thread stands in its warpgroup's 64-row accumulator (see `fa3.layouts.fragments` for the whole map)."""

import cutlass.cute as cute

ROWS_OF_THREAD = 2
"""Rows of an m64nN accumulator that one thread holds."""
ROW_STEP = 8
"""How far apart they lie."""
QUAD_OFFSETS = (1, 2)
"""Butterfly offsets that join the four threads which share a row."""
THREADS = 128


def thread_of_warpgroup():
    return cute.arch.thread_idx()[0] % THREADS


def row_of_thread():
    """The upper of the thread's two rows, from 0 to 55."""
    return thread_of_warpgroup() // 32 * 16 + cute.arch.lane_idx() // 4


def place_in_quad():
    """0 to 3: which pair of every 8 columns the thread holds."""
    return cute.arch.lane_idx() % 4
