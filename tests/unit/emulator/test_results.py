"""What is committed about the emulator says what it should: on the GPU it agrees, and every row has its error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.emulator_crosscheck import LIMIT, LSE_LIMIT, PROBLEMS
from fa3.config.table import FORWARD
from fa3.config.types import KernelKey

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def kernels() -> set[str]:
    return {KernelKey(row, "bf16").name for row in FORWARD}


def test_the_emulator_agrees_with_an_h200_on_every_row() -> None:
    result = read("h200-emulator-crosscheck.json")
    assert "H200" in result["env"]["gpu"]
    assert len(result["rows"]) == len(PROBLEMS) >= 12
    for row in result["rows"]:
        assert row["right"] and row["same_empty_rows"], row
        assert row["difference"] / row["error"] < LIMIT and row["lse_difference"] < LSE_LIMIT, row
    assert kernels() <= {row["kernel"] for row in result["rows"]}


def test_every_row_has_the_error_of_its_predictions() -> None:
    result = read("h200-emulator-timing.json")
    assert "H200" in result["env"]["gpu"] and result["source"] == "ncu"
    assert kernels() <= result["kernels"].keys()
    for row in result["rows"]:
        assert abs(row["error"] - (row["predicted"] / row["measured"] - 1)) < 1e-3, row
