"""How long one call takes on the GPU, and how several calls are compared: private to the demo and the benchmarks.

A figure is the median over rounds of the mean time of one call. The rounds of all the candidates are interleaved, each
in an order of its own (A B C, B A C, ...), so that a drift of the card's clocks reaches every candidate alike. The mean
comes from two CUDA events around a run of calls. The GPU is kept busy for a moment before the first event, while the
host runs ahead: the figure is then the GPU's time, not the time of the Python in front of it
(`benchmarks/host_time.py` measures that).

Long attention runs at the card's power limit, and the limit looks back over some time: measured right after a less
demanding kernel, the same kernel was 5-8 % faster on an H200. So every measurement first runs its own candidate,
untimed, for as long as the timed part, and no candidate always follows the same other one.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[int], object]
"""One call. Its argument counts the calls made so far, for a candidate that rotates among several sets of inputs."""

L2_BYTES = 60 << 20
"""Level two cache of an H200 (60 MiB); an H100's is 50 MiB."""

FEWEST_CALLS, MOST_CALLS = 3, 200
LONGEST_HEAD_START_MS = 25.0


@dataclass(frozen=True)
class Sample:
    """The times of one candidate, one a round: milliseconds of one call."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """(slowest round - fastest round) / median. Differences between candidates below this are noise."""
        return (max(self.rounds) - min(self.rounds)) / self.median


def interleaved(calls: Mapping[str, Call], rounds: int, measure: Callable[[Call], float]) -> dict[str, Sample]:
    """Measure every call once a round, in a shuffled order (the same one each time this is run).

    `measure` returns the milliseconds of one call; on a GPU it is `mean_call_ms`.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, not {rounds}")
    times: dict[str, list[float]] = {name: [] for name in calls}
    shuffle = random.Random(0)
    for _ in range(rounds):
        for name in shuffle.sample(list(calls), len(calls)):
            times[name].append(measure(calls[name]))
    return {name: Sample(tuple(each)) for name, each in times.items()}


def calls_in(target_ms: float, one_call_ms: float) -> int:
    """How many calls fill about `target_ms`; never so many that the launch queue could run full."""
    return max(FEWEST_CALLS, min(MOST_CALLS, int(target_ms / max(one_call_ms, 1e-3))))


def head_start_ms(calls: int, host_ms: float, device_ms: float) -> float:
    """How long the GPU must be kept busy so that `calls` calls never wait for the host.

    The host falls behind by `host_ms - device_ms` a call; half a millisecond on top covers the first of them.
    """
    return min(LONGEST_HEAD_START_MS, 0.5 + calls * max(0.0, host_ms - device_ms))


def mean_call_ms(call: Call, target_ms: float = 40.0) -> float:
    """Mean GPU time of one call, in milliseconds, on the current stream of the current device."""
    for i in range(2):
        call(i)
    torch.cuda.synchronize()
    host_ms, device_ms = _one_call(call)
    count = calls_in(target_ms, device_ms)
    for i in range(count):
        call(i)
    start, end = _event(), _event()
    _keep_busy(head_start_ms(count, host_ms, device_ms))
    start.record()
    for i in range(count):
        call(i)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def input_sets(bytes_of_one: int) -> int:
    """How many sets of inputs to rotate among, so that a call never finds its inputs in the cache: 1 if one set alone
    does not fit, else enough to fill the cache twice, at most 64."""
    if bytes_of_one > L2_BYTES:
        return 1
    return min(64, 2 * L2_BYTES // max(bytes_of_one, 1) + 1)


def rotating(call: Callable[..., object], sets: Sequence[tuple[object, ...]]) -> Call:
    """A `Call` that takes the sets of arguments in turn."""
    return lambda i: call(*sets[i % len(sets)])


def matmul_tflops(size: int = 8192, rounds: int = 3, target_ms: float = 60.0) -> float:
    """What the tensor cores give at this moment: TFLOP/s of a size x size x size bf16 product of random matrices."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    sample = interleaved({"matmul": lambda _: a @ b}, rounds, lambda call: mean_call_ms(call, target_ms))
    return tflops(2 * size**3, sample["matmul"].median)


def tflops(flops: float, milliseconds: float) -> float:
    return flops / milliseconds / 1e9


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _one_call(call: Call) -> tuple[float, float]:
    """(host, device) milliseconds of one call that starts on an idle GPU."""
    start, end = _event(), _event()
    start.record()
    before = time.perf_counter()
    call(0)
    host_ms = (time.perf_counter() - before) * 1e3
    end.record()
    end.synchronize()
    return host_ms, start.elapsed_time(end)


def _keep_busy(milliseconds: float) -> None:
    """Let the GPU spin for about this long (it counts its clock; 1.8 GHz is near what an H200 runs at)."""
    torch.cuda._sleep(int(milliseconds * 1.8e6))
