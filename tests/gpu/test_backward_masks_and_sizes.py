"""Gradients that are exactly zero, tensors that hold nothing, and sizes beyond 32 bits."""

from __future__ import annotations

import math

import pytest
import torch

from tests.gpu.cases import Case
from tests.gpu.gradient_cases import GradientCase
from tests.gpu.gradient_checking import check_gradient_tensors, check_gradients_of, gradients
from tests.gpu.test_masks_and_sizes import _far_apart, _needs


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(113, 64), (700, 1), (513, 200), (384, 255)])
def test_a_query_without_a_key_has_no_gradient(device, seqlen_q, seqlen_k, head_dim):
    case = Case(seqlen_q, seqlen_k, head_dim, head_dim, batch=2, heads_kv=2, group=2, causal=True)
    q, k, v, do, dlse = GradientCase(case, incoming="both").inputs(device)
    dq, _, _ = gradients((q, k, v), do, dlse, causal=True)
    blind = seqlen_q - seqlen_k
    assert (dq[:, :blind] == 0).all()
    assert (dq[:, blind:].abs().amax((1, 3)) > 0).all()
    check_gradients_of(GradientCase(case, incoming="both"), device)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(300, 300), (113, 64), (200, 1), (1, 1)])
def test_a_query_with_a_single_key_has_no_gradient(device, seqlen_q, seqlen_k, head_dim, causal):
    """Its probability is 1 whatever the score: dQ is 0, not a rounding. The gradient of LSE is another matter."""
    case = Case(seqlen_q, seqlen_k, head_dim, head_dim, batch=2, heads_kv=2, group=2, causal=causal)
    q, k, v, do, dlse = GradientCase(case, incoming="both").inputs(device)
    dq, dk, _ = gradients((q, k, v), do, causal=causal)
    if causal:
        assert (dq[:, seqlen_q - seqlen_k] == 0).all()
    if seqlen_k == 1:
        assert (dq == 0).all() and (dk == 0).all()
    dq, _, _ = gradients((q, k, v), do, dlse, causal=causal)
    if causal:
        assert (dq[:, seqlen_q - seqlen_k].abs().amax(-1) > 0).all()
    check_gradients_of(GradientCase(case), device)
    check_gradients_of(GradientCase(case, incoming="both"), device)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_what_blind_queries_carry_reaches_no_key(device, head_dim):
    """Their dO, dLSE and Q are huge: one that leaked into dK or dV would drown everything."""
    q, k, v, do, dlse = GradientCase(Case(300, 100, head_dim, head_dim, heads_kv=2), incoming="both").inputs(device)
    expected = gradients((q[:, 200:], k, v), do[:, 200:], dlse[:, :, 200:], causal=True, deterministic=True)
    q[:, :200], do[:, :200], dlse[:, :, :200] = 1e4, 1e4, 1e4
    got = gradients((q, k, v), do, dlse, causal=True, deterministic=True)
    assert (got[0][:, :200] == 0).all()
    check_gradient_tensors((q[:, 200:], k, v), (got[0][:, 200:], *got[1:]), do[:, 200:], dlse[:, :, 200:], causal=True)
    check_gradient_tensors((q[:, 200:], k, v), expected, do[:, 200:], dlse[:, :, 200:], causal=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 5, 7), (2, 0, 7), (2, 5, 0), (0, 0, 0), (1, 0, 0)])
def test_empty_sizes(device, batch, seqlen_q, seqlen_k, causal):
    """Keys that no query sees have gradients of exactly 0, whatever the memory held before."""
    q = torch.randn(batch, seqlen_q, 4, 64, device=device, dtype=torch.bfloat16)
    k = torch.randn(batch, seqlen_k, 2, 64, device=device, dtype=torch.bfloat16)
    poison = [torch.full_like(x, math.nan) for x in (q, k, k)]
    del poison
    got = gradients(
        (q, k, k.clone()), torch.randn_like(q), torch.randn(batch, 4, seqlen_q, device=device), None, causal
    )
    for gradient, x in zip(got, (q, k, k), strict=True):
        assert gradient.shape == x.shape
        assert (gradient == 0).all()


def test_no_heads(device):
    q = torch.randn(2, 5, 0, 64, device=device, dtype=torch.bfloat16)
    k = torch.randn(2, 7, 1, 64, device=device, dtype=torch.bfloat16)
    dq, dk, dv = gradients((q, k, k.clone()), torch.randn_like(q))
    assert dq.shape == q.shape
    assert (dk == 0).all() and (dv == 0).all()


