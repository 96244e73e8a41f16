"""Who knows what to lie behind him: follows every barrier, wait and fence of a run.

Other checkers ask it. It must be told of an event before those that ask what is known after it (`SharedMemory`), and
after those that ask what was known before (`Phases`, `NamedBarriers`); `checkers` puts them in that order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING

from fa3.emulator.check.knowledge import Events, WarpKnowledge, union
from fa3.emulator.observe import Observer
from fa3.emulator.sync import WARP_THREADS
from fa3.emulator.warp import ALL_LANES, lanes_of

if TYPE_CHECKING:
    from fa3.emulator.blocks import Step
    from fa3.emulator.cluster import Cluster
    from fa3.emulator.cta import Cta
    from fa3.emulator.observe import Addresses
    from fa3.emulator.operations import Group, Operation
    from fa3.emulator.sync import ClusterBarrier, MBarrier, NamedBarrier
    from fa3.emulator.warp import Mask, Warp
    from fa3.sass.ptx_code import Statement


WIDE_FENCES = tuple(f"fence.{sem}.{scope}" for sem in ("acq_rel", "sc") for scope in ("cluster", "gpu", "sys"))
WIDE_FENCES += ("membar.gl", "membar.sys")
"""Fences that release to threads of other CTAs."""


def _both(events: int) -> int:
    """Both bits of these events."""
    return events | events << 1


@dataclass(slots=True)
class Meeting:
    """What passes through a barrier: an mbarrier, or a named one."""

    initialised: int = 0
    """The event of mbarrier.init."""
    gathered: int = 0
    """What those who arrived in the current phase knew."""
    published: int = 0
    """The same of the last complete phase: what a wait acquires."""
    arrivals: int = 0
    """The events of the current phase's arrivals."""
    before: int = 0
    """Those of the last complete phase, and `earlier` of the one before that."""
    earlier: int = 0

    def arrive(self, known: int, event: int) -> None:
        self.gathered |= known | event
        self.arrivals |= event

    def complete(self) -> None:
        self.published, self.gathered = self.gathered, 0
        self.earlier, self.before, self.arrivals = self.before, self.arrivals, 0

    @property
    def live(self) -> int:
        return self.initialised | self.arrivals | self.before | self.earlier

    def forget(self, kept: int) -> None:
        self.gathered &= kept
        self.published &= kept


@dataclass
class CtaOrder:
    """The knowledge in one CTA."""

    cluster: ClusterOrder
    start: int
    """An event: the CTA runs."""
    warps: list[WarpKnowledge]
    mbarriers: defaultdict[int, Meeting] = field(default_factory=lambda: defaultdict(Meeting))
    """By address."""
    named: defaultdict[int, Meeting] = field(default_factory=lambda: defaultdict(Meeting))
    """By number."""
    left: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """(named barrier, generation) -> [what it hands over, warps that have not gone on yet]."""
    inside: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Warp -> the named barrier and generation that it waits in."""
    groups: dict[int, int] = field(default_factory=dict)
    """Warp -> the event of its WGMMA since the last commit."""
    members: dict[Group, int] = field(default_factory=dict)
    """Committed groups of WGMMA -> event."""
    exited: set[int] = field(default_factory=set)
    from_outside: int = 0
    """The events of stores by threads of other CTAs into the shared memory of this one."""

    @property
    def events(self) -> Events:
        return self.cluster.events

    @property
    def running(self) -> list[WarpKnowledge]:
        return [warp for index, warp in enumerate(self.warps) if index not in self.exited]

    def _meetings(self) -> list[Meeting]:
        return [*self.mbarriers.values(), *self.named.values()]

    def live(self) -> int:
        """Events that may not be given out again."""
        live = self.start
        for warp in self.warps:
            live |= warp.growing
        for meeting in self._meetings():
            live |= meeting.live
        return live | union((*self.groups.values(), *self.members.values()))

    def forget(self, kept: int) -> None:
        """Only these events are in use from now on."""
        for warp in self.warps:
            warp.forget(kept)
        for meeting in self._meetings():
            meeting.forget(kept)
        for waiting in self.left.values():
            waiting[0] &= kept
        self.from_outside &= kept


class ClusterOrder:
    """What the CTAs of a cluster have in common: events, and what passes between them."""

    def __init__(self, cluster: Cluster) -> None:
        self.events = Events(self._live, self._forget)
        self.ctas: list[CtaOrder] = []
        self.barrier = Meeting()
        """The cluster's barrier."""
        self.operations: dict[Operation, tuple[int, int]] = {}
        """Copies under way -> (event, what it comes after)."""
        self.initialisations = 0
        """The events of all mbarrier.init."""
        self.unreleased = 0
        """Those of stores by threads into other CTAs that no release of cluster scope has covered."""
        self.more_live: list[Callable[[], int]] = []
        """Where other checkers keep events."""
        self.more_forget: list[Callable[[int], None]] = []
        for cta in cluster.ctas:
            start = self.events.new()
            warps = [WarpKnowledge(self.events, known=start, covered={ALL_LANES: start}) for _ in cta.warps]
            self.ctas.append(CtaOrder(self, start, warps))

    @property
    def common(self) -> int:
        """What all warps know that still run."""
        running = [warp.known for cta in self.ctas for warp in cta.running]
        return reduce(and_, running) if running else 0

    def far_from(self, cta: CtaOrder) -> int:
        """The events of stores by threads into the shared memory of other CTAs than this one."""
        return union(other.from_outside for other in self.ctas if other is not cta)

    def _live(self) -> int:
        live = self.barrier.live | union(cta.live() for cta in self.ctas)
        live |= union(event for event, _ in self.operations.values())
        for more in self.more_live:
            live |= more()
        return live

    def _forget(self, kept: int) -> None:
        for cta in self.ctas:
            cta.forget(kept)
        self.barrier.forget(kept)
        self.operations = {op: (event, known & kept) for op, (event, known) in self.operations.items()}
        self.initialisations &= kept
        self.unreleased &= kept
        for more in self.more_forget:
            more(kept)


