"""How tensors and dO lie in memory changes nothing: the same numbers give the same bits."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.cases import LAYOUTS, Case
from tests.gpu.gradient_cases import DO_LAYOUTS, GradientCase
from tests.gpu.gradient_checking import check_gradient_tensors, differentiable, gradients, leaves

CASE = Case(203, 310, 64, 64, batch=2, heads_kv=2, group=2, causal=True)


def _deterministic(case: Case, inputs, do, dlse=None):
    return gradients(inputs, do, dlse, None, case.causal, True)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - {"contiguous"}))
def test_a_layout_of_the_inputs_gives_the_bits_of_contiguous_tensors(device, layout, head_dim):
    case = Case(203, 310, head_dim, head_dim, batch=2, heads_kv=2, group=2, causal=True)
    q, k, v, do, _ = GradientCase(case).inputs(device)
    expected = _deterministic(case, (q, k, v), do)
    got = _deterministic(case, tuple(LAYOUTS[layout](x) for x in (q, k, v)), do)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("layout", sorted(set(DO_LAYOUTS) - {"contiguous"}))
def test_a_layout_of_do_gives_the_bits_of_a_contiguous_one(device, layout):
    q, k, v, do, _ = GradientCase(CASE, do_layout=layout).inputs(device)
    expected = _deterministic(CASE, (q, k, v), do.contiguous())
    got = _deterministic(CASE, (q, k, v), do)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    check_gradient_tensors((q, k, v), got, do, causal=True)


@pytest.mark.parametrize("layout", ["expanded", "transposed", "every other row"])
def test_a_layout_of_the_gradient_of_lse_changes_nothing(device, layout):
    q, k, v, do, dlse = GradientCase(CASE, incoming="both").inputs(device)
    dlse = {
        "expanded": lambda x: x[:1, :1, :1].expand(x.shape),
        "transposed": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "every other row": lambda x: torch.stack((x, torch.full_like(x, float("nan"))), -1).flatten(2)[:, :, ::2],
    }[layout](dlse)
    expected = _deterministic(CASE, (q, k, v), do, dlse.contiguous())
    got = _deterministic(CASE, (q, k, v), do, dlse)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    check_gradient_tensors((q, k, v), got, do, dlse, causal=True)


def test_the_gradient_of_a_sum(device):
    """dO is one number with strides of 0; dV of a key is the sum of its column of P."""
    q, k, v, _, _ = GradientCase(CASE).inputs(device)
    inputs = leaves(q, k, v)
    out, _ = differentiable(*inputs, None, True)
    got = torch.autograd.grad(out.sum(), inputs)
    check_gradient_tensors((q, k, v), got, torch.ones_like(out), causal=True)


@pytest.mark.parametrize("packing", ["between_sequence_and_heads", "along_heads"])
def test_packed_projections_get_one_packed_gradient(device, packing):
    batch, seqlen, heads, dim = 2, 300, 4, 128
    shape = (batch, seqlen, 3, heads, dim) if packing == "between_sequence_and_heads" else (batch, seqlen, 12, dim)
    along = 2
    qkv = torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_()
    q, k, v = qkv.unbind(along) if qkv.dim() == 5 else qkv.split([8, 2, 2], along)
    out, _ = differentiable(q, k, v, None, True)
    do = torch.randn_like(out)
    out.backward(do)
    got = qkv.grad.unbind(along) if qkv.dim() == 5 else qkv.grad.split([8, 2, 2], along)
    check_gradient_tensors((q, k, v), got, do, causal=True)


def test_gradients_of_a_cut_are_zero_outside_of_it(device):
    q, k, v, do, _ = GradientCase(Case(200, 400, 64, 64, heads_kv=2)).inputs(device)
    k, v = (x.requires_grad_() for x in (k, v))
    out, _ = differentiable(q, k[:, :-128], v[:, :-128])
    out.backward(do)
    for x in (k, v):
        assert (x.grad[:, -128:] == 0).all()
    got = None, k.grad[:, :-128], v.grad[:, :-128]
    check_gradient_tensors((q, k[:, :-128], v[:, :-128]), got, do)


def test_one_tensor_as_q_k_and_v(device):
    """Its gradient is the sum of the three."""
    x = torch.randn(2, 200, 4, 128, device=device, dtype=torch.bfloat16)
    do = torch.randn_like(x)
    parts = gradients((x, x, x), do, causal=True, deterministic=True)
    one = x.clone().requires_grad_()
    differentiable(one, one, one, None, True, True)[0].backward(do)
    torch.testing.assert_close(one.grad.double(), sum(part.double() for part in parts), rtol=2e-2, atol=2e-2)


def test_scratch_memory_is_given_back(device):
    """What the backward holds at its peak: the gradients, dQ in float32, and two numbers a row; nothing else."""
    q, k, v, do, _ = GradientCase(Case(2048, 2048, 128, 128, batch=4, heads_kv=16)).inputs(device)
    inputs = leaves(q, k, v)
    out, _ = differentiable(*inputs)
    torch.autograd.grad(out, inputs, do, retain_graph=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = torch.autograd.grad(out, inputs, do, retain_graph=True)
    peak = torch.cuda.max_memory_allocated() - before
    rows = 4 * 16 * 2 * 4 * (2048 + 128)
    padded = 2048 + 128
    assert peak < sum(x.nbytes for x in got) + q.numel() // 2048 * padded * 4 + rows + (4 << 20)
    del got
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
