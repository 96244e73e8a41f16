"""Faults between CTAs and kernels, planted in kernels that can be read at a glance."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from fa3.emulator.mutate import chain
from fa3.emulator.mutate.analysis import Analysis
from fa3.emulator.mutate.mutant import Mutant

from ..assembler import aligned, assemble
from ..check.test_global_memory import BY_THREADS, IN_BULK, check_program

UNSEEN = {
    "sum removed": "only the sums tell, and nobody looks at them here",
    "half of a sum": "likewise",
    "sum stored": "in its turn, and nobody looks at the sums",
}
BODIES = {"threads": BY_THREADS, "bulk": IN_BULK}


def mutants(body: str) -> list[Mutant]:
    program = assemble(body, [aligned([0.0]), aligned([0])])
    return [mutant for operator in chain.OPERATORS for mutant in operator(Analysis(program))]


@pytest.mark.parametrize("body", BODIES)
def test_every_sort_of_fault_is_planted(body: str) -> None:
    found = {mutant.operator for mutant in mutants(BODIES[body])}
    wanted = {
        "griddepcontrol.wait removed", "turn not waited for", "ld.acquire relaxed", "red.release relaxed",
        "count removed", "counted twice", "sum removed", "sum stored",
    }  # fmt: skip
    assert found == wanted | ({"half of a sum"} if body == "bulk" else set())


@pytest.mark.parametrize(
    ("body", "number"), [(name, number) for name, body in BODIES.items() for number in range(len(mutants(body)))]
)
def test_a_fault_is_named(body: str, number: int) -> None:
    mutant = mutants(BODIES[body])[number]
    report: Any = check_program(partial(_program, mutant))
    if mutant.operator in UNSEEN:
        assert not report
    else:
        assert report.kinds & mutant.kinds, (mutant.operator, report.kinds)


def _program(mutant: Mutant) -> Any:
    return mutant.build()
