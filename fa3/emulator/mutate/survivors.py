"""Mutants that nothing is said about, each with the reason why it does no harm.

The list is a JSON file: entries with `operator`, `text` (the Python line), `detail` (how the row's detail begins),
`edges` (as in the row; "" for any), `kernels` (a regular expression that the name must match somewhere) and `reason`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fa3.emulator.mutate.judge import RIGHT
from fa3.emulator.mutate.table import Row


@dataclass(frozen=True)
class Survivor:
    """Mutants of one sort at one line."""

    operator: str
    text: str
    reason: str
    detail: str = ""
    edges: str = ""
    kernels: str = ""

    def holds(self, row: Row) -> bool:
        return (
            (row.operator, row.text) == (self.operator, self.text)
            and row.detail.startswith(self.detail)
            and self.edges in ("", row.edges)
            and re.search(self.kernels, row.kernel) is not None
        )


def read(path: Path) -> list[Survivor]:
    return [Survivor(**entry) for entry in json.loads(path.read_text())]


def objections(rows: Iterable[Row], survivors: Sequence[Survivor]) -> list[str]:
    """A sentence for each mutant that escaped and is not listed, and for each that is listed but was caught."""
    found = []
    for row in rows:
        listed = any(survivor.holds(row) for survivor in survivors)
        said = f"{row.kind} at {row.at} and {row.other}" if row.kind else "nothing was found"
        what = f"{row.kernel}: {row.operator} {row.detail} at {row.line} ({row.text}; PTX line {row.ptx})"
        if row.verdict not in RIGHT and not listed:
            found.append(f"{what} is not caught: {row.verdict}, {said}")
        elif row.verdict in RIGHT and listed:
            found.append(f"{what} is caught, but stands in the list of survivors: {said}")
    return found


def unused(rows: Sequence[Row], survivors: Iterable[Survivor]) -> list[Survivor]:
    """Those that no row of a whole campaign is about."""
    return [survivor for survivor in survivors if not any(survivor.holds(row) for row in rows)]
