"""The table can be written and read, adds up, and is held against the list of survivors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fa3.emulator.mutate.survivors import Survivor, objections, unused
from fa3.emulator.mutate.table import Row, details, expected_kinds, rate, read, summary, write

CAUGHT = Row(
    "forward_a", "wait removed", "k.py:5", "ring.wait(k)", 70, "k", "", "caught", "race", "k.py:9", "k.py:5"
)  # fmt: skip
OTHER = replace(CAUGHT, line="k.py:6", at="k.py:9", other="k.py:8")
ESCAPED = replace(CAUGHT, operator="bound +1", text="while n < count:", detail="ge 5 +1", verdict="escaped", kind="")
HARMLESS = replace(ESCAPED, operator="wait -1", verdict="clean")
ROWS = [CAUGHT, OTHER, ESCAPED, HARMLESS]
SURVIVOR = Survivor("bound +1", "while n < count:", "the first number is below the count", detail="ge")


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    write(file, ROWS, {"wait removed": ["race", "deadlock"]})
    assert read(file) == ROWS and expected_kinds(file) == {"wait removed": ["deadlock", "race"]}
    assert len(file.read_text().splitlines()) < len(ROWS) + 15


def test_a_table_of_other_columns_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_text('{"columns": ["kernel"], "rows": [["a"]]}')
    with pytest.raises(ValueError, match="columns"):
        read(file)


def test_only_harmful_mutants_count() -> None:
    assert rate(ROWS) == (2, 3)


def test_the_summary_has_a_row_for_each_operator() -> None:
    lines = summary(ROWS).splitlines()
    assert "| wait removed | 2 | 2 | 1 | race 2 |" in lines
    assert "| bound +1 | 1 | 0 | 0 |  |" in lines
    assert any(line.startswith("| wait -1 | 1, harmless") for line in lines)
    assert lines[-1].startswith("| **all** | 3 | 2 (66.7%)")


def test_details_are_of_one_kernel() -> None:
    rows = [CAUGHT, replace(CAUGHT, kernel="forward_b", line="k.py:77")]
    text = details(rows, "forward_a", {"wait removed": ["race"]})
    assert "| wait removed | k.py:5 `ring.wait(k)` | race | race | k.py:9 and k.py:5 |" in text
    assert "k.py:77" not in text


def test_an_escape_must_be_listed_and_what_is_caught_must_not() -> None:
    assert objections(ROWS, [SURVIVOR]) == []
    (sentence,) = objections(ROWS, [])
    assert "bound +1 ge 5 +1 at k.py:5" in sentence and "not caught" in sentence
    (sentence,) = objections([replace(ESCAPED, verdict="caught")], [SURVIVOR])
    assert "stands in the list" in sentence


@pytest.mark.parametrize(
    "other",
    [
        {"operator": "bound -1"},
        {"text": "if n < count:"},
        {"detail": "lt 5 +1"},
        {"kernel": "forward_b"},
        {"edges": "q"},
    ],
)
def test_a_survivor_holds_for_its_sort_only(other: dict[str, str]) -> None:
    survivor = replace(SURVIVOR, kernels="_a$", edges="k")
    assert survivor.holds(ESCAPED) and not survivor.holds(replace(ESCAPED, **other))


def test_entries_that_nothing_is_about_are_told() -> None:
    stale = replace(SURVIVOR, text="gone")
    assert unused(ROWS, [SURVIVOR, stale]) == [stale]
