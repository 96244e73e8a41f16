"""Checks a kernel, or shows where its time goes, on a machine without a GPU.

    python -m fa3.emulator check forward --head-dim 64 --causal --seeds 20
    python -m fa3.emulator check backward --head-dim 128 --deterministic
    python -m fa3.emulator timeline forward --head-dim 128 --causal --out timeline.png
    python -m fa3.emulator timeline backward --head-dim 128 --queries 512 --out timeline.png

`check` compiles the kernel as the sources now say, runs it on small problems under several schedules, and prints what
its checkers found. Exit status: 0 nothing, 1 findings, 2 it could not be run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fa3._arguments import add_kernel, key_of

if TYPE_CHECKING:
    from fa3.config.backward import AnyKey
    from fa3.emulator.check import Report
    from fa3.emulator.timing import Timeline

POLICIES = ("late", "early", "random")


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    try:
        return int(args.run(args))
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m fa3.emulator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="look for races, deadlocks, missing fences, wrong results")
    add_kernel(check)
    check.add_argument("--seeds", type=int, default=4, metavar="N", help="random schedules of each problem (default 4)")
    check.add_argument(
        "--policy", nargs="+", default=list(POLICIES), metavar="NAME", help=f"schedules; default {' '.join(POLICIES)}"
    )
    check.add_argument("--json", action="store_true", help="print one JSON object")
    check.set_defaults(run=run_check)
    timeline = commands.add_parser("timeline", help="draw what every warp and unit of an SM does")
    add_kernel(timeline)
    timeline.add_argument("--keys", type=int, default=1024, metavar="N", help="keys of a forward (default 1024)")
    timeline.add_argument("--queries", type=int, default=768, metavar="N", help="queries of a backward (default 768)")
    timeline.add_argument("--out", type=Path, metavar="FILE.png", help="where the picture goes")
    timeline.add_argument("--trace", type=Path, metavar="FILE.json", help="a trace for chrome://tracing or Perfetto")
    timeline.set_defaults(run=run_timeline)
    return top


# ------------------------------------------------------------------------------------------------ check
def run_check(args: argparse.Namespace) -> int:
    key = key_of(args)
    began = time.perf_counter()
    report = check_kernel(key, args.policy, range(args.seeds))
    seconds = time.perf_counter() - began
    if args.json:
        print(json.dumps({**report.as_dict(), "seconds": round(seconds, 1)}, indent=1))
    else:
        print(f"{report}\n\n{seconds:.1f} s, with compilation")
    return 1 if report else 0


def check_kernel(key: AnyKey, policies: Sequence[str] = POLICIES, seeds: Sequence[int] = range(4)) -> Report:
    """What the checkers find in a kernel, on small problems that make it do all that it can do."""
    from fa3.emulator import check
    from fa3.emulator.mutate import problems

    merged = check.Report(kernel=key.name)
    for shape in problems.shapes(key):
        case = problems.case(key, shape)
        case.run.clear()
        report = check.check(
            case.run.host.code, case.run.launch, check.describe(key), policies=policies, seeds=seeds,
            reference=case.wrong, resident=case.run.sms,
        )  # fmt: skip
        for finding in report:
            finding.schedules = [f"problem {shape.name!r}: {schedule}" for schedule in finding.schedules]
            merged.add(finding)
        merged.runs += report.runs
    return merged


# ------------------------------------------------------------------------------------------------ timeline
def run_timeline(args: argparse.Namespace) -> int:
    from fa3.emulator.timing import draw, trace

    timeline = timeline_of(key_of(args), args.keys, args.queries)
    print(timeline.summary())
    if args.out:
        draw.save(timeline, args.out)
        print(f"picture: {args.out}")
    if args.trace:
        trace.write_chrome_trace(args.trace, [timeline])
        print(f"trace for chrome://tracing or https://ui.perfetto.dev: {args.trace}")
    return 0


def timeline_of(key: AnyKey, keys: int, queries: int) -> Timeline:
    """Of a CTA with one tile: of a forward with about so many keys, of a backward with about so many queries."""
    from fa3.config.types import KernelKey
    from fa3.emulator.timing import backward, predict, replay

    if not isinstance(key, KernelKey):
        return backward.timeline(key, max(1, round(queries / key.config.tile_m)))
    blocks = max(1, round(keys / key.config.tile_n))
    return dataclasses.replace(replay(predict.emulate_tiles(key, blocks, tiles=1)), kernel=key.name)


if __name__ == "__main__":
    sys.exit(main())
