"""Shared and global memory against a plain bytearray, and what is a fault."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa3.emulator import bulk
from fa3.emulator.faults import Fault
from fa3.emulator.memory import POISON, SHARED_BASE, Global, Shared

SIZES = st.sampled_from([1, 2, 4, 8, 16])


@st.composite
def lanes(draw, nbytes):
    """(access size, element offsets in units of it) that fit `nbytes`."""
    size = draw(SIZES)
    return size, draw(st.lists(st.integers(0, nbytes // size - 1), min_size=1, max_size=32))


def random_bytes(draw, *shape):
    return np.frombuffer(draw(st.binary(min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))), np.uint8).reshape(
        shape
    )


# ------------------------------------------------------------------------------------------------ shared
@given(st.integers(48, 3000), st.data())
def test_shared_memory_is_a_bytearray(nbytes, data):
    shared, model = Shared(nbytes), bytearray([POISON] * nbytes)
    for _ in range(3):
        size, offsets = data.draw(lanes(nbytes))
        addresses = np.array(offsets, data.draw(st.sampled_from([np.int64, np.uint32]))) * size + SHARED_BASE
        values = random_bytes(data.draw, len(offsets), size)
        shared.scatter(addresses, values)
        for offset, value in zip(offsets, values, strict=True):
            model[offset * size : (offset + 1) * size] = value.tobytes()
        index = np.array(data.draw(st.lists(st.integers(0, nbytes - 1), min_size=4, max_size=4, unique=True)))
        square = random_bytes(data.draw, 2, 2)
        shared.write_at(index.reshape(2, 2) + SHARED_BASE, square)
        for offset, value in zip(index, square.reshape(-1), strict=True):
            model[offset] = value
        size, offsets = data.draw(lanes(nbytes))
        addresses = np.array(offsets) * size + SHARED_BASE
        got = shared.gather(addresses, size)
        assert [row.tobytes() for row in got] == [bytes(model[o * size : (o + 1) * size]) for o in offsets]
        assert shared.read_at(addresses.reshape(1, -1)).tolist() == [[model[o * size] for o in offsets]]
    assert shared.bytes[SHARED_BASE:].tobytes() == bytes(model)


@pytest.mark.parametrize(
    ("address", "size", "kind"),
    [
        (0, 4, "out of bounds"),
        (SHARED_BASE - 4, 4, "out of bounds"),
        (SHARED_BASE + 100, 4, "out of bounds"),
        (SHARED_BASE + 96, 8, "out of bounds"),  # begins inside, ends past the end
        (SHARED_BASE + 2, 4, "misaligned"),
        (SHARED_BASE + 8, 16, "misaligned"),
        (1 << 31, 4, "out of bounds"),
        (-4, 4, "out of bounds"),
    ],
)
def test_shared_faults_of_one_lane(address, size, kind):
    shared = Shared(100)
    addresses = np.array([SHARED_BASE, SHARED_BASE + 16, address])
    with pytest.raises(Fault, match="lane 2") as read:
        shared.gather(addresses, size)
    with pytest.raises(Fault, match="lane 2") as written:
        shared.scatter(addresses, np.zeros((3, size), np.uint8))
    assert read.value.kind == written.value.kind == kind
    assert (shared.bytes == POISON).all(), "nothing is written"


def test_shared_faults_of_tiles():
    shared = Shared(100)
    for index in (SHARED_BASE - 1, SHARED_BASE + 100):
        with pytest.raises(Fault, match="100 bytes of shared memory"):
            shared.read_at(np.array([SHARED_BASE, index]))
        with pytest.raises(Fault, match="100 bytes of shared memory"):
            shared.write_at(np.array([SHARED_BASE, index]), np.zeros(2, np.uint8))
    assert (shared.bytes == POISON).all()


WRITERS = [
    lambda s, a: s.scatter(np.array([a]), np.zeros((1, 4), np.uint8)),
    lambda s, a: s.write_at(np.array([a, a + 3]), np.zeros(2, np.uint8)),
    lambda s, a: bulk.to_shared(s, a, np.zeros(16, np.uint8)),
]


@given(st.sampled_from(WRITERS), st.integers(0, 511), st.integers(0, 8191), st.integers(1, 4096))
def test_the_version_changes_with_every_write(write, piece, lo, size):
    shared = Shared(8192)
    lo, address = SHARED_BASE + lo, SHARED_BASE + 16 * piece
    hi = min(lo + size, shared.end)
    before = shared.version(lo, hi)
    shared.remember("key", lo, hi, "value")
    write(shared, address)
    if address < hi and lo < address + 4:
        assert shared.version(lo, hi) != before and shared.derived("key") is None
    if address + 16 + 1024 <= lo or hi + 1024 <= address:
        assert shared.version(lo, hi) == before and shared.derived("key") == "value"
    assert shared.derived("other key") is None


def test_the_version_changes_on_every_page_of_a_write():
    shared = Shared(8192)
    pages = [(SHARED_BASE + 1024 * i, SHARED_BASE + 1024 * (i + 1)) for i in range(8)]
    before = [shared.version(*page) for page in pages]
    bulk.to_shared(shared, SHARED_BASE + 1040, np.zeros(3072, np.uint8))
    changed = [shared.version(*page) != old for page, old in zip(pages, before, strict=True)]
    assert changed == [False, True, True, True, True, False, False, False]


# ------------------------------------------------------------------------------------------------ global
class Tensors:
    """Two allocations with a gap, and a read-only one that overlaps the second; odd bases."""

    def __init__(self) -> None:
        self.storage = np.arange(4096, dtype=np.uint32).view(np.uint8)[:4096].copy()
        self.base = self.storage.ctypes.data
        self.memory = Global()
        for name, lo, hi, writable in (("q", 8, 1000, True), ("v", 1500, 2600, True), ("k", 2500, 4000, False)):
            self.memory.add(name, self.base + lo, hi - lo, writable)

    def legal(self, lo, hi, write):
        """By the byte: one allocation holds all of [lo, hi)."""
        ranges = [(8, 1000), (1500, 2600)] + ([] if write else [(2500, 4000)])
        return any(a <= lo and hi <= b for a, b in ranges)


@given(st.data())
def test_global_memory_is_the_processs_own(data):
    tensors = Tensors()
    model = bytearray(tensors.storage.tobytes())
    size = data.draw(SIZES)
    skew = -tensors.base % size
    candidates = list(range(skew, 4096 - size, size))
    readable = [o for o in candidates if tensors.legal(o, o + size, False)]
    writable = [o for o in candidates if tensors.legal(o, o + size, True)]
    offsets = data.draw(st.lists(st.sampled_from(readable), min_size=1, max_size=32))
    got = tensors.memory.gather(np.array(offsets, np.uint64) + np.uint64(tensors.base), size)
    assert [row.tobytes() for row in got] == [bytes(model[o : o + size]) for o in offsets]
    offsets = data.draw(st.lists(st.sampled_from(writable), min_size=1, max_size=32))
    values = random_bytes(data.draw, len(offsets), size)
    tensors.memory.scatter(np.array(offsets, np.uint64) + np.uint64(tensors.base), values)
    for offset, value in zip(offsets, values, strict=True):
        model[offset : offset + size] = value.tobytes()
    assert tensors.storage.tobytes() == bytes(model)


@given(st.integers(0, 4096), st.integers(1, 64), st.booleans())
def test_a_window_holds_its_range_or_faults(lo, size, write):
    tensors = Tensors()
    lo, hi = tensors.base + lo, tensors.base + lo + size
    if tensors.legal(lo - tensors.base, hi - tensors.base, write):
        base, whole = tensors.memory.window(lo, hi, write)
        assert whole.ctypes.data == base <= lo and hi <= base + len(whole)
    else:
        with pytest.raises(Fault):
            tensors.memory.window(lo, hi, write)


def test_global_faults_say_what_is_near():
    tensors = Tensors()
    base = tensors.base

    def fault(offsets, size, write):
        addresses = np.array(offsets, np.uint64) + np.uint64(base)
        with pytest.raises(Fault) as caught:
            if write:
                tensors.memory.scatter(addresses, np.zeros((len(offsets), size), np.uint8))
            else:
                tensors.memory.gather(addresses, size)
        return f"{caught.value.kind} | {caught.value.message}"

    before = tensors.storage.copy()
    assert "out of bounds | read of 4 bytes" in fault([16, 1000], 4, False)
    assert "ends 4 bytes past 'q'" in fault([16, 1000], 4, False)
    assert "ends 3 bytes past 'q'" in fault([1002], 1, False)
    assert "begins 4 bytes before 'q'" in fault([4], 4, False)
    assert "ends 8 bytes past 'q'" in fault([16, 32, 1600, 1000], 8, True)
    assert "begins 4 bytes before 'v'" in fault([1496], 4, True)
    assert "read only | write of 4 bytes" in fault([1600, 3000], 4, True)
    assert "'k' [" in fault([3000], 4, True) and "may only be read" in fault([3000], 4, True)
    assert "misaligned | lane 1: global read of 4 bytes" in fault([16, 18], 4, False)
    assert np.array_equal(tensors.storage, before), "nothing is written"
    with pytest.raises(Fault, match="there is no global memory"):
        Global().gather(np.array([64], np.uint64), 4)
    with pytest.raises(Fault, match="past 'k'"):
        tensors.memory.gather(np.array([2**64 - 16], np.uint64), 16)


# ------------------------------------------------------------------------------------------------ bulk copies
def test_bulk_copies_move_ranges():
    shared, storage = Shared(256), np.arange(256, dtype=np.uint8)
    memory = Global()
    memory.add("x", storage.ctypes.data, 256)
    bulk.to_shared(shared, SHARED_BASE + 32, bulk.load(memory, storage.ctypes.data + 16, 48))
    assert shared.bytes[SHARED_BASE + 32 : SHARED_BASE + 80].tolist() == list(range(16, 64))
    assert shared.bytes[SHARED_BASE + 31] == shared.bytes[SHARED_BASE + 80] == POISON
    bulk.store(memory, storage.ctypes.data + 128, bulk.from_shared(shared, SHARED_BASE + 32, 32))
    assert storage.tolist() == [*range(128), *range(16, 48), *range(160, 256)]


def test_what_a_bulk_copy_has_read_does_not_change_any_more():
    shared, storage = Shared(64), np.zeros(64, np.uint8)
    memory = Global()
    memory.add("x", storage.ctypes.data, 64)
    first, second = bulk.load(memory, storage.ctypes.data, 64), bulk.from_shared(shared, SHARED_BASE, 64)
    storage[:], shared.bytes[SHARED_BASE:] = 1, 1
    assert set(first) == {0} and set(second) == {POISON}


def test_a_bulk_reduction_adds_fp32():
    storage = np.arange(16, dtype=np.float32)
    storage[3] = 1e-40
    memory = Global()
    memory.add("dq", storage.ctypes.data, 64)
    bulk.store(memory, storage.ctypes.data, np.full(8, 0.5, np.float32).view(np.uint8), "add", "f32")
    assert storage.tolist() == [0.5, 1.5, 2.5, 0.5, 4.5, 5.5, 6.5, 7.5, *range(8, 16)]
    storage[:4] = 1e-40
    bulk.store(memory, storage.ctypes.data, np.full(4, 1e-40, np.float32).view(np.uint8), "add", "f32")
    assert storage[:4].tolist() == [0, 0, 0, 0], "subnormal numbers are flushed"


def test_bulk_faults():
    shared, storage = Shared(256), np.zeros(256, np.uint8)
    memory = Global()
    memory.add("lse", storage.ctypes.data, 256)
    for call in (
        lambda: bulk.load(memory, storage.ctypes.data + 8, 16),
        lambda: bulk.load(memory, storage.ctypes.data, 20),
        lambda: bulk.to_shared(shared, SHARED_BASE + 4, np.zeros(16, np.uint8)),
        lambda: bulk.from_shared(shared, SHARED_BASE, 8),
    ):
        with pytest.raises(Fault, match="multiples of 16") as caught:
            call()
        assert caught.value.kind == "misaligned"
    with pytest.raises(Fault, match="ends 16 bytes past 'lse'"):
        bulk.store(memory, storage.ctypes.data + 240, np.zeros(32, np.uint8))
    with pytest.raises(Fault, match="bulk copy of 32 bytes at 1264 ends 16 bytes past"):
        bulk.to_shared(shared, SHARED_BASE + 240, np.zeros(32, np.uint8))
