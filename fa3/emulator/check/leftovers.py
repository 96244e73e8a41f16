"""Copies that are still under way when they must not be: when a warp, or the whole CTA, ends.

A store reads shared memory after the instruction that started it, and a load writes there; neither may outlive the CTA,
whose shared memory the next one gets. So a store needs a commit and a wait (`.read` suffices) by its warp, and a load
somebody who waits for the phase that it reports to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fa3.emulator.check.checker import Checker, site_of
from fa3.emulator.check.names import Names

if TYPE_CHECKING:
    from fa3.emulator.cta import Cta
    from fa3.emulator.operations import Group, Operation
    from fa3.emulator.sync import MBarrier
    from fa3.emulator.warp import Warp
    from fa3.sass.ptx_code import Statement


class Leftovers(Checker):
    """Copies without a commit or a wait."""

    def __init__(self, names: Names) -> None:
        super().__init__(names)
        self._open: defaultdict[Warp, list[Operation]] = defaultdict(list)
        self._closed: defaultdict[Warp, dict[Group, list[Operation]]] = defaultdict(dict)
        self._loads: defaultdict[MBarrier, list[Operation]] = defaultdict(list)
        """Loads that nobody has waited for."""

    def issued(self, warp: Warp, operation: Operation) -> None:
        if operation.barrier is not None:
            self._loads[operation.barrier].append(operation)
        elif operation.kind != "wgmma":
            self._open[warp].append(operation)

    def committed(self, warp: Warp, at: Statement, group: Group) -> None:
        if group.kind == "bulk":
            self._closed[warp][group] = self._open.pop(warp, [])

    def joined(self, warp: Warp, at: Statement, groups: Sequence[Group], read: bool) -> None:
        for group in groups:
            self._closed[warp].pop(group, None)

    def passed(self, warp: Warp, at: Statement, barrier: MBarrier, parity: int) -> None:
        """A wait covers the loads that have reported; one that comes late has missed its phase, says `Phases`."""
        waiting = self._loads.get(barrier)
        if waiting:
            self._loads[barrier] = [load for load in waiting if not load.done]

    def exited(self, warp: Warp) -> None:
        who = self.warp(warp)
        for operation in self._open.pop(warp, []):
            happened = f"{who} ends, but the copy that it started here belongs to no group: nothing waits for it."
            self.find("copy never committed", site_of(warp, operation.at), happened)
        for operations in self._closed.pop(warp, {}).values():
            for operation in operations:
                happened = f"{who} ends without a wait for the copy that it started here."
                self.find("copy never waited for", site_of(warp, operation.at), happened)

    def finished(self, cta: Cta) -> None:
        for barrier in [barrier for barrier in self._loads if barrier.cta is cta]:
            for load in self._loads.pop(barrier):
                name = self.mbarrier(barrier)
                happened = f"nobody waits for the copy that {self.warp(load.warp)} started here, which "
                happened += f"reports to {name}."
                plan = self.names.plan(barrier.address)
                self.find(
                    "load never waited for", site_of(load.warp, load.at), happened, subject=plan.edge if plan else ""
                )
