"""Device time of each kernel of our backward, by torch.profiler: where the microseconds of a short problem go.

The kernels are chained by programmatic dependent launch. Each is counted from its own start, which comes before the end
of the one before it: the sum is more than the whole.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.problems import Problem
from fa3._providers import Attention
from fa3.config.backward import PARTS

SHORT = 1024
"""Up to this length, launches and prologues are a large part of the whole."""
CALLS = 10


def wanted(problem: Problem) -> bool:
    return problem.mode == "bwd" and problem.seqlen_k <= SHORT


def kernel_times(problem: Problem, attention: Attention) -> dict[str, float]:
    """Kernel -> microseconds of one call, of a backward on the GPU."""
    inputs = [x.requires_grad_() for x in problem.inputs()]
    q, k, v = inputs
    out, do = attention(q, k, v, problem.causal), problem.output_gradient()
    torch.autograd.grad(out, inputs, do, retain_graph=True)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(CALLS):
            torch.autograd.grad(out, inputs, do, retain_graph=True)
        torch.cuda.synchronize()
    return by_part((each.key, each.self_device_time_total / CALLS) for each in profiler.key_averages())


def by_part(events: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Sums (name on the device, microseconds) by the part of the backward; the names hold a kernel's module."""
    times = dict.fromkeys(PARTS, 0.0)
    for name, microseconds in events:
        parts = [part for part in PARTS if f"fa3kernels{part}" in name]
        if parts:
            times[max(parts, key=len)] += microseconds
    return {part: round(x, 2) for part, x in times.items() if x}
