"""The order in which the query tiles of all heads and batches are computed, and who computes which.

CTAs are persistent: each starts with the tile of its own number and draws the next from a counter in global memory, so
a CTA that got short tiles takes more of them. Without a mask all tiles are equal, and a head's follow each other, so
that neighbours in time share its keys in the L2 cache. Under a causal mask the longest tiles (the last query rows) come
first, so that the short ones fill the gaps at the end; and so that this does not spread over all heads at once, they
are taken in *sections* whose keys and values fit in the L2 cache together.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cutlass_dsl import dsl_user_op

from .asm import int32_of

SECTION_BYTES = 32 * 1024 * 1024
"""Keys and values of a section: a little over half of the L2 (H100 50 MiB, H200 60), the rest is for Q, O and what
streams by. 8, 16 and 64 MiB were no better (H200)."""


class Tile(NamedTuple):
    """One CTA's work: query rows from `m_block * tile_m`, of one head and batch; `head_kv` is the head of its keys."""

    m_block: Int32
    head: Int32
    head_kv: Int32
    batch: Int32


class Section(NamedTuple):
    """A run of sections of equally many heads: divisors by the heads of one, and by its tiles."""

    heads: cute.FastDivmodDivisorV2
    tiles: cute.FastDivmodDivisorV2


class TileSpace(NamedTuple):
    """All tiles of a launch as one range of numbers, with the divisors that take a number apart.

    The sections differ by one head at most: the first ones have the heads of `large`, all from tile number `boundary`
    on (and head `boundary_head`) have those of `small`. A rest of a head or two as a section of its own would leave
    most of the GPU idle at the end.
    """

    count: Int32
    boundary: Int32
    boundary_head: Int32
    large: Section
    small: Section
    m_blocks: cute.FastDivmodDivisorV2
    heads: cute.FastDivmodDivisorV2
    group: cute.FastDivmodDivisorV2

    @classmethod
    def over(cls, m_blocks, heads, heads_kv, batches, kv_bytes) -> "TileSpace":
        """Host side. `kv_bytes`: keys and values of one head of one batch."""
        divisor = cute.fast_divmod_create_divisor_v2
        total = heads * batches
        group = heads // heads_kv
        fitting = cutlass.min(cutlass.max(Int32(SECTION_BYTES // kv_bytes), 1), heads_kv * batches) * group
        sections = (total + fitting - 1) // fitting
        small = total // sections
        boundary_head = total % sections * (small + 1)
        return cls(
            count=m_blocks * total,
            boundary=boundary_head * m_blocks,
            boundary_head=boundary_head,
            large=Section(divisor(small + 1), divisor((small + 1) * m_blocks)),
            small=Section(divisor(small), divisor(small * m_blocks)),
            m_blocks=divisor(m_blocks),
            heads=divisor(heads),
            group=divisor(group),
        )


@dataclass(frozen=True)
class RowsFirst:
    """All tiles of a head one after the other: with equal tiles the reuse of its keys in L2 is all that matters."""

    space: TileSpace

    def tile(self, number: Int32):
        head, row = divmod(number, self.space.m_blocks)
        return _tile(self.space, head, row)


@dataclass(frozen=True)
class LongestFirst:
    """Within a section all heads' last tiles first, then their last but one, and so on."""

    space: TileSpace

    @cute.jit
    def tile(self, number: Int32):
        space = self.space
        head, row = _longest_first(space.large, number)
        if number >= space.boundary:
            head, row = _longest_first(space.small, number - space.boundary)
            head = head + space.boundary_head
        return _tile(space, head, space.m_blocks.divisor - 1 - row)


def _longest_first(section: Section, number: Int32):
    """(head counted from the first section, row block counted from the last) of a tile in sections of one size."""
    index, rest = divmod(number, section.tiles)
    row, head = divmod(rest, section.heads)
    return index * section.heads.divisor + head, row


def _tile(space: TileSpace, head_of_all: Int32, m_block: Int32):
    """The tile of a row block of one of all heads of all batches."""
    batch, head = divmod(head_of_all, space.heads)
    head_kv, _ = divmod(head, space.group)
    return Tile(m_block, head, head_kv, batch)


@dataclass(frozen=True)
class TileCounter:
    """The counter in global memory that tiles past the first one are drawn from.

    It starts at 0 and is 0 again when the launch ends: every CTA draws until it gets a number past the end, so the
    draws of a launch are exactly as many as its tiles, and the last of them takes the counter around to 0.
    """

    counter: cute.Pointer
    count: Int32

    @cute.jit
    def draw(self):
        """One warp: the number of its next tile; `count` or more when there is none left."""
        drawn = Int32(0)
        if cute.arch.lane_idx() == 0:
            drawn = increment_around(self.counter, self.count - 1)
        grid, _, _ = cute.arch.grid_dim()
        return cute.arch.shuffle_sync(drawn, 0) + grid


@dsl_user_op
def increment_around(counter, last, *, loc=None, ip=None):
    """Adds 1 to a counter in global memory, or sets it back to 0 from `last`; returns what it was. One `atom.inc`."""
    operands = [counter.toint().ir_value(loc=loc, ip=ip), Int32(last).ir_value(loc=loc, ip=ip)]
    return int32_of("atom.relaxed.gpu.global.inc.u32 $0, [$1], $2;", "=r,l,r,~{memory}", operands, True, loc, ip)
