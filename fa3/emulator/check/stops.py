"""Why a run stopped: faults of the machine, and deadlocks with who waits for whom."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fa3.emulator.check.checker import Checker, Site, of_rank, rank_of, site_of
from fa3.emulator.check.names import BarrierPlan, Names, count_of
from fa3.emulator.check.places import short
from fa3.emulator.sync import (
    WARP_THREADS,
    ClusterBarrier,
    ClusterBarrierWait,
    MBarrier,
    MBarrierWait,
    NamedBarrier,
    NamedBarrierWait,
)

if TYPE_CHECKING:
    from fa3.emulator.cta import Cta
    from fa3.emulator.faults import Fault
    from fa3.emulator.operations import Operation
    from fa3.emulator.warp import Warp
    from fa3.sass.ptx_code import Statement

Barrier = MBarrier | NamedBarrier | ClusterBarrier
Who = tuple[int | None, int]
"""A warp of a cluster: the rank of its CTA (`Site.rank`), and its index there."""
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
    here: frozenset[Who]
    """Warps that have arrived in the phase that is waited for."""
    missing: frozenset[Who]
    """Warps that could still arrive."""

    @property
    def site(self) -> Site:
        return site_of(self.warps[0], self.warps[0].at)

    @property
    def who(self) -> frozenset[Who]:
        return frozenset(_who(warp) for warp in self.warps)


class Stops(Checker):
    """Remembers who arrived at which barrier, for the day on which nobody comes."""

    def __init__(self, names: Names) -> None:
        super().__init__(names)
        self._arrivals: defaultdict[Barrier, dict[tuple[Who, int], Arrivals]] = defaultdict(dict)
        """Barrier -> (warp, PTX line) -> arrivals."""

    def arrived(self, warp: Warp, at: Statement, barrier: MBarrier, count: int, expected: int) -> None:
        self._note(barrier, warp, at, barrier.phases)

    def transferred(self, operation: Operation, barrier: MBarrier, nbytes: int) -> None:
        self._note(barrier, operation.warp, operation.at, barrier.phases)

    def entered(self, warp: Warp, at: Statement, barrier: NamedBarrier, threads: int, sync: bool) -> None:
        self._note(barrier, warp, at, barrier.generation)

    def cluster_arrived(self, warp: Warp, at: Statement, barrier: ClusterBarrier) -> None:
        self._note(barrier, warp, at, barrier.generation)

    def _note(self, barrier: Barrier, warp: Warp, at: Statement, phase: int) -> None:
        known = self._arrivals[barrier]
        arrivals = known.get((_who(warp), at.line))
        if arrivals is None:
            arrivals = known[_who(warp), at.line] = Arrivals(site_of(warp, at))
        arrivals.times += 1
        arrivals.phase = phase

    def finished(self, cta: Cta) -> None:
        for barrier in [barrier for barrier in self._arrivals if _owner(barrier) is cta]:
            del self._arrivals[barrier]

    # ---- the end of a run
    def stopped(self, fault: Fault) -> None:
        warps = getattr(fault, "warps", None)
        if warps is None:
            site = site_of(fault.warp, fault.at) if fault.warp else Site(-1, fault.at)
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
                self._deadlock(one, f" This follows from the wait at {short(roots[0].site.at)}." if roots else "")

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
        ever = frozenset(_at(one.site) for one in arrivals)
        here = frozenset(_at(one.site) for one in arrivals if one.phase == phase)
        return Blocked(warps, barrier, plan, here, self._expected(warps[0].cta, barrier, plan, ever) - here)

    def _expected(
        self, cta: Cta, barrier: Barrier | None, plan: BarrierPlan | None, ever: frozenset[Who]
    ) -> frozenset[Who]:
        """Who should come to a barrier: by the plan, in the CTAs of those who have ever come; else just they. Where
        nobody has ever come, the plan says whether another CTA should."""
        if isinstance(barrier, ClusterBarrier):
            return frozenset(_who(warp) for warp in barrier.missing())
        planned = plan.warps if plan else None
        if isinstance(barrier, NamedBarrier):
            planned = self.names.meeting(barrier.number) or None
        if planned is None:
            return ever
        others = {rank_of(other) for other in cta.cluster.ctas if other is not cta}
        ranks = {rank for rank, _ in ever} or (others if plan and plan.across else {rank_of(cta)})
        return frozenset((rank, index) for rank in ranks for index in planned if index < len(cta.warps))

    def _waits_for_blocked(self, one: Blocked, blocked: list[Blocked]) -> bool:
        """Whether somebody whom it waits for is blocked, too."""
        cluster = one.warps[0].cta.cluster
        return any(one.missing & other.who for other in blocked if other.warps[0].cta.cluster is cluster)

    # ---- sentences
    def _deadlock(self, one: Blocked, ending: str) -> None:
        wait, who = one.warps[0].waiting, self._warps(one.who)
        subject = one.plan.edge if one.plan else ""
        if isinstance(wait, MBarrierWait):
            barrier = wait.barrier
            first = f"{who} waits for phase {barrier.phases} of {self.mbarrier(barrier)} "
            first += f"(parity {wait.parity}): {_missing(barrier)}."
        elif isinstance(wait, NamedBarrierWait):
            number, missing = wait.barrier.number, wait.barrier.expected - wait.barrier.arrived
            subject = self.names.event(number).partition(" of ")[0]
            first = f"{who} waits at {self.names.named(number)}: {wait.barrier.arrived} of {wait.barrier.expected} "
            first += f"threads have arrived, which leaves {count_of(missing // WARP_THREADS, 'warp')}."
        elif isinstance(wait, ClusterBarrierWait):
            first = f"{who} waits at the cluster's barrier."
        else:
            first = f"{who} waits for {wait}."
        text = " ".join([first, *self._senders(one)]) + ending
        self.find("deadlock", one.site, text, self._missing_sender(one), subject)

    def _senders(self, one: Blocked) -> Iterator[str]:
        """Who came, who could still come, and what they do instead."""
        arrivals = self._arrivals[one.barrier] if one.barrier else {}
        if one.barrier is not None:
            yield f"In this phase came {self._warps(one.here)}." if one.here else "In this phase nobody came."
        ever = [f"{self._warps(warps)} at {line}" for line, warps in _by_line(list(arrivals.values())).items()]
        yield f"Ever arrived there: {', '.join(ever) or 'nobody'}."
        states: defaultdict[str, set[Who]] = defaultdict(set)
        for who in sorted(one.missing, key=lambda who: (who[0] or 0, who[1])):
            states[self._state(_warp(one, who))].add(who)
        for state, warps in states.items():
            yield f"{self._warps(warps)} should come, but {state}."

    def _state(self, warp: Warp) -> str:
        if warp.exited:
            return "has ended"
        if isinstance(warp.waiting, MBarrierWait):
            return f"waits for {self.mbarrier(warp.waiting.barrier)} at {short(warp.at)}"
        if isinstance(warp.waiting, NamedBarrierWait):
            return f"waits at {self.names.named(warp.waiting.barrier.number)} at {short(warp.at)}"
        if isinstance(warp.waiting, ClusterBarrierWait):
            return f"waits at the cluster's barrier at {short(warp.at)}"
        return f"stands at {short(warp.at)}"

    def _warps(self, warps: Set[Who]) -> str:
        """Several warps, by role and CTA."""
        ranks = sorted({rank for rank, _ in warps}, key=lambda rank: rank or 0)
        texts = [(self.names.warps({index for of, index in warps if of == rank}), rank) for rank in ranks]
        return ", ".join(of_rank(*text) for text in texts)

    def _missing_sender(self, one: Blocked) -> Site | None:
        """Where somebody arrived before who has not come this time; else where somebody stands who should come; else
        where those came who were not enough."""
        arrivals = list(self._arrivals[one.barrier].values()) if one.barrier else []
        before = [entry for entry in arrivals if _at(entry.site) in one.missing]
        waiting = [_warp(one, who) for who in sorted(one.missing, key=lambda who: (who[0] or 0, who[1]))]
        if not before and waiting:
            return next((site_of(warp, warp.at) for warp in waiting if not warp.exited), None)
        others = before or [entry for entry in arrivals if _at(entry.site) not in one.who]
        return max(others, key=lambda entry: entry.phase).site if others else None


def _who(warp: Warp) -> Who:
    return rank_of(warp.cta), warp.index


def _at(site: Site) -> Who:
    return site.rank, site.warp


def _warp(one: Blocked, who: Who) -> Warp:
    rank, index = who
    return one.warps[0].cta.cluster.ctas[rank or 0].warps[index]


def _owner(barrier: Barrier) -> Cta:
    return barrier.cluster.ctas[0] if isinstance(barrier, ClusterBarrier) else barrier.cta


def _missing(barrier: MBarrier) -> str:
    """What a phase still lacks."""
    lacks = [f"{barrier.pending} of {count_of(barrier.count, 'arrival')}"] if barrier.pending else []
    lacks += [f"{barrier.tx} bytes that were announced"] if barrier.tx > 0 else []
    text = f"it lacks {' and '.join(lacks)}" if lacks else ""
    more = f"{-barrier.tx} bytes more have come than were announced" if barrier.tx < 0 else ""
    return ", and ".join(filter(None, (text, more)))


def _by_line(arrivals: list[Arrivals]) -> dict[str, frozenset[Who]]:
    """Python line -> the warps that arrived there."""
    lines: dict[str, frozenset[Who]] = {}
    for one in arrivals:
        line = short(one.site.at)
        lines[line] = lines.get(line, frozenset()) | {_at(one.site)}
    return lines
