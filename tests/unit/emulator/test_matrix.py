"""ldmatrix and stmatrix against the PTX ISA's sentences, element by element."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa3.emulator.faults import Fault
from fa3.emulator.matrix import load_matrices, store_matrices
from fa3.emulator.memory import SHARED_BASE, Shared

NBYTES = 2048
COUNTS = st.sampled_from([1, 2, 4])
ADDRESSES = st.lists(st.integers(0, NBYTES // 16 - 1), min_size=32, max_size=32, unique=True).map(
    lambda rows: np.array(rows) * 16 + SHARED_BASE
)


def filled(seed):
    shared = Shared(NBYTES)
    shared.bytes[SHARED_BASE:] = np.random.default_rng(seed).integers(0, 256, NBYTES)
    return shared


def half(shared, address):
    return int(shared.bytes[address]) | int(shared.bytes[address + 1]) << 8


@given(COUNTS, ADDRESSES, st.booleans(), st.integers(0, 1000))
def test_ldmatrix(count, addresses, transpose, seed):
    shared = filled(seed)
    registers = load_matrices(shared, addresses, count, transpose)
    assert registers.shape == (count, 32) and registers.dtype == np.uint32
    for matrix in range(count):
        rows = addresses[8 * matrix : 8 * matrix + 8]
        for lane in range(32):
            elements = [(lane // 4, lane % 4 * 2), (lane // 4, lane % 4 * 2 + 1)]
            if transpose:
                elements = [(column, row) for row, column in elements]
            low, high = (half(shared, rows[row] + 2 * column) for row, column in elements)
            assert registers[matrix, lane] == low | high << 16


@given(COUNTS, ADDRESSES, st.booleans(), st.integers(0, 1000))
def test_stmatrix_undoes_ldmatrix(count, addresses, transpose, seed):
    shared, copy = filled(seed), filled(seed + 1)
    before = copy.bytes.copy()
    store_matrices(copy, addresses, load_matrices(shared, addresses, count, transpose), transpose)
    touched = (addresses[: 8 * count, None] + np.arange(16)).reshape(-1)
    assert np.array_equal(copy.bytes[touched], shared.bytes[touched])
    untouched = np.setdiff1d(np.arange(len(before)), touched)
    assert np.array_equal(copy.bytes[untouched], before[untouched])


@given(COUNTS, st.integers(0, 31), st.sampled_from([(8, "misaligned"), (NBYTES, "out of bounds")]))
def test_faults_of_the_lanes_that_count(count, lane, wrong):
    shared, addresses = filled(0), np.arange(32) * 16 + SHARED_BASE
    addresses[lane] = SHARED_BASE + wrong[0]
    if lane >= 8 * count:
        load_matrices(shared, addresses, count, False)
        return
    for call in (
        lambda: load_matrices(shared, addresses, count, False),
        lambda: store_matrices(shared, addresses, np.zeros((count, 32), np.uint32), True),
    ):
        with pytest.raises(Fault, match=f"lane {lane}:") as caught:
            call()
        assert caught.value.kind == wrong[1]