class Order(Observer):
    """Keeps a `CtaOrder` for each CTA, and the lanes that execute each warp's current step."""

    def __init__(self) -> None:
        self.ctas: dict[Cta, CtaOrder] = {}
        self.far: dict[Warp, int] = {}
        """Warp -> the event of its last access to another CTA, or arrival there."""
        self._masks: dict[Warp, Mask | None] = {}

    def lanes(self, warp: Warp) -> int:
        """The lanes that execute the warp's current step."""
        return lanes_of(self._masks.get(warp))

    def cta(self, cta: Cta) -> CtaOrder:
        found = self.ctas.get(cta)
        if found is None:
            self.ctas |= zip(cta.cluster.ctas, ClusterOrder(cta.cluster).ctas, strict=True)
            found = self.ctas[cta]
        return found

    def of(self, warp: Warp) -> WarpKnowledge:
        return self.cta(warp.cta).warps[warp.index]

    # ---- steps and fences
    def stepping(self, warp: Warp, step: Step, mask: Mask | None) -> None:
        self._masks[warp] = mask
        if step.kind == "bar.warp.sync" and mask is None:
            self.of(warp).join()

    def fenced(self, warp: Warp, at: Statement) -> None:
        cta, me, lanes = self.cta(warp.cta), self.of(warp), self.lanes(warp)
        cluster = cta.cluster
        if at.opcode.startswith("fence.proxy.async") and not at.opcode.endswith(".global"):
            me.fence(lanes, cluster.far_from(cta) if "shared::cta" in at.opcode else 0)
        elif at.opcode.startswith("fence.mbarrier_init"):
            found = me.by_engine(lanes) & cluster.initialisations
            me.known |= found << 1
            me.cover(lanes, found | found << 1)
        elif at.opcode.startswith(WIDE_FENCES):
            known = me.release(lanes)
            cluster.unreleased &= ~known
            me.cover(lanes, known)

    # ---- asynchronous operations
    def issued(self, warp: Warp, operation: Operation) -> None:
        cta = self.cta(warp.cta)
        if operation.kind == "wgmma":
            if warp.index not in cta.groups:
                cta.groups[warp.index] = cta.events.new()
        else:  # it hands over what its lanes knew, like an arrival
            event = cta.events.new()
            known = self.of(warp).release(self.lanes(warp))
            if operation.target is not warp.cta:
                known &= ~_both(cta.cluster.unreleased)
            cta.cluster.operations[operation] = (event, known)

    def event_of(self, operation: Operation) -> int:
        """The event of an operation that was just issued."""
        cta, warp = self.cta(operation.warp.cta), operation.warp
        return cta.groups[warp.index] if operation.kind == "wgmma" else cta.cluster.operations[operation][0]

    def committed(self, warp: Warp, at: Statement, group: Group) -> None:
        cta = self.cta(warp.cta)
        if group.kind == "wgmma" and warp.index in cta.groups:
            cta.members[group] = cta.groups.pop(warp.index)

    def joined(self, warp: Warp, at: Statement, groups: Sequence[Group], read: bool) -> None:
        cta, known = self.cta(warp.cta), 0
        for group in groups:
            known |= cta.members.pop(group, 0)
            for operation in group.operations:  # once its source has been read, a store touches no shared memory
                known |= cta.cluster.operations.pop(operation, (0, 0))[0]
        self.of(warp).acquire(self.lanes(warp), known)

    # ---- mbarriers
    def initialised(self, warp: Warp, at: Statement, barrier: MBarrier) -> None:
        cta = self.cta(warp.cta)
        event = self.of(warp).mark(self.lanes(warp))
        cta.cluster.initialisations |= event
        cta.mbarriers[barrier.address] = Meeting(initialised=event)

    def arrived(self, warp: Warp, at: Statement, barrier: MBarrier, count: int, expected: int) -> None:
        me, lanes = self.of(warp), self.lanes(warp)
        event = self.far[warp] = me.mark(lanes)
        self.cta(barrier.cta).mbarriers[barrier.address].arrive(self._handed_over(warp, at, barrier), event)

    def _handed_over(self, warp: Warp, at: Statement, barrier: MBarrier) -> int:
        """What who waits gets from this arrival. Nothing without release semantics; those of the CTA's scope, which an
        arrival has unless it says otherwise, do not reach what threads have stored into other CTAs."""
        me, cluster, mods = self.of(warp), self.cta(warp.cta).cluster, at.opcode.split(".")
        if "relaxed" in mods:
            return me.relaxed(self.lanes(warp))
        known = me.release(self.lanes(warp))
        if "cluster" in mods:
            cluster.unreleased &= ~known
        return known if barrier.cta is warp.cta else known & ~_both(cluster.unreleased)

    def transferred(self, operation: Operation, barrier: MBarrier, nbytes: int) -> None:
        event, known = self.cta(operation.warp.cta).cluster.operations.pop(operation, (0, 0))
        self.cta(barrier.cta).mbarriers[barrier.address].arrive(known, event)

    def completed(self, barrier: MBarrier) -> None:
        self.cta(barrier.cta).mbarriers[barrier.address].complete()

    def passed(self, warp: Warp, at: Statement, barrier: MBarrier, parity: int) -> None:
        self.of(warp).acquire(self.lanes(warp), self.cta(barrier.cta).mbarriers[barrier.address].published)

    # ---- clusters
    def remote(self, warp: Warp, at: Statement, cta: Cta, addresses: Addresses, nbytes: int, write: bool) -> None:
        event = self.far[warp] = self.of(warp).mark(self.lanes(warp))
        if write:
            target = self.cta(cta)
            target.from_outside |= event
            target.cluster.unreleased |= event

    def cluster_arrived(self, warp: Warp, at: Statement, barrier: ClusterBarrier) -> None:
        me, lanes, cluster = self.of(warp), self.lanes(warp), self.cta(warp.cta).cluster
        if "relaxed" in at.opcode.split("."):
            cluster.barrier.arrive(me.relaxed(lanes), 0)
            return
        known = me.release(lanes)
        cluster.unreleased &= ~known
        cluster.barrier.arrive(known, 0)

    def cluster_completed(self, barrier: ClusterBarrier) -> None:
        self.cta(barrier.cluster.ctas[0]).cluster.barrier.complete()

    def cluster_passed(self, warp: Warp, at: Statement, barrier: ClusterBarrier) -> None:
        self.of(warp).acquire(self.lanes(warp), self.cta(warp.cta).cluster.barrier.published)

    # ---- named barriers
    def entered(self, warp: Warp, at: Statement, barrier: NamedBarrier, threads: int, sync: bool) -> None:
        cta, me = self.cta(warp.cta), self.of(warp)
        me.join()
        event = me.mark(ALL_LANES)
        meeting = cta.named[barrier.number]
        meeting.arrive(me.known, event)
        generation = (barrier.number, barrier.generation)
        if sync:
            cta.inside[warp.index] = generation
            cta.left.setdefault(generation, [0, 0])[1] += 1
        if barrier.arrived + WARP_THREADS == threads:
            meeting.complete()
            if generation in cta.left:
                cta.left[generation][0] = meeting.published

    def left(self, warp: Warp, at: Statement, barrier: NamedBarrier) -> None:
        cta = self.cta(warp.cta)
        generation = cta.inside.pop(warp.index)
        waiting = cta.left[generation]
        self.of(warp).known |= waiting[0]
        waiting[1] -= 1
        if not waiting[1]:
            del cta.left[generation]

    # ---- ends
    def exited(self, warp: Warp) -> None:
        self.cta(warp.cta).exited.add(warp.index)
        self._masks.pop(warp, None)
        self.far.pop(warp, None)

    def finished(self, cta: Cta) -> None:
        self.ctas.pop(cta, None)
