"""One case of the backward from its inputs to the verdict. Every test of gradients goes through here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import fa3
from tests.gpu.gradient_cases import GradientCase
from tests.gpu.gradient_oracle import NAMES, Expected, complaint_about_gradients, expect_gradients
from tests.gpu.guard import GuardedOutputs

Gradients = tuple[Tensor | None, ...]
"""dQ, dK, dV; None where it was not asked for."""
Attention = Callable[..., tuple[Tensor, Tensor]]


def differentiable(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: bool = False, deterministic: bool = False
) -> tuple[Tensor, Tensor]:
    """(O, LSE) of the public function."""
    return fa3.flash_attn_func(
        q, k, v, softmax_scale=scale, causal=causal, deterministic=deterministic, return_lse=True
    )


def leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same memory as tensors that want a gradient."""
    return tuple(x.detach().requires_grad_() for x in tensors)


def gradients(
    inputs: tuple[Tensor, Tensor, Tensor],
    do: Tensor | None,
    dlse: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    attention: Attention = differentiable,
    wanted: str = "qkv",
) -> Gradients:
    """(dQ, dK, dV) by autograd, for the gradients of O and LSE that are given."""
    tensors = [x.detach().requires_grad_(name in wanted) for name, x in zip("qkv", inputs, strict=True)]
    outputs = attention(*tensors, scale, causal, deterministic)
    pairs = [(x, dx) for x, dx in zip(outputs, (do, dlse), strict=True) if dx is not None]
    asked = [x for x in tensors if x.requires_grad]
    found = iter(torch.autograd.grad([x for x, _ in pairs], asked, [dx for _, dx in pairs]))
    return tuple(next(found) if x.requires_grad else None for x in tensors)


@dataclass(frozen=True)
class Examined:
    """What came of one case."""

    complaint: str | None
    """What is wrong, in words; None if nothing is."""
    got: Gradients
    expected: Expected


def examine(problem: GradientCase, device: torch.device | str, attention: Attention = differentiable) -> Examined:
    """Runs a case. Outputs and scratch tensors are poisoned and fenced, the inputs are compared with what they were,
    and dQ, dK, dV with float64."""
    case = problem.case
    q, k, v, do, dlse = given = problem.inputs(device)
    before = [None if x is None else x.clone() for x in given]
    with GuardedOutputs(device) as guard:
        got = gradients((q, k, v), do, dlse, case.scale, case.causal, problem.deterministic, attention, problem.wanted)
    expected = expect_gradients(q, k, v, do, dlse, case.scale, case.causal)
    there = [x for x in got if x is not None]
    launched = there if case.seqlen_k and case.seqlen_q else ()  # otherwise nothing is launched, and they are zeros
    complaint = (
        _about_form(got, (q, k, v))
        or _about_inputs(given, before)
        or guard.complaint(*launched)
        or complaint_about_gradients(expected, got)
    )
    return Examined(complaint, got, expected)


def _about_form(got: Gradients, inputs: tuple[Tensor, ...]) -> str | None:
    for name, gradient, x in zip(NAMES, got, inputs, strict=True):
        if gradient is not None and (gradient.dtype != x.dtype or gradient.device != x.device):
            return f"{name} is {gradient.dtype} on {gradient.device}, expected {x.dtype} on {x.device}"
    return None


def _about_inputs(now: Sequence[Tensor | None], before: Sequence[Tensor | None]) -> str | None:
    unchanged = all(x is None or y is None or torch.equal(x, y) for x, y in zip(now, before, strict=True))
    return None if unchanged else "an input was changed"


def gradient_verdict(
    problem: GradientCase, device: torch.device | str, attention: Attention = differentiable
) -> str | None:
    """What is wrong with the gradients of a case; None if nothing is."""
    return examine(problem, device, attention).complaint


def check_gradients_of(
    problem: GradientCase, device: torch.device | str, attention: Attention = differentiable
) -> None:
    """Fails with the complaint and with the one line that repeats the case."""
    wrong = gradient_verdict(problem, device, attention)
    assert wrong is None, f"{wrong}\n  {problem}\n  again: {problem.reproducer}"


def check_gradient_tensors(
    inputs: tuple[Tensor, Tensor, Tensor],
    got: tuple[Tensor | None, ...],
    do: Tensor | None,
    dlse: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
) -> None:
    """Compares gradients that a test has obtained in its own way."""
    q, k, v = (x.detach() for x in inputs)
    wrong = complaint_about_gradients(expect_gradients(q, k, v, do, dlse, scale, causal), got)
    assert wrong is None, wrong
