"""The emulator in the place of a GPU: `fa3.emulate()` and what the calls inside it run on.

A call on CPU tensors takes the same way as one on a GPU, through `fa3.launch`: the same checks, the same row of the
table, the same host code. Only the end differs: the launch is executed by `fa3.emulator.machine`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from fa3 import backends, launch, launch_backward
from fa3.checks import Strides
from fa3.config.backward import ALL, AnyKey, BackwardConfig, BackwardKey, Wanted
from fa3.config.types import ForwardConfig, KernelKey
from fa3.emulator.artefacts import host_code
from fa3.emulator.faults import Fault
from fa3.emulator.host import HostCode, Launch
from fa3.emulator.observe import Observer
from fa3.emulator.policy import make_policy
from fa3.emulator.program import Program
from fa3.errors import LaunchError

if TYPE_CHECKING:
    from fa3.emulator.blocks import Code
    from fa3.emulator.check import Finding
    from fa3.emulator.machine import Machine


@dataclass(frozen=True)
class Signature:
    """What `fa3.launch` and `fa3.launch_backward` pass to a kernel, in order, and which of it the kernel writes."""

    arguments: tuple[str, ...]
    written: tuple[str, ...]
    sums: tuple[str, ...] = ()
    """Those that it only adds to: they start as 0."""

    @classmethod
    def of(cls, key: AnyKey) -> Signature:
        return SIGNATURES[getattr(key, "part", "forward")]


SIGNATURES = {
    "forward": Signature(
        ("q", "k", "v", "o", "lse", "counters", "slot", "scale_log2", "sm_count"), ("o", "lse", "counters")
    ),
    "backward_prepare": Signature(
        ("o", "do", "lse", "dlse", "lse_log2", "delta", "dq_accum", "turns"), ("lse_log2", "delta", "dq_accum", "turns")
    ),
    "backward": Signature(
        ("q", "k", "v", "do", "lse_log2", "delta", "dq_accum", "turns", "dk", "dv", "scale_log2", "scale"),
        ("dq_accum", "turns", "dk", "dv"),
        ("dq_accum",),
    ),
    "backward_finish": Signature(("dq_accum", "dq", "scale", "lone", "lone_end"), ("dq",)),
}


@dataclass
class KernelRun:
    """One launch on the emulated GPU."""

    key: AnyKey
    host: HostCode
    launch: Launch
    sms: int
    result: Machine | None = None
    """The machine as it ended; None if the launch was not executed, or ended with a Fault."""
    starts: dict[str, Tensor] = field(default_factory=dict)
    """What tensors that it writes hold when a replay begins, where that is not as usual."""
    findings: list[Finding] = field(default_factory=list)
    """What the checkers found, also in a run that ended with a Fault. Empty without `check`."""

    @property
    def kernel(self) -> str:
        """The name of its key."""
        return self.key.name

    @property
    def program(self) -> Program:
        return self.host.program

    def replay(
        self,
        program: Program | Code | None = None,
        *,
        policy: str = "random",
        seed: int = 0,
        observers: Sequence[Observer] = (),
    ) -> Machine:
        """Executes the launch, again or for the first time, on its own tensors (`launch.tensors`), which it clears
        before. `program` takes the place of the kernel's."""
        self.clear()
        return self._execute(program or self.host.code, policy, seed, observers)

    def clear(self) -> None:
        """Outputs become NaN, counters and sums 0, except for those in `starts`."""
        for allocation in self.launch.allocations:
            if allocation.name in self.starts:
                self.launch.tensors[allocation.name].copy_(self.starts[allocation.name])
            elif allocation.name in Signature.of(self.key).sums:
                self.launch.tensors[allocation.name].zero_()
            elif allocation.writable:
                _poison(self.launch.tensors[allocation.name])

    def _execute(self, program: Program | Code, policy: str, seed: int, observers: Sequence[Observer] = ()) -> Machine:
        from fa3.emulator import machine  # much to import, and not needed to make a plan

        return machine.run(
            program, self.launch, policy=policy, seed=seed, observers=tuple(observers), resident=self.sms
        )


