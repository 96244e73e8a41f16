"""Is an attention result right? Compared with float64 on a slice: private to the demo and the benchmarks.

Every figure beside a wrong result is worthless, so nothing is timed before it passed here. The slice is the last batch
with its first and last query head: the far corner of every stride.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fa3.reference import attention

WORST_ERROR = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
"""Largest relative error of the slice, |O - O64| / |O64|. Rounding P and O alone costs about 2.2e-3 and 2.8e-4."""

WORST_ROW_FACTOR = 6.0
"""A single row may be this much worse than the whole: it averages over few elements."""

WORST_LSE_ERROR = 1e-3
"""Largest absolute error of LSE, which is never rounded to 16 bits."""


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
