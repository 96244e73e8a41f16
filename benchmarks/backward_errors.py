"""How far dQ, dK, dV are from float64, beside every library that imports: `python -m benchmarks.backward_errors`.

Needs a GPU. The cells of the papers' backward table, with the check of `benchmarks.run`, and no timing. Exits with 1 if
an error of ours is above `WORST_RATIO` times that of the best peer, or if a problem has none of ours.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

if __name__ == "__main__" and not __package__:  # started as a file: the repository's root is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import environment, peers, results
from benchmarks.problems import DTYPES, Problem, paper_problem
from fa3._providers import OURS, Provider

NAMES = ("dq", "dk", "dv")
WORST_RATIO = 1.05

Errors = dict[str, float]
"""Gradient -> |got - float64| / |float64|, Frobenius norms over the slice."""


def main(arguments: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="benchmarks.backward_errors", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--only", type=lambda text: text.split(","), metavar="A,B", help="providers; default: all")
    p.add_argument("--head-dim", type=_integers, default=[64, 128, 256], metavar="N,N", help="default 64,128,256")
    p.add_argument("--seqlen", type=_integers, default=[1024, 4096, 16384], metavar="N,N", help="1024,4096,16384")
    p.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    p.add_argument("--out", type=Path, metavar="FILE.json")
    args = p.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.backward_errors needs a CUDA GPU, and torch sees none here", file=sys.stderr)
        return 2
    providers = peers.select(args.only)
    rows = []
    for head_dim in args.head_dim:
        for causal in (False, True):
            for seqlen in args.seqlen:
                rows.append(measure(paper_problem("bwd", args.dtype, head_dim, causal, seqlen), providers))
                print(line(rows[-1]), flush=True)
    if args.out is not None:
        results.write(args.out, {"env": environment.describe({p.name: p.version for p in providers}), "rows": rows})
        print(f"# wrote {args.out}")
    worst = max((x for row in rows if row["ratio"] for x in row["ratio"].values()), default=None)
    print(f"# largest ratio to the best peer: {worst}, allowed {WORST_RATIO}")
    ours_missing = any(OURS not in row["error"] for row in rows)
    return 1 if ours_missing or (worst is not None and worst > WORST_RATIO) else 0


def measure(problem: Problem, providers: Sequence[Provider], device: str = "cuda") -> results.Row:
    """Every provider's gradients of one problem against float64."""
    checked = peers.candidates(problem, providers, device)
    errors = {
        name: {part: float(f"{getattr(each, part):.4e}") for part in NAMES} for name, each in checked.errors.items()
    }
    return {**asdict(problem), "error": errors, "ratio": ratios(errors), "failures": checked.failures}


def ratios(errors: Mapping[str, Errors]) -> dict[str, float] | None:
    """Gradient -> our error over the smallest of a peer; None without us or without peers."""
    others = [of for name, of in errors.items() if name != OURS]
    if OURS not in errors or not others:
        return None
    return {name: round(errors[OURS][name] / min(of[name] for of in others), 4) for name in NAMES}


def line(row: results.Row) -> str:
    """E.g. `bwd bf16 D=128 full S=4096: ours 2.4e-03 2.4e-03 2.3e-03  fa4 ...  ratios 1.000 0.998 1.001`."""
    figures = [f"{name} " + " ".join(f"{x:.2e}" for x in of.values()) for name, of in row["error"].items()]
    verdict = ["ratios " + " ".join(f"{x:.3f}" for x in row["ratio"].values())] if row["ratio"] else []
    failures = [f"\n    {name}: {why}" for name, why in row["failures"].items()]
    return f"{results.problem_of(row)}: {'  '.join(figures + verdict)}{''.join(failures)}"


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