class Emulation:
    """An emulated GPU: how it behaves, and what has run on it."""

    def __init__(
        self, *, policy: str = "random", seed: int = 0, sms: int = 2, check: bool = False, keep: bool = True
    ) -> None:
        """`keep`: whether to record the runs. See `emulate` for the others."""
        if not isinstance(sms, int) or isinstance(sms, bool) or sms < 1:
            raise ValueError(f"fa3: sms is {sms!r}; the number of SMs of the emulated GPU is wanted, 1 or more")
        make_policy(policy, seed)  # ValueError for an unknown one
        self.policy, self.seed, self.sms, self.check, self.keep = policy, seed, sms, check, keep
        self.runs: list[KernelRun] = []

    @property
    def findings(self) -> list[Finding]:
        """What the checker found in all runs, in order. Empty without `check`."""
        return [finding for run in self.runs for finding in run.findings]

    def plan(self, problem: launch.Problem, views: list[Strides | None] | None) -> launch.Plan:
        """The plan of one call on CPU tensors; its kernel is compiled if need be."""
        kernel = _Kernel(self.key(problem), self)
        return _EmulatedLaunch(problem, kernel, torch.device("cpu"), views, _Gpu(self.sms), _poisoned)

    def backward_plan(
        self, problem: launch_backward.Problem, views: list[Strides | None]
    ) -> launch_backward.BackwardPlan:
        """The plan of the backward of one call on CPU tensors."""
        kernels = tuple(_Kernel(key, self) for key in problem.keys)
        gpu = _Gpu(self.sms)
        return _EmulatedBackward(problem, kernels, torch.device("cpu"), views, gpu, _poisoned)

    def key(self, problem: launch.Problem) -> KernelKey:
        """Which kernel serves the problem."""
        return problem.key

    def execute(self, run: KernelRun) -> None:
        """Runs a launch, and records it with what was found, also if it ends with a Fault."""
        if self.keep:
            self.runs.append(run)
        if not self.check:
            run.result = run._execute(run.host.code, self.policy, self.seed)
            return
        from fa3.emulator.check import checkers, describe  # like the machine, only where they are wanted
        from fa3.emulator.check.fences import find_unfenced

        names = describe(run.key)
        watching = checkers(names)
        try:
            run.result = run._execute(run.host.code, self.policy, self.seed, watching)
        except Fault as fault:
            for checker in watching:
                checker.stopped(fault)
            raise
        finally:
            run.findings += find_unfenced(run.program, names)
            run.findings += [finding for checker in watching for finding in checker.findings]


@contextlib.contextmanager
def emulate(*, policy: str = "random", seed: int = 0, sms: int = 2, check: bool = False) -> Iterator[Emulation]:
    """Inside, fa3's functions take CPU tensors and run the compiled kernels on an emulated Hopper GPU.

    Every instruction of the PTX is executed in Python: two heads of 256 tokens take about a tenth of a second, and the
    first call for a kernel a few seconds more to compile it. CUDA tensors go to the GPU as ever. Outputs start as NaN,
    so that what a kernel fails to write shows.

    Args:
        policy: who goes first when several could: "early" (asynchronous operations take effect at once), "late" (as
            late as they may), "random", or "starve:<first warp>-<last warp>".
        seed: of "random". The same seed gives the same order again.
        sms: how many SMs the GPU has, which bounds the number of persistent CTAs.
        check: look for races and missing synchronisation as well; see `Emulation.findings`.

    Yields:
        An `Emulation`: `runs` has a `KernelRun` for each launch, `findings` what the checker found in them. It keeps
        the tensors of the calls alive.

    Raises:
        fa3.emulator.faults.Fault: from the call, where the kernel does what a GPU would trap or hang on.
        fa3.errors.LaunchError: from the call, where a GPU would refuse the launch.
    """
    emulation = Emulation(policy=policy, seed=seed, sms=sms, check=check)
    token = backends.active.set(emulation)
    try:
        yield emulation
    finally:
        backends.active.reset(token)


def record(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    config: ForwardConfig | None = None,
    sms: int = 2,
) -> KernelRun:
    """The launch that `fa3.flash_attn_func` would make for these CPU tensors, not executed: for `KernelRun.replay`.

    `config` takes the place of the table's row. Its mask must be `causal`, and its head dimensions wide enough.
    """
    recorder = _Recorder(config, sms)
    token = backends.active.set(recorder)
    try:
        launch.plan(q, k, v, softmax_scale, causal).run(q, k, v)
    finally:
        backends.active.reset(token)
    (run,) = recorder.runs
    return run


