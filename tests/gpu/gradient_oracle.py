"""The float64 gradients of a case, the error that 16-bit tensor cores cannot avoid, and the verdict on a result.

As in `tests.gpu.oracle`, with the roundings of the backward: O, from which D = rowsum(dO * O) is made, P before dV,
dS before dQ and dK, and each gradient at the end. A gradient as a whole may not be above 1.3 times the error of a
float32 computation that rounds at the same places; no single element may be 8 standard deviations of its roundings
away. What must be 0 is 0 exactly: dQ of a query that sees no key, dK and dV of a key that no query sees; and, unless
LSE has a gradient, dQ of a query that sees a single key, and dK of a key that is the only one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.gpu.oracle import FLOAT32_NOISE, SMALLEST_STEP, UNIT_ROUNDOFF, WORST_DEVIATIONS, WORST_RATIO

NAMES = ("dQ", "dK", "dV")
VANISHES = 2.0**-110
"""What no gradient needs to show: a scale near float32's smallest number may be flushed to 0."""


@dataclass(frozen=True)
class ExpectedGradient:
    exact: Tensor
    """(B, S, H, D) float64, as the other tensors here."""
    deviation: Tensor
    """Standard deviation of an element, of its roundings alone."""
    noise: Tensor
    """What float32 arithmetic adds to an element at most."""
    model: Tensor
    """The result of float32 with the roundings of a kernel."""
    dead: Tensor
    """(B, S, H) bool: rows that must be 0, because nothing that they could depend on is visible."""

    @property
    def unavoidable(self) -> float:
        """The error of the model, as a Frobenius norm."""
        return float((self.model - self.exact).norm())

    def relative_error(self, got: Tensor) -> float:
        """|got - exact| / |exact|, Frobenius norms; 0 for nothing, and the norm of `got` where the result is 0."""
        size = float(self.exact.norm())
        return float((got.double() - self.exact).norm()) / (size or 1.0)


Expected = tuple[ExpectedGradient, ExpectedGradient, ExpectedGradient]


@dataclass(frozen=True)
class _Scores:
    """What both passes share, all heads at once: (B, Hq, Sq, Sk) unless said otherwise."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    """(B, Hq, S, D), keys and values repeated over their group."""
    p: Tensor
    sees: Tensor
    """(Sq, Sk) bool"""
    largest_score: float


def expect_gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor | None, dlse: Tensor | None, scale: float | None, causal: bool
) -> Expected:
    """dQ, dK, dV for the gradients of O and LSE (None is 0); sizes of tests only. Layout as `fa3.flash_attn_func`."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if do is None:
        do = q.new_zeros((*q.shape[:3], v.shape[3]))
    exact = _scores(q, k, v, do, scale, causal, torch.float64)
    model = _model(_scores(q, k, v, do, scale, causal, torch.float32), dlse, scale, q.dtype)
    seen, unseen = exact.sees.sum(1), ~exact.sees.any(0)
    settled = seen < (2 if dlse is None else 1)
    only = torch.full_like(unseen, k.shape[1] == 1 and dlse is None)
    heads = q.shape[2], k.shape[2], k.shape[2]
    dq, dk, dv = (
        _gradient(*parts, dead, count, q.dtype)
        for *parts, dead, count in zip(
            *_exact(exact, dlse, scale, q.dtype), model, (settled, unseen | only, unseen), heads, strict=True
        )
    )
    return dq, dk, dv


def complaint_about_gradients(expected: Expected, got: tuple[Tensor | None, ...]) -> str | None:
    """What is wrong with (dQ, dK, dV), in words; None if they are right. A gradient that is None was not asked for."""
    for name, want, gradient in zip(NAMES, expected, got, strict=True):
        if gradient is None:
            continue
        if gradient.shape != want.exact.shape:
            return f"{name} has shape {tuple(gradient.shape)}, expected {tuple(want.exact.shape)}"
        problem = _complaint(want, gradient.double())
        if problem is not None:
            return f"{name}: {problem}"
    return None


def _gradient(
    exact: Tensor, variance: Tensor, noise: Tensor, model: Tensor, dead: Tensor, heads: int, dtype: torch.dtype
) -> ExpectedGradient:
    """From figures of every query head, (B, Hq, S, D), to those of `heads` heads, each the sum over its group."""
    exact, variance, noise, model = (_of_group(x, heads) for x in (exact, variance, noise, model))
    deviation = (variance + _rounding(exact, dtype) / 3).sqrt()
    rounded = model.to(dtype).double()
    rows_first = (x.transpose(1, 2) for x in (exact, deviation, noise + VANISHES, rounded))
    return ExpectedGradient(*rows_first, dead[None, :, None].expand(exact.transpose(1, 2).shape[:3]))


