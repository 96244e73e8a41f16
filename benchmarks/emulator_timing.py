"""How good are the emulator's predictions? Cycles measured on a GPU beside those of `fa3.emulator.timing`.

    <NCU> python -m benchmarks.emulator_timing launch --out cases.json > ncu.csv      (`launch --help` prints <NCU>)
    python -m benchmarks.emulator_timing parse ncu.csv cases.json --out measured.json
    python -m benchmarks.emulator_timing compare measured.json --fit --out benchmarks/results/h200-emulator-timing.json

Where Nsight Compute may not read the counters, `measure --out measured.json` takes the place of the first two, but its
cycles are 4 to 20 % too many (`kernel_cycles.py` says why), so that nothing should be fitted to them.

Every row of the table runs with one tile for each SM and 512 to 4096 keys, where nothing but the kernel's own timeline
counts, and with several tiles; the row of head dim 128 also with its main loop and turns exchanged. A few heads of keys
serve all SMs, so that they are in the L2 cache. `compare` needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment
from benchmarks.kernel_cycles import NCU, Cycles, from_ncu, profiled
from benchmarks.problems import DTYPES
from fa3.config.table import FORWARD, forward_config
from fa3.config.types import ForwardConfig, KernelKey

ONE_TILE_KEYS = (512, 1024, 2048, 4096)
SHARED_BY = 4
"""Heads of keys and values for the launches with one tile for each SM."""
WARM, REPEATS = 2, 7
WARM_NCU, REPEATS_NCU = 1, 3


@dataclass(frozen=True)
class Case:
    """One kernel on one problem."""

    key: KernelKey
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int

    def as_dict(self) -> dict[str, Any]:
        sizes = {name: getattr(self, name) for name in ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k")}
        return {"kernel": self.key.name, "config": asdict(self.key.config), "dtype": self.key.dtype, **sizes}

    def __str__(self) -> str:
        c = self.key.config
        mask = "causal" if c.causal else "full"
        sizes = f"B={self.batch} H={self.heads_q}:{self.heads_kv} Sq={self.seqlen_q} Sk={self.seqlen_k}"
        return f"({c.head_dim}, {c.head_dim_v}) {mask:6} {c.algorithm:7} {c.turns:8} {sizes}"


def cases(sms: int) -> list[Case]:
    """All that is measured on a GPU with so many SMs, the same kernel's together."""
    found: list[Case] = []
    for row in FORWARD:
        found += [_one_tile(row, sms, keys) for keys in ONE_TILE_KEYS]
        several = 1024 if row.causal else 3 * row.tile_m
        found.append(replace(_one_tile(row, sms, 1024), seqlen_q=several))
        heads = 2048 // row.head_dim
        found.append(Case(KernelKey(row, "bf16"), 4, heads, heads, 4096, 4096))
    base = forward_config(128, 128, False)
    for algorithm in ("overlap", "plain"):
        for turns in ("pingpong", "free"):
            variant = replace(base, algorithm=algorithm, turns=turns)
            if variant != base:
                found += [_one_tile(variant, sms, keys) for keys in (1024, 2048, 4096)]
    return found


def _one_tile(row: ForwardConfig, sms: int, keys: int) -> Case:
    return Case(KernelKey(row, "bf16"), 1, sms, SHARED_BY if sms % SHARED_BY == 0 else 1, row.tile_m, keys)


# ------------------------------------------------------------------------------------------------ on a GPU
def prepare(case: Case) -> Callable[[], object]:
    """One launch, on random inputs of its own."""
    from fa3 import launch

    c = case.key.config
    generator = torch.Generator(device="cuda").manual_seed(0)

    def random(length: int, heads: int, width: int) -> torch.Tensor:
        shape = (case.batch, length, heads, width)
        return torch.randn(shape, generator=generator, device="cuda", dtype=DTYPES[case.key.dtype])

    q = random(case.seqlen_q, case.heads_q, c.head_dim)
    k, v = (random(case.seqlen_k, case.heads_kv, width) for width in (c.head_dim, c.head_dim_v))
    problem = launch.Problem.of(q, k, v, None, c.causal, (-1, -1), 0.0)
    plan = launch.Launch(problem, launch.kernel(case.key), q.device, views=None)
    return lambda: plan.run(q, k, v)


def measured_rows(all_cases: Sequence[Case], cycles: Sequence[Cycles]) -> list[dict[str, Any]]:
    """Rows of a measurement."""
    rows = []
    for case, found in zip(all_cases, cycles, strict=True):
        clock = {} if found.clock_mhz is None else {"clock_mhz": round(found.clock_mhz)}
        rows.append({**case.as_dict(), **figures(found), **clock})
    return rows


