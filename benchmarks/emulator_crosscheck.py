"""The same kernels on the same inputs, GPU against emulator.

    python -m benchmarks.emulator_crosscheck run --out DIR            on a Hopper GPU: O and LSE of every problem
    python -m benchmarks.emulator_crosscheck compare DIR --out FILE   anywhere: emulate them, compare, write the result

The two may differ where the hardware is free to: approximations of its special functions, contraction of products and
sums, the order in which a matrix product is added up. How much is measured against the kernel's own error:

    difference  |O_emulated - O_gpu| / |O64|
    error       |O_gpu - O64| / |O64|            O64 and LSE64 in float64, of the same inputs

Inputs come from numpy's PCG64, which gives the same numbers on every machine.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import fa3
from benchmarks import environment, results
from fa3 import reference
from fa3.launch import Problem as Call

LIMIT = 0.5
"""The difference may be at most this much of the kernel's own error."""
LSE_LIMIT = 1e-5
"""Relative to LSE64, and absolute where that is below 1."""

Inputs = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """One call. Its number is the seed of its inputs."""

    head_dim: int
    head_dim_v: int
    causal: bool
    dtype: str = "bf16"
    batch: int = 1
    heads_q: int = 2
    heads_kv: int = 2
    seqlen_q: int = 300
    seqlen_k: int = 520
    scale: float | None = None

    def inputs(self, seed: int) -> Inputs:
        """q, k, v on the CPU."""
        rng = np.random.default_rng(seed)
        dtype = torch.bfloat16 if self.dtype == "bf16" else torch.float16
        shapes = (
            (self.batch, self.seqlen_q, self.heads_q, self.head_dim),
            (self.batch, self.seqlen_k, self.heads_kv, self.head_dim),
            (self.batch, self.seqlen_k, self.heads_kv, self.head_dim_v),
        )
        q, k, v = (torch.from_numpy(rng.standard_normal(shape, np.float32)).to(dtype) for shape in shapes)
        return q, k, v


WIDTHS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
PROBLEMS = (
    *(Problem(d, dv, causal) for d, dv in WIDTHS for causal in (False, True)),
    *(Problem(d, dv, causal, "fp16", heads_q=4, heads_kv=1) for d, dv in WIDTHS for causal in (False, True)),
    # more queries than keys: rows without a key; narrower than the row's tile; a negative scale; one query
    *(Problem(d, dv, True, seqlen_q=333, seqlen_k=190) for d, dv in WIDTHS),
    Problem(40, 40, False),
    Problem(104, 72, True),
    Problem(200, 248, False),
    Problem(64, 64, True, scale=-0.2),
    Problem(128, 128, False, scale=-0.1),
    Problem(128, 128, True, seqlen_q=1, seqlen_k=700, heads_q=8, heads_kv=2),
    Problem(64, 64, False, batch=2, heads_q=3, heads_kv=1, seqlen_q=65, seqlen_k=1025),
)


def attend(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    return fa3.flash_attn_func(*inputs, softmax_scale=problem.scale, causal=problem.causal, return_lse=True)


def run_on_gpu(folder: Path) -> None:
    outputs = []
    for seed, problem in enumerate(PROBLEMS):
        q, k, v = problem.inputs(seed)
        o, lse = attend(problem, (q.cuda(), k.cuda(), v.cuda()))
        outputs.append((o.cpu(), lse.cpu()))
    torch.cuda.synchronize()
    folder.mkdir(parents=True, exist_ok=True)
    env = json.dumps(environment.describe({}), default=str)
    torch.save({"env": env, "outputs": outputs}, folder / "outputs.pt")
    print(f"{len(outputs)} problems run, in {folder / 'outputs.pt'}")


def compare(folder: Path) -> results.Result:
    stored = torch.load(folder / "outputs.pt", weights_only=True)
    rows = []
    for seed, (problem, (o, lse)) in enumerate(zip(PROBLEMS, stored["outputs"], strict=True)):
        rows.append(compare_one(problem, seed, o, lse))
        print(line(rows[-1]), flush=True)
    return {"env": json.loads(stored["env"]), "rows": rows}


def compare_one(problem: Problem, seed: int, gpu_o: Tensor, gpu_lse: Tensor) -> results.Row:
    """One row of the result: the differences, and whether they keep the limits."""
    inputs = problem.inputs(seed)
    began = time.perf_counter()
    with fa3.emulate():
        o, lse = attend(problem, inputs)
    seconds = time.perf_counter() - began
    o64, lse64 = reference.attention(*inputs, problem.scale, problem.causal)
    norm = o64.norm().item()
    difference, error = (o.double() - gpu_o.double()).norm().item(), (gpu_o.double() - o64).norm().item()
    empty, empty_gpu = lse == -math.inf, gpu_lse == -math.inf
    seen = lse64 > -math.inf
    lse_difference = ((lse - gpu_lse).double().abs()[seen] / lse64.abs()[seen].clamp_min(1)).max().item()
    share = difference / error
    same_empty = bool((empty == empty_gpu).all()) and bool((empty == ~seen).all())
    return {
        **asdict(problem),
        "seed": seed,
        "kernel": Call.of(*inputs, problem.scale, problem.causal, (-1, -1), 0.0).key.name,
        "error": float(f"{error / norm:.3e}"),
        "difference": float(f"{difference / norm:.3e}"),
        "share": float(f"{share:.3f}"),
        "differing_elements": float(f"{(o != gpu_o).double().mean().item():.2e}"),
        "lse_difference": float(f"{lse_difference:.1e}"),
        "empty_rows": int(empty_gpu.sum()),
        "same_empty_rows": same_empty,
        "right": share < LIMIT and lse_difference < LSE_LIMIT and same_empty,
        "seconds": round(seconds, 2),
    }


def line(row: results.Row) -> str:
    verdict = "right" if row["right"] else "WRONG"
    return (
        f"{verdict}  {row['kernel']:<78} error {row['error']:.2e}  difference {row['difference']:.1e} "
        f"({row['share']:.3f} of it)  LSE {row['lse_difference']:.0e}  empty rows {row['empty_rows']}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.emulator_crosscheck", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run").add_argument("--out", type=Path, required=True)
    comparison = commands.add_parser("compare")
    comparison.add_argument("folder", type=Path)
    comparison.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    if args.command == "run":
        run_on_gpu(args.out)
        return 0
    result = compare(args.folder)
    results.write(args.out, result)
    return 0 if all(row["right"] for row in result["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
