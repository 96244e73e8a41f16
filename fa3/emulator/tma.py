"""Tensor copies between global and shared memory: boxes with bounds, strides and swizzles.

A box is an array (rows, row_bytes) in the order in which it is packed into shared memory: dimension 0 along a row, the
others with dimension 1 fastest. In shared memory the swizzle exchanges its 16-byte pieces by their absolute address, as
`fa3.layouts.swizzle` describes.

Out of bounds is decided for each dimension by its coordinate alone. What is outside reads as zero and is not written,
so a box that is outside altogether is legal and touches no global memory. Addresses wrap around modulo 2^64.

Source: PTX ISA, "Tensors", "cp.async.bulk.tensor" and "cp.reduce.async.bulk.tensor".
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa3.emulator.faults import Fault
from fa3.emulator.memory import PIECE, Global, Shared
from fa3.emulator.reductions import combine
from fa3.emulator.tma_descriptor import Descriptor

__all__ = [
    "Descriptor",
    "from_shared",
    "global_range",
    "load_box",
    "shared_addresses",
    "shared_words",
    "store_box",
    "to_shared",
]

Bytes = NDArray[np.uint8]
Index = NDArray[np.int64]

ALIGNMENT = 128
"""Of a box in shared memory, in bytes."""
PERIOD = 1024
"""Addresses this far apart are swizzled alike."""
_ADDRESS_SPACE = 1 << 64


# ------------------------------------------------------------------------------------------------ global memory
def load_box(memory: Global, d: Descriptor, coords: tuple[int, ...]) -> Bytes:
    """The box whose first element has these coordinates, (rows, row_bytes), with zeros out of bounds.

    Fault("out of bounds") if what is inside the tensor lies outside every allocation.
    """
    box = np.zeros((d.rows, d.row_bytes), np.uint8)
    region = _region(d, coords)
    if region is not None:
        whole = box.reshape(*d.box[:0:-1], d.row_bytes)
        for inside, view in _views(memory, d, coords, region, write=False):
            whole[inside] = view
    return box


def store_box(memory: Global, d: Descriptor, coords: tuple[int, ...], data: Bytes, reduce: str | None = None) -> None:
    """Writes the part of a box that is in bounds, or combines it with what is there ("add", "min", "max", ...).

    Fault("out of bounds") if what is inside the tensor lies outside every allocation, Fault("read only") if it may not
    be written.
    """
    region = _region(d, coords)
    if region is None:
        return
    whole = data.reshape(*d.box[:0:-1], d.row_bytes)
    for inside, view in _views(memory, d, coords, region, write=True, apart=reduce is not None and region.overlaps):
        view[...] = whole[inside] if reduce is None else combine(reduce, d.dtype, view, whole[inside])


def global_range(d: Descriptor, coords: tuple[int, ...]) -> tuple[int, int]:
    """[first, last) byte of global memory that a copy of this box touches; (0, 0) if it is wholly out of bounds.

    If the box wraps around the end of the address space, the second number is larger than 2^64.
    """
    region = _region(d, coords)
    return (0, 0) if region is None else (region.first, region.first + region.extent)


@dataclass(frozen=True)
class _Region:
    """The part of a box that is in bounds. Tuples have dimension 0, counted in bytes, last."""

    first: int
    """Global address of its first byte."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    inside: tuple[slice, ...]
    """Where it is in the box."""

    @property
    def extent(self) -> int:
        """Bytes from its first to its last."""
        return sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)) + 1

    @property
    def overlaps(self) -> bool:
        """Whether two of its rows may be the same memory (a stride of 0, say)."""
        reach = self.shape[-1]
        for stride, n in sorted(zip(self.strides[:-1], self.shape[:-1], strict=True)):
            if n > 1 and stride < reach:
                return True
            reach += (n - 1) * stride
        return False


def _region(d: Descriptor, coords: tuple[int, ...]) -> _Region | None:
    """What of the box is in bounds; None if nothing is."""
    if len(coords) != d.rank:
        raise Fault("tma", f"{len(coords)} coordinates for a descriptor of {d.rank} dimensions: {d}")
    first, shape, strides, inside = d.base, [], [], []
    for coordinate, dim, size, stride in zip(coords, d.dims, d.box, (d.item, *d.strides), strict=True):
        lo, hi = max(0, -coordinate), min(size, dim - coordinate)
        if hi <= lo:
            return None
        first += (coordinate + lo) * stride
        shape.append(hi - lo)
        strides.append(stride)
        inside.append(slice(lo, hi))
    shape[0], strides[0] = shape[0] * d.item, 1
    inside[0] = slice(inside[0].start * d.item, inside[0].stop * d.item)
    return _Region(first % _ADDRESS_SPACE, tuple(shape[::-1]), tuple(strides[::-1]), tuple(inside[::-1]))


