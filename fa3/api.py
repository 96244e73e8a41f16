"""The public functions. Arguments are checked before anything is launched; `fa3.checks` has the rules.

A call in plain eager PyTorch goes straight to its plan. Where something must see the call as one operation (a compiler,
a tracer, a dispatch mode, functorch, forward-mode AD, a tensor subclass), it goes through the op `fa3::forward`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fa3 import checks, errors, launch, launch_backward, ops
from fa3.config.backward import AnyKey
from fa3.config.table import FORWARD

errors.check_dsl(installed_only=True)

_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch = torch._C._functorch.peek_interpreter_stack
_tracing = torch._C._get_tracing_state


@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    deterministic: bool = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    deterministic: bool = ...,
    *,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, softmax(softmax_scale * Q K^T) V, on a Hopper GPU.

    Args:
        q: (B, Sq, Hq, D), float16 or bfloat16. D is a multiple of 8 up to 256.
        k: (B, Sk, Hkv, D), v: (B, Sk, Hkv, Dv). Query head h uses head h // (Hq // Hkv); Hkv divides Hq.
            All three are read where they lie, and never copied or cast: the last dimension must be contiguous, other
            strides multiples of 16 bytes, the first element 16-byte aligned.
        softmax_scale: any finite number; None means 1 / sqrt(D).
        causal: query i sees key j if and only if j <= i + Sk - Sq (aligned to the bottom right corner).
        window_size: (left, right). Only windows that hide the same keys as `causal` does, or none; -1 is no bound.
        softcap: only 0.0, no cap.
        deterministic: gradients are bit-identical from run to run; slower. The forward always is.
        return_lse: also return LSE.

    Returns:
        O, (B, Sq, Hq, Dv), contiguous, with q's dtype; with `return_lse` (O, LSE), where LSE is float32, (B, Hq, Sq),
        the natural logarithm of the sum of exponentials. A row that sees no key has O = 0 and LSE = -inf.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: before any launch, naming the argument, what it was
            and what is allowed.
        fa3.errors.LaunchError: CUDA refused the launch.

    The kernel is compiled at the first call for a head dimension, mask and dtype (one line at level INFO in the log
    "fa3"), and kept on disk (`fa3.cache`). `fa3.explain` says in advance what a call would run.
    """
    if torch.compiler.is_compiling() or not _is_plain(q, k, v):
        o, lse = _through_op(q, k, v, softmax_scale, causal, window_size, softcap, deterministic)
    else:
        plan = launch.plan(q, k, v, softmax_scale, causal, window_size, softcap)
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            o, lse = ops.Attention.apply(q, k, v, plan, deterministic)
        else:
            o, lse = plan.run(q, k, v)
    return (o, lse) if return_lse else o


