"""What is measured: one attention problem, its work in FLOPs, its random inputs, and the named suites of problems."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MODES = ("fwd", "bwd")

TOKENS = 16384
"""Tokens of a problem, batch x seqlen, as in the FlashAttention papers."""
HIDDEN = 2048
"""Query heads x head_dim, as in the FlashAttention papers."""
DETERMINISTIC_LENGTH = 8192
"""At this length the backward is also measured with gradients that are the same bits from run to run."""


@dataclass(frozen=True)
class Problem:
    """One cell of a table. Two equal problems are the same measurement."""

    mode: str
    dtype: str
    head_dim: int
    head_dim_v: int
    causal: bool
    seqlen_q: int
    seqlen_k: int
    batch: int
    heads_q: int
    heads_kv: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def flops(self) -> float:
        """Multiplications and additions of both GEMMs, 2 B H Sq Sk (D + Dv); half of it under a causal mask.

        The convention of the papers: the half also where a causal mask hides more or less than half of the scores, and
        2.5 times the forward for the backward, which has five GEMMs.
        """
        full = 2.0 * self.batch * self.heads_q * self.seqlen_q * self.seqlen_k * (self.head_dim + self.head_dim_v)
        return full * (2.5 if self.mode == "bwd" else 1.0) / (2 if self.causal else 1)

    @property
    def input_bytes(self) -> int:
        keys = self.seqlen_k * self.heads_kv * (self.head_dim + self.head_dim_v)
        return 2 * self.batch * (self.seqlen_q * self.heads_q * self.head_dim + keys)

    def inputs(self, seed: int = 0, device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Fresh q, k, v from N(0, 1). Never zeros: on them a GPU draws less power and runs faster than on real data."""
        generator = torch.Generator(device=device).manual_seed(seed)
        queries = (self.batch, self.seqlen_q, self.heads_q, self.head_dim)
        keys = (self.batch, self.seqlen_k, self.heads_kv, self.head_dim)
        values = (self.batch, self.seqlen_k, self.heads_kv, self.head_dim_v)
        q, k, v = (
            torch.randn(shape, generator=generator, device=device, dtype=self.torch_dtype)
            for shape in (queries, keys, values)
        )
        return q, k, v

    def output_gradient(self, seed: int = 0, device: str = "cuda") -> torch.Tensor:
        """A fresh dO from N(0, 1)."""
        generator = torch.Generator(device=device).manual_seed(~seed)
        shape = (self.batch, self.seqlen_q, self.heads_q, self.head_dim_v)
        return torch.randn(shape, generator=generator, device=device, dtype=self.torch_dtype)

    @property
    def also_deterministic(self) -> bool:
        """Whether the backward is measured a second time, with gradients in a fixed order."""
        return self.mode == "bwd" and self.seqlen_k == DETERMINISTIC_LENGTH and self.heads_q == self.heads_kv

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"({self.head_dim}, {self.head_dim_v})"
        heads = f"{self.heads_q}" if self.heads_q == self.heads_kv else f"{self.heads_q}:{self.heads_kv}"
        lengths = f"{self.seqlen_k}" if self.seqlen_q == self.seqlen_k else f"{self.seqlen_q}x{self.seqlen_k}"
        mask = "causal" if self.causal else "full"
        return f"{self.mode} {self.dtype} D={dims} {mask} S={lengths} B={self.batch} H={heads}"


def paper_problem(mode: str, dtype: str, head_dim: int, causal: bool, seqlen: int) -> Problem:
    """A problem of 16k tokens and hidden size 2048. A sequence beyond 16k is one batch; a head beyond 2048 is one."""
    heads = max(1, HIDDEN // head_dim)
    batch = max(1, TOKENS // seqlen)
    return Problem(mode, dtype, head_dim, head_dim, causal, seqlen, seqlen, batch, heads, heads)


def paper_grid(
    mode: str, dtype: str, head_dims: Iterable[int], causals: Iterable[bool], seqlens: Iterable[int]
) -> list[Problem]:
    """Every combination, in the order of a table: head dim, then mask, then sequence length."""
    return [
        paper_problem(mode, dtype, head_dim, causal, seqlen)
        for head_dim, causal, seqlen in itertools.product(head_dims, causals, seqlens)
    ]


def suite(name: str, dtype: str = "bf16") -> list[Problem]:
    """A named list of problems. Raises ValueError for a name that is not in `SUITES`."""
    if name == "forward":
        return paper_grid("fwd", dtype, (64, 128, 256), (False, True), (1024, 4096, 16384))
    if name == "quick":
        return paper_grid("fwd", dtype, (64, 128), (False, True), (4096,))
    if name == "shapes":
        return _other_shapes("fwd", dtype)
    if name == "backward":
        grid = paper_grid("bwd", dtype, (64, 128, 256), (False, True), (1024, 4096, 16384))
        return [*grid, paper_problem("bwd", dtype, 128, True, DETERMINISTIC_LENGTH), *_other_shapes("bwd", dtype)]
    raise ValueError(f"no suite {name!r}; there are {', '.join(SUITES)}")


SUITES = ("forward", "quick", "shapes", "backward")


def _other_shapes(mode: str, dtype: str) -> list[Problem]:
    """Head dims between the tuned powers of two, K and V of different widths, and grouped query heads."""
    widths = [
        Problem(mode, dtype, d, dv, causal, 4096, 4096, 4, 16, 16)
        for (d, dv), causal in itertools.product(((96, 96), (192, 192), (192, 128)), (False, True))
    ]
    grouped = Problem(mode, dtype, 128, 128, True, 8192, 8192, 2, 32, 8)
    return [*widths, grouped]
