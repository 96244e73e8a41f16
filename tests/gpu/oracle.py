"""The float64 result of a case, the error that 16-bit tensor cores cannot avoid, and the verdict on a kernel's result.

A kernel rounds twice: P before the second GEMM and O at the end. Two bounds follow from that.

* All of O together: the error may not be above 1.3 times that of a float32 computation which rounds at the same two
  places (a little more where few rows leave room for luck).
* Each element alone: the two roundings are independent errors of at most u and about u / sqrt(3), weighted by p v and
  by o. Their standard deviation is known, and no element may be 8 of them away. One missing key among a thousand
  shows here, while it would vanish in the norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""The largest relative error of one rounding."""
SMALLEST_STEP = {torch.bfloat16: 0.0, torch.float16: 2.0**-25}
"""The largest absolute error of one rounding where float16 runs out of exponents; bfloat16 has those of float32."""
FLOAT32_NOISE = 2.0**-19
"""Relative error of sums in float32 on tensor cores and of the fast exponential, with room."""

WORST_RATIO = 1.3
WORST_DEVIATIONS = 8.0


@dataclass(frozen=True)
class Expected:
    out: Tensor
    """(B, Sq, Hq, Dv) float64."""
    lse: Tensor
    """(B, Hq, Sq) float64, -inf for a row without a key."""
    deviation: Tensor
    """Standard deviation of an element of O, of its roundings alone."""
    noise: Tensor
    """What float32 arithmetic adds to an element of O at most."""
    model: Tensor
    """The result of float32 with P and O rounded, as float64."""
    largest_score: float


def expect(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool) -> Expected:
    """The formulas, all heads at once; sizes of tests only. Layout as `fa3.flash_attn_func`."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    group = q.shape[2] // max(k.shape[2], 1)
    u, step = UNIT_ROUNDOFF[q.dtype], SMALLEST_STEP[q.dtype]
    kr, vr = (x.repeat_interleave(group, 2) for x in (k, v))
    p, row_sum, lse, largest = _softmax(q, kr, scale, causal, torch.float64)
    v64 = vr.double().transpose(1, 2)
    out = (p @ v64) / row_sum
    rounding_p = ((p * u) ** 2 + step**2) @ v64**2 / row_sum**2
    deviation = ((rounding_p + (out * u) ** 2 + step**2) / 3).sqrt()
    noise = FLOAT32_NOISE * (1 + largest) * (p @ v64.abs()) / row_sum
    p32, sum32, _, _ = _softmax(q, kr, scale, causal, torch.float32)
    model = ((p32.to(q.dtype).float() @ vr.float().transpose(1, 2)) / sum32).to(q.dtype)
    rows_first = (x.transpose(1, 2) for x in (out, deviation, noise, model.double()))
    o, d, n, m = rows_first
    return Expected(o, lse, d, n, m, largest)


def complaint(expected: Expected, out: Tensor, lse: Tensor | None) -> str | None:
    """What is wrong with a result, in words; None if it is right."""
    if out.shape != expected.out.shape:
        return f"O has shape {tuple(out.shape)}, expected {tuple(expected.out.shape)}"
    return _about_out(expected, out.double()) or (None if lse is None else _about_lse(expected, lse))


def _softmax(
    q: Tensor, k: Tensor, scale: float, causal: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, float]:
    """(P before its division, row sums with 1 for rows without a key, LSE, the largest |score|) in one precision."""
    s = q.to(dtype).transpose(1, 2) @ k.to(dtype).permute(0, 2, 3, 1) * scale
    largest = float(s.abs().max()) if s.numel() else 0.0
    if causal:
        sees = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril(k.shape[1] - q.shape[1])
        s = s.masked_fill(~sees, -math.inf)
    top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -math.inf)
    dead = torch.isneginf(top)
    p = torch.exp(s - top.masked_fill(dead, 0.0))
    row_sum = p.sum(-1, keepdim=True).masked_fill(dead, 1.0)
    return p, row_sum, (top + row_sum.log())[..., 0], largest


def _about_out(expected: Expected, got: Tensor) -> str | None:
    bad = ~torch.isfinite(got)
    if bad.any():
        return f"O: {int(bad.sum())} of {bad.numel()} elements are not finite, first at {_place(bad)}"
    if not got.numel():
        return None
    dead = torch.isneginf(expected.lse).transpose(1, 2)
    if (got[dead] != 0).any():
        return f"O: a row without a key is not zero, {int((got[dead] != 0).any(-1).sum())} of {int(dead.sum())}"
    error = got - expected.out
    excess = error.abs() - expected.noise - WORST_DEVIATIONS * expected.deviation
    if (excess > 0).any():
        at = _place(excess == excess.max())
        return (
            f"O: {int((excess > 0).sum())} of {excess.numel()} elements are off, the worst at {at}: "
            f"{got[at]:.6g} for {expected.out[at]:.6g}, standard deviation {expected.deviation[at]:.2g}"
        )
    return _about_norm(expected, error, rows=int((~dead).sum()))


def _about_norm(expected: Expected, error: Tensor, rows: int) -> str | None:
    """The 1.3 of the module's docstring, with room for luck that shrinks with the number of rows."""
    luck = 1 / math.sqrt(max(rows, 1))
    unavoidable = float((expected.model - expected.out).norm())
    allowed = (WORST_RATIO + 3 * luck) * unavoidable + min(1.0, 4 * luck) * float(expected.deviation.norm()) / 2
    allowed += float(expected.noise.norm())
    total = float(error.norm())
    if total > allowed:
        return f"O: error {total:.3g} in all, allowed {allowed:.3g}, unavoidable {unavoidable:.3g}"
    return None


def _about_lse(expected: Expected, got: Tensor) -> str | None:
    if got.dtype != torch.float32 or got.shape != expected.lse.shape:
        return f"LSE is {got.dtype} {tuple(got.shape)}, expected float32 {tuple(expected.lse.shape)}"
    dead = torch.isneginf(expected.lse)
    if not torch.equal(torch.isneginf(got), dead):
        return f"LSE: -inf in {int(torch.isneginf(got).sum())} rows, expected in {int(dead.sum())}"
    error = torch.where(dead, 0.0, (got.double() - expected.lse).abs())
    allowed = 1e-4 + FLOAT32_NOISE * expected.largest_score
    bad = ~(error <= allowed)
    if bad.any():
        worst = float(error.max())
        return f"LSE: {int(bad.sum())} of {bad.numel()} rows are off by up to {worst:.3g}, first at {_place(bad)}"
    return None


def _place(where: Tensor) -> tuple[int, ...]:
    """The first index at which a mask is set."""
    return tuple(int(i) for i in where.nonzero()[0])
