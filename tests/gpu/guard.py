"""Outputs that tell on a kernel: garbage wherever nothing was written, and a border that nobody may touch."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from fa3 import launch, launch_backward

BORDER = 1 << 19
"""Elements on each side: more than a whole tile of query rows of eight heads."""
UNTOUCHED = -7
GARBAGE = 0x55555555
"""What an integer is while nothing was written there; a floating-point number is NaN."""

_PATCHED = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty"))


class GuardedOutputs:
    """While active, an uninitialised floating-point or int32 tensor on `device` is garbage between two borders.

    It replaces `torch.empty` and its kin, and has both passes take their outputs and scratch tensors from there: by
    themselves they go a shorter way, which cannot be replaced. Plans made before know only that way, so they are
    forgotten on the way in and out. `complaint` is for after the call.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device).type
        self._buffers: list[Tensor] = []
        self._originals: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> GuardedOutputs:
        for owner, name in _PATCHED:
            original = getattr(owner, name)
            self._originals.append((owner, name, original))
            setattr(owner, name, self._guarded(original))
        self._originals.append((launch, "_allocator", launch._allocator))
        launch._allocator = _ordinary_allocator
        _forget_plans()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for owner, name, original in self._originals:
            setattr(owner, name, original)
        _forget_plans()

    def complaint(self, *outputs: Tensor) -> str | None:
        """What was written outside the outputs, or which output was not guarded at all; None if all is well."""
        for output in outputs:
            if output.numel() and not any(_inside(output, buffer) for buffer in self._buffers):
                return "an output was not taken from torch.empty or its kin, so nothing guarded it"
        for buffer in self._buffers:
            for side, border in (("before", buffer[:BORDER]), ("after", buffer[-BORDER:])):
                if not torch.equal(border, torch.full_like(border, UNTOUCHED)):
                    return f"something was written {side} an output of {buffer.numel() - 2 * BORDER} elements"
        return None

    def _guarded(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def guarded(*args: Any, **kwargs: Any) -> Tensor:
            given = kwargs.get("device") or next((x.device for x in args if isinstance(x, Tensor)), "cpu")
            form = original(*args, **{**kwargs, "device": "meta"})
            if torch.device(given).type != self._device or not _is_poisoned(form.dtype):
                return original(*args, **kwargs)
            return self._take(form, given)

        return guarded

    def _take(self, form: Tensor, device: Any) -> Tensor:
        span = 1 + sum((n - 1) * stride for n, stride in zip(form.shape, form.stride(), strict=True))
        span = span if form.numel() else 0
        buffer = torch.full((2 * BORDER + span,), UNTOUCHED, dtype=form.dtype, device=device)
        buffer[BORDER : BORDER + span] = float("nan") if form.dtype.is_floating_point else GARBAGE
        self._buffers.append(buffer)
        return buffer.as_strided(form.shape, form.stride(), BORDER)


def _is_poisoned(dtype: torch.dtype) -> bool:
    """Whatever a kernel writes or counts in. Others (int64 shapes, bool masks) are none of its."""
    return dtype.is_floating_point or dtype is torch.int32


def _forget_plans() -> None:
    launch._plans.clear()
    launch_backward._plans.clear()


def _ordinary_allocator(device: torch.device) -> Callable[..., Tensor]:
    """`launch._allocator` without its short way; looks `torch.empty_strided` up at each call, when it is guarded."""
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _inside(x: Tensor, buffer: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
