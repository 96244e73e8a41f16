"""Whether what a checker said about a mutant is right: the kind, and the line.

The rule for lines. Every statement has edges: the ring whose barriers or stages it touches, its event of named
barriers, its batch of WGMMA, its buffer, the CTA's registers (`fa3.emulator.mutate.trace`). A finding has the right
line if one of its two parties names

    * the Python line of the mutated statement, or
    * the line of a statement that shares an edge with it (with its anchors, for a fault in the start of a cursor or in
      a bound): who waits at the barrier where an arrival is missing, what reads the stage whose wait is missing;

and if the finding names an edge as its subject ("k", "turn") and not the statement's own line, that edge must be one
of them, too. A wrong result has a line only where `dataflow.py` watches; elsewhere its kind is enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from fa3.emulator.check.places import shown
from fa3.emulator.check.report import Finding
from fa3.emulator.mutate.mutant import Mutant

if TYPE_CHECKING:
    from fa3.sass.ptx_code import Statement

Line = tuple[str, int]
CAUGHT, OTHER_LINE, OTHER_KIND, ESCAPED = "caught", "other line", "other kind", "escaped"
CLEAN, FALSE_ALARM = "clean", "false alarm"
"""Of a change that does no harm."""
RIGHT = (CAUGHT, CLEAN)
WRONG = "wrong result"


@dataclass(frozen=True)
class Places:
    """Where the statements of a kernel are, and what they share."""

    statements: Sequence[Statement]
    edges: dict[int, frozenset[str]]
    """Statement (index) -> its edges."""
    rings: Mapping[str, str] = field(default_factory=dict)
    """As `Names.rings`."""
    lines_of_values: bool = True
    """Whether wrong results have lines: whether somebody watches what the GEMMs read (`dataflow.py`)."""

    @cached_property
    def all_edges(self) -> frozenset[str]:
        return frozenset().union(*self.edges.values())

    def edges_of(self, mutant: Mutant) -> frozenset[str]:
        around = (mutant.index, *mutant.anchors)
        return frozenset().union(*(self.edges.get(index, frozenset()) for index in around))

    def lines_of(self, mutant: Mutant) -> dict[Line, bool]:
        """The right lines; True for the mutated statement's own."""
        edges = self.edges_of(mutant)
        lines = {line_of(self.statements[index]): False for index, found in self.edges.items() if found & edges}
        lines |= {line_of(self.statements[index]): False for index in mutant.anchors}
        return {**lines, line_of(mutant.at): True}

    def verdict(self, mutant: Mutant, findings: Sequence[Finding]) -> tuple[str, Finding | None]:
        """The verdict, and the finding that it is based on: one of the right kind and line if there is one."""
        if mutant.harmless:
            return (FALSE_ALARM, findings[0]) if findings else (CLEAN, None)
        if not findings:
            return ESCAPED, None
        lines, edges = self.lines_of(mutant), self.edges_of(mutant)
        kind = [finding for finding in findings if finding.kind in mutant.kinds]
        others = self.all_edges - edges if edges else frozenset()
        right = [finding for finding in kind if self._is_there(finding, lines, others)]
        if right:
            return CAUGHT, right[0]
        return (OTHER_LINE, kind[0]) if kind else (OTHER_KIND, findings[0])

    def _is_there(self, finding: Finding, lines: dict[Line, bool], other_edges: frozenset[str]) -> bool:
        if finding.kind == WRONG and not self.lines_of_values:
            return True
        named = [lines[line] for line in lines_in(finding) if line in lines]
        subject = self.rings.get(finding.subject, finding.subject)
        return any(named) or (bool(named) and subject not in other_edges)


def line_of(at: Statement) -> Line:
    return (shown(at.source.file), at.source.line) if at.source else ("PTX", at.line)


def lines_in(finding: Finding) -> Iterable[Line]:
    return [place.line_of_source for place in (finding.at, finding.other) if place is not None]
