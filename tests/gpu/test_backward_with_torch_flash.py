"""O and LSE are what other flash attentions mean by them: PyTorch's backward takes ours, and ours takes PyTorch's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.gpu.cases import Case
from tests.gpu.gradient_cases import GradientCase
from tests.gpu.gradient_checking import check_gradient_tensors, differentiable, gradients
from tests.gpu.gradient_oracle import expect_gradients

PROBLEMS = [
    Case(256, 256, 64, 64, batch=2, heads_kv=4),
    Case(333, 333, 64, 64, batch=2, heads_kv=4, causal=True, dtype="fp16"),
    Case(333, 200, 128, 128, batch=2, heads_kv=2),
    Case(200, 333, 128, 128, batch=2, heads_kv=2, causal=True),
    Case(300, 300, 96, 96, batch=1, heads_kv=2, causal=True),
    Case(257, 257, 128, 128, batch=2, heads_kv=2, group=2, causal=True),
    Case(190, 190, 192, 192, batch=1, heads_kv=2, causal=True, dtype="fp16"),
    Case(300, 300, 256, 256, batch=1, heads_kv=2, causal=True),
]
WORST_RATIO = 1.5
"""Error of a foreign mixture against the error that two roundings cost; another library rounds at other places."""


def _name(case: Case) -> str:
    mask = "causal" if case.causal else "full"
    return f"d{case.head_dim}-{case.seqlen_q}x{case.seqlen_k}-{case.group}-{mask}-{case.dtype}"


def _torch_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """(O, LSE, two tensors of a random state) by PyTorch's flash attention, layout (B, S, H, D)."""
    scale = 1 / math.sqrt(q.shape[-1])
    lengths = q.shape[1], k.shape[1]
    return torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, *lengths, 0.0, causal, False, scale=scale
    )[:4]  # fmt: skip


def _torch_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, state: tuple[Tensor, Tensor], causal: bool
) -> tuple[Tensor, ...]:
    scale = 1 / math.sqrt(q.shape[-1])
    return torch.ops.aten._flash_attention_backward(
        do, q, k, v, o, lse, None, None, q.shape[1], k.shape[1], 0.0, causal, *state, scale=scale
    )  # fmt: skip


@pytest.mark.parametrize("case", PROBLEMS, ids=_name)
def test_both_backwards_agree_on_both_forwards(device, case):
    """Four mixtures of a forward with a backward: each as near to float64 as two roundings allow."""
    q, k, v, do, _ = GradientCase(case).inputs(device)
    ours = [x.detach() for x in differentiable(q, k, v, None, case.causal)]
    foreign_o, foreign_lse, *state = _torch_forward(q, k, v, case.causal)
    torch.testing.assert_close(ours[1], foreign_lse, rtol=1e-5, atol=1e-4)
    scale = 1 / math.sqrt(case.head_dim)
    mixtures = {
        "our backward of our forward": gradients((q, k, v), do, causal=case.causal),
        "our backward of torch's forward": torch.ops.fa3.backward(
            do, q, k, v, foreign_o, foreign_lse, None, scale, case.causal
        ),
        "torch's backward of our forward": _torch_backward(do, q, k, v, *ours, state, case.causal),
        "torch's backward of torch's forward": _torch_backward(do, q, k, v, foreign_o, foreign_lse, state, case.causal),
    }
    expected = expect_gradients(q, k, v, do, None, None, case.causal)
    for name, got in mixtures.items():
        for label, gradient, want in zip(("dQ", "dK", "dV"), got, expected, strict=True):
            error = float((gradient.double() - want.exact).norm())
            allowed = (WORST_RATIO + (case.group > 1)) * want.unavoidable
            assert error <= allowed, f"{name}: {label} is off by {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize("case", PROBLEMS, ids=_name)
def test_our_backward_of_torchs_forward_is_right_in_every_element(device, case):
    q, k, v, do, _ = GradientCase(case).inputs(device)
    o, lse, *_ = _torch_forward(q, k, v, case.causal)
    got = torch.ops.fa3.backward(do, q, k, v, o, lse, None, 1 / math.sqrt(case.head_dim), case.causal)
    check_gradient_tensors((q, k, v), got, do, causal=case.causal)


@pytest.mark.parametrize("causal", [False, True])
def test_the_op_behind_scaled_dot_product_attention_takes_our_results(device, causal):
    """The same with the layout (B, H, S, D), through the op that PyTorch's autograd calls."""
    case = Case(300, 300, 128, 128, batch=2, heads_kv=4, causal=causal)
    q, k, v, do, _ = GradientCase(case).inputs(device)
    o, lse = (x.detach() for x in differentiable(q, k, v, None, causal))
    first = [x.transpose(1, 2) for x in (do, q, k, v, o)]
    state = [torch.empty(shape, dtype=torch.uint64, device=device) for shape in ((2,), ())]  # of a dropout that is 0
    got = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *first, lse, None, None, 300, 300, 0.0, causal, *state, scale=1 / math.sqrt(128)
    )
    expected = expect_gradients(q, k, v, do, None, None, causal)
    for gradient, want in zip(got, expected, strict=True):
        assert float((gradient.transpose(1, 2).double() - want.exact).norm()) <= WORST_RATIO * want.unavoidable
