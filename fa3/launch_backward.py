"""From the gradient of an output to the three kernels of the backward: prepare, main kernel, finish.

As in `fa3.launch`, a plan holds all that depends only on what a call looks like. dO may have any strides: where TMA
cannot take them (an expanded scalar, say) it is copied, which no other argument ever is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fa3 import backends, checks, counters, launch
from fa3.checks import Strides
from fa3.config.backward import ALL, BackwardConfig, BackwardKey, Wanted, backward_keys
from fa3.config.backward_table import backward_config
from fa3.errors import LaunchError

if TYPE_CHECKING:
    from fa3.emulator.backend import Emulation

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""dQ, dK, dV; None for those that are not wanted."""


Form = tuple[tuple[int, ...], Strides, torch.dtype]
"""Shape, strides and dtype of a tensor."""


class BackwardPlan(Protocol):
    def run(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, dlse: Tensor | None
    ) -> Gradients:
        """The wanted ones, freshly allocated and contiguous, on the current stream."""


_plans: dict[tuple[Any, ...], BackwardPlan] = {}


def plan(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    softmax_scale: float,
    causal: bool,
    deterministic: bool,
    wanted: Wanted = ALL,
) -> BackwardPlan:
    """The plan for these arguments; on first sight they are checked, and kernels are compiled if need be."""
    tensors = (q, k, v, o, lse)
    look = (
        *((t.shape, t.stride(), t.dtype, t.get_device()) for t in tensors),
        do.shape, do.dtype, do.get_device(), dlse is None, softmax_scale, causal, deterministic,
        wanted,
    )  # fmt: skip
    found = _plans.get(look)
    if found is not None:
        return found
    emulation = backends.emulation_for(do, *tensors)
    made = _make_plan(do, tensors, dlse, softmax_scale, causal, deterministic, wanted, emulation)
    if emulation is None:
        if len(_plans) >= launch.MAX_PLANS:
            _plans.clear()
        _plans[look] = made
    return made


def _make_plan(
    do: Tensor,
    tensors: tuple[Tensor, ...],
    dlse: Tensor | None,
    softmax_scale: float,
    causal: bool,
    deterministic: bool,
    wanted: Wanted,
    emulation: Emulation | None,
) -> BackwardPlan:
    q, k, v, o, lse = tensors
    forward = launch.Problem.of(q, k, v, softmax_scale, causal, (-1, -1), 0.0)
    checks.check_gradients(do, o, lse, dlse, forward.o_shape, forward.lse_shape, q)
    views = [checks.legal_strides(name, t) for name, t in zip("qkvo", (q, k, v, o), strict=True)]
    if emulation is None:
        checks.check_device(q, k, v)
    if forward.is_empty:
        return NoGradients(wanted)
    problem = Problem(forward, tuple(k.shape), tuple(v.shape), dlse is not None, deterministic, wanted)
    if emulation is not None:
        return emulation.backward_plan(problem, views)
    kernels = tuple(launch.kernel(key) for key in problem.keys)
    return BackwardLaunch(problem, kernels, q.device, views)


@dataclass(frozen=True)
class Problem:
    """What is to be computed, checked: the forward's problem, and what the backward adds."""

    forward: launch.Problem
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    dlse: bool
    deterministic: bool
    wanted: Wanted = ALL

    @property
    def config(self) -> BackwardConfig:
        return backward_config(self.forward.head_dim, self.forward.o_shape[3], self.forward.causal)

    @property
    def keys(self) -> tuple[BackwardKey, ...]:
        """Of the kernels, in the order in which they run."""
        dtype = checks.DTYPES[self.forward.dtype]
        return backward_keys(self.config, dtype, self.wanted, self.dlse, self.deterministic)


