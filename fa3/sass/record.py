"""The recorded overlap of every row of the tables: what `tests/compile` holds a new compiler, or a new kernel, to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fa3.sass.report import Report, inspect

if TYPE_CHECKING:
    from fa3.config.backward import AnyKey, BackwardKey
    from fa3.config.types import DType, KernelKey


def table_keys() -> list[KernelKey]:
    """Every row of the forward table, in bf16 and fp16, as it is called for its own head dimensions."""
    from fa3.config.table import FORWARD
    from fa3.config.types import KernelKey

    return [KernelKey(row, dtype) for row in FORWARD for dtype in ("bf16", "fp16")]


def backward_keys() -> list[BackwardKey]:
    """The main kernels of every row of the backward table: dQ summed in any order in bf16 and fp16, in a fixed order in
    bf16."""
    from fa3.config.backward import BackwardKey
    from fa3.config.backward_table import BACKWARD

    forms: tuple[tuple[DType, bool], ...] = (("bf16", False), ("fp16", False), ("bf16", True))
    return [BackwardKey("backward", row, dtype, deterministic=ordered) for row in BACKWARD for dtype, ordered in forms]


def keys_of(kernel: str | None) -> list[AnyKey]:
    """The rows of one kernel, or of all whose overlap is recorded. Raises ValueError for one without a main loop."""
    found: dict[str, list[AnyKey]] = {"forward": [*table_keys()], "backward": [*backward_keys()]}
    if kernel is None:
        return [key for keys in found.values() for key in keys]
    if kernel not in found:
        raise ValueError(f"{kernel} has no main loop, and no overlap to be recorded")
    return found[kernel]


def overlap(report: Report) -> dict[str, int]:
    return {"ex2_in_flight": report.ex2_in_flight, "ex2_total": report.ex2_total}


def record(path: Path, keys: Iterable[AnyKey], look: Callable[[AnyKey], Report] = inspect) -> dict[str, object]:
    """Compiles every key and writes its overlap to `path`: {key.name: {"ex2_in_flight": 52, "ex2_total": 198}}."""
    found: dict[str, object] = {key.name: overlap(look(key)) for key in keys}
    _write(path, found)
    return found


def record_kernel(path: Path, kernel: str | None, look: Callable[[AnyKey], Report] = inspect) -> int:
    """Likewise for every row of one kernel; what `path` holds of the other stays. Returns how many were compiled."""
    before = json.loads(path.read_text()) if kernel and path.exists() else {}
    kept = {name: value for name, value in before.items() if not name.startswith(f"{kernel}_")}
    found = record(path, keys_of(kernel), look)
    _write(path, kept | found)
    return len(found)


def _write(path: Path, found: Mapping[str, object]) -> None:
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
