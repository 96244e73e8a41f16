"""The k-major 8-bit view of V, and the index maps of the transpose that makes it in shared memory.

Hopper's 8-bit WGMMA takes k-major operands only. For O = P V that means V^T with contiguous keys, while V arrives with
contiguous dimensions. Shared memory has no 8-bit transposing load, so 16-bit units are transposed and repaired:

1. `ldmatrix.x4.trans.b16` reads four 8 x 8 matrices of 16-bit units, each 8 keys x 16 dimensions of bytes. Register m
   of lane 4 g + q then holds the bytes (key 8 m + 2 q, dim 2 g), (same, 2 g + 1), (key 8 m + 2 q + 1, dim 2 g),
   (same, 2 g + 1).
2. `prmt` of registers 0 and 1 (and of 2 and 3) collects the four bytes of the even dimension, and those of the odd one:
   keys 2 q, 2 q + 1, 8 + 2 q, 8 + 2 q + 1. That is the order of `fp8_operand.column_of_slot`, so V's rows come out
   permuted as P's columns are, at no extra cost.
3. `stmatrix.x4` writes the words as rows of V^T. Lanes with g >= 4 swap even and odd, so that the eight rows of a
   matrix have eight different dimensions modulo 8 and thereby, under any swizzle, eight different bank groups.

A warp does one block of 32 keys x 16 dimensions with one load, four permutes and one store. The classes and functions
here model this on the CPU, byte by byte. Source: PTX ISA (ldmatrix, stmatrix, prmt).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from fa3.layouts.int_tuple import LayoutError
from fa3.layouts.smem import SharedLayout, bank_conflicts, k_major

__all__ = [
    "EVEN_BYTES",
    "ODD_BYTES",
    "Transpose",
    "k_major_v",
    "ldmatrix_x4_trans",
    "prmt",
    "row_major_v",
    "stmatrix_x4",
]

KEYS = 32
"""Keys of a warp's block: one k-block of the 8-bit WGMMA."""

DIMS = 16
"""Dimensions of a warp's block: one 16-byte piece of a row of V."""

EVEN_BYTES, ODD_BYTES = 0x6420, 0x7531
"""`prmt` selectors: bytes 0 and 2, or 1 and 3, of both registers."""

Word = tuple[int, int, int, int]
"""The four bytes of a 32-bit register, lowest first."""


def row_major_v(tile_n: int, head_dim: int, stages: int = 1) -> SharedLayout:
    """V as TMA writes it, 8 bits: (key, dimension, stage), contiguous dimensions."""
    return k_major(tile_n, head_dim, 8, stages)


def k_major_v(tile_n: int, head_dim: int, stages: int = 1) -> SharedLayout:
    """V^T as the 8-bit WGMMA reads it: (dimension, k-slot, stage), contiguous slots.

    The key in a slot is `fp8_operand.column_of_slot(slot)`.
    """
    return k_major(head_dim, tile_n, 8, stages)


