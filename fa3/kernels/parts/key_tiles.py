"""The order in which the backward's key blocks are computed, one CTA for each.

Heads are those of K and V: a CTA sums dK and dV over all query heads of the group by itself, which is deterministic and
takes no workspace, but with fewer and longer CTAs.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from .tiles import TileSpace, _longest_first


class KeyTile(NamedTuple):
    """One CTA's work: keys from `n_block * tile_n` of one head (of K and V) and batch."""

    n_block: Int32
    head: Int32
    batch: Int32


@dataclass(frozen=True)
class KeysFirst:
    """All key blocks of a head one after the other: they read the same Q and dO."""

    space: TileSpace

    def tile(self, number: Int32):
        head, block = divmod(number, self.space.m_blocks)
        return _tile(self.space, head, block)


@dataclass(frozen=True)
class FirstKeysFirst:
    """Within a section all heads' first blocks come first: under a causal mask those are seen by the most queries."""

    space: TileSpace

    @cute.jit
    def tile(self, number: Int32):
        space = self.space
        head, block = _longest_first(space.large, number)
        if number >= space.boundary:
            head, block = _longest_first(space.small, number - space.boundary)
            head = head + space.boundary_head
        return _tile(space, head, block)


@dataclass(frozen=True)
class LastKeysFirst:
    """Causal, for sums in a fixed order: the shortest first, so that each CTA meets a query block just after the CTA
    that it must wait for."""

    space: TileSpace

    @cute.jit
    def tile(self, number: Int32):
        tile = FirstKeysFirst(self.space).tile(number)
        return KeyTile(self.space.m_blocks.divisor - 1 - tile.n_block, tile.head, tile.batch)


def _tile(space: TileSpace, head_of_all: Int32, n_block: Int32):
    batch, head = divmod(head_of_all, space.heads)
    return KeyTile(n_block, head, batch)
