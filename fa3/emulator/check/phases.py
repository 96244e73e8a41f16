"""mbarriers: arrive counts, transaction bytes, phases that complete too early, and what is left at the end.

Two rules hold for every schedule. Who arrives for a phase must come after the end of the phase before, or the arrival
may count for that one; and who waits for a phase must come after the one before it, whose successor has the same
parity as a phase long past. Both ask what the warp knew, not what happened to be so in this run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fa3.emulator.check.checker import Checker, Site, site_of
from fa3.emulator.check.names import BarrierPlan, Names, count_of
from fa3.emulator.check.ordering import Order
from fa3.emulator.check.places import short

if TYPE_CHECKING:
    from fa3.emulator.cta import Cta
    from fa3.emulator.operations import Operation
    from fa3.emulator.sync import MBarrier
    from fa3.emulator.warp import Warp
    from fa3.sass.ptx_code import Statement

LARGEST_TX = (1 << 20) - 1


@dataclass
class History:
    """What happened at one mbarrier."""

    init: Site
    arrivals: Counter[int] = field(default_factory=Counter)
    """Arrivals of the current phase, by warp."""
    last: Site | None = None
    """The last arrival, or the last copy that reported bytes."""


class Phases(Checker):
    """Rules of mbarriers. Sees every event before `Order` does."""

    def __init__(self, names: Names, order: Order) -> None:
        super().__init__(names)
        self.order = order
        self._history: dict[MBarrier, History] = {}
        self._issued: dict[Operation, int] = {}
        """Copies under way -> completed phases of their barrier when they were started."""

    # ---- init
    def initialised(self, warp: Warp, at: Statement, barrier: MBarrier) -> None:
        site, name = site_of(warp, at), self.mbarrier(barrier)
        plan = self.names.plan(barrier.address)
        before = [old for old in self._history if old.cta is barrier.cta and old.address == barrier.address]
        for old in before:
            happened = f"{self.warp(warp)} initialises {name}, which was initialised before."
            self.find("barrier initialised twice", site, happened, self._history.pop(old).init, _edge(plan))
        if plan and plan.arrivals != barrier.count:
            happened = f"{name} is initialised for {count_of(barrier.count, 'arrival')} in a phase; "
            happened += f"{self.names.warps(plan.warps)} should arrive once each."
            self.find("arrival count", site, happened, subject=plan.edge)
        self._history[barrier] = History(site)

    # ---- arrivals
    def arrived(self, warp: Warp, at: Statement, barrier: MBarrier, count: int, expected: int) -> None:
        site, plan = site_of(warp, at), self.names.plan(barrier.address)
        meeting = self.order.cta(barrier.cta).mbarriers[barrier.address]
        known = self.order.of(warp).by_threads(self.order.lanes(warp))
        if meeting.initialised & ~known:
            self._not_visible(site, barrier, plan)
        if meeting.before & ~known:
            self._unordered(site, barrier, plan, "arrives for")
        if plan and expected and expected != plan.bytes:
            self._bytes(site, barrier, plan, expected)
        elif expected > LARGEST_TX:
            name = self.mbarrier(barrier)
            happened = f"{expected} bytes are announced to {name}; an mbarrier counts to {LARGEST_TX}."
            self.find("transaction bytes", site, happened)
        history = self._history.get(barrier)
        if history:
            history.arrivals[warp.index] += count
            history.last = site

    def _bytes(self, site: Site, barrier: MBarrier, plan: BarrierPlan, expected: int) -> None:
        happened = f"{self.who(site)} announces {expected} bytes to {self.mbarrier(barrier)}; a stage has {plan.bytes}."
        self.find("transaction bytes", site, happened, subject=plan.edge)

    def issued(self, warp: Warp, operation: Operation) -> None:
        barrier = operation.barrier
        if barrier is None:
            return
        self._issued[operation] = barrier.phases
        site, plan = site_of(warp, operation.at), self.names.plan(barrier.address)
        meeting = self.order.cta(barrier.cta).mbarriers[barrier.address]
        known = self.order.of(warp).by_engine(self.order.lanes(warp))
        if meeting.initialised << 1 & ~known:
            self._not_visible(site, barrier, plan)
        if meeting.before & ~known:
            self._unordered(site, barrier, plan, "starts a copy that reports to")

    def transferred(self, operation: Operation, barrier: MBarrier, nbytes: int) -> None:
        site = site_of(operation.warp, operation.at)
        phase = self._issued.pop(operation, barrier.phases)
        history = self._history.get(barrier)
        if phase != barrier.phases:
            self._early(site, barrier, history, phase)
        if history:
            history.last = site

    def _early(self, site: Site, barrier: MBarrier, history: History | None, phase: int) -> None:
        plan = self.names.plan(barrier.address)
        happened = (
            f"a copy of {self.who(site)} was started in phase {phase} of "
            f"{self.mbarrier(barrier)}, but the phase completed without its bytes: fewer bytes were "
            f"announced than are loaded."
        )
        self.find("transaction bytes", site, happened, history.last if history else None, _edge(plan))

    # ---- phases
    def completed(self, barrier: MBarrier) -> None:
        history, plan = self._history.get(barrier), self.names.plan(barrier.address)
        if history is None:
            return
        if plan and history.last and any(history.arrivals[warp] != plan.times for warp in plan.warps):
            self._incomplete(barrier, plan, history)
        history.arrivals.clear()

    def _incomplete(self, barrier: MBarrier, plan: BarrierPlan, history: History) -> None:
        missing = {warp for warp in plan.warps if not history.arrivals[warp]}
        often = {warp for warp, times in history.arrivals.items() if times > plan.times}
        what = f"phase {barrier.phases - 1} of {self.mbarrier(barrier)} is complete"
        what += f" without {self.names.warps(missing)}" if missing else ""
        what += f"; {self.names.warps(often)} arrived more than once" if often else ""
        assert history.last is not None
        self.find("early phase", history.last, what + ".", history.init, plan.edge)

    def passed(self, warp: Warp, at: Statement, barrier: MBarrier, parity: int) -> None:
        site, plan = site_of(warp, at), self.names.plan(barrier.address)
        meeting = self.order.cta(barrier.cta).mbarriers[barrier.address]
        known = self.order.of(warp).by_threads(self.order.lanes(warp))
        if meeting.initialised & ~known:
            self._not_visible(site, barrier, plan)
        if meeting.earlier & ~known:
            self._unordered(site, barrier, plan, "waits for")

    # ---- rules
    def _not_visible(self, site: Site, barrier: MBarrier, plan: BarrierPlan | None) -> None:
        history = self._history.get(barrier)
        happened = (
            f"{self.who(site)} uses {self.mbarrier(barrier)}, but its initialisation need not "
            f"be visible there: no fence and barrier lie in between."
        )
        self.find("barrier not visible", site, happened, history.init if history else None)

    def _unordered(self, site: Site, barrier: MBarrier, plan: BarrierPlan | None, does: str) -> None:
        history = self._history.get(barrier)
        name, at = self.mbarrier(barrier), history.last if history else None
        before = barrier.phases - 1 - (does == "waits for")
        what = f"{self.who(site)} {does} phase {before + 1} of {name}, but does not know that phase {before} is "
        what += "over: the wait may pass at once." if does == "waits for" else "over, and may meet that one."
        if at:
            what += f" The last to arrive there was {self.who(at)} at {short(at.at)}."
        self.find("barrier phase", site, what, at, _edge(plan))

    # ---- ends
    def finished(self, cta: Cta) -> None:
        for barrier in [barrier for barrier in self._history if barrier.cta is cta]:
            history = self._history.pop(barrier)
            if barrier.pending != barrier.count or barrier.tx:
                self._left(barrier, history)

    def _left(self, barrier: MBarrier, history: History) -> None:
        plan = self.names.plan(barrier.address)
        came = barrier.count - barrier.pending
        happened = f"the CTA ends while phase {barrier.phases} of {self.mbarrier(barrier)} has {came} of "
        happened += f"{barrier.count} arrivals"
        if barrier.tx:
            happened += f" and {abs(barrier.tx)} bytes {'too many' if barrier.tx < 0 else 'missing'}"
        self.find("barrier left mid-phase", history.last or history.init, happened + ".", subject=_edge(plan))


def _edge(plan: BarrierPlan | None) -> str:
    return plan.edge if plan else ""
