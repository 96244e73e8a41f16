"""What all checkers have in common: names, findings, and the lanes that execute the current step."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fa3.emulator.check.advice import advice_for
from fa3.emulator.check.names import Names
from fa3.emulator.check.places import Place
from fa3.emulator.check.report import Finding, Report
from fa3.emulator.observe import Observer

if TYPE_CHECKING:
    from fa3.emulator.cta import Cta
    from fa3.emulator.faults import Fault
    from fa3.emulator.sync import MBarrier
    from fa3.emulator.warp import Warp
    from fa3.sass.ptx_code import Statement


class Site(NamedTuple):
    """Who and where."""

    warp: int
    """Its index in the CTA; -1 for nobody in particular."""
    at: Statement | None
    rank: int | None = None
    """Of the CTA in its cluster; None where a cluster is one CTA."""


class Checker(Observer):
    """An observer that finds faults. For one run of one program."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.report = Report(kernel=names.kernel)

    @property
    def findings(self) -> list[Finding]:
        return self.report.findings

    def stopped(self, fault: Fault) -> None:
        """The run ended with a fault; whoever calls `machine.run` tells it."""

    def find(self, kind: str, site: Site, happened: str, other: Site | None = None, subject: str = "") -> None:
        """Adds a finding at `site`; `other` is the other party."""
        finding = Finding(
            kind, self.names.kernel, self.place(site), happened, advice_for(kind),
            self.place(other) if other else None, subject,
        )  # fmt: skip
        self.report.add(finding)

    def place(self, site: Site) -> Place:
        return Place.of(self.names.role(site.warp) if site.warp >= 0 else "the CTA", site.warp, site.at, site.rank)

    # ---- names, with the CTA where there are several in a cluster
    def who(self, site: Site) -> str:
        return of_rank(self.names.warp(site.warp), site.rank)

    def warp(self, warp: Warp) -> str:
        return of_rank(self.names.warp(warp.index), rank_of(warp.cta))

    def mbarrier(self, barrier: MBarrier) -> str:
        return of_rank(self.names.mbarrier(barrier.address), rank_of(barrier.cta))


def site_of(warp: Warp, at: Statement | None) -> Site:
    return Site(warp.index, at, rank_of(warp.cta))


def rank_of(cta: Cta) -> int | None:
    """The rank of a CTA, or None if it is alone in its cluster."""
    return cta.rank if len(cta.cluster.ctas) > 1 else None


def of_rank(text: str, rank: int | None) -> str:
    """ "math0 (warp 4) of CTA rank 1"."""
    return text if rank is None else f"{text} of CTA rank {rank}"
