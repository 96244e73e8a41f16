"""A random problem of the backward as a plain value: a `Case`, and the gradients that come into it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from tests.gpu.cases import DTYPES, LAYOUTS, Case

INCOMING = ("o", "lse", "both")
"""Which outputs have a gradient: O, LSE, or each of them."""


@dataclass(frozen=True)
class GradientCase:
    case: Case
    do_layout: str = "contiguous"
    """How dO lies in memory; the names of `DO_LAYOUTS`."""
    incoming: str = "o"
    deterministic: bool = False
    wanted: str = "qkv"
    """Which inputs require a gradient."""

    def inputs(self, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """q, k, v as of the case; dO and dLSE from N(0, 1), None where that output has no gradient."""
        q, k, v = self.case.inputs(device)
        batch, seqlen_q, heads, _ = q.shape
        generator = torch.Generator(device=device).manual_seed(self.case.seed + 1)
        do = torch.randn((batch, seqlen_q, heads, v.shape[3]), generator=generator, device=device)
        do = DO_LAYOUTS[self.do_layout](do.to(DTYPES[self.case.dtype]))
        dlse = torch.randn((batch, heads, seqlen_q), generator=generator, device=device)
        return q, k, v, None if self.incoming == "lse" else do, None if self.incoming == "o" else dlse

    @property
    def reproducer(self) -> str:
        """A command that runs this case alone."""
        return f".venv/bin/python -m tests.gpu.reproduce '{json.dumps(asdict(self))}'"

    @staticmethod
    def from_json(text: str) -> GradientCase:
        fields = json.loads(text)
        return GradientCase(**{**fields, "case": Case.from_json(json.dumps(fields["case"]))})


def expanded_scalar(x: Tensor) -> Tensor:
    """One number with strides of 0, as the gradient of a sum is."""
    return x.flatten()[:1].expand(x.shape) if x.numel() else x


def expanded_heads(x: Tensor) -> Tensor:
    """One head shown many times."""
    return x[:, :, :1].expand(x.shape)


def reversed_dimensions(x: Tensor) -> Tensor:
    """(D, H, S, B) in memory: head_dim is the slowest."""
    return x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)


def spread_columns(x: Tensor) -> Tensor:
    """Every other column of wider rows."""
    buffer = torch.full((*x.shape[:3], 2 * x.shape[3]), float("nan"), dtype=x.dtype, device=x.device)
    buffer[..., ::2] = x
    return buffer[..., ::2]


def odd_rows(x: Tensor) -> Tensor:
    """Columns 1 to 1 + D of rows of odd length: neither the first element nor any stride suits TMA."""
    buffer = torch.full((*x.shape[:3], x.shape[3] + 3), float("nan"), dtype=x.dtype, device=x.device)
    buffer[..., 1:-2] = x
    return buffer[..., 1:-2]


DO_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = LAYOUTS | {
    f.__name__: f for f in (expanded_scalar, expanded_heads, reversed_dimensions, spread_columns, odd_rows)
}
