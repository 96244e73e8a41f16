"""The torch.library ops, for callers that must see the call as a graph node: torch.compile, torch.export, functorch.

    fa3::forward (q, k, v, softmax_scale, causal) -> (o, lse)
    fa3::backward(do, q, k, v, o, lse, softmax_scale, causal) -> (dq, dk, dv)       raises: not in this version

`Attention` is the same for eager autograd, without the dispatcher's cost.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa3 import checks, launch
from fa3.errors import NO_BACKWARD

_library = torch.library.Library("fa3", "DEF")
# The kernels read strided inputs in place; without the tag a compiler may hand over other strides than it was given.
_tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_library.define(
    "forward(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal) -> (Tensor o, Tensor lse)", tags=_tags
)
_library.define(
    "backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, float softmax_scale, bool causal)"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=_tags,
)


# ------------------------------------------------------------------------------------------------ forward
def _forward(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    return launch.plan(q, k, v, softmax_scale, causal).run(q, k, v)


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    checks.check_tensors(q, k, v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        checks.legal_strides(name, tensor)
    batch, seqlen_q, heads, _ = q.shape
    return q.new_empty((batch, seqlen_q, heads, v.shape[3])), q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)


_library.impl("forward", _forward, "CUDA")
_library.impl("forward", _forward, "CPU")  # says what is needed, better than the dispatcher does
torch.library.register_fake("fa3::forward", _forward_fake, lib=_library)


# ------------------------------------------------------------------------------------------------ backward
def _backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *options: Any) -> Any:
    raise NotImplementedError(NO_BACKWARD)


def _backward_fake(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *options: Any) -> Any:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


_library.impl("backward", _backward, "CUDA")
_library.impl("backward", _backward, "CPU")
torch.library.register_fake("fa3::backward", _backward_fake, lib=_library)


# ------------------------------------------------------------------------------------------------ autograd
class Attention(torch.autograd.Function):
    """Eager autograd over a plan: forward(q, k, v, plan) -> (o, lse)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: launch.Plan) -> tuple[Tensor, Tensor]:
        o, lse = plan.run(q, k, v)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = plan.softmax_scale, plan.causal
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlse: Tensor) -> Any:
        return *torch.ops.fa3.backward(do, *ctx.saved_tensors, *ctx.options), None


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.options = options


def _gradient(ctx: Any, do: Tensor, dlse: Tensor) -> Any:
    """A gradient of LSE is not looked at: `backward` refuses everything until it is there."""
    return *torch.ops.fa3.backward(do, *ctx.saved_tensors, *ctx.options), None, None


torch.library.register_autograd("fa3::forward", _gradient, setup_context=_setup, lib=_library)