def test_chunks_of_queries_give_the_gradients_of_the_whole(device):
    """dK and dV of the whole are the sums over the chunks of a causal prefill."""
    q, k, v, do, _ = GradientCase(Case(333, 333, 128, 128, heads_kv=2, group=2)).inputs(device)
    whole = gradients((q, k, v), do, causal=True)
    dk, dv = (torch.zeros(x.shape, dtype=torch.float64, device=device) for x in (k, v))
    for begin, end in [(0, 1), (1, 130), (130, 257), (257, 333)]:
        part = gradients((q[:, begin:end], k[:, :end], v[:, :end]), do[:, begin:end], causal=True)
        torch.testing.assert_close(part[0], whole[0][:, begin:end], rtol=2e-2, atol=1e-2)
        dk[:, :end] += part[1].double()
        dv[:, :end] += part[2].double()
    torch.testing.assert_close(dk, whole[1].double(), rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(dv, whole[2].double(), rtol=3e-2, atol=3e-2)


# ---- beyond 2^31 elements


@pytest.mark.parametrize("causal", [False, True])
def test_offsets_past_2_to_the_31_in_keys_and_values(device, causal):
    """140 rows, 2^24 elements from one to the next: the last begin 4.6 GB after the first."""
    _needs(12)
    q, do = (torch.randn(1, 150, 1, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    k, v = (_far_apart(device, 140, 1 << 24, 64) for _ in range(2))
    check_gradient_tensors((q, k, v), gradients((q, k, v), do, causal=causal), do, causal=causal)


def test_offsets_past_2_to_the_31_in_queries_and_the_gradient_of_o(device):
    _needs(12)
    q, do = (_far_apart(device, 140, 1 << 24, 128) for _ in range(2))
    k = torch.randn(1, 200, 1, 128, device=device, dtype=torch.bfloat16)
    check_gradient_tensors((q, k, k), gradients((q, k, k.clone()), do), do)


def test_gradients_of_more_than_2_to_the_31_elements(device):
    """(66, 512, 260, 256) is 2.2e9 elements: 4.2 GiB each for q, O, dO, dQ, and 8.4 for the sum of dQ in float32.

    Checked at both ends and in the middle; K and V have one head, so that dK and dV are sums over 260.
    """
    _needs(50)
    shape = (66, 512, 260, 256)
    q, do = (torch.empty(shape, device=device, dtype=torch.bfloat16).normal_() for _ in range(2))
    k, v = (torch.randn(66, 64, 1, 256, device=device, dtype=torch.bfloat16) for _ in range(2))
    dq, dk, dv = gradients((q, k, v), do)
    for batch in (0, 33, 64, 65):
        one = slice(batch, batch + 1)
        for heads in (slice(0, 2), slice(258, 260)):
            inputs = q[one, :, heads], k[one], v[one]
            check_gradient_tensors(inputs, (dq[one, :, heads], None, None), do[one, :, heads])
    for batch in (0, 65):
        one = slice(batch, batch + 1)
        check_gradient_tensors((q[one], k[one], v[one]), (None, dk[one], dv[one]), do[one])


def test_gradients_of_more_than_2_to_the_31_elements_in_keys_and_values(device):
    """(66, 512, 260, 256) of K, V, dK and dV, with few queries."""
    _needs(50)
    shape = (66, 512, 260, 256)
    q, do = (torch.randn(66, 64, 260, 256, device=device, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.empty(shape, device=device, dtype=torch.bfloat16).normal_() for _ in range(2))
    got = gradients((q, k, v), do)
    for batch in (0, 33, 65):
        for heads in (slice(0, 2), slice(258, 260)):
            at = slice(batch, batch + 1), slice(None), heads
            check_gradient_tensors((q[at], k[at], v[at]), tuple(x[at] for x in got), do[at])


@pytest.mark.parametrize("causal", [False, True])
def test_a_batch_beyond_65535(device, causal):
    """More than a CUDA grid's y or z holds."""
    q, k, v, do = (torch.randn(65537, 3, 1, 64, device=device, dtype=torch.bfloat16) for _ in range(4))
    got = gradients((q, k, v), do, causal=causal)
    check_gradient_tensors((q, k, v), got, do, causal=causal)


@pytest.mark.parametrize("deterministic", [False, True])
def test_heads_beyond_65535(device, deterministic):
    q, k, v, do = (torch.randn(1, 5, 65540, 64, device=device, dtype=torch.bfloat16) for _ in range(4))
    got = gradients((q, k, v), do, deterministic=deterministic)
    for heads in (slice(0, 3), slice(65530, 65540)):
        inputs = tuple(x[:, :, heads] for x in (q, k, v))
        check_gradient_tensors(inputs, tuple(x[:, :, heads] for x in got), do[:, :, heads])