class _Recorder(Emulation):
    """Executes nothing."""

    def __init__(self, config: ForwardConfig | None, sms: int) -> None:
        super().__init__(sms=sms)
        self.config = config

    def key(self, problem: launch.Problem) -> KernelKey:
        key = super().key(problem)
        return replace(key, config=self.config) if self.config else key

    def execute(self, run: KernelRun) -> None:
        self.runs.append(run)


def record_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    wanted: Wanted = ALL,
    *,
    config: BackwardConfig | None = None,
    sms: int = 2,
) -> dict[str, KernelRun]:
    """The launches that the backward of these CPU tensors would make, by part, not executed. What one of them writes
    for the next is not there: who replays one fills its `launch.tensors`.

    `config` is as in `record`.
    """
    recorder = _BackwardRecorder(config, sms)
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    token = backends.active.set(recorder)
    try:
        made = launch_backward.plan(do, q, k, v, o, lse, dlse, scale, causal, deterministic, wanted)
        made.run(do, q, k, v, o, lse, dlse)
    finally:
        backends.active.reset(token)
    return {run.key.part: run for run in recorder.runs if isinstance(run.key, BackwardKey)}


class _BackwardRecorder(Emulation):
    """Executes nothing."""

    def __init__(self, config: BackwardConfig | None, sms: int) -> None:
        super().__init__(sms=sms)
        self.config = config

    def backward_plan(
        self, problem: launch_backward.Problem, views: list[Strides | None]
    ) -> launch_backward.BackwardPlan:
        return super().backward_plan(_OfRow.of(problem, self.config) if self.config else problem, views)

    def execute(self, run: KernelRun) -> None:
        self.runs.append(run)


@dataclass(frozen=True, kw_only=True)
class _OfRow(launch_backward.Problem):
    """A problem for a row that its dimensions do not choose."""

    row: BackwardConfig | None = None

    @classmethod
    def of(cls, problem: launch_backward.Problem, row: BackwardConfig) -> _OfRow:
        return cls(**{item.name: getattr(problem, item.name) for item in fields(problem)}, row=row)

    @property
    def config(self) -> BackwardConfig:
        return self.row or super().config


@cache
def of_environment() -> Emulation:
    """The emulation under FA3_BACKEND=emulator. It records nothing, as nobody could look at it."""
    return Emulation(keep=False)


# ------------------------------------------------------------------------------------------------ one call
class _Kernel:
    """What `fa3.launch.Launch` calls in place of a compiled kernel."""

    def __init__(self, key: AnyKey, emulation: Emulation) -> None:
        self.key, self.emulation = key, emulation
        self.host = host_code(key)

    def __call__(self, *arguments: Any) -> None:
        signature = Signature.of(self.key)
        named = dict(zip(signature.arguments, arguments, strict=True))
        for captured in self.host.capture(named, signature.written):
            self.emulation.execute(KernelRun(self.key, self.host, captured, self.emulation.sms))
        if "counters" in named and named["counters"].any():
            raise Fault("counter", f"{self.key.name} left its tile counter at {named['counters'].tolist()}, not at 0")


class _EmulatedLaunch(launch.Launch):
    """A launch whose faults reach the caller as they are."""

    __slots__ = ()

    def _failed(self, q: Tensor, k: Tensor, v: Tensor, error: Exception) -> NoReturn:
        if isinstance(error, LaunchError):
            super()._failed(q, k, v, error)
        raise error


class _EmulatedBackward(launch_backward.BackwardLaunch):
    """Likewise, of a backward."""

    def _failed(self, error: Exception) -> NoReturn:
        raise error


class _Gpu:
    """A `fa3.launch.Device`. Every launch has a counter of its own, so that one which fails leaves none behind."""

    index, alone = -1, True

    def __init__(self, sms: int) -> None:
        self.sm_count = sms

    def take(self) -> tuple[Tensor, int]:
        return torch.zeros(1, dtype=torch.int32), 0


def _poisoned(shape: Strides, strides: Strides, dtype: torch.dtype) -> Tensor:
    fresh = torch.empty_strided(shape, strides, dtype=dtype)
    return _poison(fresh) if dtype.is_floating_point else fresh.fill_(GARBAGE)


GARBAGE = 0x55555555


def _poison(tensor: Tensor) -> Tensor:
    """What memory holds that a kernel is to write: NaN, and 0 in a counter."""
    return tensor.fill_(math.nan if tensor.is_floating_point() else 0)
