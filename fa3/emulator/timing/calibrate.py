"""How far predictions are from what a GPU measured, and the choice of the few constants that are free.

Fitted are `Cost.launch` and the constants in `cost.FREE`, by trying their values one constant after the other until
nothing improves. The error that counts is the mean of |log(predicted / measured)|. The fit sees launches with 1024
keys, and those with 4096 and one tile for each SM; what a report says about the others was not fitted.

Held out are values, not ideas: which terms the model has (`Cost.tile`, `Cost.cut`, what a block counts for that only
some warpgroups see) was decided with all launches of `benchmarks/results/h200-emulator-timing.json` in view. Launches
of other sizes and rows would be the fairer test.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fa3.config.types import ForwardConfig, KernelKey
from fa3.emulator.timing.cost import FREE, Cost
from fa3.emulator.timing.predict import SMS, Size, predict, tiles_of

FEW_KEYS, MANY_KEYS = 1024, 4096
"""Of the launches that a fit sees."""
LONGEST_LAUNCH = 10_000.0
"""Cycles. What a fit would put beyond it is something else."""


@dataclass(frozen=True)
class Measured:
    """A launch and how many cycles it took on a GPU."""

    key: KernelKey
    size: Size
    cycles: float

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Measured:
        """From a row of a measurement's JSON. KeyError or TypeError for one that is not of its form."""
        size = Size(row["batch"], row["heads_q"], row["seqlen_q"], row["seqlen_k"])
        return cls(KernelKey(ForwardConfig(**row["config"]), row["dtype"]), size, float(row["cycles"]))

    def is_fitted(self, sms: int) -> bool:
        """Whether a fit may see it."""
        one_tile = len(tiles_of(self.key.config, self.size)) <= sms
        return self.size.seqlen_k == FEW_KEYS or (self.size.seqlen_k == MANY_KEYS and one_tile)


@dataclass(frozen=True)
class Compared:
    """A measurement beside its prediction."""

    measured: Measured
    predicted: float
    fitted: bool

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted / self.measured.cycles - 1.0


def compare(rows: Sequence[Measured], cost: Cost, sms: int = SMS) -> list[Compared]:
    """Predicts every row."""
    return [Compared(row, predict(row.key, row.size, cost, sms).cycles, row.is_fitted(sms)) for row in rows]


def mean_error(rows: Iterable[Compared]) -> float:
    """Mean of |log(predicted / measured)|; near to the mean relative error. 0 for no rows."""
    errors = [abs(math.log(row.predicted / row.measured.cycles)) for row in rows]
    return statistics.fmean(errors) if errors else 0.0


Say = Callable[[str], None]


def fit(rows: Sequence[Measured], cost: Cost | None = None, sms: int = SMS, say: Say = lambda text: None) -> Cost:
    """The cost model with `launch` and the constants in `FREE` chosen for the rows that a fit may see.

    ValueError if there is none. `say` is told what was tried.
    """
    seen = [row for row in rows if row.is_fitted(sms)]
    if not seen:
        raise ValueError(f"nothing to fit: launches with {FEW_KEYS} keys are needed")
    best, error = _with_launch(cost or Cost(), seen, sms)
    improved = True
    while improved:
        improved = False
        for name, values in FREE.items():
            for value in values:
                if value == getattr(best, name):
                    continue
                tried, its_error = _with_launch(best.with_constants(**{name: value}), seen, sms)
                say(f"{name} = {value}: launch {tried.launch:.0f}, mean error {its_error:.1%}")
                if its_error < error - 1e-4:
                    best, error, improved = tried, its_error, True
    return best


def _with_launch(cost: Cost, rows: Sequence[Measured], sms: int) -> tuple[Cost, float]:
    """The launch overhead that fits best with the other constants, and the mean error with it."""
    without = compare(rows, replace(cost, launch=0.0), sms)
    rest = statistics.median(row.measured.cycles - row.predicted for row in without)
    launch = min(max(0.0, rest), LONGEST_LAUNCH)
    return replace(cost, launch=launch), mean_error(replace(row, predicted=row.predicted + launch) for row in without)


def block_cycles(rows: Sequence[Compared], sms: int = SMS) -> tuple[float, float] | None:
    """Cycles of one more key block, measured and predicted: the slope over launches of one tile an SM of one kernel.

    None with fewer than two different numbers of blocks.
    """
    points = []
    for row in rows:
        tiles = tiles_of(row.measured.key.config, row.measured.size)
        if len(tiles) <= sms:
            points.append((tiles[0].blocks, row.measured.cycles, row.predicted))
    if len({blocks for blocks, _, _ in points}) < 2:
        return None
    numbers, measured, predicted = zip(*points, strict=True)
    measured_line, predicted_line = (statistics.linear_regression(numbers, ys) for ys in (measured, predicted))
    return measured_line.slope, predicted_line.slope


def report(rows: Sequence[Compared], cost: Cost, sms: int = SMS) -> dict[str, Any]:
    """Plain values for a result file: constants, every row, and the errors of each kernel and of all."""
    kernels: dict[str, list[Compared]] = {}
    for row in rows:
        kernels.setdefault(row.measured.key.name, []).append(row)
    fitted, held_out = ([row for row in rows if row.fitted is is_fitted] for is_fitted in (True, False))
    return {
        "constants": {name: getattr(cost, name) for name in (*FREE, "launch")},
        "mean_error": {"fitted": round(mean_error(fitted), 4), "held_out": round(mean_error(held_out), 4)},
        "kernels": {name: _of_kernel(some, sms) for name, some in kernels.items()},
        "rows": [
            {
                "kernel": row.measured.key.name, **asdict(row.measured.size), "measured": round(row.measured.cycles),
                "predicted": round(row.predicted), "error": round(row.error, 4), "fitted": row.fitted,
            }
            for row in rows
        ],
    }  # fmt: skip


def _of_kernel(rows: Sequence[Compared], sms: int) -> dict[str, Any]:
    slopes = block_cycles(rows, sms)
    held_out = [row for row in rows if not row.fitted]
    worst = max(rows, key=lambda row: abs(row.error))
    return {
        "mean_error": round(mean_error(rows), 4),
        "mean_error_held_out": round(mean_error(held_out), 4),
        "worst_error": round(worst.error, 4),
        "block_cycles": None if slopes is None else {"measured": round(slopes[0]), "predicted": round(slopes[1])},
    }
