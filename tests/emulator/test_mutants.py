"""Every mutant of every shipped kernel is caught, with the right kind and line, or stands in the list of survivors.

The kernels of the table in bf16. The fp16 kernels and those for negative scales synchronise at the same lines in the
same way, which is tested, so that their mutants would be the same.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from fa3.config.types import KernelKey
from fa3.emulator.artefacts import host_code
from fa3.emulator.mutate import survivors, table
from fa3.emulator.mutate.__main__ import keys, rows_of
from fa3.emulator.mutate.campaign import Kernel
from fa3.emulator.mutate.skeleton import skeleton
from fa3.emulator.mutate.survivors import objections, unused
from fa3.emulator.mutate.table import Row, rate

pytestmark = [pytest.mark.compile, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "benchmarks" / "results" / "emulator-mutants.json"
SURVIVORS = Path(__file__).with_name("survivors.json")
PARTS = 4
"""A kernel's mutants are dealt out to so many tests, for several processes."""
POLICIES = ("early", "late", "random", "starve:0-0", "starve:4-7", "starve:8-11")
SEEDS = 50

KEYS = pytest.mark.parametrize("key", keys(), ids=lambda key: key.name)


@cache
def listed() -> tuple[survivors.Survivor, ...]:
    return tuple(survivors.read(SURVIVORS))


@cache
def committed() -> tuple[Row, ...]:
    return tuple(table.read(TABLE))


# ---------------------------------------------------------------------------------------------------- the table itself
def test_at_least_97_percent_are_caught() -> None:
    caught, total = rate(committed())
    assert total > 1000 and caught >= 0.97 * total


def test_every_survivor_of_the_table_is_listed_and_no_other() -> None:
    assert objections(committed(), listed()) == []
    assert unused(committed(), listed()) == []
    assert all(len(survivor.reason) > 20 for survivor in listed())


@KEYS
def test_the_table_is_of_these_kernels(key: KernelKey) -> None:
    """`python -m fa3.emulator.mutate benchmarks/results/emulator-mutants.json` writes it anew."""
    rows = [(row.operator, row.text) for row in committed() if row.kernel == key.name]
    found = [Row.planned(key.name, mutant) for mutant in Kernel(key).mutants]
    assert rows == [(row.operator, row.text) for row in found]


# -------------------------------------------------------------------------------------------------------- the campaign
@pytest.mark.parametrize("part", range(PARTS))
@KEYS
def test_every_mutant_is_caught(key: KernelKey, part: int) -> None:
    rows, _ = rows_of(key, PARTS, part)
    assert objections(rows, listed()) == []


@KEYS
def test_the_kernel_itself_gives_no_finding(key: KernelKey) -> None:
    kernel = Kernel(key)
    for name in kernel.cases:
        for policy in POLICIES:
            assert kernel.findings(kernel.code, (name, policy)) == [], (name, policy)
    for seed in range(1, SEEDS):
        name = list(kernel.cases)[seed % len(kernel.cases)]
        assert kernel.findings(kernel.code, (name, "random"), seed=seed) == [], (name, seed)


# --------------------------------------------------------------------------------------------------------- other dtypes
@pytest.mark.parametrize(("dtype", "negative"), [("fp16", False), ("bf16", True), ("fp16", True)])
@KEYS
def test_variants_synchronise_alike(key: KernelKey, dtype: str, negative: bool) -> None:
    other = KernelKey(key.config, dtype, negative)  # type: ignore[arg-type]
    assert skeleton(host_code(other).program) == skeleton(host_code(key).program)
