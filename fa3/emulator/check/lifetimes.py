"""Shared memory of other CTAs of a cluster: they must have started before somebody reaches into it, and may not end
before he is done.

A CTA runs behind its first instruction, which others know behind the cluster's barrier or an arrival of it. It ends
with its last warp, and its shared memory with it. So whoever reads, writes or arrives there must be known to be done by
a warp of the CTA when that exits: it has waited for the copy or the arrival, or for the cluster's barrier. A copy from
one CTA to another reads the first until it has written the second.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fa3.emulator.check.checker import Checker, Site, site_of
from fa3.emulator.check.knowledge import union
from fa3.emulator.check.names import Names
from fa3.emulator.check.ordering import CtaOrder, Order

if TYPE_CHECKING:
    from fa3.emulator.cta import Cta
    from fa3.emulator.observe import Addresses
    from fa3.emulator.operations import Operation
    from fa3.emulator.sync import MBarrier
    from fa3.emulator.warp import Warp
    from fa3.sass.ptx_code import Statement

NOT_STARTED, EXITED = "CTA not started", "exited CTA"


@dataclass
class Visits:
    """What may still reach into a CTA's shared memory: event -> who, and what he does there."""

    order: CtaOrder
    open: dict[int, tuple[Site, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.order.cluster.more_live.append(self._live)

    def _live(self) -> int:
        """Who is known to be done by some warp needs no watching."""
        known = union(warp.known for warp in self.order.warps)
        self.open = {event: visit for event, visit in self.open.items() if not event & known}
        return union(self.open)


class Lifetimes(Checker):
    """Sees every event after `Order` does."""

    def __init__(self, names: Names, order: Order) -> None:
        super().__init__(names)
        self.order = order
        self._visits: dict[Cta, Visits] = {}
        self._said: defaultdict[Cta, set[int]] = defaultdict(set)
        """PTX lines that reach into a CTA which may not have started."""

    def remote(self, warp: Warp, at: Statement, cta: Cta, addresses: Addresses, nbytes: int, write: bool) -> None:
        what = f"{'writes' if write else 'reads'} {self.names.shared(int(addresses[0]), int(addresses[-1]))}"
        self._visit(warp, at, cta, what, self.order.far[warp])

    def arrived(self, warp: Warp, at: Statement, barrier: MBarrier, count: int, expected: int) -> None:
        if barrier.cta is not warp.cta:
            what = f"arrives at {self.names.mbarrier(barrier.address)}"
            self._visit(warp, at, barrier.cta, what, self.order.far[warp])

    def issued(self, warp: Warp, operation: Operation) -> None:
        if operation.target is warp.cta:
            return
        event, first = self.order.event_of(operation), 4 * int(operation.writes[0])
        self._visit(warp, operation.at, operation.target, f"writes {self.names.shared(first, first)}", event)
        if operation.kind == "bulk.send":
            first = 4 * int(operation.reads[0])
            site = site_of(warp, operation.at)
            self._of(warp.cta).open[event] = site, f"copies {self.names.shared(first, first)} to another CTA"

    def _visit(self, warp: Warp, at: Statement, cta: Cta, what: str, event: int) -> None:
        site, me = site_of(warp, at), self.order.of(warp)
        if not me.by_threads(self.order.lanes(warp)) & self.order.cta(cta).start and at.line not in self._said[cta]:
            self._said[cta].add(at.line)
            happened = f"{self.who(site)} {what} of CTA rank {cta.rank}, but does not know that this CTA has started."
            self.find(NOT_STARTED, site, happened)
        self._of(cta).open[event] = site, f"{what} of CTA rank {cta.rank}"

    def _of(self, cta: Cta) -> Visits:
        found = self._visits.get(cta)
        if found is None:
            found = self._visits[cta] = Visits(self.order.cta(cta))
        return found

    def exited(self, warp: Warp) -> None:
        """The CTA ends with its last warp."""
        visits = self._visits.get(warp.cta)
        if visits is None or warp.cta.running:
            return
        known = union(one.all for one in visits.order.warps)
        for event, (site, what) in visits.open.items():
            if not event & known:
                happened = f"{self.who(site)} {what}, and CTA rank {warp.cta.rank} may have ended by then: none of its "
                happened += "warps knows that this is done."
                self.find(EXITED, site, happened, site_of(warp, warp.at))
        visits.open.clear()

    def finished(self, cta: Cta) -> None:
        self._visits.pop(cta, None)
        self._said.pop(cta, None)
