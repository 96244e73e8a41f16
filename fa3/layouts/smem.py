"""Where an element of a tile lies in shared memory, and how much of it a kernel needs.

A tile is stored as a grid of atoms: 8 lines of 128, 64, 32 or 16 bytes, swizzled so that eight consecutive lines put
the same 16-byte column into eight different bank groups. The line length is the longest that divides the contiguous
extent of the tile. WGMMA calls a tile k-major if the dimension it sums over is contiguous, mn-major if the other is.

Elements are addressed as (row, column, stage); for an mn-major tile the row runs contiguously. A tile starts on a
multiple of 1024 bytes. `smem_dsl.py` builds the DSL layout from a `SharedLayout`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fa3.layouts.algebra import Layout, tile_to_shape
from fa3.layouts.int_tuple import LayoutError
from fa3.layouts.swizzle import Swizzle

__all__ = [
    "SHARED_MEMORY_PER_CTA",
    "SWIZZLE_ALIGNMENT",
    "Buffer",
    "Placed",
    "SharedLayout",
    "SharedMemoryError",
    "SharedMemoryPlan",
    "bank_conflicts",
    "k_major",
    "line_bytes",
    "mn_major",
    "shared_k",
    "shared_o",
    "shared_q",
    "shared_v",
    "swizzle_of",
]

SHARED_MEMORY_PER_CTA = 227 * 1024
"""The most shared memory one CTA of sm_90 can have, in bytes: 232448."""

SWIZZLE_ALIGNMENT = 1024
"""The alignment of a swizzled tile, in bytes: the period of the 128-byte swizzle."""

PIECE = 16
"""Bytes that a swizzle moves together: one row of an 8x8 matrix, one lane's part of an ldmatrix or stmatrix."""


