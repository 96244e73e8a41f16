"""A CTA: its warps, shared memory and barriers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa3.emulator.faults import Fault
from fa3.emulator.memory import OFFSET_BITS, OFFSET_MASK, Shared
from fa3.emulator.sync import WARP_THREADS, MBarrier, NamedBarrier
from fa3.emulator.warp import Warp

if TYPE_CHECKING:
    from fa3.emulator.cluster import Cluster
    from fa3.emulator.machine import Machine

NAMED_BARRIERS = 16


class Cta:
    """The CTA of a rank in a cluster, which is its place `inside` there, at `block` in the grid; all (x, y, z)."""

    def __init__(
        self, machine: Machine, cluster: Cluster, rank: int, inside: tuple[int, int, int], block: tuple[int, int, int]
    ) -> None:
        self.machine, self.cluster, self.rank, self.inside, self.block = machine, cluster, rank, inside, block
        x, y, _ = machine.launch.grid
        self.number = block[0] + x * (block[1] + y * block[2])
        """In the grid."""
        self.shared = Shared(machine.launch.smem_bytes)
        self.mbarriers: dict[int, MBarrier] = {}
        self.named = [NamedBarrier(self, i) for i in range(NAMED_BARRIERS)]
        self.threads = machine.program.threads
        self.warps = [Warp(self, i) for i in range(self.threads // WARP_THREADS)]
        self.running = len(self.warps)
        self.under_way = 0
        """Asynchronous operations, other than WGMMA, that have effects left."""

    @property
    def done(self) -> bool:
        """Whether its last warp has exited and its last operation is done."""
        return self.running == 0 and self.under_way == 0

    def reach(self, address: int) -> tuple[Cta, int]:
        """Whose shared memory an address of `.shared::cluster` is in, and where there."""
        return self.cluster.reached(self, address >> OFFSET_BITS), address & OFFSET_MASK

    def mbarrier(self, address: int) -> MBarrier:
        """The mbarrier at an address of its own. Fault if none was initialised there."""
        found = self.mbarriers.get(address)
        if found is None:
            raise Fault("mbarrier", f"there is no initialised mbarrier at shared address {address}")
        return found

    def warp_exited(self, warp: Warp) -> None:
        self.running -= 1
        for observer in self.machine.observers:
            observer.exited(warp)
        self.try_finish()

    def try_finish(self) -> None:
        if self.done:
            self.machine.cta_finished(self)
