"""Findings, and the report that collects them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from fa3.emulator.check.places import Place

SHOWN_SCHEDULES = 4


@dataclass
class Finding:
    """One fault of a kernel: what happened where, with whom, and what to do about it."""

    kind: str
    """Short and fixed; see `fa3.emulator.check.advice`."""
    kernel: str
    at: Place
    happened: str
    """A sentence."""
    advice: str
    """Another one."""
    other: Place | None = None
    """The other party, where there is one."""
    subject: str = ""
    """What it is about, without an index: "k", "turn", "o"."""
    count: int = 1
    schedules: list[str] = field(default_factory=list)
    """The runs in which it was seen, such as "late" or "random, seed 3"."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for findings that say the same: one kind, one subject, the same pair of lines in either order."""
        ends = sorted({place.line_of_source for place in (self.at, self.other) if place})
        return self.kind, self.kernel, self.subject, tuple(ends)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        lines = [f"{self.kind}{times}", f"  {self.at}", f"  {self.happened}"]
        if self.other:
            lines.append(f"  the other one: {self.other}")
        lines.append(f"  {self.advice}")
        if self.schedules:
            more = len(self.schedules) - SHOWN_SCHEDULES
            names = "; ".join(self.schedules[:SHOWN_SCHEDULES])
            lines.append(f"  seen under: {names}{f' and {more} more' if more > 0 else ''}")
        return "\n".join(line for line in lines if line.strip())


class Report:
    """Findings without repetitions, in the order in which they were first seen."""

    def __init__(self, findings: Iterable[Finding] = (), kernel: str = "", runs: int = 0) -> None:
        self.kernel, self.runs = kernel, runs
        self._found: dict[tuple[Any, ...], Finding] = {}
        for finding in findings:
            self.add(finding)

    def add(self, finding: Finding) -> None:
        """A repetition only counts."""
        known = self._found.get(finding.key)
        if known is None:
            self._found[finding.key] = finding
            return
        if known is finding:
            return
        known.count += finding.count
        known.schedules += [name for name in finding.schedules if name not in known.schedules]

    @property
    def findings(self) -> list[Finding]:
        return list(self._found.values())

    def of(self, kind: str) -> list[Finding]:
        """The findings of one kind."""
        return [finding for finding in self if finding.kind == kind]

    @property
    def kinds(self) -> set[str]:
        return {finding.kind for finding in self}

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"kernel": self.kernel, "runs": self.runs, "findings": [finding.as_dict() for finding in self]}

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self._found)

    def __bool__(self) -> bool:
        return bool(self._found)

    def __str__(self) -> str:
        runs = f" in {self.runs} run{'s' * (self.runs != 1)}" if self.runs else ""
        of = f" of {self.kernel}" if self.kernel else ""
        if not self._found:
            return f"no findings{runs}{of}"
        title = f"{len(self)} finding{'s' * (len(self) != 1)}{runs}{of}"
        return "\n\n".join([title, *(f"{number}. {finding}" for number, finding in enumerate(self, 1))])
