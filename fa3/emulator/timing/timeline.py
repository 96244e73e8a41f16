"""The result of a replay: who did what when, in cycles from the first instruction of a CTA."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fa3.sass.listing import Source


class Interval(NamedTuple):
    """`kind` says what for colours and sums, `label` what in words; `at` is the Python line."""

    start: float
    end: float
    kind: str
    label: str = ""
    at: Source | None = None

    @property
    def cycles(self) -> float:
        return self.end - self.start


WAITS = ("wait", "barrier", "gemm")
"""Kinds of a warp that stands: for an mbarrier, at a named barrier, for the tensor cores."""


@dataclass(frozen=True)
class Timeline:
    """One CTA on one SM."""

    warps: Sequence[Sequence[Interval]]
    """By warp; each list in the order of time, without overlaps."""
    units: Mapping[str, Sequence[Interval]]
    """By unit: "tensor cores", "MUFU <sub-partition>", "TMA load", "TMA store"; likewise without overlaps."""
    cycles: float
    """Of the launch: the CTA's, and what a launch costs by itself."""
    end: float
    """Of the CTA, counted from its first instruction: its last warp has exited and its last store is done."""
    kernel: str = ""
    number: int = 0
    """Of the CTA in its grid."""
    roles: Mapping[int, str] = field(default_factory=dict)
    """Warp -> what it is called, where that is known."""

    def busy(self, unit: str) -> float:
        """Cycles for which a unit works. KeyError for one that does not exist."""
        return sum(interval.cycles for interval in self.units[unit])

    def utilisation(self, unit: str) -> float:
        """Share of the CTA's time for which a unit works, from 0 to 1."""
        return self.busy(unit) / self.end if self.end else 0.0

    def totals(self, warp: int) -> dict[str, float]:
        """Cycles of one warp by kind."""
        sums: defaultdict[str, float] = defaultdict(float)
        for interval in self.warps[warp]:
            sums[interval.kind] += interval.cycles
        return dict(sums)

    @property
    def math_warps(self) -> list[int]:
        """First warps of the warpgroups that issue GEMMs."""
        return [w for w in range(0, len(self.warps), 4) if any(i.kind == "gemm" for i in self.warps[w])]

    @property
    def copy_warps(self) -> list[int]:
        """Warps that start copies, and belong to no math warpgroup."""
        math = {warp + i for warp in self.math_warps for i in range(4)}
        others = (w for w in range(len(self.warps)) if w not in math)
        return [w for w in others if any(i.kind == "copy" for i in self.warps[w])]

    def summary(self) -> str:
        """A few lines: cycles, how busy the units are, and what the copying warps and the math warpgroups do."""
        busy = ", ".join(f"{unit} {self.utilisation(unit):.0%}" for unit in self.units if self.units[unit])
        lines = [f"{self.end:.0f} cycles in CTA {self.number} of {self.kernel or 'a kernel'}: {busy}"]
        for warp in (*(w for w in self.copy_warps if w in self.roles), *self.math_warps):
            sums = sorted(self.totals(warp).items(), key=lambda item: -item[1])
            who = f"warp {warp}" + (f" ({self.roles[warp]})" if warp in self.roles else "")
            lines.append(f"  {who}: " + ", ".join(f"{kind} {cycles:.0f}" for kind, cycles in sums))
        return "\n".join(lines)