def figures(found: Cycles) -> dict[str, float]:
    """Median and (largest - smallest) / median of the repetitions."""
    median = statistics.median(found.each)
    return {"cycles": round(median), "spread": round((max(found.each) - min(found.each)) / median, 4)}


def measure(out: Path | None) -> int:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    all_cases = cases(sms)
    cycles = profiled([prepare(case) for case in all_cases], WARM, REPEATS)
    rows = measured_rows(all_cases, cycles)
    for case, row in zip(all_cases, rows, strict=True):
        print(f"{case!s:70} {row['cycles']:>9} cycles at {row['clock_mhz']} MHz, spread {row['spread']:.1%}")
    _write(out, {"env": environment.describe({}), "source": "profiler", "rows": rows})
    return 0


def launch_all(out: Path | None) -> int:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    all_cases = cases(sms)
    for case in all_cases:
        call = prepare(case)
        for _ in range(WARM_NCU + REPEATS_NCU):
            call()
        torch.cuda.synchronize()
    _write(out, {"env": environment.describe({}), "source": "ncu", "rows": [case.as_dict() for case in all_cases]})
    return 0


# ------------------------------------------------------------------------------------------------ anywhere
def parse(csv_file: Path, cases_file: Path, out: Path | None) -> int:
    """Puts ncu's cycles to the cases that were launched under it."""
    result = json.loads(cases_file.read_text())
    cycles = from_ncu(csv_file.read_text(), len(result["rows"]), WARM_NCU, REPEATS_NCU)
    for row, found in zip(result["rows"], cycles, strict=True):
        row |= figures(found)
    _write(out, result)
    return 0


def compare(file: Path, fit: bool, out: Path | None) -> int:
    """Predicts what was measured; prints the error of every kernel."""
    from fa3.emulator.timing import calibrate
    from fa3.emulator.timing.cost import Cost

    result = json.loads(file.read_text())
    sms = result["env"]["multiprocessors"]
    rows = [calibrate.Measured.of(row) for row in result["rows"]]
    cost = calibrate.fit(rows, Cost(), sms, print) if fit else Cost()
    compared = calibrate.compare(rows, cost, sms)
    report = calibrate.report(compared, cost, sms)
    print(f"{'kernel':62} {'error':>7} {'held out':>9} {'worst':>7}   cycles of a block")
    for name, kernel in report["kernels"].items():
        block = kernel["block_cycles"] or {"measured": "-", "predicted": "-"}
        errors = f"{kernel['mean_error']:7.1%} {kernel['mean_error_held_out']:9.1%} {kernel['worst_error']:7.1%}"
        print(f"{name[8:]:62} {errors}   {block['measured']} measured, {block['predicted']} predicted")
    print(f"mean error: {report['mean_error']['fitted']:.1%} fitted, {report['mean_error']['held_out']:.1%} held out")
    print(f"constants: {report['constants']}")
    _write(out, {"env": result["env"], "source": result["source"], **report})
    return 0


def _write(out: Path | None, result: dict[str, Any]) -> None:
    if out is not None:
        rows = result.pop("rows")
        head = json.dumps(result, indent=1)[:-2]
        out.write_text(head + ',\n "rows": [\n  ' + ",\n  ".join(json.dumps(row) for row in rows) + "\n ]\n}\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.emulator_timing", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, words in (("measure", "on a GPU, with torch's profiler"), ("launch", f"on a GPU, under `{NCU}`")):
        commands.add_parser(name, help=words, description=words).add_argument("--out", type=Path)
    parsing = commands.add_parser("parse", help="what ncu printed")
    parsing.add_argument("csv", type=Path)
    parsing.add_argument("cases", type=Path)
    parsing.add_argument("--out", type=Path)
    comparing = commands.add_parser("compare", help="predictions with a measurement")
    comparing.add_argument("measured", type=Path)
    comparing.add_argument("--fit", action="store_true", help="choose the free constants first")
    comparing.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    if args.command in ("measure", "launch") and not torch.cuda.is_available():
        print("benchmarks.emulator_timing measures on a CUDA GPU, and torch sees none here", file=sys.stderr)
        return 2
    if args.command == "measure":
        return measure(args.out)
    if args.command == "launch":
        return launch_all(args.out)
    if args.command == "parse":
        return parse(args.csv, args.cases, args.out)
    return compare(args.measured, args.fit, args.out)


if __name__ == "__main__":
    sys.exit(main())
