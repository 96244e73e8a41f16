"""Is an attention result right? Compared with float64 on a slice: private to the demo and the benchmarks.

Every figure beside a wrong result is worthless, so nothing is timed before it passed here. The slice is the last batch
with its first and last query head (of the gradients: all query heads of the first and the last head of K): the far
corner of every stride.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fa3.reference import attention, gradients

WORST_ERROR = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
"""Largest relative error of the slice, |O - O64| / |O64|. Rounding P and O alone costs about 2.2e-3 and 2.8e-4."""

WORST_ROW_FACTOR = 6.0
"""A single row may be this much worse than the whole: it averages over few elements."""

WORST_LSE_ERROR = 1e-3
"""Largest absolute error of LSE, which is never rounded to 16 bits."""

WORST_GRADIENT_ERROR = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
"""Largest relative error of dQ, dK or dV on the slice. Rounding P, dS and the results costs about 2.4e-3 and 3e-4."""


@dataclass(frozen=True)
class Errors:
    """Distances from float64 on the slice. NaN wherever the result holds a NaN."""

    relative: float
    """|O - O64| / |O64|, Frobenius norms over the slice."""
    worst_row: float
    """The largest |o - o64| / |o64| of one row; a row that should be zero counts with its own norm."""
    lse: float | None
    """The largest |LSE - LSE64|; None if the provider gives no LSE."""

    def refusal(self, dtype: torch.dtype) -> str | None:
        """Why this result may not be timed, in words; None if it is right."""
        limit = WORST_ERROR[dtype]
        if not self.relative <= limit:  # written so that NaN is refused
            return f"relative error {self.relative:.2e} against float64, allowed {limit:.0e}"
        if not self.worst_row <= limit * WORST_ROW_FACTOR:
            return f"relative error {self.worst_row:.2e} in one row, allowed {limit * WORST_ROW_FACTOR:.0e}"
        if self.lse is not None and not self.lse <= WORST_LSE_ERROR:
            return f"LSE is off by {self.lse:.2e}, allowed {WORST_LSE_ERROR:.0e}"
        return None


@dataclass(frozen=True)
class Slice:
    """The float64 result of one batch and two query heads. `out` (Sq, 2, Dv), `lse` (2, Sq)."""

    heads: tuple[int, int]
    out: torch.Tensor
    lse: torch.Tensor

    def errors(self, out: torch.Tensor, lse: torch.Tensor | None = None) -> Errors:
        """Distances of a whole result, O (B, Sq, Hq, Dv) and perhaps LSE (B, Hq, Sq), from this slice."""
        got = out[-1].detach()[:, list(self.heads)].double()
        difference, norm = (got - self.out).norm(dim=-1), self.out.norm(dim=-1)
        worst_row = (difference / torch.where(norm > 0, norm, torch.ones_like(norm))).max()
        return Errors(
            relative=float(difference.norm() / norm.norm()),
            worst_row=float(worst_row),
            lse=None if lse is None else float(self._lse_distance(lse[-1, list(self.heads)].double())),
        )

    def _lse_distance(self, got: torch.Tensor) -> torch.Tensor:
        both_dead = torch.isneginf(got) & torch.isneginf(self.lse)  # rows without a key: -inf is the right answer
        return torch.where(both_dead, torch.zeros_like(got), (got - self.lse).abs()).max()


def float64_slice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Slice:
    """The reference for the slice: q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv)."""
    heads_q, heads_kv = q.shape[2], k.shape[2]
    heads = (0, heads_q - 1)
    kv_heads = [h // (heads_q // heads_kv) for h in heads]
    out, lse = attention(q[-1:, :, list(heads)], k[-1:, :, kv_heads], v[-1:, :, kv_heads], causal=causal)
    return Slice(heads, out[0], lse[0])


@dataclass(frozen=True)
class GradientErrors:
    """Distances of dQ, dK and dV from float64 on the slice. NaN wherever a gradient holds a NaN."""

    dq: float
    dk: float
    dv: float
    """|x - x64| / |x64| of each, Frobenius norms over the slice."""
    worst_row: float
    """The largest |row - row64| / |row64| of one row of the three; a row that is smaller than the rows are on average
    (root of the mean square) counts with that average: where dS cancels out, its rounding is all there is."""
    lse: None = None

    @property
    def relative(self) -> float:
        """The largest of the three; NaN if one is."""
        return float(torch.tensor([self.dq, self.dk, self.dv], dtype=torch.float64).max())

    def refusal(self, dtype: torch.dtype) -> str | None:
        """Why these gradients may not be timed, in words; None if they are right."""
        limit = WORST_GRADIENT_ERROR[dtype]
        for name in ("dq", "dk", "dv"):
            if not getattr(self, name) <= limit:  # written so that NaN is refused
                return f"relative error {getattr(self, name):.2e} of {name} against float64, allowed {limit:.1e}"
        if not self.worst_row <= limit * WORST_ROW_FACTOR:
            return f"relative error {self.worst_row:.2e} in one row, allowed {limit * WORST_ROW_FACTOR:.0e}"
        return None


@dataclass(frozen=True)
class GradientSlice:
    """The float64 gradients of one batch: of all query heads of the first and the last head of K."""

    heads_kv: tuple[int, int]
    exact: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """dQ (1, Sq, 2 group, D), dK (1, Sk, 2, D), dV (1, Sk, 2, Dv)."""

    def errors(self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> GradientErrors:
        """Distances of whole gradients, dQ (B, Sq, Hq, D), dK (B, Sk, Hkv, D) and dV (B, Sk, Hkv, Dv)."""
        group = dq.shape[2] // dk.shape[2]
        heads = (_query_heads(self.heads_kv, group), list(self.heads_kv), list(self.heads_kv))
        relative, worst = [], []
        for got, chosen, exact in zip((dq, dk, dv), heads, self.exact, strict=True):
            difference = (got[-1:].detach()[:, :, chosen].double() - exact).norm(dim=-1)
            norm = exact.norm(dim=-1)
            average = norm.square().mean().sqrt()
            relative.append(float(difference.norm() / norm.norm()))
            worst.append((difference / norm.clamp_min(average)).max())
        of_dq, of_dk, of_dv = relative
        return GradientErrors(of_dq, of_dk, of_dv, worst_row=float(torch.stack(worst).max()))


def float64_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, causal: bool
) -> GradientSlice:
    """The reference for the slice: tensors as for `float64_slice`, and dO (B, Sq, Hq, Dv)."""
    heads_kv = (0, k.shape[2] - 1)
    heads = _query_heads(heads_kv, q.shape[2] // k.shape[2])
    queries, keys = (q, do), (k, v)
    q, do = (t[-1:, :, heads].detach() for t in queries)
    k, v = (t[-1:, :, list(heads_kv)].detach() for t in keys)
    return GradientSlice(heads_kv, gradients(do, q, k, v, causal=causal))


def _query_heads(heads_kv: tuple[int, int], group: int) -> list[int]:
    return [head * group + i for head in heads_kv for i in range(group)]
