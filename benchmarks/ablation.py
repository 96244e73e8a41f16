"""What each technique of the paper is worth in this kernel: `python -m benchmarks.ablation --out FILE.json`.

The paper's ablation (arXiv 2407.08608, table 3: 4 sequences of 8448, 16 heads, head dim 128, no mask) switches off the
overlap of GEMMs and softmax, and the warp specialisation. Here every kernel is warp-specialised; the rows are both main
loops, with and without ping-pong, and with O rescaled at every step, or lazily, instead of where a maximum rises. All
on the same tile, in one interleaved run, checked against float64 like every benchmark.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import environment, results
from benchmarks.problems import Problem
from benchmarks.run import line, measure, save
from fa3 import launch
from fa3._providers import Provider
from fa3._timing import interleaved, matmul_tflops, mean_call_ms
from fa3.config.table import forward_key
from fa3.config.types import DType, ForwardConfig, KernelKey

PAPER = Problem("fwd", "bf16", 128, 128, causal=False, seqlen_q=8448, seqlen_k=8448, batch=4, heads_q=16, heads_kv=16)
VARIANTS: dict[str, Callable[[ForwardConfig], ForwardConfig]] = {
    "both": lambda row: replace(row, algorithm="overlap", turns="pingpong"),
    "no_overlap": lambda row: replace(row, algorithm="plain", turns="pingpong"),
    "no_pingpong": lambda row: replace(row, algorithm="overlap", turns="free"),
    "neither": lambda row: replace(row, algorithm="plain", turns="free"),
    "always_rescale": lambda row: replace(row, algorithm="overlap", turns="pingpong", rescale="always"),
    "lazy_rescale": lambda row: replace(row, algorithm="overlap", turns="pingpong", rescale="lazy"),
}
"""Name -> the tuned row with its strategies exchanged."""


def variant_key(problem: Problem, name: str) -> KernelKey:
    """The key of one variant for this problem."""
    dtype: DType = "bf16" if problem.dtype == "bf16" else "fp16"
    key = forward_key(problem.head_dim, problem.head_dim_v, problem.causal, dtype)
    return replace(key, config=VARIANTS[name](key.config))


def provider(name: str, problem: Problem) -> Provider:
    """One variant, in the form in which the benchmark takes peers."""
    kernel = launch.kernel(variant_key(problem, name))

    def forward_lse(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = launch.Problem.of(q, k, v, None, causal, (-1, -1), 0.0)
        return launch.Launch(shape, kernel, q.device, views=None).run(q, k, v)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        return forward_lse(q, k, v, causal)[0]

    return Provider(name, name.replace("_", " "), "this package", forward, forward_lse)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.ablation", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.ablation needs a CUDA GPU, and torch sees none here", file=sys.stderr)
        return 2
    matmul = matmul_tflops()
    rows = []
    for problem in (PAPER, replace(PAPER, causal=True)):
        variants = [provider(name, problem) for name in VARIANTS]
        row = measure(problem, variants, lambda calls: interleaved(calls, args.rounds, mean_call_ms), matmul)
        rows.append(row)
        print(line(problem, row), flush=True)
    result: results.Result = {"env": environment.describe({}, matmul), "rows": rows}
    if args.out is not None:
        save(result, args.out, draw=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