def _scores(q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float, causal: bool, dtype: torch.dtype) -> _Scores:
    group = q.shape[2] // max(k.shape[2], 1)
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    q, k, v, do = (x.to(dtype).transpose(1, 2) for x in (q, k, v, do))
    s = q @ k.mT * scale
    largest = float(s.abs().max()) if s.numel() else 0.0
    sees = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device)
    sees = sees.tril(k.shape[2] - q.shape[2]) if causal else sees
    s = s.masked_fill(~sees, -math.inf)
    top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_zeros((*s.shape[:-1], 1))
    p = torch.exp(s - top.masked_fill(torch.isneginf(top), 0.0))
    row_sum = p.sum(-1, keepdim=True)
    return _Scores(q, k, v, do, p / torch.where(row_sum > 0, row_sum, 1.0), sees, largest)


def _exact(x: _Scores, dlse: Tensor | None, scale: float, dtype: torch.dtype) -> tuple[list[Tensor], ...]:
    """(gradients, their variances but for the last rounding, noise), each of dQ, dK, dV of every query head."""
    dp = x.do @ x.v.mT
    o = x.p @ x.v
    delta = (x.do * o).sum(-1, keepdim=True)
    rise = torch.zeros_like(delta) if dlse is None else dlse.double()[..., None]
    ds = x.p * (dp - delta + rise)
    # D inherits the forward's roundings, of P and of O. Its error shifts a whole row of dS in proportion to P.
    delta_variance = (_rounding(x.p, dtype) * dp**2).sum(-1, keepdim=True)
    delta_variance = delta_variance + (x.do**2 * _rounding(o, dtype)).sum(-1, keepdim=True)
    rounded_ds = _rounding(ds, dtype) * x.sees
    size = FLOAT32_NOISE * (1 + x.largest_score)
    ds_noise = size * ds.abs() + FLOAT32_NOISE * x.p * (
        x.do.abs() @ x.v.abs().mT + (x.do * o).abs().sum(-1, keepdim=True) + rise.abs()
    )
    gradients = [scale * ds @ x.k, scale * ds.mT @ x.q, x.p.mT @ x.do]
    variances = [
        scale**2 * (rounded_ds @ x.k**2 + delta_variance * (x.p @ x.k) ** 2) / 3,
        scale**2 * (rounded_ds.mT @ x.q**2 + (x.p**2 * delta_variance).mT @ x.q**2) / 3,
        (_rounding(x.p, dtype) * x.sees).mT @ x.do**2 / 3,
    ]
    noise = [
        abs(scale) * ds_noise @ x.k.abs(),
        abs(scale) * ds_noise.mT @ x.q.abs(),
        size * x.p.mT @ x.do.abs(),
    ]
    return gradients, variances, noise


def _model(x: _Scores, dlse: Tensor | None, scale: float, dtype: torch.dtype) -> list[Tensor]:
    """float32 with P, O and dS rounded; the gradients themselves are rounded by the caller, after the group's sum."""
    p = x.p.to(dtype).float()
    o = (p @ x.v).to(dtype).float()
    delta = (x.do * o).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse[..., None]
    ds = (x.p * (x.do @ x.v.mT - delta)).to(dtype).float()
    return [scale * (ds @ x.k), scale * (ds.mT @ x.q), p.mT @ x.do]


def _rounding(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The square of the largest error of rounding x to 16 bits."""
    return (x * UNIT_ROUNDOFF[dtype]) ** 2 + SMALLEST_STEP[dtype] ** 2


def _of_group(x: Tensor, heads: int) -> Tensor:
    """(B, Hq, S, D) -> (B, heads, S, D): the sum over the query heads that share one."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, x.shape[1] // heads)).sum(2)


def _complaint(expected: ExpectedGradient, got: Tensor) -> str | None:
    bad = ~torch.isfinite(got)
    if bad.any():
        return f"{int(bad.sum())} of {bad.numel()} elements are not finite, first at {_place(bad)}"
    if not got.numel():
        return None
    wrong = (got != 0).any(-1) & expected.dead
    if wrong.any():
        return f"{int(wrong.sum())} of {int(expected.dead.sum())} rows that must be 0 are not, first at {_place(wrong)}"
    error = got - expected.exact
    excess = error.abs() - expected.noise - WORST_DEVIATIONS * expected.deviation
    if (excess > 0).any():
        at = _place(excess == excess.max())
        return (
            f"{int((excess > 0).sum())} of {excess.numel()} elements are off, the worst at {at}: "
            f"{got[at]:.6g} for {expected.exact[at]:.6g}, standard deviation {expected.deviation[at]:.2g}"
        )
    return _about_norm(expected, error, rows=int((~expected.dead).sum()))


def _about_norm(expected: ExpectedGradient, error: Tensor, rows: int) -> str | None:
    """The 1.3 of the module's docstring, with room for luck that shrinks with the number of rows."""
    luck = 1 / math.sqrt(max(rows, 1))
    allowed = (WORST_RATIO + 3 * luck) * expected.unavoidable
    allowed += min(1.0, 4 * luck) * float(expected.deviation.norm()) / 2 + float(expected.noise.norm())
    total = float(error.norm())
    if total > allowed:
        return f"error {total:.3g} in all, allowed {allowed:.3g}, unavoidable {expected.unavoidable:.3g}"
    return None


def _place(where: Tensor) -> tuple[int, ...]:
    """The first index at which a mask is set."""
    return tuple(int(i) for i in where.nonzero()[0])