def _is_plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether nothing but eager autograd has to know of a call with these tensors."""
    return (
        type(q) is type(k) is type(v) is Tensor
        and not _dispatch_modes()
        and _functorch() is None
        and _tracing() is None
        and forward_ad._current_level < 0
    )


def _through_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """The op checks the tensors too, in its fake and its implementation; the options that it lacks are checked here."""
    checks.check_tensors(q, k, v)
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in (q, k, v)):
        raise NotImplementedError(errors.NO_FORWARD_MODE)  # PyTorch would drop the tangents without a word
    checks.check_softcap(softcap)
    is_causal = checks.resolve_mask(causal, window_size, q.shape[1], k.shape[1])
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(q.shape[3])
    else:
        checks.check_scale_type(softmax_scale)
    return torch.ops.fa3.forward(q, k, v, softmax_scale, is_causal, deterministic)


# ------------------------------------------------------------------------------------------------ looking and preparing
@dataclass(frozen=True)
class Explanation:
    """What a call would run."""

    kernel: str | None
    """The kernel's name; None if nothing is launched, because there is no row or no key."""
    config: dict[str, object]
    """Its row of the table."""
    state: str
    """loaded | prebuilt | on disk | to be compiled | no launch."""
    file: Path | None = None
    backward: tuple[Explanation, ...] = ()
    """The kernels that the gradient of O will run, in their order; none if no input requires a gradient."""

    def __str__(self) -> str:
        lines = [f"kernel  {self.kernel}", f"state   {self.state}" + (f": {self.file}" if self.file else "")]
        lines += [f"  {name} = {value}" for name, value in self.config.items()]
        return "\n".join(lines + [str(each) for each in self.backward])


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Explanation:
    """What `flash_attn_func` would run for these arguments, without running, loading or compiling it.

    The tensors may be on any device, `meta` included. They are checked as for a call, apart from their device. Where
    one of them requires a gradient (and grad mode is on), `backward` has the kernels for these gradients as well.
    """
    problem = launch.Problem.of(q, k, v, softmax_scale, causal, window_size, softcap)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        checks.legal_strides(name, tensor)
    if problem.is_empty:
        return Explanation(None, {}, "no launch")
    wanted = ops.WANTED[tuple(torch.is_grad_enabled() and t.requires_grad for t in (q, k, v))]
    if wanted is None:
        return _explanation(problem.key)
    backward = launch_backward.Problem(problem, tuple(k.shape), tuple(v.shape), False, deterministic, wanted)
    return replace(_explanation(problem.key), backward=tuple(map(_explanation, backward.keys)))


def _explanation(key: AnyKey) -> Explanation:
    state, file = launch.where(key)
    return Explanation(key.name, asdict(key.config), state, file)


def warmup(
    head_dims: Iterable[int | tuple[int, int]] | None = None,
    dtypes: Iterable[torch.dtype] = (torch.bfloat16, torch.float16),
    causal: Iterable[bool] = (False, True),
    device: torch.device | str | int | None = None,
    backward: bool = False,
    deterministic: bool = False,
) -> list[str]:
    """Makes later calls quick: loads or compiles their kernels, and runs each once on `device`.

    `head_dims` are D, or (D, Dv) where V's differs; None means every row of the table. With `backward` also the kernels
    of the gradients of all three inputs, in a fixed order of sums if `deterministic`. Without a device the current GPU
    is used; on a machine without one, the kernels are only compiled. Returns the kernels' names.
    """
    rows = {(row.head_dim, row.head_dim_v) for row in FORWARD}
    dims = rows if head_dims is None else checks.head_dim_pairs(head_dims)
    chosen, masks = checks.list_of_dtypes(dtypes), checks.list_of_masks(causal)
    wanted = [(d, dv, dtype, mask) for d, dv in sorted(dims) for dtype in chosen for mask in masks]
    keys = [key for choice in wanted for key in _keys(*choice, backward, deterministic)]
    if device is None and not torch.cuda.is_available():
        for key in keys:
            launch.kernel(key)
        return [key.name for key in keys]
    where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    for d, dv, dtype, mask in wanted:
        q, k, v = (torch.zeros(1, 1, 1, dim, dtype=dtype, device=where, requires_grad=backward) for dim in (d, d, dv))
        with torch.set_grad_enabled(backward):
            o = flash_attn_func(q, k, v, causal=mask, deterministic=deterministic)
        if backward:
            torch.autograd.grad(o, (q, k, v), torch.zeros_like(o))
    torch.cuda.synchronize(where)
    return [key.name for key in keys]


def _keys(
    head_dim: int, head_dim_v: int, dtype: torch.dtype, causal: bool, backward: bool, deterministic: bool
) -> list[AnyKey]:
    """Of the forward, and of the backward's kernels if they are wanted."""
    q, v = (torch.empty(1, 1, 1, dim, dtype=dtype, device="meta") for dim in (head_dim, head_dim_v))
    problem = launch.Problem.of(q, q, v, None, causal, (-1, -1), 0.0)
    if not backward:
        return [problem.key]
    shapes = tuple(q.shape), tuple(v.shape)
    return [problem.key, *launch_backward.Problem(problem, *shapes, False, deterministic).keys]
