"""One case from its inputs to the verdict. Every test of numbers goes through here."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import fa3
from tests.gpu.cases import Case
from tests.gpu.guard import GuardedOutputs
from tests.gpu.oracle import complaint, expect

Attention = Callable[..., tuple[Tensor, Tensor]]


def call(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: bool = False) -> tuple[Tensor, Tensor]:
    """(O, LSE) of the public function."""
    return fa3.flash_attn_func(q, k, v, softmax_scale=scale, causal=causal, return_lse=True)


def verdict(case: Case, device: torch.device | str, attention: Attention = call) -> str | None:
    """What is wrong with the result of a case; None if nothing is.

    Outputs are poisoned and fenced, the inputs are compared with what they were, and O and LSE with float64.
    """
    q, k, v = inputs = case.inputs(device)
    before = [x.clone() for x in inputs]
    with GuardedOutputs(device) as guard:
        out, lse = attention(q, k, v, case.scale, case.causal)
    if out.dtype != q.dtype or out.device != q.device:
        return f"O is {out.dtype} on {out.device}, expected {q.dtype} on {q.device}"
    if not all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True)):
        return "an input was changed"
    expected = expect(q, k, v, case.scale, case.causal)
    launched = (out, lse) if case.seqlen_k else ()  # without a key nothing is launched, and nothing needs a guard
    return guard.complaint(*launched) or complaint(expected, out, lse)


def check(case: Case, device: torch.device | str, attention: Attention = call) -> None:
    """Fails with the complaint and with the one line that repeats the case."""
    problem = verdict(case, device, attention)
    assert problem is None, f"{problem}\n  {case}\n  again: {case.reproducer}"


def check_tensors(
    inputs: tuple[Tensor, Tensor, Tensor], got: tuple[Tensor, Tensor], scale: float | None = None, causal: bool = False
) -> None:
    """Compares a result that a test has obtained in its own way."""
    problem = complaint(expect(*inputs, scale, causal), *got)
    assert problem is None, problem
