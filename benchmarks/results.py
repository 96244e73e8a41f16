"""The form of every file under `results/`, and its arithmetic: ratios, per cents, merging.

    {"env": {...}, "rows": [{"mode", "dtype", "head_dim", "head_dim_v", "causal", "seqlen_q", "seqlen_k", "batch",
     "heads_q", "heads_kv", "tflops": {provider: x}, "spread": {provider: x}, "ratio", "best_peer",
     "error": {provider: x}, "lse_error": {provider: x}, "percent_of_matmul", "failures": {provider: text}}]}

A row of the backward has no `lse_error`; its `error` is the largest of those of dQ, dK and dV, and it has besides
"gradient_errors": {provider: {"dq", "dk", "dv"}}; where it was measured, "deterministic": {"tflops": {provider: x},
"of_default": {provider: x}}, the share of its own default speed; and "kernels_us": {kernel: x}, the device time of each
of our kernels (`benchmarks/kernel_times.py`).

A row whose own figure is missing has `ratio` None and says why in `failures["ours"]`, or in `failures["all"]` if the
whole row was lost. A row that came from an earlier run on another machine or revision carries that run's `env` itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from benchmarks.peers import DETERMINISTIC
from benchmarks.problems import Problem
from fa3._accuracy import Errors, GradientErrors
from fa3._providers import OURS
from fa3._timing import Sample, tflops

Row = dict[str, Any]
Result = dict[str, Any]

CASE_FIELDS = tuple(field.name for field in fields(Problem))
_VARY_IN_ONE_SETTING = ("date", "matmul_tflops")


def row(
    problem: Problem,
    samples: Mapping[str, Sample],
    errors: Mapping[str, Errors | GradientErrors],
    failures: Mapping[str, str],
    matmul_tflops: float | None,
) -> Row:
    """One row of a result file. Figures are rounded for reading: TFLOP/s to 0.1, ratios to 0.001."""
    all_speeds = {name: tflops(problem.flops, sample.median) for name, sample in samples.items()}
    speeds = {name: x for name, x in all_speeds.items() if not name.endswith(DETERMINISTIC)}
    best = best_peer(speeds)
    ours = speeds.get(OURS)
    return {
        **asdict(problem),
        "tflops": {name: round(x, 1) for name, x in speeds.items()},
        "spread": {name: round(sample.spread, 4) for name, sample in samples.items()},
        "ratio": None if ours is None or best is None else round(ours / speeds[best], 3),
        "best_peer": best,
        "error": {name: float(f"{e.relative:.3e}") for name, e in errors.items()},
        "lse_error": {name: float(f"{e.lse:.3e}") for name, e in errors.items() if e.lse is not None},
        "percent_of_matmul": None if ours is None or not matmul_tflops else round(100 * ours / matmul_tflops, 1),
        "failures": dict(failures),
        **_backward_fields(all_speeds, errors),
    }


def _backward_fields(speeds: Mapping[str, float], errors: Mapping[str, Errors | GradientErrors]) -> Row:
    """What only rows of the backward have."""
    fields: Row = {}
    parts = {name: e for name, e in errors.items() if isinstance(e, GradientErrors)}
    if parts:
        fields["gradient_errors"] = {
            name: {part: float(f"{getattr(e, part):.3e}") for part in ("dq", "dk", "dv")} for name, e in parts.items()
        }
    ordered = {n.removesuffix(DETERMINISTIC): x for n, x in speeds.items() if n.endswith(DETERMINISTIC)}
    if ordered:
        fields["deterministic"] = {
            "tflops": {name: round(x, 1) for name, x in ordered.items()},
            "of_default": {name: round(x / speeds[name], 3) for name, x in ordered.items() if name in speeds},
        }
    return fields


def best_peer(speeds: Mapping[str, float]) -> str | None:
    """The fastest provider that is not ours; None if there is no other."""
    peers = {name: x for name, x in speeds.items() if name != OURS}
    return max(peers, key=lambda name: peers[name]) if peers else None


def merged(old: Result, new: Result) -> Result:
    """`new` with those rows of `old` that it does not measure again, in the order of the old file.

    Rows of `old` keep their own env if it differs from the new one in more than the time of day.
    """
    measured = {case_of(each): each for each in new["rows"]}
    same_setting = _setting(old["env"]) == _setting(new["env"])
    rows = []
    for each in old["rows"]:
        again = measured.pop(case_of(each), None)
        if again is not None:
            rows.append(again)
        else:
            rows.append(each if same_setting or "env" in each else {**each, "env": old["env"]})
    return {"env": new["env"], "rows": rows + list(measured.values())}


def case_of(each: Row) -> tuple[object, ...]:
    """What makes two rows the same measurement."""
    return tuple(each[name] for name in CASE_FIELDS)


def problem_of(each: Row) -> Problem:
    """What a row is the measurement of."""
    return Problem(**{name: each[name] for name in CASE_FIELDS})


def read(path: Path) -> Result:
    result = json.loads(path.read_text())
    if not isinstance(result, dict) or not {"env", "rows"} <= result.keys():
        raise ValueError(f"{path} is not a result file: it needs an object with env and rows")
    return result


def write(path: Path, result: Result) -> None:
    """One row a line, so that a change of one figure is a change of one line. NaN becomes null: JSON has none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(f"  {json.dumps(_without_nan(each))}" for each in result["rows"])
    env = json.dumps(_without_nan(result["env"]), indent=1).replace("\n", "\n ")
    path.write_text(f'{{\n "env": {env},\n "rows": [\n{rows}\n ]\n}}\n')


def _setting(env: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in env.items() if name not in _VARY_IN_ONE_SETTING}


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_nan(each) for each in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value
