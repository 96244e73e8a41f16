"""Rows that see nothing, tensors that hold nothing, the causal corner, and sizes beyond 32 bits."""

from __future__ import annotations

import math

import pytest
import torch

from tests.gpu.cases import Case
from tests.gpu.checking import call, check, check_tensors

GIB = 1 << 30


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(113, 64), (700, 1), (513, 200), (384, 255)])
def test_rows_without_a_key_are_exactly_zero_and_minus_infinity(device, seqlen_q, seqlen_k, head_dim):
    case = Case(seqlen_q, seqlen_k, head_dim, head_dim, batch=2, heads_kv=2, group=2, causal=True)
    out, lse = call(*case.inputs(device), None, True)
    blind = seqlen_q - seqlen_k
    assert (out[:, :blind] == 0).all()
    assert torch.isneginf(lse[:, :, :blind]).all()
    assert torch.isfinite(lse[:, :, blind:]).all()
    check(case, device)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 5, 7), (2, 0, 7), (2, 5, 0), (0, 0, 0), (1, 0, 0)])
def test_empty_sizes(device, batch, seqlen_q, seqlen_k, causal):
    q = torch.randn(batch, seqlen_q, 4, 64, device=device, dtype=torch.bfloat16)
    k = torch.randn(batch, seqlen_k, 2, 64, device=device, dtype=torch.bfloat16)
    poison = torch.full_like(q, math.nan)
    del poison
    out, lse = call(q, k, k, None, causal)
    assert out.shape == q.shape
    assert lse.shape == (batch, 4, seqlen_q)
    assert (out == 0).all()
    assert torch.isneginf(lse).all()


def test_no_heads(device):
    q = torch.randn(2, 5, 0, 64, device=device, dtype=torch.bfloat16)
    k = torch.randn(2, 7, 1, 64, device=device, dtype=torch.bfloat16)
    out, lse = call(q, k, k)
    assert out.shape == q.shape
    assert lse.shape == (2, 0, 5)


def test_the_bottom_right_corner_counts_keys(device):
    """With q = 0 every visible key counts alike, so that exp(LSE) is the number of visible keys."""
    for seqlen_q, seqlen_k in [(300, 300), (300, 457), (457, 300), (1, 999)]:
        q = torch.zeros(1, seqlen_q, 1, 128, device=device, dtype=torch.bfloat16)
        k = torch.randn(1, seqlen_k, 1, 128, device=device, dtype=torch.bfloat16)
        _, lse = call(q, k, k, None, True)
        rows = torch.arange(seqlen_q, device=device)
        seen = (rows + 1 + seqlen_k - seqlen_q).clamp(0, seqlen_k)
        torch.testing.assert_close(lse[0, 0].exp(), seen.float(), rtol=1e-5, atol=1e-5)


def test_chunks_of_a_prefill_are_the_rows_of_the_whole(device):
    q, k, v = Case(333, 333, 128, 128, heads_kv=2, group=2).inputs(device)
    whole, whole_lse = call(q, k, v, None, True)
    for begin, end in [(0, 1), (1, 130), (130, 257), (257, 333)]:
        part = q[:, begin:end], k[:, :end], v[:, :end]
        out, lse = call(*part, None, True)
        check_tensors(part, (out, lse), None, True)
        torch.testing.assert_close(lse, whole_lse[:, :, begin:end], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out, whole[:, begin:end], rtol=2e-2, atol=1e-2)


def test_halves_of_the_keys_merge_into_the_whole(device):
    """What ring attention and split keys do with LSE: a wrong base or scale of it would show."""
    q, k, v = Case(100, 300, 128, 128, heads_kv=2).inputs(device)
    whole, whole_lse = call(q, k, v)
    parts = [call(q, k[:, at], v[:, at]) for at in (slice(0, 77), slice(77, 300))]
    merged = torch.stack([lse for _, lse in parts]).logsumexp(0)
    torch.testing.assert_close(merged, whole_lse, rtol=1e-5, atol=1e-5)
    weights = [(lse - merged).exp().transpose(1, 2)[..., None] for _, lse in parts]
    out = sum(o.float() * w for (o, _), w in zip(parts, weights, strict=True))
    torch.testing.assert_close(out, whole.float(), rtol=2e-2, atol=1e-2)


# ---- beyond 2^31 elements


def _needs(gib: float) -> None:
    free = torch.cuda.mem_get_info()[0] / GIB
    if free < gib:
        pytest.skip(f"needs {gib:.0f} GiB of free GPU memory, there are {free:.0f}")


def _far_apart(device: torch.device, rows: int, row_stride: int, head_dim: int) -> torch.Tensor:
    """(1, rows, 1, head_dim) bf16 with that many elements from a row to the next, in memory left as it is."""
    buffer = torch.empty((rows - 1) * row_stride + head_dim, device=device, dtype=torch.bfloat16)
    view = buffer.as_strided((1, rows, 1, head_dim), (buffer.numel(), row_stride, head_dim, 1))
    view.copy_(torch.randn(1, rows, 1, head_dim, device=device))
    return view


@pytest.mark.parametrize("causal", [False, True])
def test_offsets_past_2_to_the_31_in_keys_and_values(device, causal):
    """140 rows, 2^24 elements from one to the next: the last begin 4.6 GB after the first."""
    _needs(12)
    q = torch.randn(1, 150, 1, 64, device=device, dtype=torch.bfloat16)
    k, v = (_far_apart(device, 140, 1 << 24, 64) for _ in range(2))
    check_tensors((q, k, v), call(q, k, v, None, causal), None, causal)


def test_offsets_past_2_to_the_31_in_queries(device):
    _needs(6)
    q = _far_apart(device, 140, 1 << 24, 128)
    k = torch.randn(1, 200, 1, 128, device=device, dtype=torch.bfloat16)
    check_tensors((q, k, k), call(q, k, k))


def test_an_output_of_more_than_2_to_the_31_elements(device):
    """(66, 512, 260, 256) is 2.2e9 elements, 4.2 GiB each for q and O. Checked at both ends and in the middle."""
    _needs(16)
    shape = (66, 512, 260, 256)
    q = torch.empty(shape, device=device, dtype=torch.bfloat16).normal_()
    k = torch.randn(66, 64, 1, 256, device=device, dtype=torch.bfloat16)
    out, lse = call(q, k, k)
    for batch in (0, 33, 64, 65):
        for heads in (slice(0, 2), slice(258, 260)):
            one = slice(batch, batch + 1)
            inputs = q[one, :, heads], k[one], k[one]
            check_tensors(inputs, (out[one, :, heads], lse[one, heads]))


@pytest.mark.parametrize("causal", [False, True])
def test_a_batch_beyond_65535(device, causal):
    """More than a CUDA grid's y or z holds."""
    q, k, v = (torch.randn(65537, 3, 1, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    out, lse = call(q, k, v, None, causal)
    check_tensors((q, k, v), (out, lse), None, causal)
