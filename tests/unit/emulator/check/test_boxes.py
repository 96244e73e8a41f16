"""Addresses of the elements of a TMA box, against what a store of the box writes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fa3.emulator import tma
from fa3.emulator.check.boxes import element_addresses
from fa3.emulator.memory import Global
from fa3.emulator.tma_descriptor import Descriptor

from ..assembler import aligned

DIMS = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@given(DIMS, st.lists(st.integers(1, 5), min_size=4, max_size=4), st.lists(st.integers(-3, 7), min_size=4, max_size=4))
def test_addresses_are_those_that_a_store_writes(dims: list[int], box: list[int], at: list[int]) -> None:
    """A tensor of 2-byte elements with gaps between its rows."""
    strides = [16 * 6]
    for dim in dims[1:-1]:
        strides.append(strides[-1] * dim + 32)
    memory = aligned(np.zeros(1 << 18, np.uint8))
    rank = len(dims)
    d = Descriptor(memory.ctypes.data, "u16", 2, 0, tuple(dims), tuple(strides[: rank - 1]), tuple(box[:rank]))
    space = Global()
    space.add("o", memory.ctypes.data, memory.nbytes)
    tma.store_box(space, d, tuple(at[:rank]), np.full((d.rows, d.row_bytes), 0xFF, np.uint8))
    addresses = element_addresses(d, tuple(at[:rank]))
    written = sorted(int(a) - memory.ctypes.data + i for a in addresses for i in range(2))
    assert written == np.flatnonzero(memory).tolist()
