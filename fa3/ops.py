"""The torch.library ops, for callers that must see the call as a graph node: torch.compile, torch.export, functorch.

    fa3::forward (q, k, v, softmax_scale, causal, deterministic) -> (o, lse)
    fa3::backward(do, q, k, v, o, lse, dlse, softmax_scale, causal, deterministic, output_mask) -> (dq, dk, dv)

`deterministic` says how the backward adds up dQ; the forward takes it along. `dlse`, the gradient of LSE, may be None.
`output_mask` says which gradients are computed; the others have no element.
`Attention` is the same for eager autograd, without the dispatcher's cost. There are no second derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from fa3 import checks, launch, launch_backward
from fa3.config.backward import ALL, Wanted
from fa3.errors import NO_SECOND_DERIVATIVE

_library = torch.library.Library("fa3", "DEF")
# The kernels read strided inputs in place; without the tag a compiler may hand over other strides than it was given.
_tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_library.define(
    "forward(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal, bool deterministic=False)"
    " -> (Tensor o, Tensor lse)",
    tags=_tags,
)
_library.define(
    "backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? dlse, float softmax_scale,"
    " bool causal, bool deterministic=False, bool[3] output_mask=[True, True, True])"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=_tags,
)


# ------------------------------------------------------------------------------------------------ forward
def _forward(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, deterministic: bool = False
) -> tuple[Tensor, Tensor]:
    return launch.plan(q, k, v, softmax_scale, causal).run(q, k, v)


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, deterministic: bool = False
) -> tuple[Tensor, Tensor]:
    checks.check_tensors(q, k, v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        checks.legal_strides(name, tensor)
    batch, seqlen_q, heads, _ = q.shape
    return q.new_empty((batch, seqlen_q, heads, v.shape[3])), q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)


_library.impl("forward", _forward, "CUDA")
_library.impl("forward", _forward, "CPU")  # says what is needed, better than the dispatcher does
torch.library.register_fake("fa3::forward", _forward_fake, lib=_library)


# ------------------------------------------------------------------------------------------------ backward
EVERY = True, True, True
"""`output_mask` for all of dQ, dK and dV."""
WANTED: dict[tuple[bool, ...], Wanted | None] = {(False, False, False): None} | {
    tuple(name in wanted for name in ALL): wanted for wanted in get_args(Wanted)
}
"""`output_mask` -> what a plan of the backward calls it."""


def _backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    softmax_scale: float,
    causal: bool,
    deterministic: bool = False,
    output_mask: Sequence[bool] = EVERY,
) -> tuple[Tensor, Tensor, Tensor]:
    wanted = WANTED[tuple(output_mask)]
    if wanted is None:
        return q.new_empty(0), k.new_empty(0), v.new_empty(0)
    plan = launch_backward.plan(do, q, k, v, o, lse, dlse, softmax_scale, causal, deterministic, wanted)
    dq, dk, dv = plan.run(do, q, k, v, o, lse, dlse)
    return _or_nothing(dq, q), _or_nothing(dk, k), _or_nothing(dv, v)


def _or_nothing(gradient: Tensor | None, like: Tensor) -> Tensor:
    """The gradient; in the place of one that is not wanted a tensor without elements: an op cannot return None."""
    return like.new_empty(0) if gradient is None else gradient


def _backward_fake(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    softmax_scale: float,
    causal: bool,
    deterministic: bool = False,
    output_mask: Sequence[bool] = EVERY,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (t.new_empty(t.shape if on else 0) for t, on in zip((q, k, v), output_mask, strict=True))
    return dq, dk, dv


_library.impl("backward", _backward, "CUDA")
_library.impl("backward", _backward, "CPU")
torch.library.register_fake("fa3::backward", _backward_fake, lib=_library)


# ------------------------------------------------------------------------------------------------ autograd
class Attention(torch.autograd.Function):
    """Eager autograd over a plan: forward(q, k, v, plan, deterministic) -> (o, lse)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: launch.Plan, deterministic: bool = False
    ) -> tuple[Tensor, Tensor]:
        o, lse = plan.run(q, k, v)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = plan.softmax_scale, plan.causal, deterministic
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:
        return *_gradients(ctx, do, dlse, _awaited(ctx)), None, None


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)
    ctx.options = options


def _of_op(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:
    return *_gradients(ctx, do, dlse, ctx.needs_input_grad[:3]), None, None, None


_will_run = getattr(torch._C, "_will_engine_execute_node", None)  # not public, so that it may be missing


def _awaited(ctx: Any) -> tuple[bool, ...]:
    """Which of dQ, dK and dV somebody waits for, in eager autograd.

    An input that requires a gradient gets none if `torch.autograd.grad` or `backward(inputs=...)` ask for others only.
    The engine then does not run the node behind it; about leaves it cannot be asked, and theirs are computed.
    """
    needed: tuple[bool, ...] = ctx.needs_input_grad[:3]
    if _will_run is None or torch.compiler.is_compiling():  # compiled autograd traces this, without an engine to ask
        return needed
    nodes = [node for node, _ in ctx.next_functions[:3]]
    return tuple(
        need and (type(node).__name__ == "AccumulateGrad" or _will_run(node))
        for need, node in zip(needed, nodes, strict=True)
    )


def _gradients(ctx: Any, do: Tensor | None, dlse: Tensor | None, asked: tuple[bool, ...]) -> Any:
    """Those of (q, k, v) that are asked for, else None."""
    if (do is None and dlse is None) or not any(asked):
        return None, None, None
    q, k, v, o, lse = ctx.saved_tensors
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (do, dlse)):
        raise NotImplementedError(NO_SECOND_DERIVATIVE)
    if do is None:
        do = torch.zeros_like(o)
    with torch.no_grad():
        every = torch.ops.fa3.backward(do, q, k, v, o, lse, dlse, *ctx.options, asked)
    found = [gradient if wanted else None for gradient, wanted in zip(every, asked, strict=True)]
    if torch.is_grad_enabled():
        found = [None if gradient is None else _Once.apply(gradient, q) for gradient in found]
    return tuple(found)


class _Once(torch.autograd.Function):
    """Marks a gradient that was asked for with create_graph: it depends on the inputs, but not differentiably here."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, source: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError(NO_SECOND_DERIVATIVE)


torch.library.register_autograd("fa3::forward", _of_op, setup_context=_setup, lib=_library)
