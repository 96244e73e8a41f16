"""Time fa3 beside every attention library that imports, in one run: `python -m benchmarks.run --help`.

Needs a GPU. Prints a line for each problem; with `--out` also writes the form of `benchmarks/results.py`, after every
problem, and draws it at the end. A provider that fails costs the others nothing. One that breaks the process' GPU
context costs its row: the rest is measured by a fresh process. After a timeout, `--merge --skip N` goes on.

Exits with 1 if a problem has no figure of ours: because fa3 failed, or because its numerics are wrong, which is never
timed.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

if __name__ == "__main__" and not __package__:  # started as a file: the repository's root is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import environment, kernel_times, peers, results
from benchmarks.problems import DTYPES, MODES, SUITES, Problem, paper_grid, suite
from fa3._providers import NAMES, OURS, Provider
from fa3._timing import Sample, interleaved, matmul_tflops, mean_call_ms

BY_NAME = Path("")
"""The value of `--out` without a file: `default_path` names one."""

Sampler = Callable[[dict[str, Callable[[int], object]]], dict[str, Sample]]


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.run needs a CUDA GPU, and torch sees none here", file=sys.stderr)
        return 2
    providers = peers.select(args.only)
    problems = chosen_problems(args)
    matmul = matmul_tflops()
    env = environment.describe({p.name: p.version for p in providers}, matmul)
    print("# " + ", ".join(f"{name} {value}" for name, value in env.items() if name not in ("peers", "matmul_tflops")))
    print(f"# matmul 8192x8192x8192 bf16: {matmul:.0f} TFLOP/s. Below: TFLOP/s, error against float64")

    def sampler(calls: dict[str, Callable[[int], object]]) -> dict[str, Sample]:
        return interleaved(calls, args.rounds, lambda call: mean_call_ms(call, args.target_ms))

    path = default_path(args, env) if args.out == BY_NAME else args.out
    old = results.read(path) if path is not None and args.merge and path.exists() else {"env": env, "rows": []}
    result, measured = old, []
    for done, problem in enumerate(problems[args.skip :], args.skip + 1):
        measured.append(measure_or_say(problem, providers, sampler, matmul))
        print(line(problem, measured[-1]), flush=True)
        result = results.merged(old, {"env": env, "rows": measured})
        if path is not None:
            results.write(path, result)
        if context_is_broken():
            return start_again(path, done)
    rows = rows_of(problems, result)
    add_kernel_times(rows, providers)
    print(table(rows))
    print(summary(rows))
    if path is not None:
        save(result, path, draw=not args.no_charts)
    ours_asked = any(p.name == OURS for p in providers) or args.only is None or OURS in args.only
    return 1 if ours_asked and any(OURS not in each["tflops"] for each in rows) else 0


def measure(
    problem: Problem, providers: Sequence[Provider], sampler: Sampler, matmul: float | None, device: str = "cuda"
) -> results.Row:
    """Check every provider on one problem, time those that are right, and return the row."""
    left = peers.candidates(problem, providers, device)
    return results.row(problem, sampler(left.calls), left.errors, left.failures, matmul)


def measure_or_say(
    problem: Problem, providers: Sequence[Provider], sampler: Sampler, matmul: float | None
) -> results.Row:
    """`measure`; if that itself fails, a row without figures that says why."""
    try:
        return measure(problem, providers, sampler, matmul)
    except Exception as error:  # the other problems still count
        return results.row(problem, {}, {}, {"all": peers.reason(error)}, matmul)


def context_is_broken() -> bool:
    """Whether a kernel has failed so that this process can launch nothing any more."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def start_again(path: Path | None, done: int) -> int:
    """Replace this process by one that goes on after the first `done` problems; without a path, give up."""
    if path is None:
        print("# the GPU context is broken; with --out, a new process would go on here", file=sys.stderr)
        return 1
    print("# the GPU context is broken: going on in a new process", flush=True)
    more = ["--out", str(path), "--merge", "--skip", str(done)]
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], *more])


def rows_of(problems: Sequence[Problem], result: results.Result) -> list[results.Row]:
    """The rows of these problems, whenever they were measured."""
    by_case = {results.case_of(row): row for row in result["rows"]}
    cases = [results.case_of(asdict(problem)) for problem in problems]
    return [by_case[case] for case in cases if case in by_case]


def add_kernel_times(rows: Sequence[results.Row], providers: Sequence[Provider]) -> None:
    """`kernels_us` of the rows that want it. After all timing: a profiler leaves its hooks in the process."""
    ours = [provider.forward for provider in providers if provider.name == OURS]
    for row in rows:
        problem = results.problem_of(row)
        if ours and OURS in row["tflops"] and kernel_times.wanted(problem):
            try:
                row["kernels_us"] = kernel_times.kernel_times(problem, ours[0])
            except Exception as error:  # a machine may forbid profiling; the speeds are measured
                print(f"# no kernel times of {problem}: {peers.reason(error)}")


def chosen_problems(args: argparse.Namespace) -> list[Problem]:
    if args.suite is not None:
        return suite(args.suite, args.dtype)
    return paper_grid(args.mode, args.dtype, args.head_dim, args.causal, args.seqlen)


def default_path(args: argparse.Namespace, env: Mapping[str, object]) -> Path:
    """Where `--out` without a name writes: benchmarks/results/<gpu>-<suite or mode>-<dtype>-<day>.json."""
    gpu = re.sub(r"[^a-z0-9]+", "-", str(env["gpu"]).lower().removeprefix("nvidia ")).strip("-")
    day = str(env["date"])[: len("2026-11-30")]
    return environment.ROOT / "benchmarks" / "results" / f"{gpu}-{args.suite or args.mode}-{args.dtype}-{day}.json"


