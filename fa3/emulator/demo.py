"""What `make demo` shows on a machine without a GPU: real tensors through the compiled kernel, on the emulator."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

import fa3
from fa3._accuracy import float64_gradients, float64_slice
from fa3.config.table import forward_key
from fa3.config.types import KernelKey
from fa3.emulator import check

HEAD_DIM, SEQLEN, HEADS = 64, 256, 2
SEEDS = range(4)
PICTURE, TRACE = "fa3-timeline.png", "fa3-timeline.json"

Say = Callable[[str], None]


def show(folder: Path, say: Say) -> bool:
    """Runs, checks and draws one causal problem; files go to `folder`. Whether numbers and verdict are good."""
    key = forward_key(HEAD_DIM, HEAD_DIM, True, "bf16")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, SEQLEN, HEADS, HEAD_DIM, generator=generator).bfloat16() for _ in range(3))
    right = _run(q, k, v, say)
    clean = _check(key, q, k, v, say)
    gradients = _run_backward(q[:, :, :1], k[:, :, :1], v[:, :, :1], say)
    _draw(key, folder, say)
    return right and clean and gradients


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, say: Say) -> bool:
    with fa3.emulate() as emulation:
        began = time.perf_counter()
        fa3.flash_attn_func(q, k, v, causal=True)
        first = time.perf_counter() - began
        began = time.perf_counter()
        o, lse = fa3.flash_attn_func(q, k, v, causal=True, return_lse=True)
        seconds = time.perf_counter() - began
    machine = emulation.runs[-1].result
    assert machine is not None
    errors = float64_slice(q, k, v, causal=True).errors(o, lse)
    lse_error = f"{errors.lse:.0e}" if errors.lse is not None else "-"
    say(
        f"The emulator executes the PTX that was compiled for sm_90a, through the kernel's own host code: bf16, "
        f"{HEADS} heads, {SEQLEN} tokens, head dim {HEAD_DIM}, causal: {machine.executed} warp instructions in "
        f"{seconds:.2f} s (the first call, with loading or compiling, {first:.1f} s). Error against float64 "
        f"{errors.relative:.1e}, of which rounding P and O to bf16 alone makes about 2.2e-3; LSE {lse_error}."
    )
    refusal = errors.refusal(q.dtype)
    if refusal is not None:
        say(f"That is wrong: {refusal}")
    return refusal is None


def _check(key: KernelKey, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, say: Say) -> bool:
    from fa3.emulator.backend import record

    run = record(q, k, v, causal=True)
    report = check.check(run.host.code, run.launch, check.describe(key), seeds=SEEDS, resident=run.sms)
    say(
        f"The checker looks for races, deadlocks, missing waits and fences, and wrong counts, under several schedules: "
        f"{report}."
    )
    return not report


def _run_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, say: Say) -> bool:
    """Forward and backward of one head through autograd, under the checker."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    do = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q.dtype)
    with fa3.emulate(check=True) as emulation:
        dq, dk, dv = torch.autograd.grad(fa3.flash_attn_func(q, k, v, causal=True), (q, k, v), do)
    errors = float64_gradients(q, k, v, do, causal=True).errors(dq, dk, dv)
    instructions = [run.result.executed for run in emulation.runs[1:] if run.result is not None]
    findings = "; ".join(map(str, emulation.findings)) or "none"
    say(
        f"The backward of one head, through autograd: {len(instructions)} kernels ({sum(instructions)} warp "
        f"instructions) clear and prepare, add up the gradients, and convert dQ. Error against float64: dQ "
        f"{errors.dq:.1e}, dK {errors.dk:.1e}, dV {errors.dv:.1e}. The checker's findings: {findings}."
    )
    refusal = errors.refusal(q.dtype)
    if refusal is not None:
        say(f"That is wrong: {refusal}")
    return refusal is None and not emulation.findings


def _draw(key: KernelKey, folder: Path, say: Say) -> None:
    from fa3.emulator.timing import draw, predict, replay, trace

    timeline = replay(predict.emulate_tiles(key, blocks=8, tiles=1))
    trace.write_chrome_trace(folder / TRACE, [timeline])
    try:
        draw.save(timeline, folder / PICTURE)
        picture = f"as a picture in {folder / PICTURE}, and "
    except ImportError as error:
        picture = f"({error}) "
    say(
        f"When would an SM do what? One tile of {key.config.tile_m} queries and 8 blocks of keys by the cost model, "
        f"{picture}as a trace for chrome://tracing or https://ui.perfetto.dev in {folder / TRACE}."
    )