@dataclass(frozen=True)
class SharedLayout:
    """A staged, swizzled tile: (row, column, stage) -> byte address relative to the tile's 1024-byte aligned start.

    `outer` counts elements without the swizzle; `swizzle` acts on the byte address. The DSL keeps the same two apart,
    because the swizzle belongs to the pointer: `storage.get_tensor(layout.outer, swizzle=layout.inner)`.
    """

    outer: Layout
    swizzle: Swizzle
    element_bits: int

    def byte(self, row: int, column: int, stage: int = 0) -> int:
        """The byte address of an element's first byte."""
        return self.swizzle(self.outer(row, column, stage) * self.element_bits // 8)

    @property
    def bytes(self) -> int:
        """The bytes of all stages together."""
        return self.outer.cosize * self.element_bits // 8

    @property
    def stage_bytes(self) -> int:
        """The bytes of one stage: what one TMA load of the whole tile announces to its barrier."""
        return self.bytes // self.outer[2].size

    @property
    def line(self) -> int:
        """The bytes of one swizzled line: 128, 64, 32, or 16 (no swizzle)."""
        return PIECE << self.swizzle.bits

    def __str__(self) -> str:
        return f"{self.swizzle} o 0 o {self.outer}"


def line_bytes(contiguous: int, element_bits: int) -> int:
    """The longest swizzled line, 128, 64, 32 or 16 bytes, that divides `contiguous` elements.

    Raises LayoutError if not even 16 bytes do: such a tile can be described neither to TMA nor to WGMMA.
    """
    for line in (128, 64, 32, 16):
        if contiguous * element_bits % (8 * line) == 0:
            return line
    raise LayoutError(f"{contiguous} elements of {element_bits} bits are not a multiple of 16 bytes")


def swizzle_of(line: int) -> Swizzle:
    """The hardware's swizzle for lines of 128, 64, 32 or 16 bytes, on byte addresses."""
    return Swizzle({128: 3, 64: 2, 32: 1, 16: 0}[line], 4, 3)


def k_major(rows: int, columns: int, element_bits: int, stages: int = 1) -> SharedLayout:
    """A tile with contiguous columns. Atoms follow each other down the rows, then across the columns, then stages.

    Example: 128 x 128 elements of 16 bits are ((8,16),(64,2),(1,1)):((64,512),(1,8192),(0,0)) under S<3,4,3>.
    `rows` must be a multiple of 8. Raises LayoutError otherwise, or if a line is not a multiple of 16 bytes.
    """
    line = line_bytes(columns, element_bits)
    width = 8 * line // element_bits
    outer = tile_to_shape(Layout((8, width), (width, 1)), (rows, columns, stages), order=(0, 1, 2))
    return SharedLayout(outer, swizzle_of(line), element_bits)


def mn_major(rows: int, columns: int, element_bits: int, stages: int = 1) -> SharedLayout:
    """A tile with contiguous rows. Atoms follow each other across the columns, then down the rows, then stages.

    Example: 128 x 128 elements of 16 bits are ((64,2),(8,16),(1,1)):((1,8192),(64,512),(0,0)) under S<3,4,3>.
    The bytes are those of `k_major` with rows and columns exchanged. Hopper's 8-bit WGMMA does not take such a tile.
    """
    line = line_bytes(rows, element_bits)
    width = 8 * line // element_bits
    outer = tile_to_shape(Layout((width, 8), (1, width)), (rows, columns, stages), order=(1, 0, 2))
    return SharedLayout(outer, swizzle_of(line), element_bits)


def shared_q(tile_m: int, head_dim: int, element_bits: int = 16, stages: int = 1) -> SharedLayout:
    """Q as the A operand of S = Q K^T: (query, dimension), k-major."""
    return k_major(tile_m, head_dim, element_bits, stages)


def shared_k(tile_n: int, head_dim: int, element_bits: int = 16, stages: int = 2) -> SharedLayout:
    """K as the B operand of S = Q K^T: (key, dimension), k-major."""
    return k_major(tile_n, head_dim, element_bits, stages)


def shared_v(tile_n: int, head_dim_v: int, element_bits: int = 16, stages: int = 2) -> SharedLayout:
    """V^T as the B operand of O = P V: (dimension, key), contiguous along the dimension as V lies in memory.

    WGMMA takes this mn-major form for 16-bit elements only; `kmajor_fp8` has the form for 8 bits.
    """
    return mn_major(head_dim_v, tile_n, element_bits, stages)


def shared_o(tile_m: int, head_dim_v: int, element_bits: int = 16, stages: int = 1) -> SharedLayout:
    """O on its way to global memory: (query, dimension), swizzled like Q, so that stmatrix meets no bank twice."""
    return k_major(tile_m, head_dim_v, element_bits, stages)


def bank_conflicts(addresses: Sequence[int]) -> int:
    """How many times one phase must be repeated: 16-byte accesses at these byte addresses, 0 if none collide.

    Shared memory has 32 banks of 4 bytes, so a phase serves eight lanes if their 16-byte pieces lie in eight different
    bank groups (address / 16 modulo 8). A warp's ldmatrix or stmatrix of four matrices is four such phases. Equal
    addresses are served together.
    """
    groups = [0] * 8
    for piece in {address // PIECE for address in addresses}:
        groups[piece % 8] += 1
    return max(groups) - 1 if addresses else 0


class SharedMemoryError(ValueError):
    """A shared-memory plan that does not fit; the message shows its arithmetic line by line."""


@dataclass(frozen=True)
class Buffer:
    """What a plan is built from: a named number of bytes, and the alignment of its first byte."""

    name: str
    bytes: int
    alignment: int = SWIZZLE_ALIGNMENT

    def __post_init__(self) -> None:
        if self.bytes < 0:
            raise SharedMemoryError(f"buffer {self.name!r}: {self.bytes} bytes")
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise SharedMemoryError(f"buffer {self.name!r}: alignment {self.alignment} is not a power of two")


@dataclass(frozen=True)
class Placed:
    """A buffer at its offset from the start of the CTA's shared memory, in bytes."""

    name: str
    bytes: int
    alignment: int
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.bytes


@dataclass(frozen=True)
class SharedMemoryPlan:
    """The buffers of one CTA in the order of their addresses, laid out as a C struct (and as `cute.struct`) would.

    Build it with `SharedMemoryPlan.of([Buffer("q", 32768), Buffer("barriers", 64, 8)])`; a plan is only data, and may
    be larger than the device allows until `check` is called.
    """

    fields: tuple[Placed, ...]
    capacity: int = SHARED_MEMORY_PER_CTA

    @staticmethod
    def of(buffers: Iterable[Buffer], capacity: int = SHARED_MEMORY_PER_CTA) -> SharedMemoryPlan:
        """Place buffers one after the other, each at the next multiple of its alignment."""
        placed: list[Placed] = []
        end = 0
        for buffer in buffers:
            offset = _align(end, buffer.alignment)
            placed.append(Placed(buffer.name, buffer.bytes, buffer.alignment, offset))
            end = offset + buffer.bytes
        names = [field.name for field in placed]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SharedMemoryError(f"two buffers have the same name: {', '.join(twice)}")
        return SharedMemoryPlan(tuple(placed), capacity)

    @property
    def total_bytes(self) -> int:
        """The bytes to reserve: the end of the last buffer, rounded up to the largest alignment as a struct is."""
        end = max((field.end for field in self.fields), default=0)
        return _align(end, max((field.alignment for field in self.fields), default=1))

    @property
    def padding_bytes(self) -> int:
        """What alignment costs: the total without the buffers' own bytes."""
        return self.total_bytes - sum(field.bytes for field in self.fields)

    def __getitem__(self, name: str) -> Placed:
        """The buffer of this name. Raises KeyError."""
        for field in self.fields:
            if field.name == name:
                return field
        raise KeyError(f"no buffer {name!r} in the plan; it has {', '.join(field.name for field in self.fields)}")

    def check(self) -> SharedMemoryPlan:
        """The plan itself if it fits its capacity. Raises SharedMemoryError with the whole sum if it does not."""
        if self.total_bytes > self.capacity:
            over = self.total_bytes - self.capacity
            raise SharedMemoryError(
                f"the shared-memory plan is {over} bytes over what one CTA can have:\n{self.table()}"
            )
        return self

    def table(self) -> str:
        """One line for each buffer, padding included, then the sum and the capacity."""
        width = max([len(field.name) for field in self.fields] + [len("(padding)")])
        lines = [f"{'buffer':<{width}} {'bytes':>9} {'align':>6} {'offset':>9}"]
        lines += [f"{f.name:<{width}} {f.bytes:>9} {f.alignment:>6} {f.offset:>9}" for f in self.fields]
        lines += [f"{'(padding)':<{width}} {self.padding_bytes:>9}"]
        lines += [f"{'total':<{width}} {self.total_bytes:>9}", f"{'capacity':<{width}} {self.capacity:>9}"]
        left = self.capacity - self.total_bytes
        return "\n".join([*lines, f"{'free' if left >= 0 else 'over':<{width}} {abs(left):>9}"])


def _align(address: int, alignment: int) -> int:
    return -(-address // alignment) * alignment
