"""The mutants of a small ring under the checkers: the rule for lines, on a kernel that can be read at a glance."""

from __future__ import annotations

from typing import Any

import pytest

from fa3.emulator import machine
from fa3.emulator.check.composite import Checks
from fa3.emulator.faults import Fault
from fa3.emulator.mutate.judge import CAUGHT, Places
from fa3.emulator.mutate.operators import mutants
from fa3.emulator.mutate.trace import Trace

from ..assembler import launch_of
from .ring import RingNames, arguments, program

PROGRAM = program()
ESCAPES = {
    ("barrier number +1", 4): "nobody else uses barrier 1",
    ("init fence removed", 3): "the async proxy does not use these barriers",
    ("bound +1", 4): "there are blocks",
    ("bound -1", 4): "there is more than one block",
    ("bound -1", 24): "only the output tells that the last block was not read, and nobody looks at it here",
}
"""(operator, line) -> why nothing is found."""
FILL, READ = range(10, 15), range(20, 25)


def run(changed: Any, *observers: Any, policy: str = "random") -> None:
    memory = arguments()  # which the launch knows by address only
    launch: Any = launch_of(changed, memory)
    machine.run(changed, launch, policy=policy, observers=observers)


@pytest.fixture(scope="module", name="places")
def _places() -> Places:
    trace = Trace(RingNames("k"))
    run(PROGRAM, trace)
    return Places(PROGRAM.statements, {index: frozenset(edges) for index, edges in trace.edges.items()})


def findings(changed: Any) -> list[Any]:
    found: list[Any] = []
    for policy in ("random", "late", "early"):
        checks = Checks(RingNames("k"))
        try:
            run(changed, checks, policy=policy)
        except Fault as fault:
            checks.stopped(fault)
        found += checks.findings
    return found


def test_the_ring_itself_is_right() -> None:
    assert findings(PROGRAM) == []


@pytest.mark.parametrize("number", range(len(mutants(PROGRAM))))
def test_a_mutant_is_named(number: int, places: Places) -> None:
    mutant = mutants(PROGRAM)[number]
    found = findings(mutant.build())
    if (mutant.operator, mutant.at.source.line) in ESCAPES:
        assert found == []
        return
    assert places.verdict(mutant, found)[0] == CAUGHT, (mutant.operator, str(mutant.at), [str(f) for f in found])


def test_an_edge_joins_its_two_ends(places: Places) -> None:
    """A barrier of the ring is waited for by one warp, and the other arrives."""
    wait, arrival = (
        next(m for m in mutants(PROGRAM) if m.operator == f"{what} removed" and m.at.source.line in lines)
        for what, lines in (("wait", FILL), ("arrival", READ))
    )
    assert places.edges_of(wait) & places.edges_of(arrival)
    assert places.lines_of(arrival)["kernel.py", 22] is True
    assert places.lines_of(arrival)["kernel.py", 10] is False
