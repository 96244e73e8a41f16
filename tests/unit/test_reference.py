"""The reference against an even plainer one, written with loops over rows, and its contract at the edges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa3 import reference
from fa3.reference import attention, visible


def by_loops(q, k, v, scale, causal):
    """One row at a time, with lists of visible keys."""
    (b, sq, hq, _), (sk, hkv) = q.shape, k.shape[1:3]
    out = torch.zeros(b, sq, hq, v.shape[3], dtype=torch.float64)
    lse = torch.full((b, hq, sq), -math.inf, dtype=torch.float64)
    for n in range(b):
        for h in range(hq):
            kv = h // (hq // hkv)
            for i in range(sq):
                keys = [j for j in range(sk) if not causal or j <= i + sk - sq]
                if keys:
                    s = torch.stack([scale * (q[n, i, h].double() * k[n, j, kv].double()).sum() for j in keys])
                    lse[n, h, i] = torch.logsumexp(s, 0)
                    out[n, i, h] = torch.softmax(s, 0) @ v[n, keys, kv].double()
    return out, lse


@given(
    b=st.integers(0, 2),
    sq=st.integers(0, 7),
    sk=st.integers(0, 7),
    hkv=st.integers(1, 2),
    group=st.integers(1, 3),
    dims=st.sampled_from([(1, 1), (4, 2), (3, 5)]),
    scale=st.sampled_from([None, 0.0, 1.5, -0.7]),
    causal=st.booleans(),
    chunk=st.sampled_from([1, 7, 40, 1 << 24]),
)
def test_equals_the_loops_in_chunks_of_any_size(b, sq, sk, hkv, group, dims, scale, causal, chunk):
    g = torch.Generator().manual_seed(sq * 8 + sk)
    q = torch.randn(b, sq, hkv * group, dims[0], generator=g)
    k = torch.randn(b, sk, hkv, dims[0], generator=g)
    v = torch.randn(b, sk, hkv, dims[1], generator=g)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_CHUNK", chunk)
        o, lse = attention(q, k, v, scale, causal)
    want_o, want_lse = by_loops(q, k, v, dims[0] ** -0.5 if scale is None else scale, causal)
    assert o.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(o, want_o, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)


@given(sq=st.integers(0, 9), sk=st.integers(0, 9), causal=st.booleans())
def test_visible_is_aligned_to_the_bottom_right(sq, sk, causal):
    seen = visible(sq, sk, causal)
    assert seen.shape == (sq, sk) and seen.dtype == torch.bool
    for i in range(sq):
        for j in range(sk):
            assert bool(seen[i, j]) == (not causal or j <= i + sk - sq)
    rows = torch.arange(sq).flip(0)[::2]
    assert torch.equal(visible(sq, sk, causal, rows=rows), seen[rows])


def test_rows_without_a_key_are_exact():
    q, k = torch.randn(1, 5, 2, 8), torch.randn(1, 3, 1, 8)
    o, lse = attention(q, k, k, causal=True)
    assert (o[:, :2] == 0).all() and (lse[..., :2] == -math.inf).all() and lse[..., 2:].isfinite().all()


def test_large_logits_and_float32():
    q, k, v = (torch.randn(1, 20, 2, 16) * 60 for _ in range(3))
    o, lse = attention(q, k, v)
    o32, lse32 = attention(q, k, v, dtype=torch.float32)
    assert o.isfinite().all() and o32.dtype == lse32.dtype == torch.float32
    torch.testing.assert_close(lse32.double(), lse, rtol=1e-5, atol=1e-3)


def test_strided_bf16_inputs_are_left_alone():
    q = torch.randn(2, 3, 9, 16).bfloat16().transpose(1, 2)
    before = q.clone()
    o, _ = attention(q, q, q, causal=True)
    assert torch.equal(q, before)
    assert torch.equal(o, attention(q.contiguous(), q.contiguous(), q.contiguous(), causal=True)[0])