def line(problem: Problem, row: results.Row) -> str:
    """The printed line of one row, e.g. `fwd bf16 D=128 full S=4096 B=4 H=16: ours 701 (2.2e-03) ... 1.03x fa4`."""
    figures = [f"{name} {speed:.0f} ({row['error'][name]:.1e})" for name, speed in row["tflops"].items()]
    verdict = [f"{row['ratio']:.3f}x {row['best_peer']}"] if row["ratio"] is not None else []
    share = [f"{row['percent_of_matmul']:.0f}% of matmul"] if row["percent_of_matmul"] is not None else []
    failures = [f"\n    {name} not timed: {why}" for name, why in row["failures"].items()]
    return f"{problem}: {'  '.join(figures + verdict + share)}{''.join(failures)}"


def table(rows: Sequence[results.Row]) -> str:
    """The rows in brief: ours, the best peer, the ratio; of the backward also its own columns."""
    lines = [f"# {'':<48}{'ours':>7}{'peer':>7}{'ratio':>8}"]
    for row in rows:
        ours, best = row["tflops"].get(OURS), row["best_peer"]
        figures = [
            "-" if ours is None else f"{ours:.0f}",
            "-" if best is None else f"{row['tflops'][best]:.0f}",
            "-" if row["ratio"] is None else f"{row['ratio']:.3f}",
        ]
        cells = "{:>7}{:>7}{:>8}".format(*figures)
        lines.append(f"# {results.problem_of(row)!s:<48}{cells} {best or '':<6}{_details(row)}".rstrip())
    return "\n".join(lines)


def _details(row: results.Row) -> str:
    """Our error over the best peer's, the deterministic mode's share of the default, times of kernels."""
    errors, best = row.get("gradient_errors", {}), row["best_peer"]
    parts = []
    if OURS in errors and best in errors:
        shares_of_error = (f"{name} {x / errors[best][name]:.2f}" for name, x in errors[OURS].items())
        parts.append("  error/peer's " + " ".join(shares_of_error))
    shares = row.get("deterministic", {}).get("of_default", {})
    parts += [f"  {name} deterministic/default {share:.3f}" for name, share in shares.items()]
    parts += [f"  {kernel} {x:.1f} us" for kernel, x in row.get("kernels_us", {}).items()]
    return "".join(parts)


def summary(rows: Sequence[results.Row]) -> str:
    """How the ratios are spread over the rows that have one."""
    ratios = sorted(row["ratio"] for row in rows if row["ratio"] is not None)
    if not ratios:
        return "# no ratios: fa3 or every peer is missing"
    steps = ", ".join(f"{sum(r >= step for r in ratios)} at least {step:.2f}" for step in (0.95, 1.0, 1.05))
    middle = ratios[len(ratios) // 2]
    return f"# {len(ratios)} ratios to the best peer: least {ratios[0]:.3f}, middle {middle:.3f}; {steps}"


def save(result: results.Result, path: Path, *, draw: bool) -> None:
    """Write the JSON, and beside it a picture of each mode and dtype."""
    results.write(path, result)
    print(f"# wrote {path}")
    if not draw:
        return
    try:
        from benchmarks import charts
    except ImportError as error:
        print(f"# no charts: {error}")
        return
    for picture in charts.draw([result], path.with_suffix("")):
        print(f"# wrote {picture}")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="benchmarks.run", description=__doc__.splitlines()[0] if __doc__ else None)
    p.add_argument("--suite", choices=SUITES, help="a named list of problems, instead of the grid below")
    p.add_argument("--mode", choices=MODES, default="fwd")
    p.add_argument("--head-dim", type=integers, default=[64, 128, 256], metavar="N,N", help="default 64,128,256")
    p.add_argument(
        "--seqlen", type=integers, default=[1024, 4096, 16384], metavar="N,N", help="default 1024,4096,16384"
    )
    p.add_argument("--causal", type=booleans, default=[False, True], metavar="0,1", help="default 0,1")
    p.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    p.add_argument("--only", type=names, metavar="A,B", help=f"some of {','.join(NAMES)}; default: all that import")
    p.add_argument("--rounds", type=int, default=5, help="interleaved rounds, the median counts (5)")
    p.add_argument("--target-ms", type=float, default=40.0, help="GPU time of one provider in one round (40)")
    p.add_argument(
        "--out",
        type=Path,
        nargs="?",
        const=BY_NAME,
        metavar="FILE.json",
        help="write the result, and charts beside it; without FILE.json the name is made of GPU, suite, dtype and day, "
        "in benchmarks/results (a second run of the day replaces it, unless --merge is given)",
    )
    p.add_argument("--merge", action="store_true", help="keep the rows of an existing FILE.json not measured now")
    p.add_argument("--skip", type=int, default=0, metavar="N", help="leave the first N problems out")
    p.add_argument("--no-charts", action="store_true")
    return p


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def booleans(text: str) -> list[bool]:
    return [bool(int(part)) for part in text.split(",")]


def names(text: str) -> list[str]:
    chosen = text.split(",")
    unknown = [name for name in chosen if name not in NAMES]
    if unknown:
        raise argparse.ArgumentTypeError(f"no provider {unknown[0]!r}; there are {', '.join(NAMES)}")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
