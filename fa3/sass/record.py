"""The recorded overlap of every row of the table: what `tests/compile` holds a new compiler, or a new kernel, to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fa3.sass.report import Report, inspect

if TYPE_CHECKING:
    from fa3.config.types import KernelKey


def table_keys() -> list[KernelKey]:
    """Every row of the forward table, in bf16 and fp16, as it is called for its own head dimensions."""
    from fa3.config.table import FORWARD
    from fa3.config.types import KernelKey

    return [KernelKey(row, dtype) for row in FORWARD for dtype in ("bf16", "fp16")]


def overlap(report: Report) -> dict[str, int]:
    return {"ex2_in_flight": report.ex2_in_flight, "ex2_total": report.ex2_total}


def record(path: Path, keys: Iterable[KernelKey], look: Callable[[KernelKey], Report] = inspect) -> dict[str, object]:
    """Compiles every key and writes its overlap to `path`: {key.name: {"ex2_in_flight": 52, "ex2_total": 198}}."""
    found = {key.name: overlap(look(key)) for key in keys}
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    return dict(found)
