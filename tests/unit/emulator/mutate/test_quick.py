"""One mutant of every sort on one shipped kernel; all of them on all kernels are in tests/emulator."""

from __future__ import annotations

from pathlib import Path

import pytest

from fa3.emulator.check import Finding, ForwardNames
from fa3.emulator.mutate import survivors
from fa3.emulator.mutate.__main__ import keys
from fa3.emulator.mutate.campaign import Kernel
from fa3.emulator.mutate.dataflow import Dataflow
from fa3.emulator.mutate.mutant import Mutant
from fa3.emulator.mutate.table import Row

pytestmark = pytest.mark.compile

KERNEL = Kernel(next(key for key in keys() if key.config.causal))
SURVIVORS = Path(__file__).parents[3] / "emulator" / "survivors.json"


def one_of_each() -> list[Mutant]:
    """Of every operator the mutant in the middle."""
    operators: dict[str, list[Mutant]] = {}
    for mutant in KERNEL.mutants:
        operators.setdefault(mutant.operator, []).append(mutant)
    return [found[len(found) // 2] for found in operators.values()]


def test_one_of_each_is_caught() -> None:
    rows = []
    for mutant in one_of_each():
        outcome = KERNEL.outcome(mutant)
        rows.append(Row.of(KERNEL.key.name, outcome, KERNEL.places.edges_of(mutant)))
    assert len(rows) > 40
    assert survivors.objections(rows, survivors.read(SURVIVORS)) == []


def test_the_kernel_itself_gives_no_finding() -> None:
    for name in KERNEL.cases:
        assert KERNEL.findings(KERNEL.code, (name, "random")) == []


def test_every_mutant_is_executed() -> None:
    """The problems reach every statement that is changed."""
    assert {mutant.index for mutant in KERNEL.mutants} <= KERNEL.trace.reached


def dataflow(operator: str, problem: str) -> list[Finding]:
    """What `Dataflow` alone says about the first mutant of an operator."""
    mutant = next(mutant for mutant in KERNEL.mutants if mutant.operator == operator)
    observer = Dataflow(ForwardNames(KERNEL.key))
    KERNEL.cases[problem].run.replay(mutant.build(), policy="late", observers=[observer])
    return observer.findings


def test_a_box_of_other_rows_is_found_at_its_load() -> None:
    found = [finding for finding in dataflow("box +64 rows", "deep") if finding.kind == "wrong block"]
    assert found and all("cute.copy(operand.atom" in finding.at.text for finding in found)
    assert {finding.at.role for finding in found} == {"load"}
    assert any("start_scores(q, k)" in finding.other.text for finding in found if finding.other)


def test_a_mask_that_is_moved_is_found_at_the_gemms() -> None:
    found = [finding for finding in dataflow("mask limit +1", "deep") if finding.kind == "wrong mask"]
    assert found and all("start_output(v)" in finding.at.text for finding in found)
    assert all(finding.other and "start_scores(q, k)" in finding.other.text for finding in found)
    assert "gives weight to key" in found[0].happened
