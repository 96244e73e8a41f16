"""Mutants of the backward's main kernels: what the checker must name, and the list of those that do no harm.

The suite runs one mutant of every sort, and a part of those that have to do with dQ, its turns and the earlier kernel.
All of them take hours of one core; `python -m fa3.emulator.mutate TABLE --of backward --processes N` runs them, and
`test_the_table` judges what it wrote.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from fa3.emulator.artefacts import host_code
from fa3.emulator.mutate import survivors, table
from fa3.emulator.mutate.__main__ import backward_keys
from fa3.emulator.mutate.campaign import Kernel
from fa3.emulator.mutate.mutant import Mutant
from fa3.emulator.mutate.skeleton import skeleton
from fa3.emulator.mutate.survivors import objections
from fa3.emulator.mutate.table import Row, rate

pytestmark = [pytest.mark.compile, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "benchmarks" / "results" / "emulator-mutants-backward.json"
SURVIVORS = Path(__file__).with_name("survivors_backward.json")
POLICIES = ("early", "late", "random", "starve:0-0", "starve:1-1", "starve:4-7")
DQ_EDGES = frozenset(("dq", "sums", "grid"))
EVERY = 8
"""One of so many of the mutants around dQ is run."""


def ordered(head_dim_v: int, causal: bool) -> Kernel:
    (key,) = (
        key
        for key in backward_keys()
        if key.deterministic and (key.config.head_dim_v, key.config.causal) == (head_dim_v, causal)
    )
    return Kernel(key)


SMALL, WIDE = ordered(64, True), ordered(192, False)


@cache
def listed() -> tuple[survivors.Survivor, ...]:
    return tuple(survivors.read(SURVIVORS))


def rows(kernel: Kernel, mutants: list[Mutant]) -> list[Row]:
    outcomes = map(kernel.outcome, mutants)
    return [Row.of(kernel.key.name, outcome, kernel.places.edges_of(outcome.mutant)) for outcome in outcomes]


def assert_right(found: list[Row]) -> None:
    wrong = objections(found, listed())
    assert not wrong, "\n".join(wrong)


# ------------------------------------------------------------------------------------------------ the suite's part
def test_one_of_each_is_caught() -> None:
    """Of every operator the mutant in the middle."""
    operators: dict[str, list[Mutant]] = {}
    for mutant in SMALL.mutants:
        operators.setdefault(mutant.operator, []).append(mutant)
    found = rows(SMALL, [each[len(each) // 2] for each in operators.values()])
    assert len(found) > 45
    assert_right(found)


@pytest.mark.parametrize("kernel", [SMALL, WIDE], ids=["64", "192"])
def test_faults_around_dq_are_caught(kernel: Kernel) -> None:
    around = [mutant for mutant in kernel.mutants if kernel.places.edges_of(mutant) & DQ_EDGES]
    assert {"griddepcontrol.wait removed", "count removed", "turn not waited for"} <= {m.operator for m in around}
    assert_right(rows(kernel, around[::EVERY]))


@pytest.mark.parametrize("kernel", [SMALL, WIDE], ids=["64", "192"])
def test_the_kernel_itself_gives_no_finding(kernel: Kernel) -> None:
    for name in kernel.cases:
        for policy in POLICIES:
            assert kernel.findings(kernel.code, (name, policy)) == [], (name, policy)


def test_every_mutant_is_executed() -> None:
    assert {mutant.index for mutant in SMALL.mutants} <= SMALL.trace.reached


@pytest.mark.parametrize("key", [key for key in backward_keys() if key.deterministic], ids=lambda key: key.name)
def test_types_synchronise_alike(key) -> None:  # type: ignore[no-untyped-def]
    other = type(key)(key.part, key.config, "fp16", deterministic=key.deterministic)
    assert skeleton(host_code(other).program) == skeleton(host_code(key).program)


# ------------------------------------------------------------------------------------------------ all of them
def test_the_table() -> None:
    """At least 90 % of the mutants of all rows are caught, and the others are listed."""
    if not TABLE.exists():
        pytest.skip(f"{TABLE.name} is not there: python -m fa3.emulator.mutate {TABLE} --of backward")
    found = table.read(TABLE)
    caught, total = rate(found)
    assert total > 1000 and caught >= 0.9 * total
    assert_right(found)


def test_every_survivor_has_a_reason() -> None:
    assert listed() and all(len(survivor.reason) > 20 for survivor in listed())
