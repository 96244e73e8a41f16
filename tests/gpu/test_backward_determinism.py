"""`deterministic=True`: the same bits in every run, whatever else has run; and without it, dK and dV all the same."""

from __future__ import annotations

import pytest
import torch

from fa3.config.backward_table import BACKWARD
from tests.gpu.cases import Case
from tests.gpu.gradient_cases import GradientCase
from tests.gpu.gradient_checking import check_gradient_tensors, differentiable, gradients, leaves

REPEATS = 30
WIDTHS = sorted({(row.head_dim, row.head_dim_v) for row in BACKWARD})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_repeated_runs_are_bit_identical(device, widths, causal, dtype):
    """Many key blocks add into the same rows of dQ, in an order that the GPU picks anew each time."""
    case = Case(1000, 1100, *widths, batch=2, heads_kv=8, group=2, causal=causal, dtype=dtype)
    q, k, v, do, dlse = GradientCase(case, incoming="both").inputs(device)
    inputs = leaves(q, k, v)
    outputs = differentiable(*inputs, None, causal, True)
    first = torch.autograd.grad(outputs, inputs, (do, dlse), retain_graph=True)
    for _ in range(REPEATS):
        again = torch.autograd.grad(outputs, inputs, (do, dlse), retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    one = slice(0, 1)
    check_gradient_tensors((q[one], k[one], v[one]), tuple(x[one] for x in first), do[one], dlse[one], None, causal)


@pytest.mark.parametrize("widths", WIDTHS)
def test_keys_and_values_are_bit_identical_in_any_case(device, widths):
    """One CTA alone makes a block of dK and dV: only dQ depends on an order."""
    case = Case(700, 900, *widths, batch=2, heads_kv=4, group=2, causal=True)
    q, k, v, do, _ = GradientCase(case).inputs(device)
    first = gradients((q, k, v), do, causal=True)
    for _ in range(REPEATS):
        again = gradients((q, k, v), do, causal=True)
        assert all(torch.equal(a, b) for a, b in zip(again[1:], first[1:], strict=True))
        torch.testing.assert_close(again[0], first[0], rtol=2e-2, atol=1e-2)


def test_a_batch_does_not_depend_on_its_neighbours(device):
    q, k, v, do, _ = GradientCase(Case(500, 700, 128, 128, batch=8, heads_kv=4, group=2)).inputs(device)
    whole = gradients((q, k, v), do, causal=True, deterministic=True)
    for at in range(8):
        one = slice(at, at + 1)
        alone = gradients((q[one], k[one], v[one]), do[one], causal=True, deterministic=True)
        assert all(torch.equal(a, b[one]) for a, b in zip(alone, whole, strict=True))


def test_deterministic_gradients_beside_other_work(device):
    """Other kernels hold some of the multiprocessors, so that CTAs start late and in another order."""
    q, k, v, do, _ = GradientCase(Case(2000, 2000, 128, 128, heads_kv=8, causal=True)).inputs(device)
    expected = gradients((q, k, v), do, causal=True, deterministic=True)
    x = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(REPEATS):
        with torch.cuda.stream(other):
            for _ in range(4):
                x @ x
        got = gradients((q, k, v), do, causal=True, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_many_short_key_loops(device):
    """Large values and little work for each CTA: a race shows now and then."""
    case = Case(2048, 128, 128, 128, batch=300, dtype="fp16", amplitude=3.0)
    q, k, v, do, _ = GradientCase(case).inputs(device)
    first = gradients((q, k, v), do)
    for batch in (0, 17, 150, 299):
        one = slice(batch, batch + 1)
        check_gradient_tensors((q[one], k[one], v[one]), tuple(x[one] for x in first), do[one])
    for _ in range(20):
        again = gradients((q, k, v), do)
        assert all(torch.equal(a, b) for a, b in zip(again[1:], first[1:], strict=True))
        torch.testing.assert_close(again[0], first[0], rtol=1e-2, atol=1e-2)
