"""Small problems that make a kernel of the backward do all that it can do.

deep    one head: the rings go around several times; several key blocks, the last of them cut
wide    several CTAs at a time, two query heads for a head of K and V, both lengths cut
short   one query block, a last key block that lacks one key, and scores so low that a key which does not exist, whose
        score is 0, has a weight of infinity if it is not hidden
edge    more queries than keys, fewer columns than the kernel is padded to; under a causal mask rows that see no key
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from fa3 import reference
from fa3.config.backward import BackwardConfig, BackwardKey
from fa3.config.types import ROWS_OF_WARPGROUP as ROWS
from fa3.emulator.backend import KernelRun, record_backward
from fa3.emulator.mutate.case import DTYPES, SEED, Case, Output
from fa3.layouts.fragments import THREADS, accumulator

TOLERANCE = {"bf16": 2**-6, "fp16": 2**-9}
"""Of gradients, relative to the largest element: P and dS are rounded to 16 bits, and so is the result."""
EXACT = 2**-16
"""Of sums in float32, likewise."""
DLSE = 0.5
LOW = -120.0
"""A score of which exp(-score) is infinite in float32."""
SMS = 3


@dataclass(frozen=True)
class Shape:
    """A problem of one batch."""

    name: str
    rows: int
    keys: int
    group: int = 1
    """Query heads for the one head of K and V."""
    less: int = 0
    """Columns that the head dimensions are narrower than the tile."""
    score: float = 0.0
    """Is added to all scores."""


@dataclass(frozen=True)
class Exact:
    """What a backward should give, in float64 where it is computed; q, k, v, do in 16 bits."""

    do: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    dlse: Tensor | None
    gradients: tuple[Tensor, Tensor, Tensor]
    blind: Tensor
    """Which query rows see no key."""
    scale: float


def shapes(key: BackwardKey) -> tuple[Shape, ...]:
    """Their lengths are chosen so that every bound decides somewhere."""
    m, n = key.config.tile_m, key.config.tile_n
    deep, wide = Shape("deep", 4 * m + 8, n + n // 2 + 4), Shape("wide", m + m // 2, 2 * n + 8, group=2)
    edge = Shape("edge", 2 * m + 8, n - 8, less=8)
    if key.part != "backward":
        return deep, edge
    if key.config.causal:
        deep = Shape("deep", 3 * m + 8, 3 * m + 12)
    return deep, wide, edge, Shape("short", m - 8, 2 * n - 1, score=LOW)


@cache
def case(key: BackwardKey, shape: Shape) -> Case:
    """What the kernels in front of it would have written is put into its launch."""
    exact = _exact(key, shape)
    runs = record_backward(
        exact.do, exact.q, exact.k, exact.v, exact.o.to(exact.q.dtype), exact.lse.float(), exact.dlse, exact.scale,
        key.config.causal, key.deterministic, key.wanted, config=key.config, sms=SMS,
    )  # fmt: skip
    run = runs[key.part]
    if run.key != key:
        raise ValueError(f"{key.name} does not serve {shape}; {run.key.name} does")
    outputs = {"backward_prepare": _prepared, "backward": _main, "backward_finish": _finished}[key.part](
        key, exact, run
    )
    return Case(shape, run, outputs)


def _exact(key: BackwardKey, shape: Shape) -> Exact:
    random = torch.Generator().manual_seed(SEED)
    c = key.config

    def tensor(length: int, heads: int, dim: int) -> Tensor:
        return torch.randn(1, length, heads, dim - shape.less, generator=random).to(DTYPES[key.dtype])

    q, do = tensor(shape.rows, shape.group, c.head_dim), tensor(shape.rows, shape.group, c.head_dim_v)
    k, v = tensor(shape.keys, 1, c.head_dim), tensor(shape.keys, 1, c.head_dim_v)
    scale = 1 / math.sqrt(c.head_dim)
    if shape.score:
        q[..., 0], k[..., 0] = shape.score / scale, 1.0
    o, lse = reference.attention(q, k, v, scale, c.causal)
    dlse = torch.full(lse.shape, DLSE) if key.dlse else None
    gradients = reference.gradients(do, q, k, v, scale, c.causal, dlse)
    blind = ~reference.visible(shape.rows, shape.keys, c.causal).any(1)
    return Exact(do, q, k, v, o, lse, dlse, gradients, blind, scale)


# ------------------------------------------------------------------------------------------------ the kernels
def _prepared(key: BackwardKey, exact: Exact, run: KernelRun) -> tuple[Output, ...]:
    lse, delta = rows_of(key, exact)
    found = (
        Output("lse_log2", lse, EXACT * _largest(lse)),
        Output("delta", delta, TOLERANCE[key.dtype] * _largest(delta)),  # from o in 16 bits
    )
    if "q" not in key.wanted:
        return found
    sums, turns = (torch.zeros_like(run.launch.tensors[name]).double() for name in ("dq_accum", "turns"))
    kept = ~cleared(key, exact)[:, None, None]
    cleared_sums = Output("dq_accum", sums, 0.0, lambda found: found.masked_fill(kept, 0.0))
    return (*found, cleared_sums, Output("turns", turns, 0.0))


def _main(key: BackwardKey, exact: Exact, run: KernelRun) -> tuple[Output, ...]:
    lse, delta = rows_of(key, exact)
    tensors = run.launch.tensors
    tensors["lse_log2"].copy_(lse)
    tensors["delta"].copy_(delta)
    found = [
        Output(f"d{name}", right, TOLERANCE[key.dtype] * _largest(right))
        for name, right in zip("kv", exact.gradients[1:], strict=True)
        if name in key.wanted
    ]
    return (*found, *_main_dq(key, exact, run)) if "q" in key.wanted else tuple(found)


def _main_dq(key: BackwardKey, exact: Exact, run: KernelRun) -> tuple[Output, ...]:
    tensors, dq = run.launch.tensors, exact.gradients[0]
    sums = torch.zeros_like(tensors["dq_accum"])
    run.starts["dq_accum"] = sums.masked_fill_(~cleared(key, exact)[:, None, None], math.nan)
    read = partial(sums_in_rows, key.config, rows=dq.shape[1], columns=dq.shape[3])
    right = dq / exact.scale
    found = Output("dq_accum", right, TOLERANCE[key.dtype] * _largest(right), read, _blind(exact))
    if not key.deterministic:
        return (found,)
    return found, Output("turns", _turns(key, exact, tensors["turns"]), 0.0)


def _finished(key: BackwardKey, exact: Exact, run: KernelRun) -> tuple[Output, ...]:
    sums = run.launch.tensors["dq_accum"]
    sums.copy_(torch.randn(sums.shape, generator=torch.Generator().manual_seed(SEED)))
    dq = exact.scale * sums_in_rows(key.config, sums, exact.q.shape[1], exact.q.shape[3])
    seen = reference.visible(exact.q.shape[1], exact.k.shape[1], key.config.causal).sum(1)
    dq[:, seen == 1] = 0.0  # exp(S - LSE) is 1 there whatever S is
    return (Output("dq", dq, TOLERANCE[key.dtype] * _largest(dq)),)


def _blind(exact: Exact) -> Tensor:
    return exact.blind[None, :, None, None].expand_as(exact.gradients[0])


def _largest(tensor: Tensor) -> float:
    return float(tensor[tensor.isfinite()].abs().max())


# ------------------------------------------------------------------------------------------------ their tensors
def rows_of(key: BackwardKey, exact: Exact) -> tuple[Tensor, Tensor]:
    """LSE in base 2, +inf where a row sees no key or does not exist, and D, as (batch, head, padded row)."""
    rows = exact.q.shape[1]
    padding = -rows % key.config.tile_m
    lse = exact.lse * math.log2(math.e)
    lse = torch.where(exact.blind, math.inf, lse)
    delta = (exact.do.double() * exact.o).sum(-1).transpose(1, 2)
    if exact.dlse is not None:
        delta = delta - exact.dlse
    delta = torch.where(exact.blind, 0.0, delta)
    return torch.nn.functional.pad(lse, (0, padding), value=math.inf), torch.nn.functional.pad(delta, (0, padding))


def sums_in_rows(c: BackwardConfig, sums: Tensor, rows: int, columns: int) -> Tensor:
    """dQ as (batch, row, head, dimension) from (batch, head, m_block, slice, element), which are accumulators, 16 bytes
    of each thread next to each other (`fa3.kernels.parts.dq`)."""
    batch, heads, blocks, slices, size = sums.shape
    registers = size // THREADS
    width = c.tile_m if c.dq_gemm == "transposed" else c.head_dim
    layout = accumulator(width)
    element = torch.arange(size)
    thread, register = element // 4 % THREADS, element // (4 * THREADS) * 4 + element % 4
    place = torch.tensor([layout(t + THREADS * r) for r in range(registers) for t in range(THREADS)])
    place = place.view(registers, THREADS)[register, thread]
    parts = torch.empty(batch, heads, blocks, slices, ROWS, width, dtype=torch.float64)
    parts[..., place % ROWS, place // ROWS] = sums.double()
    parts = parts.flatten(3, 4)
    if c.dq_gemm == "transposed":
        parts = parts.transpose(3, 4)
    return parts.flatten(2, 3)[:, :, :rows, :columns].transpose(1, 2)


def _key_blocks(key: BackwardKey, exact: Exact) -> Tensor:
    """How many key blocks each query block sees; pairs of them where CTAs work in pairs."""
    c = key.config
    seen = reference.visible(exact.q.shape[1], exact.k.shape[1], c.causal)
    together = c.tile_n * c.cluster
    blocks = [[bool(keys.any()) for keys in rows.split(together, 1)] for rows in seen.split(c.tile_m, 0)]
    return torch.tensor(blocks).sum(1)


def cleared(key: BackwardKey, exact: Exact) -> Tensor:
    """Whether backward_prepare sets the sum of a query block to 0: all of them, or, where whoever comes first stores
    its part, those that no key block sees."""
    blocks = _key_blocks(key, exact)
    return blocks == 0 if key.config.dq_start == "stored" else torch.ones_like(blocks, dtype=torch.bool)


def _turns(key: BackwardKey, exact: Exact, turns: Tensor) -> Tensor:
    """How often each query block has been counted: by every key block, or pair of them, that it sees, and by each of
    their warpgroups where they add by themselves."""
    c = key.config
    each = c.math_warpgroups * c.cluster if c.dq_store == "direct" else 1
    return (each * _key_blocks(key, exact)).expand(turns.shape).double()