def _views(
    memory: Global, d: Descriptor, coords: tuple[int, ...], region: _Region, write: bool, apart: bool = False
) -> Iterator[tuple[Any, Bytes]]:
    """(index into the box, global memory there): all at once if possible, row by row if the box wraps around the
    address space or `apart` asks for it."""
    try:
        if region.first + region.extent <= _ADDRESS_SPACE and not apart:
            yield region.inside, _window(memory, region.first, region.extent, region.shape, region.strides, write)
            return
        outer = region.inside[:-1]
        for row in itertools.product(*(range(n) for n in region.shape[:-1])):
            offset = sum(i * stride for i, stride in zip(row, region.strides, strict=False))
            first = (region.first + offset) % _ADDRESS_SPACE
            index = tuple(part.start + i for part, i in zip(outer, row, strict=True))
            yield (*index, region.inside[-1]), _window(memory, first, region.shape[-1], region.shape[-1:], (1,), write)
    except Fault as fault:
        raise Fault(fault.kind, f"the box at {coords} of a TMA copy ({d}): {fault.message}") from None


def _window(
    memory: Global, first: int, extent: int, shape: tuple[int, ...], strides: tuple[int, ...], write: bool
) -> Bytes:
    base, whole = memory.window(first, first + extent, write)
    return np.ndarray(shape, np.uint8, whole, first - base, strides)


# ------------------------------------------------------------------------------------------------ shared memory
def shared_addresses(d: Descriptor, address: int) -> Index:
    """The shared address of every byte of a box that is at `address`, (rows, row_bytes).

    Fault("misaligned") if `address` is not a multiple of 128.
    """
    start = _aligned(d, address)
    return (_bytes(d.bytes, d.swizzle, address - start) + start).reshape(d.rows, d.row_bytes)


def shared_words(d: Descriptor, address: int) -> Index:
    """The 4-byte words (address // 4) of shared memory that a box at `address` occupies, each once, in order."""
    start = _aligned(d, address)
    return _words(d.bytes, d.swizzle, address - start) + start // 4


def to_shared(shared: Shared, d: Descriptor, address: int, data: Bytes) -> None:
    """Writes a box to shared memory. Fault("out of bounds") if it does not fit, Fault("misaligned")."""
    start = _aligned(d, address)
    pieces, lo, hi = _pieces(d.bytes, d.swizzle, address - start)
    shared.require(start + lo, start + hi, "TMA write")
    if d.bytes % PIECE:
        shared.write_at(shared_addresses(d, address), data)
        return
    shared.pieces[start // PIECE :][pieces] = np.ascontiguousarray(data).reshape(-1).view(np.complex128)
    shared.touch(start + lo, start + hi)


def from_shared(shared: Shared, d: Descriptor, address: int) -> Bytes:
    """Reads a box from shared memory, (rows, row_bytes). Faults as in `to_shared`."""
    start = _aligned(d, address)
    pieces, lo, hi = _pieces(d.bytes, d.swizzle, address - start)
    shared.require(start + lo, start + hi, "TMA read")
    if d.bytes % PIECE:
        return shared.read_at(shared_addresses(d, address))
    return shared.pieces[start // PIECE :].take(pieces).view(np.uint8).reshape(d.rows, d.row_bytes)


def _aligned(d: Descriptor, address: int) -> int:
    """The multiple of 1024 at or below a box's address."""
    if address % ALIGNMENT:
        raise Fault("misaligned", f"a TMA copy's shared address {address} is no multiple of {ALIGNMENT} ({d})")
    return address - address % PERIOD


def _swizzled(address: Index, swizzle: int) -> Index:
    """Bits 7, 8, 9 of an address, as many as the swizzle has, are exclusive-ored into bits 4, 5, 6."""
    return address ^ (address >> 3 & {0: 0, 32: 0x10, 64: 0x30, 128: 0x70}[swizzle])


@lru_cache(maxsize=128)
def _pieces(nbytes: int, swizzle: int, offset: int) -> tuple[Index, int, int]:
    """For `nbytes` at `offset`: the number of every 16-byte piece, and the range of addresses that they take."""
    pieces = _swizzled(np.arange(offset, offset + nbytes, PIECE), swizzle) // PIECE
    lo, hi = int(pieces.min()) * PIECE, (int(pieces.max()) + 1) * PIECE
    return pieces, lo, hi


@lru_cache(maxsize=32)
def _bytes(nbytes: int, swizzle: int, offset: int) -> Index:
    return _swizzled(np.arange(offset, offset + nbytes), swizzle)


@lru_cache(maxsize=128)
def _words(nbytes: int, swizzle: int, offset: int) -> Index:
    return np.unique(_bytes(nbytes, swizzle, offset) // 4)
