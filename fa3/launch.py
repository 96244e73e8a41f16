"""From a problem to a launch: problem -> row of the table -> compiled kernel -> one call.

`plan` does everything that depends only on what a call looks like (dtypes, shapes, strides, options), checks included,
and keeps the result; a later call that looks the same costs a dictionary lookup. A kernel is looked for in memory, then
on disk (`fa3.cache`), and is compiled otherwise. No key holds a tensor, and a kernel's key holds no length.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import Tensor

from fa3 import backends, cache, checks, counters
from fa3.cache import Kernel
from fa3.checks import Strides
from fa3.config.backward import AnyKey
from fa3.config.table import forward_key
from fa3.config.types import KernelKey
from fa3.errors import LaunchError

if TYPE_CHECKING:
    from fa3.emulator.backend import Emulation

log = logging.getLogger("fa3")

MAX_PLANS = 4096
"""Kept plans; then all are dropped. A decoding loop makes a new one for each length."""


# ------------------------------------------------------------------------------------------------ kernels
_kernels: dict[AnyKey, Kernel] = {}
_compiling = threading.RLock()


def kernel(key: AnyKey) -> Kernel:
    """The compiled kernel: from memory, else from disk, else compiled now."""
    found = _kernels.get(key)
    if found is None:
        with _compiling:
            found = _kernels.get(key)
            if found is None:
                found = _kernels[key] = _from_disk(key) or _compile_and_keep(key)
    return found


def where(key: AnyKey) -> tuple[str, Path | None]:
    """What `kernel` would do now: "loaded", "prebuilt" or "on disk" with the file, or "to be compiled"."""
    if key in _kernels:
        return "loaded", None
    for state, root in (("prebuilt", cache.prebuilt_folder()), ("on disk", cache.folder())):
        if file := cache.find(key, root):
            return state, file
    return "to be compiled", None


def _from_disk(key: AnyKey) -> Kernel | None:
    _, file = where(key)
    if file is None:
        return None
    try:
        return cache.load(file, key)
    except (OSError, RuntimeError, AttributeError) as error:
        log.warning("%s cannot be loaded, compiling instead: %s", file, error)
        return None


def _compile_and_keep(key: AnyKey) -> Kernel:
    root = cache.folder()
    if root is None:
        return _compile(key, "FA3_DISK_CACHE is off", "not stored")
    try:
        with cache.lock(key, root):
            if loaded := _from_disk(key):  # another process was faster
                return loaded
            return cache.load(compile_to_disk(key, root), key)
    except OSError as error:
        return _compile(key, f"the disk cache cannot be used: {error}", "not stored")


def compile_to_disk(key: AnyKey, root: Path) -> Path:
    """Compiles a kernel and stores it under `root`; returns the file."""
    start = time.perf_counter()
    compiled = importlib.import_module("fa3.compile").compile_kernel(key)
    seconds = time.perf_counter() - start
    file = cache.store(compiled, key, root)
    searched = " nor ".join(str(place) for place in (cache.prebuilt_folder(), root) if place is not None)
    _log_compilation(key, f"not found in {searched}", seconds, f"stored as {file}")
    return file


def _compile(key: AnyKey, why: str, stored: str) -> Kernel:
    cache.check_dsl()
    start = time.perf_counter()
    compiled = importlib.import_module("fa3.compile").compile_kernel(key)
    _log_compilation(key, why, time.perf_counter() - start, stored)
    return compiled


def _log_compilation(key: AnyKey, why: str, seconds: float, stored: str) -> None:
    log.info("compiled %s in %.1f s (%s; %s)", key.name, seconds, why, stored)


# ------------------------------------------------------------------------------------------------ plans
class Plan(Protocol):
    """How to serve all calls that look the same."""

    softmax_scale: float
    causal: bool

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(O, LSE), freshly allocated, on the current stream of the tensors' device."""


_plans: dict[tuple[Any, ...], Plan] = {}


def plan(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: Any, causal: Any, window_size: Any = (-1, -1), softcap: Any = 0.0
) -> Plan:
    """The plan for these arguments; on first sight they are checked, and a kernel is compiled if need be."""
    look: tuple[Any, ...] | None
    try:
        look = (
            q.shape, q.stride(), q.dtype, q.get_device(),
            k.shape, k.stride(), k.dtype, k.get_device(),
            v.shape, v.stride(), v.dtype, v.get_device(),
            softmax_scale, causal, window_size, softcap,
        )  # fmt: skip
        return _plans[look]
    except KeyError:
        pass
    except (AttributeError, RuntimeError, TypeError):  # not a dense tensor, or an option that cannot be hashed
        look = None
    emulation = backends.emulation_for(q, k, v)
    made = _make_plan(q, k, v, softmax_scale, causal, window_size, softcap, emulation)
    if look is not None and emulation is None:  # a plan for CPU tensors is good for one call: the next may be outside
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        _plans[look] = made
    return made


def _make_plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    emulation: Emulation | None,
) -> Plan:
    problem = Problem.of(q, k, v, softmax_scale, causal, window_size, softcap)
    strides = [checks.legal_strides(name, t) for name, t in (("q", q), ("k", k), ("v", v))]
    views = None if strides == [None, None, None] else strides
    if emulation is None:
        checks.check_device(q, k, v)
    if problem.is_empty:
        return NoLaunch(problem)
    if emulation is not None:
        return emulation.plan(problem, views)
    return Launch(problem, kernel(problem.key), q.device, views)


