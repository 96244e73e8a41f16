"""Swizzles: permutations of addresses that spread a column of a tile over all shared-memory banks.

Swizzle(b, m, s) exclusive-ors the b address bits from m + s upwards into the b bits from m upwards. On byte addresses,
Swizzle(3, 4, 3) is the hardware's 128-byte swizzle: of every 16-byte piece, the number (bits 4..6) is exclusive-ored
with the number of its 128-byte line (bits 7..9). TMA writes and WGMMA reads with the same rule, so neither sees it.

Source: CUTLASS `cute/swizzle.hpp` documentation, and the CUDA driver API's CU_TENSOR_MAP_SWIZZLE_* table.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa3.layouts.algebra import Layout, Tiler, composition
from fa3.layouts.int_tuple import IntTuple, LayoutError

__all__ = ["ComposedLayout", "Swizzle"]


@dataclass(frozen=True)
class Swizzle:
    """x -> x with bits [base + shift, base + shift + bits) exclusive-ored into bits [base, base + bits).

    It is its own inverse, and permutes every aligned block of `period` addresses. `bits = 0` is the identity.
    """

    bits: int
    base: int
    shift: int

    def __post_init__(self) -> None:
        if self.bits < 0 or self.base < 0 or self.shift < self.bits:
            raise LayoutError(f"{self} needs bits >= 0, base >= 0 and shift >= bits")

    def __call__(self, address: int) -> int:
        mask = ((1 << self.bits) - 1) << self.base
        return address ^ ((address >> self.shift) & mask)

    @property
    def period(self) -> int:
        """Addresses that are a multiple of this apart are swizzled alike: the alignment that a tile needs."""
        return 1 << (self.base + self.shift + self.bits)

    def __str__(self) -> str:
        return f"S<{self.bits},{self.base},{self.shift}>"


@dataclass(frozen=True)
class ComposedLayout:
    """The function c -> swizzle(offset + layout(c)): a layout seen through a swizzle."""

    swizzle: Swizzle
    offset: int
    layout: Layout

    def __call__(self, *coordinate: IntTuple) -> int:
        return self.swizzle(self.offset + self.layout(*coordinate))

    @property
    def size(self) -> int:
        """How many coordinates there are."""
        return self.layout.size

    @property
    def shape(self) -> IntTuple:
        return self.layout.shape

    def indices(self) -> list[int]:
        """The index of every coordinate, leftmost mode fastest."""
        return [self(index) for index in range(self.size)]

    def compose(self, inner: Tiler) -> ComposedLayout:
        """c -> self(inner(c)): only the linear part changes."""
        return ComposedLayout(self.swizzle, self.offset, composition(self.layout, inner))

    def __str__(self) -> str:
        return f"{self.swizzle} o {self.offset} o {self.layout}"
