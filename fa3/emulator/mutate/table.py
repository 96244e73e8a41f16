"""The table of mutants: what was planted where, what had to be said about it, and what was said.

Written as JSON, a row for each mutant, for the tests and for whoever looks for one; and as Markdown, a row for each
operator, for the documentation.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fa3.emulator.check import Place
from fa3.emulator.mutate.campaign import Outcome
from fa3.emulator.mutate.judge import CAUGHT, CLEAN, FALSE_ALARM, line_of
from fa3.emulator.mutate.mutant import Mutant


@dataclass(frozen=True)
class Row:
    """One mutant of one kernel, in plain values."""

    kernel: str
    operator: str
    line: str
    """Of Python, such as "fa3/kernels/forward.py:191"."""
    text: str
    """That line."""
    ptx: int
    """Line of the PTX."""
    edges: str
    """Such as "k, batch 12"."""
    detail: str
    verdict: str
    kind: str
    """Of the finding; "" if there is none."""
    at: str
    other: str
    """The lines of its two parties."""

    @classmethod
    def planned(cls, kernel: str, mutant: Mutant, edges: Iterable[str] = ()) -> Row:
        """Of a mutant that has not been run."""
        text = Place.of("", -1, mutant.at).text
        shared = ", ".join(sorted(edge for edge in edges if not edge.startswith("batch")))
        line = _text(line_of(mutant.at))
        return cls(kernel, mutant.operator, line, text, mutant.at.line, shared, mutant.detail, "", "", "", "")

    @classmethod
    def of(cls, kernel: str, outcome: Outcome, edges: Iterable[str]) -> Row:
        """`edges`: those of the mutant."""
        row, finding = cls.planned(kernel, outcome.mutant, edges), outcome.finding
        if finding is None:
            return replace(row, verdict=outcome.verdict)
        at, other = _text(finding.at.line_of_source), _text(finding.other.line_of_source) if finding.other else ""
        return replace(row, verdict=outcome.verdict, kind=finding.kind, at=at, other=other)

    @property
    def own_line(self) -> bool:
        """Whether the finding names the very line of the fault."""
        return self.line in (self.at, self.other)


def _text(line: tuple[str, int]) -> str:
    return f"{line[0]}:{line[1]}"


# ------------------------------------------------------------------------------------------------ JSON
def write(path: Path, rows: Sequence[Row], expected: Mapping[str, Iterable[str]]) -> None:
    """`expected`: operator -> kinds that are right for it. The table has a line for each row."""
    columns = list(Row.__dataclass_fields__)
    lines = ",\n  ".join(json.dumps(list(asdict(row).values())) for row in rows)
    kinds = json.dumps({operator: sorted(found) for operator, found in expected.items()}, indent=2)
    path.write_text(f'{{"columns": {json.dumps(columns)},\n"expected": {kinds},\n"rows": [\n  {lines}\n]}}\n')


def read(path: Path) -> list[Row]:
    """ValueError if the file has other columns."""
    table = json.loads(path.read_text())
    if table["columns"] != list(Row.__dataclass_fields__):
        raise ValueError(f"{path} has the columns {table['columns']}")
    return [Row(*values) for values in table["rows"]]


def expected_kinds(path: Path) -> dict[str, list[str]]:
    """Operator -> the kinds that are right for it."""
    kinds: dict[str, list[str]] = json.loads(path.read_text())["expected"]
    return kinds


# ------------------------------------------------------------------------------------------------ Markdown
def summary(rows: Sequence[Row]) -> str:
    """A row for each operator: mutants, how many are caught, and as what, the most frequent kind first."""
    groups: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.operator].append(row)
    lines = ["| fault | mutants | caught | on its own line | reported as |", "|---|---|---|---|---|"]
    lines += [_summary(operator, found) for operator, found in groups.items()]
    caught, total = rate(rows)
    lines.append(f"| **all** | {total} | {caught} ({caught / max(total, 1):.1%}) | | |")
    return "\n".join(lines) + "\n"


def _summary(operator: str, rows: Sequence[Row]) -> str:
    caught = [row for row in rows if row.verdict == CAUGHT]
    kinds = Counter(row.kind for row in caught)
    said = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
    if any(row.verdict == CLEAN for row in rows):
        return f"| {operator} | {len(rows)}, harmless | | | nothing, as is right |"
    return f"| {operator} | {len(rows)} | {len(caught)} | {sum(row.own_line for row in caught)} | {said} |"


def rate(rows: Iterable[Row]) -> tuple[int, int]:
    """(caught, all) of the mutants that do harm."""
    harmful = [row for row in rows if row.verdict not in (CLEAN, FALSE_ALARM)]
    return sum(row.verdict == CAUGHT for row in harmful), len(harmful)


def details(rows: Sequence[Row], kernel: str, expected: Mapping[str, Iterable[str]]) -> str:
    """The mutants of one kernel: fault, kinds expected, kind and lines reported."""
    lines = ["| fault | at | kinds expected | kind reported | lines reported |", "|---|---|---|---|---|"]
    for row in rows:
        if row.kernel == kernel:
            fault = f"{row.operator} ({row.detail})" if row.detail else row.operator
            kinds, said = (
                ", ".join(sorted(expected.get(row.operator, ()))),
                " and ".join(filter(None, (row.at, row.other))),
            )
            lines.append(f"| {fault} | {row.line} `{row.text}` | {kinds} | {row.kind or row.verdict} | {said} |")
    return "\n".join(lines) + "\n"
