"""A mutant: a kernel with one fault, and what a checker must say about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fa3.emulator.program import Program
from fa3.sass.ptx_code import Statement

# Kinds of findings (`fa3.emulator.check.advice`, and of faults of the machine) that faults of one sort may show as.
UNORDERED = frozenset(
    ("overwritten while read", "read before it arrived", "written twice at once", "uninitialised shared memory")
)
"""Accesses to shared memory that nothing orders. Which of the two came first depends on the schedule."""
STUCK = frozenset(("deadlock",))
EARLY = frozenset(("barrier phase", "early phase", "mbarrier arrivals"))
"""Arrivals that count for the wrong phase, or that no phase waits for."""
UNEVEN = frozenset(("barrier left mid-phase", "load never waited for", "named barrier left mid-phase"))
"""One end of a ring, or one warpgroup, went further than the other."""
BYTES = frozenset(("transaction bytes",))
NAMED = frozenset(("named barrier", "named barrier left mid-phase"))
NO_BARRIER = frozenset(("mbarrier", "barrier not visible"))
REGISTERS = frozenset(("accumulator in flight", "A registers in flight"))
SUMS = frozenset(("sums in no fixed order", "race in global memory"))
"""Sums in global memory that nothing orders."""
VALUES = frozenset(("wrong result", "never written", "written twice"))
"""What only the outputs tell."""


@dataclass(frozen=True)
class Mutant:
    """One fault planted at a statement.

    `place` names it across versions of a kernel: operator, file, text of the Python line, edge.
    """

    operator: str
    """Such as "wait removed"; the keys of `fa3.emulator.mutate.operators.OPERATORS`."""
    index: int
    """Of the statement, in the unchanged program."""
    at: Statement
    build: Callable[[], Program]
    """Makes the changed program."""
    kinds: frozenset[str]
    """The findings that are right; one of them is enough."""
    anchors: tuple[int, ...] = ()
    """Further statements whose edges the fault concerns: for the start of a cursor its waits, for a bound what it
    bounds."""
    detail: str = ""
    """What was changed, such as "12 -> 13 arrivals"."""
    harmless: bool = False
    """Whether it only waits for more than it must: no finding is right."""
