"""Many random problems of the backward against float64: `python -m tests.gpu.random_problems --count 1000`.

Problem i is drawn from the seed `--seed` + i alone, so that two numbers repeat a run. Every failure prints the line
that repeats it. Exits with 1 if there was one. The file records the seeds, the failures, and how the error of each
gradient compares with that of a float32 computation that rounds at the same places.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from benchmarks import environment
from fa3 import build, cache, launch
from fa3._hardware import why_no_hopper
from fa3.config.backward import AnyKey, BackwardConfig
from fa3.config.backward_table import BACKWARD, backward_config
from fa3.launch_backward import Problem
from tests.gpu.cases import DTYPES, LAYOUTS, Case
from tests.gpu.gradient_cases import DO_LAYOUTS, INCOMING, GradientCase
from tests.gpu.gradient_checking import Attention, Examined, differentiable, examine
from tests.gpu.gradient_oracle import NAMES
from tests.gpu.strategies import edges

LONGEST = 700
FEWEST_ROWS = 64
"""Of a gradient whose error is recorded: the ratio of two errors of a few numbers says nothing."""


def draw(seed: int, dtypes: Sequence[str] = tuple(DTYPES)) -> GradientCase:
    """The problem of one seed. A positive scale: the others are the forward's affair, and kernels of their own."""
    r = random.Random(seed)
    seqlen_q, seqlen_k = (
        r.choice(edges(LONGEST)) if r.random() < 0.5 else r.randint(1, LONGEST) for _ in range(2)
    )  # fmt: skip
    head_dim, head_dim_v = r.choice(sorted({(row.head_dim, row.head_dim_v) for row in BACKWARD}))
    if r.random() < 0.4:
        head_dim, head_dim_v = (8 * r.randint(1, dim // 8) for dim in (head_dim, head_dim_v))
    names = sorted(LAYOUTS)
    case = Case(
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_q if r.random() < 0.4 else seqlen_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        batch=r.randint(1, 3),
        heads_kv=r.randint(1, 3),
        group=r.choice([1, 1, 2, 3, 4, 8]),
        causal=r.random() < 0.5,
        dtype=r.choice(list(dtypes)),
        scale=r.choice([None, None, 0.5 * r.random()]),
        amplitude=r.choice([1.0, 1.0, 0.1, 5.0]),
        layouts=(r.choice(names), r.choice(names), r.choice(names)),
        seed=seed,
    )
    do_layout = r.choice(["contiguous", r.choice(sorted(DO_LAYOUTS))])
    return GradientCase(case, do_layout, r.choice(["o", "o", *INCOMING]), deterministic=r.random() < 0.4)


def run(
    problems: Iterable[GradientCase], device: torch.device | str, attention: Attention = differentiable
) -> tuple[list[dict[str, object]], dict[str, dict[str, object]]]:
    """(failures, for every row and dtype how large the errors are)."""
    failures: list[dict[str, object]] = []
    ratios: dict[str, dict[str, list[float]]] = defaultdict(lambda: {name: [] for name in NAMES})
    for problem in problems:
        try:
            examined = examine(problem, device, attention)
        except Exception as error:  # a refused launch or a CUDA error is a failure too, with its reproducer
            _report(failures, problem, f"{type(error).__name__}: {error}")
            if "CUDA error" in str(error):
                break
            continue
        if examined.complaint is not None:
            _report(failures, problem, examined.complaint)
        for name, ratio in _error_ratios(examined).items():
            ratios[_row_of(problem.case)][name].append(ratio)
    return failures, {row: _summary(of) for row, of in sorted(ratios.items())}


def _report(failures: list[dict[str, object]], problem: GradientCase, why: str) -> None:
    failures.append({"seed": problem.case.seed, "why": why, "again": problem.reproducer})
    print(f"FAILED: {why}\n  again: {problem.reproducer}", flush=True)


def _error_ratios(examined: Examined) -> dict[str, float]:
    """Gradient -> its error over that of the float32 computation, where there are enough numbers to compare."""
    return {
        name: float((got.double() - want.exact).norm()) / want.unavoidable
        for name, got, want in zip(NAMES, examined.got, examined.expected, strict=True)
        if got is not None and int((~want.dead).sum()) >= FEWEST_ROWS and want.unavoidable > 0
    }


def _row_of(case: Case) -> str:
    row: BackwardConfig = backward_config(case.head_dim, case.head_dim_v, case.causal)
    return f"d{row.head_dim}v{row.head_dim_v} {'causal' if row.causal else 'full'} {case.dtype}"


def _summary(of: dict[str, list[float]]) -> dict[str, object]:
    return {
        name: {"problems": len(x), "median": round(statistics.median(x), 3), "max": round(max(x), 3)}
        for name, x in of.items()
        if x
    }


# ---- kernels


def kernels(problems: Iterable[GradientCase]) -> list[AnyKey]:
    """Those of both passes that the problems need, without any that they share."""
    found: dict[AnyKey, None] = {}
    for problem in problems:
        forward, backward = _problem(problem)
        if not forward.is_empty:
            found.update(dict.fromkeys((forward.key, *backward.keys)))
    return list(found)


def _problem(problem: GradientCase) -> tuple[launch.Problem, Problem]:
    case = problem.case
    q, k, v = (torch.empty(shape, dtype=DTYPES[case.dtype], device="meta") for shape in case.shapes)
    forward = launch.Problem.of(q, k, v, case.scale, case.causal, (-1, -1), 0.0)
    return forward, Problem(forward, *case.shapes[1:], problem.incoming != "o", problem.deterministic, problem.wanted)


def compile_missing(keys: Sequence[AnyKey], processes: int) -> int:
    """Puts the kernels that are not on disk there, several at a time. Returns how many there were."""
    missing = [key for key in keys if launch.where(key)[0] == "to be compiled"]
    folder = cache.folder()
    if missing and folder is not None:
        build.build(missing, folder, processes)
    return len(missing)


# ---- the command


def main(arguments: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="tests.gpu.random_problems", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--count", type=int, default=1000, help="problems (1000)")
    p.add_argument("--seed", type=int, default=0, help="of the first problem (0)")
    p.add_argument("--dtypes", type=lambda text: text.split(","), default=sorted(DTYPES), metavar="bf16,fp16")
    p.add_argument("--processes", type=int, default=8, help="that compile what is not on disk yet (8)")
    p.add_argument("--out", type=Path, metavar="FILE.json")
    args = p.parse_args(arguments)
    reason = why_no_hopper()
    if reason is not None:
        print(f"tests.gpu.random_problems {reason}", file=sys.stderr)
        return 2
    problems = [draw(args.seed + at, args.dtypes) for at in range(args.count)]
    compiled = compile_missing(kernels(problems), args.processes)
    before = time.perf_counter()
    failures, errors = run(problems, "cuda")
    seconds = time.perf_counter() - before
    for row, of in errors.items():
        print(f"{row:<24} " + "  ".join(f"{name} {x['median']:.2f} (max {x['max']:.2f})" for name, x in of.items()))
    print(
        f"{len(problems)} problems, seeds {args.seed} to {args.seed + args.count - 1}, {len(failures)} failures, "
        f"{seconds:.0f} s; {compiled} kernels were compiled first. Above: error over the unavoidable one"
    )
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        result = {
            "env": environment.describe({}),
            "seeds": [args.seed, args.seed + args.count - 1],
            "problems": len(problems),
            "failures": failures,
            "seconds": round(seconds, 1),
            "error_over_unavoidable": errors,
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
