"""Tensor copies against loops over elements."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fa3.emulator import tma
from fa3.emulator.faults import Fault
from fa3.emulator.memory import SHARED_BASE, Global, Shared
from fa3.emulator.tma import Descriptor
from fa3.layouts.swizzle import Swizzle

ITEMS = {"u8": 1, "bf16": 2, "f16": 2, "f32": 4, "u32": 4, "s32": 4, "u64": 8}
SWIZZLES = {0: Swizzle(0, 4, 3), 32: Swizzle(1, 4, 3), 64: Swizzle(2, 4, 3), 128: Swizzle(3, 4, 3)}


class Tensor:
    """A descriptor of one to five dimensions over a buffer of its own, and coordinates that may be anywhere."""

    def __init__(self, draw, dtypes=tuple(ITEMS)):
        dtype = draw(st.sampled_from(dtypes))
        item, rank = ITEMS[dtype], draw(st.integers(1, 5))
        swizzle = draw(st.sampled_from(sorted(SWIZZLES)))
        pieces = draw(st.integers(1, min(4, (swizzle or 64) // 16)))
        box = (16 * pieces // item, *(draw(st.integers(1, 3)) for _ in range(rank - 1)))
        dims = (draw(st.integers(1, 2 * box[0])), *(draw(st.integers(1, 4)) for _ in range(rank - 1)))
        strides, reach = [0] * (rank - 1), -(-dims[0] * item // 16) * 16
        for i in draw(st.permutations(range(rank - 1))):
            strides[i] = reach + 16 * draw(st.integers(0, 2))
            reach = strides[i] * dims[i + 1]
        self.storage = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, reach + 32).astype(np.uint8)
        self.offset = -self.storage.ctypes.data % 16
        base = self.storage.ctypes.data + self.offset
        self.d = Descriptor(base, dtype, item, swizzle, dims, tuple(strides), box)
        self.coords = tuple(draw(st.integers(-size - 1, dim + 1)) for size, dim in zip(box, dims, strict=True))
        self.memory = Global()
        self.memory.add("x", self.storage.ctypes.data, len(self.storage))

    def elements(self):
        """(row, byte within the row, offset in the storage or None out of bounds) of every element of the box."""
        d = self.d
        for position in itertools.product(*(range(size) for size in reversed(d.box))):
            position = position[::-1]
            row = 0
            for size, index in zip(reversed(d.box[1:]), reversed(position[1:]), strict=True):
                row = row * size + index
            place = [c + i for c, i in zip(self.coords, position, strict=True)]
            inside = all(0 <= p < dim for p, dim in zip(place, d.dims, strict=True))
            steps = (d.item, *d.strides)
            offset = self.offset + sum(p * step for p, step in zip(place, steps, strict=True))
            yield row, position[0] * d.item, offset if inside else None


@given(st.data())
def test_loads(data):
    tensor = Tensor(data.draw)
    assert tensor.d.problems() == []
    box = tma.load_box(tensor.memory, tensor.d, tensor.coords)
    assert box.shape == (tensor.d.rows, tensor.d.row_bytes) and box.size == tensor.d.bytes
    touched = []
    for row, byte, offset in tensor.elements():
        item = tensor.d.item
        expected = tensor.storage[offset : offset + item] if offset is not None else np.zeros(item)
        assert np.array_equal(box[row, byte : byte + item], expected)
        touched += [] if offset is None else [offset, offset + item]
    start = tensor.storage.ctypes.data
    expected_range = (start + min(touched), start + max(touched)) if touched else (0, 0)
    assert tma.global_range(tensor.d, tensor.coords) == expected_range


@given(st.data())
def test_stores(data):
    tensor = Tensor(data.draw)
    box = np.random.default_rng(1).integers(0, 256, (tensor.d.rows, tensor.d.row_bytes)).astype(np.uint8)
    expected = tensor.storage.copy()
    for row, byte, offset in tensor.elements():
        if offset is not None:
            expected[offset : offset + tensor.d.item] = box[row, byte : byte + tensor.d.item]
    tma.store_box(tensor.memory, tensor.d, tensor.coords, box)
    assert np.array_equal(tensor.storage, expected)


TORCH = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "s32": torch.int32}
NUMPY = {"u8": np.uint8, "u32": np.uint32, "u64": np.uint64}
REDUCTIONS = [(d, op) for d in (*TORCH, *NUMPY) for op in ("add", "min", "max")] + [
    (d, op) for d in ("u32", "u64") for op in ("and", "or", "xor")
]


def one_reduction(dtype, operation, old, new):
    """Bytes of one element, by torch for the types that numpy lacks. Subnormal fp32 sums are not drawn."""
    if dtype in NUMPY:
        names = {"add": np.add, "min": np.minimum, "max": np.maximum}
        function = names.get(operation) or getattr(np, f"bitwise_{operation}")
        return function(old.view(NUMPY[dtype]), new.view(NUMPY[dtype])).view(np.uint8)
    a, b = (torch.from_numpy(x.copy()).view(TORCH[dtype]) for x in (old, new))
    function = {"add": torch.add, "min": torch.fmin, "max": torch.fmax}[operation]
    return function(a, b).view(torch.uint8).numpy()


@pytest.mark.parametrize(("dtype", "operation"), REDUCTIONS)
@settings(max_examples=20)
@given(st.data())
def test_reductions(dtype, operation, data):
    tensor = Tensor(data.draw, (dtype,))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    box = rng.integers(0, 256, (tensor.d.rows, tensor.d.row_bytes)).astype(np.uint8)
    if dtype in ("bf16", "f16", "f32"):
        tensor.storage[:] = 0
        for target in (tensor.storage[tensor.offset : tensor.offset + tensor.storage.size // 16 * 16 - 16], box):
            values = rng.standard_normal(target.size // tensor.d.item, np.float32)
            target[...] = torch.from_numpy(values).to(TORCH[dtype]).view(torch.uint8).numpy().reshape(target.shape)
    expected = tensor.storage.copy()
    for row, byte, offset in tensor.elements():
        if offset is not None:
            old, new = expected[offset : offset + tensor.d.item], box[row, byte : byte + tensor.d.item]
            expected[offset : offset + tensor.d.item] = one_reduction(dtype, operation, old, new)
    tma.store_box(tensor.memory, tensor.d, tensor.coords, box, operation)
    assert np.array_equal(tensor.storage, expected)


def test_a_reduction_into_rows_that_are_the_same_memory_adds_all_of_them():
    storage = np.zeros(8, np.float32)
    memory = Global()
    memory.add("sum", storage.ctypes.data, 32)
    d = Descriptor(storage.ctypes.data, "f32", 4, 0, (4, 5), (0,), (4, 3))
    tma.store_box(memory, d, (0, 0), np.ones((3, 4), np.float32).view(np.uint8), "add")
    assert storage.tolist() == [3, 3, 3, 3, 0, 0, 0, 0]


def test_a_reduction_that_does_not_exist():
    storage = np.zeros(8, np.float32)
    memory = Global()
    memory.add("sum", storage.ctypes.data, 32)
    d = Descriptor(storage.ctypes.data, "f32", 4, 0, (4,), (), (4,))
    with pytest.raises(Fault, match=r"reduction \.xor of \.f32") as caught:
        tma.store_box(memory, d, (0,), np.zeros((1, 16), np.uint8), "xor")
    assert caught.value.kind == "unsupported"


# ------------------------------------------------------------------------------------------------ bounds
def tile(memory_rows=8, dims=(64, 8), box=(64, 4)):
    storage = np.zeros(memory_rows * 128, np.uint8)
    memory = Global()
    memory.add("k", storage.ctypes.data, storage.size)
    return storage, memory, Descriptor(storage.ctypes.data, "bf16", 2, 128, dims, (128,), box)


def test_a_box_outside_the_tensor_touches_no_memory():
    _, memory, d = tile()
    nowhere = replace(d, base=1 << 50)
    for coords in ((0, 8), (0, -4), (64, 0), (-64, 0), (2**31 - 1, -(2**31))):
        assert not tma.load_box(memory, nowhere, coords).any()
        tma.store_box(memory, nowhere, coords, np.ones((4, 128), np.uint8))
        tma.store_box(memory, nowhere, coords, np.ones((4, 128), np.uint8), "add")


def test_a_tensor_that_is_larger_than_its_memory_faults():
    _, memory, d = tile(memory_rows=7)
    tma.load_box(memory, d, (0, 3))
    for call in (
        lambda: tma.load_box(memory, d, (0, 4)),
        lambda: tma.store_box(memory, d, (0, 4), np.zeros((4, 128), np.uint8)),
    ):
        with pytest.raises(Fault, match=r"the box at \(0, 4\) .* ends 128 bytes past 'k'") as caught:
            call()
        assert caught.value.kind == "out of bounds"
    with pytest.raises(Fault, match="3 coordinates for a descriptor of 2 dimensions"):
        tma.load_box(memory, d, (0, 0, 0))


def test_a_store_to_memory_that_may_only_be_read():
    storage = np.zeros(1024, np.uint8)
    memory = Global()
    memory.add("q", storage.ctypes.data, 1024, writable=False)
    d = Descriptor(storage.ctypes.data, "bf16", 2, 128, (64, 8), (128,), (64, 4))
    with pytest.raises(Fault, match="'q'") as caught:
        tma.store_box(memory, d, (0, 0), np.zeros((4, 128), np.uint8))
    assert caught.value.kind == "read only"


@given(st.integers(0, 60), st.integers(0, 3), st.integers(1, 40))
def test_addresses_wrap_around(first, head, length):
    """Ragged tensors: two huge coordinates whose strides cancel modulo 2^64 move the bound of a sequence to its end."""
    storage = np.random.default_rng(first).integers(0, 256, (128, 4, 256)).astype(np.uint8)
    memory = Global()
    memory.add("v", storage.ctypes.data, storage.size)
    huge = 2**30
    d = Descriptor(
        storage.ctypes.data, "bf16", 2, 128, (128, huge, 4, 2**31 - 1, 2**31 - 1),
        (1024, 256, 2**35 - 1024, 1024), (64, 16, 1, 1, 1),
    )  # fmt: skip
    # Row huge - length of a tensor that begins huge - length rows before row `first`; the rest of the box is outside.
    coords = (64, huge - length, head, huge, huge - huge + first + length)
    assert (coords[1] * 1024 + coords[3] * (2**35 - 1024) + coords[4] * 1024) % 2**64 == first * 1024
    box = tma.load_box(memory, d, coords)
    rows = min(16, length)
    assert tma.global_range(d, coords)[0] == storage[first, head, 128:].ctypes.data
    assert np.array_equal(box[:rows], storage[first : first + rows, head, 128:])
    assert not box[rows:].any()


def test_a_box_across_the_end_of_the_address_space_is_looked_up_row_by_row():
    storage, memory, d = tile()
    first = (storage.ctypes.data - 200 * (1 << 39)) % (1 << 64)
    wrapping = replace(d, base=first, dims=(64, 256), strides=(1 << 39,), box=(64, 256))
    assert tma.global_range(wrapping, (0, 0)) == (first, first + 255 * (1 << 39) + 128)
    assert first + 255 * (1 << 39) > 1 << 64
    with pytest.raises(Fault, match=f"read of 128 bytes at {first:#x}"):  # and not of all that lies between the rows
        tma.load_box(memory, wrapping, (0, 0))


# ------------------------------------------------------------------------------------------------ shared memory
@given(st.data())
def test_boxes_in_shared_memory(data):
    d = Tensor(data.draw).d
    address = SHARED_BASE + 128 * data.draw(st.integers(0, 20))
    shared = Shared(16384)
    box = np.random.default_rng(2).integers(0, 256, (d.rows, d.row_bytes)).astype(np.uint8)
    expected = {
        SWIZZLES[d.swizzle](address + row * d.row_bytes + byte): box[row, byte]
        for row in range(d.rows)
        for byte in range(d.row_bytes)
    }
    addresses = tma.shared_addresses(d, address)
    assert addresses.reshape(-1).tolist() == list(expected)
    assert tma.shared_words(d, address).tolist() == sorted({a // 4 for a in expected})
    before, version = shared.bytes.copy(), shared.version(address, address + d.bytes)
    tma.to_shared(shared, d, address, box)
    before[list(expected)] = list(expected.values())
    assert np.array_equal(shared.bytes, before)
    assert shared.version(address, address + d.bytes) != version
    assert np.array_equal(tma.from_shared(shared, d, address), box)
    assert np.array_equal(shared.read_at(addresses), box)


def test_shared_faults():
    _, _, d = tile()
    shared = Shared(1024)
    box = np.zeros((4, 128), np.uint8)
    for wrong in (
        lambda: tma.to_shared(shared, d, SHARED_BASE + 64, box),
        lambda: tma.from_shared(shared, d, SHARED_BASE + 64),
        lambda: tma.shared_addresses(d, SHARED_BASE + 64),
        lambda: tma.shared_words(d, SHARED_BASE + 64),
    ):
        with pytest.raises(Fault, match="no multiple of 128") as caught:
            wrong()
        assert caught.value.kind == "misaligned"
    with pytest.raises(Fault, match="TMA write of 512 bytes at 1664 ends 128 bytes past"):
        tma.to_shared(shared, d, SHARED_BASE + 640, box)
    with pytest.raises(Fault, match="begins 1024 bytes before"):
        tma.from_shared(shared, d, 0)
