"""What a call costs before the GPU does anything: `python -m benchmarks.host_time [--out FILE.json]`. Needs a GPU.

Host time of one eager call on a tiny problem, without waiting for the GPU: without a gradient, with recording one, and
with the backward pass; beside every library that imports. And the first call of a fresh process whose kernels are
already on disk, forward and backward.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

if __name__ == "__main__" and not __package__:  # started as a file: the repository's root is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import environment, peers
from benchmarks.problems import Problem
from fa3._providers import OURS, Provider
from fa3._timing import Sample, interleaved

TINY = Problem("fwd", "bf16", 64, 64, False, 64, 64, 1, 1, 1)
KINDS = ("no_grad", "grad", "forward_backward")
"""What is timed: a call, one that records a graph, and one with the gradients of q, k and v."""
CALLS = 100
"""Calls between two waits for the GPU: far fewer than the launch queue holds, so that no call ever waits in it."""

FIRST_CALL = """
import time
began = time.perf_counter()
import torch
q = torch.randn(1, 64, 1, 64, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
ready = time.perf_counter()
import fa3
fa3.flash_attn_func(q, q, q)
torch.cuda.synchronize()
first = time.perf_counter()
fa3.flash_attn_func(q, q, q)
torch.cuda.synchronize()
second = time.perf_counter()
q.requires_grad_()
fa3.flash_attn_func(q, q, q).backward(q.detach())
torch.cuda.synchronize()
print(ready - began, first - ready, second - first, time.perf_counter() - second)
"""
FIRST_CALL_NAMES = ("torch_and_cuda", "first_call", "second_call", "first_forward_backward")


def main(arguments: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="benchmarks.host_time", description=__doc__.splitlines()[0] if __doc__ else None)
    p.add_argument("--only", type=lambda text: text.split(","), metavar="A,B", help="providers; default: all")
    p.add_argument(
        "--rounds", type=int, default=10, help=f"interleaved rounds of {CALLS} calls, the median counts (10)"
    )
    p.add_argument("--out", type=Path, metavar="FILE.json")
    args = p.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.host_time needs a CUDA GPU, and torch sees none here", file=sys.stderr)
        return 2
    providers = peers.select(args.only)
    failures: dict[str, str] = {}
    result: dict[str, object] = {
        "env": environment.describe({p.name: p.version for p in providers}),
        "problem": str(TINY),
        **{f"{kind}_us": host_times(providers, args.rounds, kind=kind, failures=failures) for kind in KINDS},
        "failures": failures,
    }
    if args.only is None or OURS in args.only:
        result["first_call_s"] = first_call(failures)
    print(json.dumps({name: each for name, each in result.items() if name != "env"}, indent=1))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any(name.startswith(OURS) for name in failures) else 0


def host_times(
    providers: Sequence[Provider],
    rounds: int,
    *,
    kind: str,
    failures: dict[str, str],
    device: str = "cuda",
    wait: Callable[[], None] = torch.cuda.synchronize,
) -> dict[str, float]:
    """Provider -> microseconds of host time of one call of a kind of `KINDS`. Why a provider has none is added to
    `failures`."""
    grad = kind != "no_grad"
    inputs = [x.requires_grad_(grad) for x in TINY.inputs(device=device)]
    calls = {}
    with torch.set_grad_enabled(grad):
        for provider in providers:
            call = _both_passes(provider, inputs) if kind == "forward_backward" else _call(provider, inputs)
            try:
                for i in range(3):
                    call(i)
            except Exception as error:  # a foreign library may refuse or fail in any way
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                failures[f"{provider.name} {kind}"] = reason
            else:
                calls[provider.name] = call
        samples: dict[str, Sample] = interleaved(calls, rounds, lambda call: host_us(call, wait))
    return {name: round(sample.median, 2) for name, sample in samples.items()}


def host_us(call: Callable[[int], object], wait: Callable[[], None]) -> float:
    """Mean host time of one call, in microseconds, that starts with an empty launch queue."""
    wait()
    before = time.perf_counter()
    for i in range(CALLS):
        call(i)
    taken = time.perf_counter() - before
    wait()
    return taken / CALLS * 1e6


def first_call(failures: dict[str, str]) -> dict[str, float] | None:
    """Seconds of the first call of a fresh process, `import fa3` included, once the kernel is on disk.

    The first process may still have to compile and is not counted.
    """
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(environment.ROOT), os.environ.get("PYTHONPATH", "")]))
    seconds: list[float] = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", FIRST_CALL], env=env, capture_output=True, text=True, timeout=300)
        if done.returncode:
            failures[f"{OURS} first_call"] = (done.stderr.strip().splitlines() or ["no message"])[-1][:200]
            return None
        seconds = [round(float(x), 4) for x in done.stdout.split()[-len(FIRST_CALL_NAMES) :]]
    return dict(zip(FIRST_CALL_NAMES, seconds, strict=True))


def _call(provider: Provider, inputs: Sequence[torch.Tensor]) -> Callable[[int], object]:
    q, k, v = inputs
    return lambda _: provider.forward(q, k, v, TINY.causal)


def _both_passes(provider: Provider, inputs: Sequence[torch.Tensor]) -> Callable[[int], object]:
    """A call and its gradients, handed back rather than added up anywhere."""
    q, k, v = inputs
    do = torch.randn_like(v)  # O is as large as V here
    return lambda _: torch.autograd.grad(provider.forward(q, k, v, TINY.causal), inputs, do)


if __name__ == "__main__":
    sys.exit(main())
