"""A CTA: its warps, shared memory and barriers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa3.emulator.faults import Fault
from fa3.emulator.memory import Shared
from fa3.emulator.sync import WARP_THREADS, MBarrier, NamedBarrier
from fa3.emulator.warp import Warp

if TYPE_CHECKING:
    from fa3.emulator.machine import Machine

NAMED_BARRIERS = 16


class Cta:
    """CTA number `number` of the grid, at `block` = (x, y, z)."""

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine, self.number = machine, number
        x, y, _ = machine.launch.grid
        self.block = (number % x, number // x % y, number // (x * y))
        self.shared = Shared(machine.launch.smem_bytes)
        self.mbarriers: dict[int, MBarrier] = {}
        self.named = [NamedBarrier(self, i) for i in range(NAMED_BARRIERS)]
        self.threads = machine.program.threads
        self.warps = [Warp(self, i) for i in range(self.threads // WARP_THREADS)]
        self.running = len(self.warps)
        self.under_way = 0
        """Asynchronous operations, other than WGMMA, that have effects left."""

    def mbarrier(self, address: int) -> MBarrier:
        """The mbarrier at an address. Fault if none was initialised there."""
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
        """The CTA is finished once its last warp has exited and its last operation is done."""
        if self.running == 0 and self.under_way == 0:
            self.machine.cta_finished(self)
