"""Why a run stopped: faults of the machine, and deadlocks with who waits for whom."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fa3.emulator.check.checker import Checker, Site
from fa3.emulator.check.names import BarrierPlan, Names, count_of
from fa3.emulator.check.places import short
from fa3.emulator.sync import WARP_THREADS, MBarrier, MBarrierWait, NamedBarrier, NamedBarrierWait

if TYPE_CHECKING:
    from fa3.emulator.cta import Cta
    from fa3.emulator.faults import Fault
    from fa3.emulator.operations import Operation
    from fa3.emulator.warp import Warp
    from fa3.sass.ptx_code import Statement

Barrier = MBarrier | NamedBarrier
_ADDRESS = re.compile(r"\baddress (\d+)")


@dataclass
class Arrivals:
    """What one warp has done at a barrier with one statement."""

    site: Site
    times: int = 0
    phase: int = -1
    """Of the last time."""


@dataclass
class Blocked:
    """Warps of one role that wait at one place."""

    warps: list[Warp]
    barrier: Barrier | None
    plan: BarrierPlan | None
    here: frozenset[int]
    """Warps that have arrived in the phase that is waited for."""
    missing: frozenset[int]
    """Warps that could still arrive."""

    @property
    def site(self) -> Site:
        return self.warps[0].index, self.warps[0].at

    @property
    def indices(self) -> frozenset[int]:
        return frozenset(warp.index for warp in self.warps)


class Stops(Checker):
    """Remembers who arrived at which barrier, for the day on which nobody comes."""

    def __init__(self, names: Names) -> None:
        super().__init__(names)
        self._arrivals: defaultdict[Barrier, dict[tuple[int, int], Arrivals]] = defaultdict(dict)
        """Barrier -> (warp, PTX line) -> arrivals."""

    def arrived(self, warp: Warp, at: Statement, barrier: MBarrier, count: int, expected: int) -> None:
        self._note(barrier, warp, at, barrier.phases)

    def transferred(self, operation: Operation, barrier: MBarrier, nbytes: int) -> None:
        self._note(barrier, operation.warp, operation.at, barrier.phases)

    def entered(self, warp: Warp, at: Statement, barrier: NamedBarrier, threads: int, sync: bool) -> None:
        self._note(barrier, warp, at, barrier.generation)

    def _note(self, barrier: Barrier, warp: Warp, at: Statement, phase: int) -> None:
        known = self._arrivals[barrier]
        arrivals = known.get((warp.index, at.line))
        if arrivals is None:
            arrivals = known[warp.index, at.line] = Arrivals((warp.index, at))
        arrivals.times += 1
        arrivals.phase = phase

    def finished(self, cta: Cta) -> None:
        for barrier in [barrier for barrier in self._arrivals if barrier.cta is cta]:
            del self._arrivals[barrier]

    # ---- the end of a run
    def stopped(self, fault: Fault) -> None:
        warps = getattr(fault, "warps", None)
        if warps is None:
            site = (fault.warp.index if fault.warp else -1, fault.at)
            self.find(fault.kind, site, f"{_ADDRESS.sub(self._named, fault.message)}.")
            return
        waiting: defaultdict[tuple[object, ...], list[Warp]] = defaultdict(list)
        for warp in warps:
            barrier = getattr(warp.waiting, "barrier", None)
            waiting[warp.cta, self.names.role(warp.index), warp.at.line, barrier].append(warp)
        blocked = [self._blocked(group) for group in waiting.values()]
        roots = [one for one in blocked if not self._waits_for_blocked(one, blocked)]
        for one in roots:
            self._deadlock(one, "")
        for one in blocked:
            if one not in roots:
                self._deadlock(one, f" This follows from the wait at {short(roots[0].site[1])}." if roots else "")

    def _named(self, found: re.Match[str]) -> str:
        """An address with the name of what is there."""
        address = int(found[1])
        plan = self.names.plan(address)
        return f"{found[0]} ({plan.name if plan else self.names.shared(address, address)})"

    def _blocked(self, warps: list[Warp]) -> Blocked:
        barrier = getattr(warps[0].waiting, "barrier", None)
        plan = self.names.plan(barrier.address) if isinstance(barrier, MBarrier) else None
        arrivals = self._arrivals[barrier].values() if barrier else ()
        phase = -1 if barrier is None else barrier.phases if isinstance(barrier, MBarrier) else barrier.generation
        here = frozenset(one.site[0] for one in arrivals if one.phase == phase)
        expected = plan.warps if plan else frozenset(one.site[0] for one in arrivals)
        if isinstance(barrier, NamedBarrier):
            expected = self.names.meeting(barrier.number) or expected
        count = len(warps[0].cta.warps)
        return Blocked(warps, barrier, plan, here, frozenset(index for index in expected - here if index < count))

    def _waits_for_blocked(self, one: Blocked, blocked: list[Blocked]) -> bool:
        """Whether somebody whom it waits for is blocked, too."""
        cta = one.warps[0].cta
        return any(one.missing & other.indices for other in blocked if other.warps[0].cta is cta)

    # ---- sentences
    def _deadlock(self, one: Blocked, ending: str) -> None:
        wait, who = one.warps[0].waiting, self.names.warps(one.indices)
        subject = one.plan.edge if one.plan else ""
        if isinstance(wait, MBarrierWait):
            barrier = wait.barrier
            first = f"{who} waits for phase {barrier.phases} of {self.names.mbarrier(barrier.address)} "
            first += f"(parity {wait.parity}): {_missing(barrier)}."
        elif isinstance(wait, NamedBarrierWait):
            number, missing = wait.barrier.number, wait.barrier.expected - wait.barrier.arrived
            subject = self.names.event(number).partition(" of ")[0]
            first = f"{who} waits at {self.names.named(number)}: {wait.barrier.arrived} of {wait.barrier.expected} "
            first += f"threads have arrived, which leaves {count_of(missing // WARP_THREADS, 'warp')}."
        else:
            first = f"{who} waits for {wait}."
        text = " ".join([first, *self._senders(one)]) + ending
        self.find("deadlock", one.site, text, self._missing_sender(one), subject)

    def _senders(self, one: Blocked) -> Iterator[str]:
        """Who came, who could still come, and what they do instead."""
        arrivals = self._arrivals[one.barrier] if one.barrier else {}
        if one.barrier is not None:
            yield f"In this phase came {self.names.warps(one.here)}." if one.here else "In this phase nobody came."
        ever = [f"{self.names.warps(warps)} at {line}" for line, warps in _by_line(list(arrivals.values())).items()]
        yield f"Ever arrived there: {', '.join(ever) or 'nobody'}."
        states: defaultdict[str, set[int]] = defaultdict(set)
        for index in one.missing:
            states[self._state(one.warps[0].cta.warps[index])].add(index)
        for state, indices in states.items():
            yield f"{self.names.warps(indices)} should come, but {state}."

    def _state(self, warp: Warp) -> str:
        if warp.exited:
            return "has ended"
        if isinstance(warp.waiting, MBarrierWait):
            return f"waits for {self.names.mbarrier(warp.waiting.barrier.address)} at {short(warp.at)}"
        if isinstance(warp.waiting, NamedBarrierWait):
            return f"waits at {self.names.named(warp.waiting.barrier.number)} at {short(warp.at)}"
        return f"stands at {short(warp.at)}"

    def _missing_sender(self, one: Blocked) -> Site | None:
        """Where somebody arrived before who has not come this time; else where somebody stands who should come; else
        where those came who were not enough."""
        arrivals = list(self._arrivals[one.barrier].values()) if one.barrier else []
        before = [entry for entry in arrivals if entry.site[0] in one.missing]
        waiting = [one.warps[0].cta.warps[index] for index in sorted(one.missing)]
        if not before and waiting:
            return next(((warp.index, warp.at) for warp in waiting if not warp.exited), None)
        others = before or [entry for entry in arrivals if entry.site[0] not in one.indices]
        return max(others, key=lambda entry: entry.phase).site if others else None


def _missing(barrier: MBarrier) -> str:
    """What a phase still lacks."""
    lacks = [f"{barrier.pending} of {count_of(barrier.count, 'arrival')}"] if barrier.pending else []
    lacks += [f"{barrier.tx} bytes that were announced"] if barrier.tx > 0 else []
    text = f"it lacks {' and '.join(lacks)}" if lacks else ""
    more = f"{-barrier.tx} bytes more have come than were announced" if barrier.tx < 0 else ""
    return ", and ".join(filter(None, (text, more)))


def _by_line(arrivals: list[Arrivals]) -> dict[str, frozenset[int]]:
    """Python line -> the warps that arrived there."""
    lines: dict[str, frozenset[int]] = {}
    for one in arrivals:
        line = short(one.site[1])
        lines[line] = lines.get(line, frozenset()) | {one.site[0]}
    return lines