class NoGradients:
    """No row or no key: every gradient is 0."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted

    def run(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, dlse: Tensor | None
    ) -> Gradients:
        dq, dk, dv = (
            torch.zeros_like(t, memory_format=torch.contiguous_format) if name in self.wanted else None
            for name, t in zip(ALL, (q, k, v), strict=True)
        )
        return dq, dk, dv


class BackwardLaunch:
    """The launches of one backward pass."""

    def __init__(
        self,
        problem: Problem,
        kernels: tuple[Callable[..., Any], ...],
        device: torch.device,
        views: list[Strides | None],
        gpu: launch.Device | None = None,
        empty: launch.Empty | None = None,
    ) -> None:
        """`gpu` and `empty` are those of `device`, unless something stands in for it."""
        self.problem = problem
        self.kernels = kernels
        self.device = device
        self.views = None if views == [None] * 4 else views
        self.gpu = gpu or counters.device(device.index)
        self.empty = empty or launch._allocator(device)
        forward, config = problem.forward, problem.config
        self.scale = forward.softmax_scale
        self.scale_log2 = checks.kernel_scale(forward.softmax_scale)
        batch, seqlen_q, heads, _ = forward.o_shape
        blocks = -(-seqlen_q // config.tile_m)
        q_shape = batch, seqlen_q, heads, forward.head_dim
        # The gradient of LSE does reach a query with one key: its LSE is its score.
        self.lone = (0, 0) if problem.dlse else _lone_queries(seqlen_q, problem.k_shape[1], forward.causal)
        self.rows = _form((batch, heads, blocks * config.tile_m), torch.float32)
        with_dq = "q" in problem.wanted
        accum_shape = batch, heads, blocks, config.dq_slices, config.dq_slice
        self.accum = _form(accum_shape, torch.float32) if with_dq else None
        self.turns = _form((batch, heads, blocks), torch.int32) if with_dq else None
        shapes = q_shape, problem.k_shape, problem.v_shape
        self.outputs = [
            _form(shape, forward.dtype) if name in problem.wanted else None
            for name, shape in zip(ALL, shapes, strict=True)
        ]

    def run(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, dlse: Tensor | None
    ) -> Gradients:
        gpu = self.gpu
        if not gpu.alone and gpu.index != torch.cuda.current_device():
            with torch.cuda.device(gpu.index):
                return self.run(do, q, k, v, o, lse, dlse)
        do = checks.for_tma(do)
        if (q.data_ptr() | k.data_ptr() | v.data_ptr() | o.data_ptr()) % checks.TMA_ALIGN:
            checks.check_alignment(q, k, v)
            o = o.clone(memory_format=torch.contiguous_format)
        if self.views is not None:
            q, k, v, o = (launch._view(t, strides) for t, strides in zip((q, k, v, o), self.views, strict=True))
        lse_log2, delta = self.empty(*self.rows), self.empty(*self.rows)
        accum, turns = self._empty(self.accum), self._empty(self.turns)
        dq, dk, dv = (self._empty(form) for form in self.outputs)
        prepare, main, *finish = self.kernels
        try:
            prepare(o, do, lse, lse if dlse is None else dlse, lse_log2, delta, accum, turns)
            main(q, k, v, do, lse_log2, delta, accum, turns, dk, dv, self.scale_log2, self.scale)
            for kernel in finish:
                kernel(accum, dq, self.scale, *self.lone)
            if dk is not None and k.shape[1] == 1 and dlse is None:
                dk.zero_()  # as for lone queries: where all see this one key alone, dS is 0, not a rounding error
        except Exception as error:
            self._failed(error)
        return dq, dk, dv

    def _empty(self, form: Form | None) -> Tensor | None:
        return None if form is None else self.empty(*form)

    def _failed(self, error: Exception) -> None:
        launch.clear_cuda_error()
        names = ", ".join(key.name for key in self.problem.keys)
        raise LaunchError(
            f"fa3: the backward ({names}) could not be launched on {self.device}: {error}\n{self.problem}"
        ) from error


def _lone_queries(seqlen_q: int, seqlen_k: int, causal: bool) -> tuple[int, int]:
    """From the first query to behind the last one that sees exactly one key."""
    if causal:
        first = seqlen_q - seqlen_k
        return (first, first + 1) if first >= 0 else (0, 0)
    return (0, seqlen_q) if seqlen_k == 1 else (0, 0)


def _form(shape: tuple[int, ...], dtype: torch.dtype) -> Form:
    """Of a contiguous tensor."""
    return shape, tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))), dtype