@dataclass(frozen=True)
class Transpose:
    """The transpose of one tile_n x head_dim tile of bytes by a number of warps: who reads and writes which address.

    Addresses are bytes from the (1024-byte aligned) starts of the two tiles, swizzles applied.
    tile_n must be a multiple of 32, head_dim of 16. Raises LayoutError otherwise.
    """

    tile_n: int
    head_dim: int
    warps: int = 4

    def __post_init__(self) -> None:
        if self.tile_n < KEYS or self.tile_n % KEYS or self.head_dim < DIMS or self.head_dim % DIMS:
            raise LayoutError(f"a tile of {self.tile_n} keys x {self.head_dim} is not made of {KEYS} x {DIMS} blocks")

    @cached_property
    def source(self) -> SharedLayout:
        return row_major_v(self.tile_n, self.head_dim)

    @cached_property
    def target(self) -> SharedLayout:
        return k_major_v(self.tile_n, self.head_dim)

    @property
    def blocks(self) -> int:
        """The number of 32-key x 16-dimension blocks."""
        return self.tile_n // KEYS * (self.head_dim // DIMS)

    def blocks_of(self, warp: int) -> range:
        """The blocks of one warp, dealt in turn."""
        return range(warp, self.blocks, self.warps)

    def origin(self, block: int) -> tuple[int, int]:
        """(first key, first dimension) of a block; the dimension runs fastest."""
        across = self.head_dim // DIMS
        return block // across * KEYS, block % across * DIMS

    def load_address(self, block: int, lane: int) -> int:
        """Where lane points `ldmatrix`: lane 8 m + r names row r of matrix m, 16 bytes of key 8 m + r."""
        key, dim = self.origin(block)
        return self.source.byte(key + lane, dim)

    def selectors(self, lane: int) -> tuple[int, int]:
        """The `prmt` selectors for the words of matrices 0 and 2, and of matrices 1 and 3."""
        return (EVEN_BYTES, ODD_BYTES) if lane < 16 else (ODD_BYTES, EVEN_BYTES)

    def store_address(self, block: int, lane: int) -> int:
        """Where lane points `stmatrix`: lane 8 m + r names row r of matrix m, 16 slots of dimension 2 r or 2 r + 1.

        The second half of the rows takes the other parity, as the swapped selectors do.
        """
        key, dim = self.origin(block)
        matrix, row = divmod(lane, 8)
        parity = (matrix & 1) ^ (row >> 2)
        return self.target.byte(dim + 2 * row + parity, key + 16 * (matrix >> 1))

    def conflicts(self) -> tuple[int, int]:
        """Repeated phases of the worst (load, store) of the tile: (0, 0) means free of bank conflicts."""
        return self._worst(self.load_address), self._worst(self.store_address)

    def _worst(self, address_of: Callable[[int, int], int]) -> int:
        phases = (
            [address_of(block, 8 * phase + row) for row in range(8)]
            for block in range(self.blocks)
            for phase in range(4)
        )
        return max(bank_conflicts(phase) for phase in phases)

    def run(self, memory: Sequence[int]) -> bytearray:
        """Transpose a tile: bytes laid out like `source` in, bytes laid out like `target` out."""
        if len(memory) != self.source.bytes:
            raise LayoutError(f"the tile has {self.source.bytes} bytes, got {len(memory)}")
        result = bytearray(self.target.bytes)
        for warp in range(self.warps):
            for block in self.blocks_of(warp):
                self._move(block, memory, result)
        return result

    def _move(self, block: int, memory: Sequence[int], result: bytearray) -> None:
        """One block: load, permute, store."""
        loaded = ldmatrix_x4_trans(memory, [self.load_address(block, lane) for lane in range(32)])
        words = []
        for lane, (r0, r1, r2, r3) in enumerate(loaded):
            first, second = self.selectors(lane)
            words.append((prmt(r0, r1, first), prmt(r0, r1, second), prmt(r2, r3, first), prmt(r2, r3, second)))
        stmatrix_x4(result, [self.store_address(block, lane) for lane in range(32)], words)


def ldmatrix_x4_trans(memory: Sequence[int], rows: Sequence[int]) -> list[tuple[Word, Word, Word, Word]]:
    """What `ldmatrix.sync.aligned.m8n8.x4.trans.b16` gives each of 32 lanes: one register for each matrix.

    `rows[8 m + r]` is the byte address of row r of matrix m: eight 16-bit units. Lane 4 g + q gets the units
    (row 2 q, column g) and (row 2 q + 1, column g).
    """

    def register(matrix: int, lane: int) -> Word:
        g, q = divmod(lane, 4)
        upper, lower = rows[8 * matrix + 2 * q] + 2 * g, rows[8 * matrix + 2 * q + 1] + 2 * g
        return memory[upper], memory[upper + 1], memory[lower], memory[lower + 1]

    return [(register(0, lane), register(1, lane), register(2, lane), register(3, lane)) for lane in range(32)]


def stmatrix_x4(memory: bytearray, rows: Sequence[int], words: Sequence[Sequence[Word]]) -> None:
    """`stmatrix.sync.aligned.m8n8.x4.b16`: lane 4 g + q writes word q of row g of matrix m from its register m."""
    for lane, registers in enumerate(words):
        g, q = divmod(lane, 4)
        for matrix, word in enumerate(registers):
            address = rows[8 * matrix + g] + 4 * q
            memory[address : address + 4] = bytes(word)


def prmt(a: Word, b: Word, selector: int) -> Word:
    """`prmt.b32`: byte i of the result is byte (selector >> 4 i) & 7 of the eight bytes a, b."""
    both = a + b
    return (
        both[selector & 7],
        both[(selector >> 4) & 7],
        both[(selector >> 8) & 7],
        both[(selector >> 12) & 7],
    )
