"""A stand-in for the GPU: the host code runs whole, with kernels that compute by the reference on the CPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from fa3 import checks, counters, launch, launch_backward, reference
from fa3.config.backward import BackwardKey
from fa3.config.types import KernelKey


class CpuDevice(counters.Device):
    """A device whose counters are on the CPU."""

    def __init__(self, index: int = -1) -> None:
        self.index, self.sm_count, self.alone = index, 132, True
        self._counters = None
        self._of_stream = {}
        self._captured = itertools.count()

    def _stream(self) -> int:
        return 0

    def _device(self) -> torch.device:
        return torch.device("cpu")

    def _wait(self) -> None:
        pass


@dataclass
class StandIn:
    """What the stand-in kernels were asked to do, and how their next call may fail."""

    keys: list[KernelKey] = field(default_factory=list)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    failure: Exception | None = None

    prepared: tuple[Any, ...] = ()
    """What the backward's first kernel was called with, for the others."""

    def kernel(self, key: KernelKey | BackwardKey) -> Callable[..., None]:
        """A kernel for this key: checks its arguments as the compiled ones do, then computes by the reference."""
        self.keys.append(key)
        if isinstance(key, BackwardKey):
            return partial(self._backward, key)

        def run(*arguments: Any) -> None:
            self.calls.append(arguments)
            if self.failure is not None:
                raise self.failure
            q, k, v, o, lse, zeros, slot, scale_log2, sm_count = arguments
            assert sm_count > 0 and 0 <= slot < len(zeros) and zeros[slot] == 0
            assert scale_log2 != 0 and (scale_log2 < 0) == key.negative_scale
            for tensor in (q, k, v, o):
                assert checks.DTYPES[tensor.dtype] == key.dtype
                assert tensor.numel() and tensor.data_ptr() % 16 == 0
                assert tensor.stride(3) == 1 and all(s % 8 == 0 for s in tensor.stride()[:3])
            assert o.is_contiguous() and lse.is_contiguous() and lse.dtype == torch.float32
            assert q.shape[3] <= key.config.head_dim and v.shape[3] <= key.config.head_dim_v
            out, exact_lse = reference.attention(q, k, v, scale_log2 * math.log(2), key.config.causal)
            o.copy_(out)
            lse.copy_(exact_lse)

        return run

    def _backward(self, key: BackwardKey, *arguments: Any) -> None:
        """The three kernels of the backward; the second computes all gradients."""
        self.calls.append(arguments)
        if self.failure is not None:
            raise self.failure
        if key.part == "backward_prepare":
            o, do, _, dlse, *written = arguments
            assert do.stride(3) == 1 and all(s % 8 == 0 and s > 0 for s in do.stride()[:3])
            lse_log2, delta, *for_dq = written
            assert [t is not None for t in for_dq] == ["q" in key.wanted] * 2
            assert do.shape == o.shape and all(t.is_contiguous() for t in (lse_log2, delta, *for_dq) if t is not None)
            self.prepared = do, dlse if key.dlse else None
        elif key.part == "backward":
            q, k, v, do, _, _, accum, turns, dk, dv, scale_log2, scale = arguments
            given = accum is not None and turns is not None, dk is not None, dv is not None
            assert given == tuple(name in key.wanted for name in "qkv")
            assert math.isclose(scale_log2, scale * math.log2(math.e))
            do, dlse = self.prepared
            dq, exact_dk, exact_dv = reference.gradients(do, q, k, v, scale, key.config.causal, dlse)
            if dk is not None:
                dk.copy_(exact_dk)
            if dv is not None:
                dv.copy_(exact_dv)
            self.prepared = (dq,)
        else:
            arguments[1].copy_(self.prepared[0])


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Lets fa3 take CPU tensors and run the reference in place of kernels."""
    made = StandIn()
    device = CpuDevice()
    monkeypatch.setattr(checks, "check_device", lambda q, k, v: None)
    monkeypatch.setattr(counters, "device", lambda index: device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launch, "kernel", made.kernel)
    monkeypatch.setattr(launch, "_plans", {})
    monkeypatch.setattr(launch_backward, "_plans", {})
    yield made
