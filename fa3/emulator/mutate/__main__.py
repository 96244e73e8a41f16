"""Runs the mutants of the shipped kernels and writes the table.

python -m fa3.emulator.mutate table.json                    all rows of the forward table, bf16: minutes
python -m fa3.emulator.mutate table.json --of backward      of the backward table, dQ in a fixed order: tens of minutes
python -m fa3.emulator.mutate table.json --kernels d64_causal --every 10
python -m fa3.emulator.mutate table.json --markdown         prints the summary of a table that exists
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import zip_longest
from pathlib import Path

from fa3.config.backward import AnyKey, BackwardKey
from fa3.config.types import KernelKey
from fa3.emulator.mutate.campaign import Kernel
from fa3.emulator.mutate.judge import RIGHT
from fa3.emulator.mutate.table import Row, details, expected_kinds, read, summary, write
from fa3.sass import record
from fa3.sass.record import table_keys

PARTS = 8
"""A kernel's mutants are dealt out to so many jobs, for the processes."""


def keys() -> list[KernelKey]:
    """The kernels whose mutants are run. The fp16 and the negative-scale ones synchronise alike; a test says so."""
    return [key for key in table_keys() if key.dtype == "bf16"]


def backward_keys() -> list[BackwardKey]:
    """Likewise of the backward: those that sum dQ in a fixed order, and at head dim 64 the others, which know who is
    first in another way. Without those in clusters, whose barriers no operator changes."""
    found = [key for key in record.backward_keys() if key.dtype == "bf16" and key.config.cluster == 1]
    return [key for key in found if key.deterministic or key.config.head_dim == 64]


def rows_of(key: AnyKey, every: int = 1, first: int = 0) -> tuple[list[Row], dict[str, list[str]]]:
    """One mutant of `every`, from the `first` on; and the expected kinds by operator."""
    kernel = Kernel(key)
    chosen = kernel.mutants[first::every]
    outcomes = map(kernel.outcome, chosen)
    rows = [Row.of(key.name, outcome, kernel.places.edges_of(outcome.mutant)) for outcome in outcomes]
    return rows, {mutant.operator: sorted(mutant.kinds) for mutant in chosen}


def _dealt(parts: Sequence[Sequence[Row]]) -> list[Row]:
    """What was dealt out to several parts, in the old order."""
    rounds = zip_longest(*parts)
    return [row for each in rounds for row in each if row is not None]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m fa3.emulator.mutate", description=__doc__.split("\n")[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("--of", choices=["forward", "backward"], default="forward", help="which kernels (forward)")
    parser.add_argument("--kernels", default="", help="only those whose name holds this")
    parser.add_argument("--every", type=int, default=1, help="only one mutant of so many")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--summary", action="store_true", help="run nothing")
    parser.add_argument("--details", metavar="KERNEL", help="run nothing")
    options = parser.parse_args(arguments)
    if options.summary or options.details:
        rows = read(options.table)
        print(
            details(rows, options.details, expected_kinds(options.table)) if options.details else summary(rows), end=""
        )
        return 0
    tables: dict[str, list[AnyKey]] = {"forward": [*keys()], "backward": [*backward_keys()]}
    chosen = [key for key in tables[options.of] if options.kernels in key.name]
    deals = [(key, part) for key in chosen for part in range(PARTS)]
    with ProcessPoolExecutor(options.processes) as pool:
        every = [options.every * PARTS] * len(deals)
        parts = list(pool.map(rows_of, [k for k, _ in deals], every, [options.every * part for _, part in deals]))
    rows = [
        row for first in range(0, len(parts), PARTS) for row in _dealt([found for found, _ in parts[first:][:PARTS]])
    ]
    write(options.table, rows, {name: kinds for _, expected in parts for name, kinds in expected.items()})
    print(summary(rows), end="")
    return 0 if all(row.verdict in RIGHT for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
