"""A cluster: CTAs that run at the same time and reach into each other's shared memory.

An address of the window `.shared::cluster` has in its high bits whose shared memory it is in, and an offset in the low
ones: 0 in the high bits means one's own, so that an address of `.shared::cta` is one of `.shared::cluster` as well, and
r + 1 that of the CTA of rank r. `mapa` makes such addresses. What a GPU has in the high bits is not documented, and no
program may rely on it (PTX ISA, "State Spaces", "mapa").
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from fa3.emulator.cta import Cta
from fa3.emulator.faults import Fault
from fa3.emulator.memory import OFFSET_BITS, OFFSET_MASK
from fa3.emulator.sync import ClusterBarrier

if TYPE_CHECKING:
    from fa3.emulator.machine import Machine

Triple = tuple[int, int, int]


class Cluster:
    """Cluster number `number` of the grid, at `place` = (x, y, z). Its CTAs are in the order of their ranks."""

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine, self.number = machine, number
        sizes = machine.launch.cluster
        self.place = unravelled(number, clusters_of(machine.launch.grid, sizes))
        self.barrier = ClusterBarrier(self)
        self.ctas: list[Cta] = []
        for rank in range(prod(sizes)):
            inside = unravelled(rank, sizes)
            x, y, z = (k * size + i for k, size, i in zip(self.place, sizes, inside, strict=True))
            self.ctas.append(Cta(machine, self, rank, inside, (x, y, z)))

    @property
    def done(self) -> bool:
        """Whether every CTA has ended, and every copy of theirs."""
        return all(cta.done for cta in self.ctas)

    def reached(self, cta: Cta, window: int) -> Cta:
        """The CTA that addresses of `cta` with these high bits are in. Fault if there is none, or if it has ended."""
        if window == 0:
            return cta
        rank = window - 1
        if not 0 <= rank < len(self.ctas):
            raise Fault("out of bounds", f"shared memory of CTA rank {rank} in a cluster of {len(self.ctas)}")
        found = self.ctas[rank]
        if found.running == 0 and found is not cta:
            raise exited(found)
        return found

    def mapped(self, cta: Cta, addresses: Any, ranks: Any) -> Any:
        """`mapa`: what `cta` calls these addresses, of its own, in the CTAs of these ranks."""
        offsets, ranks = np.broadcast_arrays(np.asarray(addresses, np.int64) & OFFSET_MASK, np.asarray(ranks, np.int64))
        wrong = ranks[ranks >= len(self.ctas)]
        if wrong.size:
            raise Fault("out of bounds", f"an address in CTA rank {wrong[0]} of a cluster of {len(self.ctas)}")
        return np.where(ranks == cta.rank, offsets, offsets | ranks + 1 << OFFSET_BITS)


def exited(cta: Cta) -> Fault:
    """What it is to touch the shared memory of a CTA that has ended."""
    return Fault("exited CTA", f"the shared memory of CTA rank {cta.rank} is gone: all of its warps have exited")


def clusters_of(grid: Triple, cluster: Triple) -> Triple:
    """How many clusters a grid has in each direction."""
    x, y, z = (ctas // size for ctas, size in zip(grid, cluster, strict=True))
    return x, y, z


def unravelled(number: int, sizes: Triple) -> Triple:
    """(x, y, z) of a number, x fastest."""
    x, y, _ = sizes
    return number % x, number // x % y, number // (x * y)
