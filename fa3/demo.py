"""`python -m fa3.demo`: what the package does, on the machine that you have.

With a Hopper GPU: real tensors, the error against float64 beside PyTorch's own, and TFLOP/s beside every attention
library that is installed, forward and backward. Without: real tensors through the compiled kernels on the emulator,
with the checker's verdict and a timeline; then what the compiler made of the kernels.

Exits with 0 only if our numbers are right, and without a GPU, if besides the checker finds nothing and the kernels keep
what they were promised.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fa3._accuracy import Errors, GradientErrors, float64_gradients, float64_slice
from fa3._hardware import why_no_hopper
from fa3._providers import OURS, Provider, find
from fa3._timing import Call, Sample, interleaved, matmul_tflops, mean_call_ms, tflops

if TYPE_CHECKING:
    from fa3.sass import Report

WIDTH = 100


def main(arguments: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m fa3.demo", description=__doc__.splitlines()[0] if __doc__ else None)
    p.add_argument("--inspect", action="store_true", help="emulate and inspect, even if there is a Hopper GPU")
    p.add_argument("--out", type=Path, default=Path("build"), help="folder for the timeline (default: build)")
    args = p.parse_args(arguments)
    reason = why_no_hopper()
    if reason is None and not args.inspect:
        return run_on_gpu()
    say(
        "fa3 demo. "
        + (f"Running the kernels {reason}. " if reason else "")
        + "They are compiled for sm_90a instead, run on an emulator of the GPU, and their machine code is read."
    )
    emulated = emulate_without_gpu(args.out)
    inspected = inspect_without_gpu()
    return emulated or inspected


def say(text: str) -> None:
    print(textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False), end="\n\n", flush=True)


# ---- without a GPU: emulate, compile and inspect


def emulate_without_gpu(folder: Path) -> int:
    """0 if the emulated kernel is right and the checker finds nothing."""
    try:
        from fa3.emulator.demo import show

        folder.mkdir(parents=True, exist_ok=True)
        return 0 if show(folder, say) else 1
    except (ImportError, OSError, RuntimeError) as error:
        say(f"The emulator cannot run: {error}")
        return 1


INSPECTED = ((64, False), (128, True))
"""(head_dim, causal) of the kernels that the demo compiles; a few seconds each."""


def inspect_without_gpu() -> int:
    try:
        from fa3.config.table import forward_key
        from fa3.sass import ToolError, inspect
    except ImportError as error:
        say(f"The inspection cannot start: {error}")
        return 1
    reports = []
    for head_dim, causal in INSPECTED:
        began = time.perf_counter()
        try:
            reports.append(inspect(forward_key(head_dim, head_dim, causal, "bf16")))
        except ToolError as error:
            say(f"The kernel cannot be disassembled: {error}")
            return 1
        mask = "causal" if causal else "no mask"
        print(f"bf16, head dim {head_dim}, {mask}: compiled in {time.perf_counter() - began:.1f} s")
    print()
    print_figures(reports)
    broken = [f"{report.name}: {what}" for report in reports for what in broken_promises(report)]
    for line in broken:
        say(line)
    for what, command in (("inspection", "fa3.sass forward"), ("checking and timelines", "fa3.emulator check forward")):
        print(f"More {what}: {interpreter()} -m {command} --head-dim 128 --causal")
    say("On a Hopper GPU this demo runs the kernels, and times them.")
    return 1 if broken else 0


def interpreter() -> str:
    """How to call this Python from the current folder, such as .venv/bin/python."""
    path, here = Path(sys.executable), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


@dataclass(frozen=True)
class Figure:
    """One line of the inspection and the paragraph that says how to read it."""

    name: str
    value: Callable[[Report], str]
    meaning: str


FIGURES = (
    Figure(
        "registers at entry",
        lambda r: str(r.registers),
        "What every thread gets at launch. An SM has 65536 registers, so the threads of a CTA bound the number.",
    ),
    Figure(
        "setmaxnreg",
        lambda r: " / ".join(str(x) for kind in ("dec", "inc") for x in r.setmaxnreg.get(kind, ())) or "none",
        "Right after launch the load warps hand registers back (the smaller number) and the math warpgroups take them "
        "(the larger): they hold O, S and P of their 64 rows in registers all the time.",
    ),
    Figure(
        "spilled bytes",
        lambda r: str(r.spill_bytes),
        "Registers that the compiler had to keep in memory. In the main loop a single one costs more than any trick in "
        "this kernel gains; it must be 0.",
    ),
    Figure(
        "shared memory",
        lambda r: f"{r.smem_bytes} B",
        "Q, and a ring of K and V tiles that TMA fills while the math warpgroups read. A CTA can have 232448 bytes.",
    ),
    Figure(
        "WGMMA",
        lambda r: ", ".join(f"{form} x{count}" for form, count in r.mma.items()),
        "Matrix instructions in the machine code. SS reads both operands from shared memory (S = Q K^T); RS takes its "
        "left operand from registers (O = P V), so that P never leaves them.",
    ),
    Figure(
        "exponentials in flight",
        lambda r: f"{r.ex2_in_flight} of {r.ex2_total}",
        "Exponentials that are issued while a matrix product of the same warpgroup has not been waited for. Softmax is "
        "slow beside the tensor cores; the paper's second algorithm runs the softmax of one block under O += P V of "
        "the block before. ptxas moves the wait for that product up between the exponentials, and so leaves a third to "
        "a half of the main loop's under it. The others run under the products of the neighbouring warpgroups, which "
        "this count of one warpgroup does not see. Holding the wait back was measured 2 to 4 % slower on an H200 "
        "(docs/algorithms.md).",
    ),
    Figure(
        "ptxas warnings",
        lambda r: str(len(r.warnings)),
        "The assembler warns when it waits for each matrix instruction in turn (C75xx); then nothing overlaps.",
    ),
)


def print_figures(reports: Sequence[Report]) -> None:
    """The kernels' figures side by side, then a paragraph about each figure."""
    for report in reports:
        print(report.name)
        for figure in FIGURES:
            print(f"    {figure.name:<24}{figure.value(report)}")
        print()
    for figure in FIGURES:
        body = f"{figure.name}: {figure.meaning}"
        print(textwrap.fill(body, WIDTH, subsequent_indent="    "))
    print()


