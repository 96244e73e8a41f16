"""What all checkers have in common: names, findings, and the lanes that execute the current step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fa3.emulator.check.advice import advice_for
from fa3.emulator.check.names import Names
from fa3.emulator.check.places import Place
from fa3.emulator.check.report import Finding, Report
from fa3.emulator.observe import Observer

if TYPE_CHECKING:
    from fa3.emulator.faults import Fault
    from fa3.emulator.warp import Mask, Warp
    from fa3.sass.ptx_code import Statement

ALL_LANES = (1 << 32) - 1

Site = tuple[int, "Statement | None"]
"""Who and where: the index of a warp, and a statement."""


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
        warp, at = site
        return Place.of(self.names.role(warp) if warp >= 0 else "the CTA", warp, at)


def lanes_of(mask: Mask | None) -> int:
    """The lanes of a mask as a set of bits."""
    if mask is None:
        return ALL_LANES
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


def site_of(warp: Warp, at: Statement) -> Site:
    return warp.index, at
