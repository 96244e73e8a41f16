"""Operands of WGMMA in shared memory: which bytes a matrix descriptor means, and their values.

A descriptor holds, in units of 16 bytes, the start (bits 13:0), the leading byte offset (29:16) and the stride byte
offset (45:32), and in bits 63:62 the swizzle: 0 none, 1 for lines of 128 bytes, 2 for 64, 3 for 32. Lines come in cores
of 8. With `line` = 16 where nothing is swizzled, element (row, k) of an operand with T elements to 16 bytes is at

    k-major    start + row / 8 * stride + row % 8 * line + k / T * 16                        (line > 16)
               start + row / 8 * stride + row % 8 * line + k / T * leading                   (line = 16)
    mn-major   start + row / (line's elements) * leading + k / 8 * stride + k % 8 * line     (line > 16)
               start + row / T * stride                  + k / 8 * leading + k % 8 * line    (line = 16)

plus its place in the 16 bytes or the line; then the swizzle acts on the absolute address, so that a start in the middle
of a line needs no correction. Sources: PTX ISA, "Matrix Descriptor Format" and "Strides"; the canonical layouts in
CUTLASS, `cute/atom/mma_traits_sm90_gmma.hpp`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa3.emulator import numerics
from fa3.emulator.faults import Fault
from fa3.emulator.memory import PIECE, Shared

Index = NDArray[np.int64]
Matrix = NDArray[np.float32]

CORE = 8
"""Lines that belong together: rows of a k-major operand, k of an mn-major one."""
PERIOD = 1024
"""Starts this far apart are swizzled alike."""
_RESERVED = ~(0x3FFF | 0x3FFF << 16 | 0x3FFF << 32 | 3 << 62) & (1 << 64) - 1
_BASE_OFFSET = 7 << 49


@dataclass(frozen=True)
class Element:
    """An operand type: bytes of a code, its numpy type, and how codes become fp32."""

    bytes: int
    code: type[Any]
    widen: Callable[[Any], Matrix]


ELEMENTS = {
    "bf16": Element(2, np.uint16, numerics.widen_bf16),
    "f16": Element(2, np.uint16, numerics.widen_f16),
    "e4m3": Element(1, np.uint8, numerics.widen_e4m3),
    "e5m2": Element(1, np.uint8, numerics.widen_e5m2),
    "tf32": Element(4, np.uint32, numerics.widen_tf32),
}


@dataclass(frozen=True)
class MatrixDescriptor:
    """A descriptor in bytes."""

    start: int
    leading: int
    stride: int
    line: int
    """Bytes of a swizzled line: 128, 64, 32, or 16 for none."""

    @staticmethod
    def decode(bits: int) -> MatrixDescriptor:
        """Reads a 64-bit descriptor. Fault("wgmma") if bits are set that no descriptor has."""
        if bits & _BASE_OFFSET:
            raise Fault("wgmma", f"matrix descriptor {bits:#018x} has a base offset, which is not modelled")
        if bits & _RESERVED or bits >> 64:
            raise Fault("wgmma", f"matrix descriptor {bits:#018x} has bits outside its fields")
        start, leading, stride = ((bits >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        return MatrixDescriptor(start, leading, stride, (16, 128, 64, 32)[bits >> 62])


def operand_addresses(descriptor: int, rows: int, k: int, item_bytes: int, mn_major: bool) -> Index:
    """The shared address of every element, (rows, k). Fault("wgmma") on a malformed descriptor.

    `rows` is 64 for A and n for B; an mn-major operand has 16-bit elements.
    """
    base = _base(descriptor)
    pieces = _pieces(*_place(descriptor, base), rows, k, item_bytes, mn_major) + base
    elements = pieces[..., None] + np.arange(0, PIECE, item_bytes)
    return elements.reshape(k, rows).T if mn_major else elements.reshape(rows, k)


def fetch(
    shared: Shared, descriptors: tuple[int, ...], rows: int, k: int, kind: str, mn_major: bool, k_first: bool
) -> Matrix:
    """The values of an operand that several instructions take one after the other, k elements each.

    (rows, k len(descriptors)), or its transpose if `k_first`. They are kept until somebody writes to that memory: the
    four warps of a warpgroup need the same B, and all warpgroups of a CTA do.
    """
    key = (descriptors, rows, k, kind, mn_major, k_first)
    matrix: Matrix | None = shared.derived(key)
    if matrix is not None:
        return matrix
    base = _base(descriptors[0])
    places = tuple([_place(descriptor, base) for descriptor in descriptors])
    element = ELEMENTS[kind]
    index, lo, hi = _group(places, rows, k, element.bytes, mn_major)
    shared.require(base + lo, base + hi, "read of a wgmma operand")
    codes = shared.pieces.take(index + base // PIECE).view(element.code)
    matrix = element.widen(codes if mn_major == k_first else np.ascontiguousarray(codes.T))
    shared.remember(key, base + lo, base + hi, matrix)
    return matrix


# Patterns of addresses are kept relative to a multiple of 1024, since an operand recurs in every stage of a ring.
Place = tuple[int, int]
"""Start of an operand relative to the base, and its descriptor's bits above the start."""


def _base(descriptor: int) -> int:
    start = (descriptor & 0x3FFF) << 4
    return start - start % PERIOD


def _place(descriptor: int, base: int) -> Place:
    return ((descriptor & 0x3FFF) << 4) - base, descriptor >> 14


@lru_cache(maxsize=512)
def _group(places: tuple[Place, ...], rows: int, k: int, item_bytes: int, mn_major: bool) -> tuple[Index, int, int]:
    """The number of every 16-byte piece of an operand in several parts, and the range of addresses they lie in.

    (rows, pieces) for a k-major operand, (k, pieces) for an mn-major one.
    """
    parts = [_pieces(*place, rows, k, item_bytes, mn_major) for place in places]
    addresses = np.concatenate(parts, axis=0 if mn_major else 1)
    return addresses // PIECE, int(addresses.min()), int(addresses.max()) + PIECE


@lru_cache(maxsize=512)
def _pieces(start: int, fields: int, rows: int, k: int, item_bytes: int, mn_major: bool) -> Index:
    """The addresses of the 16-byte pieces of one operand, shaped as those of `_group`."""
    at = MatrixDescriptor.decode(fields << 14)
    per_piece = PIECE // item_bytes
    if mn_major:
        if item_bytes != 2:
            raise Fault("wgmma", f"an mn-major operand of {8 * item_bytes}-bit elements; only 16-bit ones can be")
        line, part = np.arange(k)[:, None], np.arange(rows // per_piece)[None]
        inner, along, cores = at.line // PIECE, at.leading, at.stride
        if at.line == PIECE:
            along, cores = at.stride, at.leading
        offset = part // inner * along + part % inner * PIECE
    else:
        line, part = np.arange(rows)[:, None], np.arange(k // per_piece)[None]
        cores = at.stride
        offset = part * (at.leading if at.line == PIECE else PIECE)
    linear = start + line // CORE * cores + line % CORE * at.line + offset
    return linear ^ (linear >> 3 & (at.line - PIECE))
