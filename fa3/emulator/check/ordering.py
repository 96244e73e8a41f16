"""Who knows what to lie behind him: follows every barrier, wait and fence of a run.

Other checkers ask it. It must be told of an event before those that ask what is known after it (`SharedMemory`), and
after those that ask what was known before (`Phases`, `NamedBarriers`); `checkers` puts them in that order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fa3.emulator.check.checker import ALL_LANES, lanes_of
from fa3.emulator.check.knowledge import Events, WarpKnowledge
from fa3.emulator.observe import Observer
from fa3.emulator.sync import WARP_THREADS

if TYPE_CHECKING:
    from fa3.emulator.blocks import Step
    from fa3.emulator.cta import Cta
    from fa3.emulator.operations import Group, Operation
    from fa3.emulator.sync import MBarrier, NamedBarrier
    from fa3.emulator.warp import Mask, Warp
    from fa3.sass.ptx_code import Statement


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

    warp_count: int
    events: Events = field(init=False)
    warps: list[WarpKnowledge] = field(init=False)
    mbarriers: defaultdict[int, Meeting] = field(default_factory=lambda: defaultdict(Meeting))
    """By address."""
    named: defaultdict[int, Meeting] = field(default_factory=lambda: defaultdict(Meeting))
    """By number."""
    left: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """(named barrier, generation) -> [what it hands over, warps that have not gone on yet]."""
    inside: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Warp -> the named barrier and generation that it waits in."""
    operations: dict[Operation, tuple[int, int]] = field(default_factory=dict)
    """Copies under way -> (event, what it comes after)."""
    groups: dict[int, int] = field(default_factory=dict)
    """Warp -> the event of its WGMMA since the last commit."""
    members: dict[Group, int] = field(default_factory=dict)
    """Committed groups of WGMMA -> event."""
    initialisations: int = 0
    """The events of all mbarrier.init."""
    more_live: list[Callable[[], int]] = field(default_factory=list)
    """Where other checkers keep events."""
    more_forget: list[Callable[[int], None]] = field(default_factory=list)
    exited: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.events = Events(self._live, self._forget)
        self.warps = [WarpKnowledge(self.events) for _ in range(self.warp_count)]

    @property
    def common(self) -> int:
        """What all warps know that still run."""
        result = -1
        for index, warp in enumerate(self.warps):
            if index not in self.exited:
                result &= warp.known
        return max(result, 0)

    def _meetings(self) -> list[Meeting]:
        return [*self.mbarriers.values(), *self.named.values()]

    def _live(self) -> int:
        live = 0
        for warp in self.warps:
            live |= warp.growing
        for meeting in self._meetings():
            live |= meeting.live
        for event, _ in self.operations.values():
            live |= event
        for event in (*self.groups.values(), *self.members.values()):
            live |= event
        for more in self.more_live:
            live |= more()
        return live

    def _forget(self, kept: int) -> None:
        for warp in self.warps:
            warp.forget(kept)
        for meeting in self._meetings():
            meeting.forget(kept)
        for waiting in self.left.values():
            waiting[0] &= kept
        self.operations = {op: (event, known & kept) for op, (event, known) in self.operations.items()}
        self.initialisations &= kept
        for more in self.more_forget:
            more(kept)


class Order(Observer):
    """Keeps a `CtaOrder` for each CTA, and the lanes that execute each warp's current step."""

    def __init__(self) -> None:
        self.ctas: dict[Cta, CtaOrder] = {}
        self._masks: dict[Warp, Mask | None] = {}

    def lanes(self, warp: Warp) -> int:
        """The lanes that execute the warp's current step."""
        return lanes_of(self._masks.get(warp))

    def cta(self, cta: Cta) -> CtaOrder:
        found = self.ctas.get(cta)
        if found is None:
            found = self.ctas[cta] = CtaOrder(len(cta.warps))
        return found

    def of(self, warp: Warp) -> WarpKnowledge:
        return self.cta(warp.cta).warps[warp.index]

    # ---- steps and fences
    def stepping(self, warp: Warp, step: Step, mask: Mask | None) -> None:
        self._masks[warp] = mask
        if step.kind == "bar.warp.sync" and mask is None:
            self.of(warp).join()

    def fenced(self, warp: Warp, at: Statement) -> None:
        cta, me = self.cta(warp.cta), self.of(warp)
        if at.opcode.startswith("fence.proxy.async") and not at.opcode.endswith(".global"):
            me.fence(self.lanes(warp))
        elif at.opcode.startswith("fence.mbarrier_init"):
            me.known |= (me.by_engine(self.lanes(warp)) & cta.initialisations) << 1

    # ---- asynchronous operations
    def issued(self, warp: Warp, operation: Operation) -> None:
        cta = self.cta(warp.cta)
        if operation.kind == "wgmma":
            if warp.index not in cta.groups:
                cta.groups[warp.index] = cta.events.new()
        else:  # it hands over what its lanes knew, like an arrival
            event = cta.events.new()
            cta.operations[operation] = (event, self.of(warp).release(self.lanes(warp)))

    def event_of(self, operation: Operation) -> int:
        """The event of an operation that was just issued."""
        cta, warp = self.cta(operation.warp.cta), operation.warp
        return cta.groups[warp.index] if operation.kind == "wgmma" else cta.operations[operation][0]

    def committed(self, warp: Warp, at: Statement, group: Group) -> None:
        cta = self.cta(warp.cta)
        if group.kind == "wgmma" and warp.index in cta.groups:
            cta.members[group] = cta.groups.pop(warp.index)

    def joined(self, warp: Warp, at: Statement, groups: Sequence[Group], read: bool) -> None:
        cta, known = self.cta(warp.cta), 0
        for group in groups:
            known |= cta.members.pop(group, 0)
            for operation in group.operations:  # once its source has been read, a store touches no shared memory
                known |= cta.operations.pop(operation, (0, 0))[0]
        self.of(warp).acquire(self.lanes(warp), known)

    # ---- mbarriers
    def initialised(self, warp: Warp, at: Statement, barrier: MBarrier) -> None:
        cta = self.cta(warp.cta)
        event = self.of(warp).mark(self.lanes(warp))
        cta.initialisations |= event
        cta.mbarriers[barrier.address] = Meeting(initialised=event)

    def arrived(self, warp: Warp, at: Statement, barrier: MBarrier, count: int, expected: int) -> None:
        me, lanes = self.of(warp), self.lanes(warp)
        event = me.mark(lanes)
        self.cta(warp.cta).mbarriers[barrier.address].arrive(me.release(lanes), event)

    def transferred(self, operation: Operation, barrier: MBarrier, nbytes: int) -> None:
        cta = self.cta(operation.warp.cta)
        event, known = cta.operations.pop(operation, (0, 0))
        cta.mbarriers[barrier.address].arrive(known, event)

    def completed(self, barrier: MBarrier) -> None:
        self.cta(barrier.cta).mbarriers[barrier.address].complete()

    def passed(self, warp: Warp, at: Statement, barrier: MBarrier, parity: int) -> None:
        self.of(warp).acquire(self.lanes(warp), self.cta(warp.cta).mbarriers[barrier.address].published)

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

    def finished(self, cta: Cta) -> None:
        self.ctas.pop(cta, None)