@dataclass(frozen=True)
class Problem:
    """What is to be computed, checked."""

    o_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    seqlen_k: int
    head_dim: int
    dtype: torch.dtype
    softmax_scale: float
    causal: bool

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Any, causal: Any, window_size: Any, softcap: Any) -> Problem:
        checks.check_tensors(q, k, v)
        checks.check_softcap(softcap)
        (batch, seqlen_q, heads, head_dim), seqlen_k = q.shape, k.shape[1]
        scale = checks.resolve_scale(softmax_scale, head_dim)
        is_causal = checks.resolve_mask(causal, window_size, seqlen_q, seqlen_k)
        o_shape, lse_shape = (batch, seqlen_q, heads, v.shape[3]), (batch, heads, seqlen_q)
        return Problem(o_shape, lse_shape, seqlen_k, head_dim, q.dtype, scale, is_causal)

    @property
    def is_empty(self) -> bool:
        """No row to compute, or no key to compute it from: TMA cannot describe an empty tensor."""
        return math.prod(self.o_shape) == 0 or self.seqlen_k == 0

    @property
    def key(self) -> KernelKey:
        dtype = checks.DTYPES[self.dtype]
        return forward_key(self.head_dim, self.o_shape[3], self.causal, dtype, negative_scale=self.softmax_scale < 0)


class NoLaunch:
    """Rows without a key: O = 0 and LSE = -inf; or no rows at all."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.softmax_scale, self.causal = problem.softmax_scale, problem.causal

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        o = torch.zeros(self.problem.o_shape, dtype=q.dtype, device=q.device)
        lse = torch.full(self.problem.lse_shape, -math.inf, dtype=torch.float32, device=q.device)
        return o, lse


class Device(Protocol):
    """What a launch asks of its device; `counters.Device` is a GPU."""

    index: int
    sm_count: int
    alone: bool

    def take(self) -> tuple[Tensor, int]:
        """(counters, slot): an int32 counter that is 0 and that no launch at the same time uses."""


Empty = Callable[[Strides, Strides, torch.dtype], Tensor]
"""(shape, strides, dtype) -> an uninitialised tensor on a launch's device, which is current when this is called."""


class Launch:
    """One launch of one kernel. Every call runs `run`, so it is written for speed: about a microsecond beside the
    allocations and the launch itself."""

    __slots__ = (
        "causal", "device", "empty", "gpu", "kernel", "lse_form", "o_form", "problem", "scale_log2",
        "softmax_scale", "views",
    )  # fmt: skip

    def __init__(
        self,
        problem: Problem,
        kernel: Kernel,
        device: torch.device,
        views: list[Strides | None] | None,
        gpu: Device | None = None,
        empty: Empty | None = None,
    ) -> None:
        """`gpu` and `empty` are those of `device`, unless something stands in for it."""
        self.problem = problem
        self.softmax_scale, self.causal = problem.softmax_scale, problem.causal
        self.kernel = kernel
        self.device = device
        self.gpu = gpu or counters.device(device.index)
        self.empty = empty or _allocator(device)
        self.o_form = problem.o_shape, _contiguous(problem.o_shape), problem.dtype
        self.lse_form = problem.lse_shape, _contiguous(problem.lse_shape), torch.float32
        self.scale_log2 = checks.kernel_scale(problem.softmax_scale)
        self.views = views

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        gpu = self.gpu
        if not gpu.alone and gpu.index != torch.cuda.current_device():
            with torch.cuda.device(gpu.index):
                return self.run(q, k, v)
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % checks.TMA_ALIGN:
            checks.check_alignment(q, k, v)
        if self.views is not None:
            q, k, v = (_view(t, strides) for t, strides in zip((q, k, v), self.views, strict=True))
        o = self.empty(*self.o_form)
        lse = self.empty(*self.lse_form)
        zeros, slot = gpu.take()
        try:
            self.kernel(q, k, v, o, lse, zeros, slot, self.scale_log2, gpu.sm_count)
        except Exception as error:
            self._failed(q, k, v, error)
        return o, lse

    def _failed(self, q: Tensor, k: Tensor, v: Tensor, error: Exception) -> NoReturn:
        clear_cuda_error()
        key = self.problem.key
        named = (("q", q), ("k", k), ("v", v))
        tensors = ", ".join(f"{name} {tuple(t.shape)} strides {t.stride()}" for name, t in named)
        raise LaunchError(
            f"fa3: {key.name} could not be launched on {self.device}: {error}\n{key.config}\n{tensors}"
        ) from error


def _allocator(device: torch.device) -> Empty:
    """How to allocate on `device`.

    An allocation is the second largest part of a call, after the launch. TorchInductor's generated code calls a
    function that does it in half the time of torch.empty; it is not public, so that it may be missing.
    """
    short_way = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    if device.type == "cuda" and short_way is not None:
        return short_way
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _contiguous(shape: tuple[int, ...]) -> Strides:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _view(tensor: Tensor, strides: Strides | None) -> Tensor:
    """The same elements under strides that TMA can take (they differ in dimensions of size 1)."""
    return tensor if strides is None else tensor.as_strided(tensor.shape, strides)


def clear_cuda_error() -> None:
    """Takes CUDA's last error away, which a failed launch leaves for the next, innocent kernel to report."""
    for library in _cuda_runtimes():
        ctypes.CDLL(library).cudaGetLastError()


def _cuda_runtimes() -> list[str]:
    """Paths of the CUDA runtimes in this process."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    return sorted(set(re.findall(r"/\S*libcudart\.so\S*", maps)))
