"""Named barriers: who meets whom, and with how many.

Who enters a barrier must come after the end of its generation before, or the arrival may count for that one under
another schedule: two groups that share a barrier mix, or one group turns around too fast. The rule asks what the warp
knew. Which warps meet is compared with the names' plan; without one a warp may arrive for itself (bar.arrive, then
bar.sync).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fa3.emulator.check.checker import Checker, Site, site_of
from fa3.emulator.check.names import Names
from fa3.emulator.check.ordering import Order
from fa3.emulator.check.places import short
from fa3.emulator.sync import WARP_THREADS
from fa3.emulator.warp import ALL_LANES

if TYPE_CHECKING:
    from fa3.emulator.cta import Cta
    from fa3.emulator.sync import NamedBarrier
    from fa3.emulator.warp import Warp
    from fa3.sass.ptx_code import Statement


@dataclass
class Generation:
    """Who has entered a barrier since it last opened, and where."""

    entered: dict[int, Site] = field(default_factory=dict)
    threads: int = 0


class NamedBarriers(Checker):
    """Rules of named barriers. Sees every event before `Order` does."""

    def __init__(self, names: Names, order: Order) -> None:
        super().__init__(names)
        self.order = order
        self._ctas: dict[Cta, dict[int, Generation]] = {}
        """CTA -> number of a barrier -> its current generation."""

    def entered(self, warp: Warp, at: Statement, barrier: NamedBarrier, threads: int, sync: bool) -> None:
        site, number = site_of(warp, at), barrier.number
        current = self._ctas.setdefault(warp.cta, {})
        generation = current.setdefault(number, Generation())
        self._check_threads(warp, at, number, threads, generation)
        self._check_plan(site, number, threads)
        meeting = self.order.cta(warp.cta).named[number]
        if meeting.before & ~self.order.of(warp).by_threads(ALL_LANES):
            what = f"enters {self.names.named(number)}, but does not know that its generation {barrier.generation - 1} "
            self._found(site, number, what + "is over, and may meet that one")
        if warp.index in generation.entered and self.names.meeting(number):
            other = generation.entered[warp.index]
            self._found(site, number, f"enters {self.names.named(number)} twice in one generation", other)
        generation.entered[warp.index] = site
        generation.threads = generation.threads or threads
        if barrier.arrived + WARP_THREADS == threads:
            del current[number]

    def _check_threads(self, warp: Warp, at: Statement, number: int, threads: int, generation: Generation) -> None:
        site, name = site_of(warp, at), self.names.named(number)
        if threads % WARP_THREADS or not 0 < threads <= WARP_THREADS * len(warp.cta.warps):
            self._found(
                site, number, f"enters {name} for {threads} threads; a multiple of 32 up to the CTA's is needed"
            )
        elif generation.threads not in (0, threads):
            other = next(iter(generation.entered.values()))
            self._found(site, number, f"enters {name} for {threads} threads, others for {generation.threads}", other)

    def _check_plan(self, site: Site, number: int, threads: int) -> None:
        """Compares with what the barrier is for, where that is known."""
        meeting = self.names.meeting(number)
        if meeting is None:
            return
        if site.warp not in meeting:
            here = f"is for {self.names.warps(meeting)}" if meeting else "is not used"
            self._found(site, number, f"enters {self.names.named(number)}, which {here}")
        elif threads != WARP_THREADS * len(meeting):
            joins = f"joins {WARP_THREADS * len(meeting)}"
            self._found(site, number, f"enters {self.names.named(number)} for {threads} threads; it {joins}")

    def finished(self, cta: Cta) -> None:
        left = self._ctas.pop(cta, {})
        for number, generation in left.items():
            warps = frozenset(generation.entered)
            if len(left) > self.names.most_left or not self.names.may_be_left(number, len(warps)):
                happened = f"the CTA ends while {self.names.warps(warps)} has arrived at {self.names.named(number)}, "
                happened += f"which {WARP_THREADS * len(warps)} of {generation.threads} threads have entered."
                site = next(iter(generation.entered.values()))
                self.find("named barrier left mid-phase", site, happened, subject=self._event(number))

    def _found(self, site: Site, number: int, what: str, other: Site | None = None) -> None:
        where = f" (at {short(other.at)})" if other else ""
        self.find("named barrier", site, f"{self.who(site)} {what}{where}.", other, self._event(number))

    def _event(self, number: int) -> str:
        """Without the role: "turn"."""
        return self.names.event(number).partition(" of ")[0]
