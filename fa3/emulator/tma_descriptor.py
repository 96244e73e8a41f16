"""The descriptor of a tensor copy (CUtensorMap), read from its bits.

The layout of the bits is not documented. It was found by comparing the descriptors that the DSL's generated host code
assembles with the tensors and boxes that it was asked for, in two to five dimensions, all types and swizzles. Of the
128 bytes the first 64 are written; the rest is whatever lay there.

    64-bit word  bits           field
    0            63:0           global address of element 0
    1            3:0            2
                 6:4            rank - 1
                 10:7           element type
                 12:11          interleave, here always 0
                 14:13          swizzle: none, 32, 64 or 128 bytes
                 16:15          what out of bounds reads as, here always 0: zeros
                 19:17, 21      hints for the L2 cache
                 63:32          stride of dimension 1 in 16 bytes, low 32 bits
    2            31:0, 63:32    the same of dimensions 2 and 3
    3            31:0           the same of dimension 4
                 35:32 .. 47:44 bits 35:32 of the strides of dimensions 1 .. 4
    4, 5, 6      halves         size - 1 of dimensions 0 .. 4
    6            55:32          steps between elements - 1, here always 0
    6, 7         63:56, bytes   box size - 1 of dimension 0; of dimensions 1 .. 4

Dimension 0 is contiguous. Terms and rules: CUDA driver API, `cuTensorMapEncodeTiled`.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache

from fa3.emulator.faults import Fault

WRITTEN = 64
"""Bytes of a descriptor that mean anything."""

_TYPES = {
    0: ("u8", 1), 1: ("u16", 2), 2: ("u32", 4), 3: ("s32", 4), 4: ("u64", 8), 5: ("s64", 8), 6: ("f16", 2),
    7: ("f32", 4), 8: ("f64", 8), 9: ("f32.ftz", 4), 10: ("bf16", 2), 11: ("tf32", 4), 12: ("tf32.ftz", 4),
}  # fmt: skip
_MAX_BOX = 256
_MAX_STRIDE = 1 << 40


@dataclass(frozen=True)
class Descriptor:
    """A tensor in global memory and the box that one copy moves. Tuples have dimension 0, the contiguous one, first."""

    base: int
    """Global address of element 0."""
    dtype: str
    """"u8" (also 8-bit floats), "bf16", "f16", "f32", "u32", ..."""
    item: int
    """Bytes of an element."""
    swizzle: int
    """Bytes of a swizzled line in shared memory: 128, 64, 32, or 0."""
    dims: tuple[int, ...]
    """Elements along each dimension: what lies outside reads as zero and is not written."""
    strides: tuple[int, ...]
    """Bytes from one element to the next along dimensions 1, 2, ..."""
    box: tuple[int, ...]
    """Elements of the box along each dimension."""

    @staticmethod
    def decode(raw: bytes) -> Descriptor:
        """Reads a descriptor of 128 bytes, of which the first 64 count. Fault("tma") if they make no sense."""
        if len(raw) < WRITTEN:
            raise ValueError(f"a descriptor has 128 bytes, of which 64 mean something; got {len(raw)}")
        return _decode(bytes(raw[:WRITTEN]))

    @property
    def rank(self) -> int:
        return len(self.dims)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of the box along dimension 0: what lies contiguously on both sides."""
        return self.box[0] * self.item

    @cached_property
    def rows(self) -> int:
        """Contiguous rows of the box, over all other dimensions."""
        return math.prod(self.box[1:])

    @cached_property
    def bytes(self) -> int:
        """Bytes of the whole box, which is also what a load reports to its mbarrier, in bounds or not."""
        return self.rows * self.row_bytes

    def problems(self) -> list[str]:
        """The rules of `cuTensorMapEncodeTiled` that the descriptor breaks, a sentence each."""
        found = []
        if self.base % 16:
            found.append(f"the base address {self.base:#x} is not a multiple of 16 bytes")
        for i, stride in enumerate(self.strides, 1):
            if stride % 16:
                found.append(f"the stride of dimension {i}, {stride} bytes, is not a multiple of 16 bytes")
            if not 0 <= stride < _MAX_STRIDE:
                found.append(f"the stride of dimension {i}, {stride} bytes, is not below 2^40")
        for i, (dim, size) in enumerate(zip(self.dims, self.box, strict=True)):
            if not 1 <= dim <= 1 << 32:
                found.append(f"dimension {i} has {dim} elements; it may have 1 to 2^32")
            if not 1 <= size <= _MAX_BOX:
                found.append(f"the box has {size} elements along dimension {i}; it may have 1 to {_MAX_BOX}")
        if self.row_bytes % 16:
            found.append(f"the box's {self.row_bytes} contiguous bytes are not a multiple of 16")
        if self.swizzle and self.row_bytes > self.swizzle:
            found.append(f"the box's {self.row_bytes} contiguous bytes exceed the {self.swizzle}-byte swizzle")
        return found

    def __str__(self) -> str:
        swizzle = f"swizzle {self.swizzle} B" if self.swizzle else "no swizzle"
        box = " x ".join(str(size) for size in self.box)
        dims = " x ".join(_readable(size) for size in self.dims)
        strides = ", ".join(_readable(stride) for stride in self.strides)
        return f"{self.dtype} box {box} of {dims} at {self.base:#x}, strides ({strides}) bytes, {swizzle}"


@lru_cache(maxsize=256)
def _decode(raw: bytes) -> Descriptor:
    word = struct.unpack("<8Q", raw)
    half = struct.unpack("<16I", raw)
    rank = _bits(word[1], 4, 3) + 1
    kind = _bits(word[1], 7, 4)
    if _bits(word[1], 0, 4) != 2 or rank > 5 or kind not in _TYPES:
        raise Fault("tma", f"these are not the bits of a descriptor: {raw[:16].hex()} ...")
    for what, value in (
        ("an interleaved layout", _bits(word[1], 11, 2)),
        ("another filling than zeros", _bits(word[1], 15, 2)),
        ("steps between elements", _bits(word[6], 32, 24)),
    ):
        if value:
            raise Fault("unsupported", f"a TMA descriptor with {what} (bits {value:#x})")
    low = (half[3], half[4], half[5], half[6])
    strides = tuple((low[i] | _bits(word[3], 32 + 4 * i, 4) << 32) << 4 for i in range(rank - 1))
    dims = tuple(half[8 + i] + 1 for i in range(rank))
    box = tuple(size + 1 for size in (raw[55], *raw[56:60])[:rank])
    return Descriptor(word[0], *_TYPES[kind], (0, 32, 64, 128)[_bits(word[1], 13, 2)], dims, strides, box)


def _bits(word: int, first: int, count: int) -> int:
    return (word >> first) & ((1 << count) - 1)


def _readable(number: int) -> str:
    """Large powers of two as such: they stand for "no bound" and are hard to read otherwise."""
    for offset, sign in ((0, ""), (-1, "-1")):
        exponent = (number - offset).bit_length() - 1
        if exponent >= 20 and number == (1 << exponent) + offset:
            return f"2^{exponent}{sign}"
    return str(number)
