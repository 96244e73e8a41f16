"""Order in global memory: what an earlier kernel of a chain has written, and sums that several CTAs add to.

A kernel that is launched with programmatic dependency may start before the one in front of it has ended. Who touches
what that one writes must come after a `griddepcontrol.wait`: its own, or that of somebody it has waited for.

Sums (`Names.sums`) are added to by reductions, which may come in any order, unless the key asks for a fixed one
(`Names.ordered`). Then every sum must come after all earlier ones at the same place, which only counters in global
memory (`Names.counters`) can tell: who counts with release semantics hands over the sums that he knows to be complete,
and who reads the count with acquire semantics gets them. A bulk reduction is complete behind `wait_group`, without
`.read`, of the lane that started it. Plain accesses to a sum must be ordered in any case.

Like the other rules this one asks what somebody knew, not who came first in this run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fa3.emulator.check.boxes import box_of
from fa3.emulator.check.checker import Checker, Site, site_of
from fa3.emulator.check.names import Names
from fa3.emulator.check.ordering import CtaOrder, Order
from fa3.emulator.check.places import short
from fa3.emulator.cuda_abi import PROGRAMMATIC

if TYPE_CHECKING:
    from fa3.emulator.blocks import Step
    from fa3.emulator.cluster import Cluster
    from fa3.emulator.cta import Cta
    from fa3.emulator.host import Allocation
    from fa3.emulator.machine import Machine
    from fa3.emulator.observe import Addresses
    from fa3.emulator.operations import Group, Operation
    from fa3.emulator.warp import Mask, Warp
    from fa3.sass.ptx_code import Statement

DEPENDENCY, UNORDERED_SUMS, RACE = "grid dependency", "sums in no fixed order", "race in global memory"
UNIT = 4
"""Bytes; the smallest piece of a sum."""
NOBODY = -1


@dataclass
class Sum:
    """A tensor that is added to: the number of the last sum, and of the last plain access, of each of its words."""

    name: str
    first: int
    end: int
    added: NDArray[np.int32]
    accessed: NDArray[np.int32]

    @classmethod
    def of(cls, allocation: Allocation) -> Sum:
        words = allocation.nbytes // UNIT
        return cls(
            allocation.name, allocation.address, allocation.address + allocation.nbytes,
            np.full(words, NOBODY, np.int32), np.full(words, NOBODY, np.int32),
        )  # fmt: skip


@dataclass
class ClusterGlobal:
    """What the warps of a cluster know of global memory, by events of its order. Numbers of touches are sets of bits:
    bit n for touch n."""

    order: CtaOrder
    waited: int = field(init=False)
    """The event of griddepcontrol.wait."""
    touches: dict[int, int] = field(default_factory=dict)
    """Event -> the touches that it stands for: an own one, or those that a counter has told of."""
    under_way: dict[Operation, int] = field(default_factory=dict)
    """Bulk reductions that nobody has waited for -> event."""
    by_all: int = 0
    """The touches that all warps know."""

    def __post_init__(self) -> None:
        self.waited = self.order.events.new()
        self.order.cluster.more_live.append(self._live)

    def known(self, known: int) -> int:
        """The touches that lie behind who knows these events."""
        found = self.by_all
        for event, touches in self.touches.items():
            if event & known:
                found |= touches
        return found

    def _live(self) -> int:
        common, live = self.order.cluster.common, self.waited
        for event in [event for event in self.touches if event & common]:
            self.by_all |= self.touches.pop(event)
        for event in self.touches:
            live |= event
        return live


class GlobalMemory(Checker):
    """Watches the tensors that the names speak of."""

    def __init__(self, names: Names, order: Order) -> None:
        super().__init__(names)
        self.order = order
        self._clusters: dict[Cluster, ClusterGlobal] = {}
        self._earlier: list[Allocation] = []
        self._counters: list[Allocation] = []
        self._sums: list[Sum] = []
        self._sites: list[Site] = []
        """Of each touch."""
        self._stretches: dict[tuple[Cta, int, int], int] = {}
        """(CTA, event, PTX line) -> the touch that its accesses belong to."""
        self._counted: defaultdict[int, int] = defaultdict(int)
        """Address of a counter -> the touches that those knew who counted there."""
        self._fenced: dict[Warp, int] = {}
        """Warp -> the touches that it knew at its last fence for the whole GPU."""

    def started(self, machine: Machine) -> None:
        launch = machine.launch
        chained = launch.attributes.get(PROGRAMMATIC) == (1,)
        self._earlier = [a for a in launch.allocations if chained and a.name in self.names.earlier]
        self._counters = [a for a in launch.allocations if a.name in self.names.counters]
        self._sums = [Sum.of(a) for a in launch.allocations if a.name in self.names.sums]

    # ---- griddepcontrol
    def stepping(self, warp: Warp, step: Step, mask: Mask | None) -> None:
        if step.statements[0].opcode == "griddepcontrol.wait":
            self.order.of(warp).acquire(self.order.lanes(warp), self._cta(warp.cta).waited)

    def _depends(self, site: Site, cta: ClusterGlobal, address: int, known: int) -> None:
        for allocation in self._earlier:
            if allocation.address <= address < allocation.address + allocation.nbytes and not known & cta.waited:
                happened = (
                    f"{self.who(site)} touches {allocation.name}, which an earlier kernel of the chain "
                    f"writes, and no griddepcontrol.wait lies behind it."
                )
                self.find(DEPENDENCY, site, happened, subject=allocation.name)

    # ---- accesses by threads
    def memory(self, warp: Warp, at: Statement, addresses: Addresses, nbytes: int, write: bool) -> None:
        if not len(addresses) or not (self._earlier or self._sums or self._counters):
            return
        cta, me, lanes = self._cta(warp.cta), self.order.of(warp), self.order.lanes(warp)
        site, first = site_of(warp, at), int(addresses[0])
        self._depends(site, cta, first, me.by_threads(lanes))
        if _inside(self._counters, first):
            self._count(warp, at, first, write)
        elif (target := self._sum(first)) is not None:
            if at.name in ("red", "atom") and not write:
                return  # told twice
            known = cta.known(me.by_threads(lanes))
            event = me.access(lanes)
            touch = self._stretches.get((warp.cta, event, at.line))
            if touch is None or not cta.touches.get(event, 0) >> touch & 1:
                touch = self._stretches[warp.cta, event, at.line] = self._touch(site)
                cta.touches[event] = cta.touches.get(event, 0) | 1 << touch
            offsets = np.asarray(addresses).astype(np.int64) - target.first
            words = (offsets[:, None] + np.arange(0, nbytes, UNIT)).reshape(-1) // UNIT
            self._meet(target, words, touch, known, adds=at.name in ("red", "atom"), write=write)

    def _count(self, warp: Warp, at: Statement, counter: int, write: bool) -> None:
        cta, me, lanes = self._cta(warp.cta), self.order.of(warp), self.order.lanes(warp)
        mods = at.opcode.split(".")
        if not {"gpu", "sys"} & set(mods):
            return
        if write:
            releases = "release" in mods or "acq_rel" in mods
            self._counted[counter] |= cta.known(me.release(lanes)) if releases else self._fenced.get(warp, 0)
        elif "acquire" in mods or "acq_rel" in mods:
            told = self._counted[counter] & ~cta.known(me.by_threads(lanes))
            if told:
                cta.touches[me.mark(lanes)] = told

    def fenced(self, warp: Warp, at: Statement) -> None:
        if self._counters and at.opcode.startswith(
            ("fence.acq_rel.gpu", "fence.sc.gpu", "membar.gl", "fence.acq_rel.sys")
        ):
            me, lanes = self.order.of(warp), self.order.lanes(warp)
            self._fenced[warp] = self._cta(warp.cta).known(me.by_threads(lanes))

    # ---- asynchronous operations
    def issued(self, warp: Warp, operation: Operation) -> None:
        if operation.kind == "wgmma" or not (self._earlier or self._sums):
            return
        cta, lanes, site = self._cta(warp.cta), self.order.lanes(warp), site_of(warp, operation.at)
        known = self.order.of(warp).by_engine(lanes)
        first, end = operation.global_range
        if not end and (box := box_of(operation, lanes)) is not None:
            first = box[0].base
        self._depends(site, cta, first, known)
        target = self._sum(first)
        if target is None or not end:
            return
        event, touch = cta.order.events.new(), self._touch(site)
        cta.touches[event] = 1 << touch
        cta.under_way[operation] = event
        words = np.arange(first - target.first, end - target.first, UNIT) // UNIT
        adds, write = operation.kind.endswith("reduce"), not operation.kind.endswith("load")
        self._meet(target, words, touch, cta.known(known), adds, write)

    def joined(self, warp: Warp, at: Statement, groups: Sequence[Group], read: bool) -> None:
        cta = self._clusters.get(warp.cta.cluster)
        if cta is None or read:
            return
        complete = 0
        for group in groups:
            for operation in group.operations:
                complete |= cta.under_way.pop(operation, 0)
        self.order.of(warp).acquire(self.order.lanes(warp), complete)

    # ---- rules
    def _meet(self, target: Sum, words: NDArray[np.int64], touch: int, known: int, adds: bool, write: bool) -> None:
        """A sum meets plain accesses, and other sums if their order matters; a plain access meets everything but reads
        that meet reads."""
        words = words[(words >= 0) & (words < len(target.added))]
        met = {RACE: target.accessed[words]} if adds or write else {}
        if not adds:
            met = {RACE: np.concatenate([target.added[words], *([target.accessed[words]] if write else [])])}
        elif self.names.ordered:
            met[UNORDERED_SUMS] = target.added[words]
        for kind, others in met.items():
            for other in np.unique(others):
                if other not in (NOBODY, touch) and not known >> int(other) & 1:
                    self._unordered(kind, self._sites[touch], self._sites[other], target, adds)
        (target.added if adds else target.accessed)[words] = touch

    def _unordered(self, kind: str, site: Site, other: Site, target: Sum, adds: bool) -> None:
        does = "adds to" if adds else "touches"
        happened = (
            f"{self.who(site)} {does} {target.name} where {self.who(other)} of this or another CTA "
            f"does so at {short(other.at)}: nothing orders the two."
        )
        self.find(kind, site, happened, other, target.name)

    # ---- places
    def _touch(self, site: Site) -> int:
        self._sites.append(site)
        return len(self._sites) - 1

    def _sum(self, address: int) -> Sum | None:
        return next((target for target in self._sums if target.first <= address < target.end), None)

    def _cta(self, cta: Cta) -> ClusterGlobal:
        found = self._clusters.get(cta.cluster)
        if found is None:
            found = self._clusters[cta.cluster] = ClusterGlobal(self.order.cta(cta))
        return found

    def finished(self, cta: Cta) -> None:
        self._clusters.pop(cta.cluster, None)


def _inside(allocations: Sequence[Allocation], address: int) -> bool:
    return any(a.address <= address < a.address + a.nbytes for a in allocations)