def broken_promises(report: Report) -> list[str]:
    """What every kernel of the table must keep, and this one does not."""
    broken = []
    if report.spill_bytes:
        broken.append(f"{report.spill_bytes} bytes are spilled")
    if not all(report.setmaxnreg.get(kind) for kind in ("dec", "inc")):
        broken.append("ptxas ignored a setmaxnreg")
    if report.warnings:
        broken.append("; ".join(str(warning) for warning in report.warnings))
    return broken


# ---- on a Hopper GPU: numbers and speed


@dataclass(frozen=True)
class Shape:
    head_dim: int
    causal: bool
    batch: int = 4
    seqlen: int = 4096
    hidden: int = 2048
    backward: bool = False
    """Whether the gradients are computed and timed, instead of the output."""

    @property
    def flops(self) -> float:
        full = (10.0 if self.backward else 4.0) * self.batch * self.hidden * self.seqlen**2
        return full / 2 if self.causal else full

    def inputs(self, device: str = "cuda") -> list[torch.Tensor]:
        shape = (self.batch, self.seqlen, self.hidden // self.head_dim, self.head_dim)
        generator = torch.Generator(device=device).manual_seed(0)
        return [torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(3)]

    def __str__(self) -> str:
        heads = self.hidden // self.head_dim
        mask = "causal" if self.causal else "no mask"
        what = "backward, " if self.backward else ""
        return f"{what}bf16, batch {self.batch}, {heads} heads, {self.seqlen} tokens, head dim {self.head_dim}, {mask}"


SHAPES = (Shape(64, True), Shape(128, False), Shape(128, True), Shape(128, True, backward=True))


def run_on_gpu() -> int:
    providers, missing = find()
    say(f"fa3 demo on {torch.cuda.get_device_name()}, torch {torch.__version__}.")
    for name, reason in missing.items():
        print(f"{name} is not installed or does not import: {reason}")
    matmul = matmul_tflops(rounds=3, target_ms=30)
    say(f"A bf16 matrix product of 8192 x 8192 x 8192 runs at {matmul:.0f} TFLOP/s now; attention is measured by it.")
    right = [compare(shape, providers, matmul) for shape in SHAPES]
    say(
        "error: |O - O64| / |O64| against float64, on one batch and two heads; of the backward the largest of those of "
        "dQ, dK and dV. LSE: its largest absolute error. All must be as small as PyTorch's: rounding P and O to bf16 "
        "alone costs about 2.2e-3. TFLOP/s: the median of interleaved rounds, everyone in this process on the same "
        "tensors."
    )
    return 0 if all(right) else 1


def compare(
    shape: Shape,
    providers: Sequence[Provider],
    matmul: float,
    device: str = "cuda",
    sampler: Callable[[dict[str, Call]], dict[str, Sample]] = lambda calls: interleaved(
        calls, 3, lambda call: mean_call_ms(call, 20)
    ),
) -> bool:
    """Print one table: every provider's error and speed. True if our own numbers are right."""
    check = _backward(shape, device) if shape.backward else _forward(shape, device)
    errors: dict[str, Errors | GradientErrors] = {}
    verdicts: dict[str, str] = {}
    calls: dict[str, Call] = {}
    for provider in providers:
        try:
            errors[provider.name], call = check(provider)
            refusal = errors[provider.name].refusal(torch.bfloat16)
        except Exception as error:  # a foreign library may fail in any way; ours is then reported as wrong
            refusal = f"{type(error).__name__}: {error}".splitlines()[0]
        if refusal is not None:
            verdicts[provider.name] = refusal
        else:
            calls[provider.name] = call
    speeds = {name: tflops(shape.flops, sample.median) for name, sample in sampler(calls).items()}
    print(table(shape, providers, errors, speeds, verdicts, matmul), end="\n\n", flush=True)
    return OURS in calls


def table(
    shape: Shape,
    providers: Sequence[Provider],
    errors: dict[str, Errors | GradientErrors],
    speeds: dict[str, float],
    verdicts: dict[str, str],
    matmul: float,
) -> str:
    lines = [str(shape), f"    {'':<30}{'error':>9}{'LSE':>10}{'TFLOP/s':>10}{'of matmul':>11}{'fa3 is':>9}"]
    for provider in providers:
        name = provider.name
        found = errors.get(name)
        error = f"{found.relative:.1e}" if found else "-"
        lse = f"{found.lse:.0e}" if found and found.lse is not None else "-"
        line = f"    {provider.title:<30}{error:>9}{lse:>10}"
        if name in speeds:
            times = f"{speeds[OURS] / speeds[name]:.2f}x" if OURS in speeds and name != OURS else ""
            line += f"{speeds[name]:>10.0f}{100 * speeds[name] / matmul:>10.0f}%{times:>9}"
        else:
            line += f"    not timed: {verdicts[name]}"
        lines.append(line)
    return "\n".join(lines)


Check = Callable[[Provider], "tuple[Errors | GradientErrors, Call]"]
"""Runs a provider once: its errors, and the call to be timed."""


def _forward(shape: Shape, device: str) -> Check:
    q, k, v = shape.inputs(device)
    reference = float64_slice(q, k, v, shape.causal)

    def check(provider: Provider) -> tuple[Errors, Call]:
        result = provider.forward_lse(q, k, v, shape.causal) if provider.forward_lse else None
        errors = reference.errors(*(result or (provider.forward(q, k, v, shape.causal),)))
        return errors, lambda _: provider.forward(q, k, v, shape.causal)

    return check


def _backward(shape: Shape, device: str) -> Check:
    inputs = [x.requires_grad_() for x in shape.inputs(device)]
    q, k, v = inputs
    do = torch.randn_like(q, requires_grad=False)
    reference = float64_gradients(q, k, v, do, shape.causal)

    def check(provider: Provider) -> tuple[GradientErrors, Call]:
        if not provider.differentiable:
            raise NotImplementedError("forward only")
        out = provider.forward(q, k, v, shape.causal)

        def call(_: int) -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(out, inputs, do, retain_graph=True)

        dq, dk, dv = call(0)
        return reference.errors(dq, dk, dv), call

    return check


if __name__ == "__main__":
    sys.exit(main())
