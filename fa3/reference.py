"""The specification of attention, as plain as it can be written. Tests, notebooks and benchmarks compare with it.

    S = scale * Q K^T,   P = softmax(S) over the visible keys,   O = P V,   LSE = log(sum(exp(S))) over the same keys

It runs on any device, in float64 unless told otherwise, and works in chunks, so that long sequences fit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_CHUNK = 1 << 24
"""Scores held at a time: 128 MiB in float64."""


def visible(sq: int, sk: int, causal: bool, rows: Tensor | None = None, device: torch.device | None = None) -> Tensor:
    """Which keys each query sees: bool (Sq, Sk), or only the given `rows` of it (int64 query indices, on any device).

    Causal is aligned to the bottom right corner: query i sees key j if and only if j <= i + Sk - Sq. So the last query
    sees every key, and the first Sq - Sk queries see none if Sq > Sk.
    """
    if rows is None:
        rows = torch.arange(sq, device=device)
    keys = torch.arange(sk, device=rows.device)
    if not causal:
        return torch.ones(len(rows), sk, dtype=torch.bool, device=rows.device)
    return keys[None, :] <= rows[:, None] + (sk - sq)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """(O, LSE) of q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv), computed and returned in `dtype`.

    * O is (B, Sq, Hq, Dv); LSE is (B, Hq, Sq), the natural logarithm.
    * Query head h uses the key and value head h // (Hq // Hkv); Hkv divides Hq.
    * `softmax_scale` is any finite number, also 0 or negative; None means 1 / sqrt(D).
    * A row that sees no key (see `visible`, and Sk = 0) has O = 0 and LSE = -inf, exactly.
    * The inputs are finite: here a NaN in V would reach rows that do not see its key, as 0 * NaN. None is changed.
    """
    (batch, sq, hq, dim), (sk, hkv), dim_v = q.shape, k.shape[1:3], v.shape[-1]
    group = hq // max(hkv, 1)
    scale = 1.0 / math.sqrt(dim) if softmax_scale is None else float(softmax_scale)

    out = torch.zeros(batch * hkv, group, sq, dim_v, dtype=dtype, device=q.device)
    lse = torch.full((batch * hkv, group, sq), -math.inf, dtype=dtype, device=q.device)
    if out.numel() and sk:
        queries = q.detach().transpose(1, 2).unflatten(1, (hkv, group)).flatten(0, 1)  # (B Hkv, group, Sq, D)
        keys = k.detach().transpose(1, 2).flatten(0, 1)  # (B Hkv, Sk, D)
        values = v.detach().transpose(1, 2).flatten(0, 1)
        rows_at_once = max(1, min(sq, _CHUNK // (group * sk)))
        heads_at_once = max(1, _CHUNK // (group * rows_at_once * sk))
        for heads in _slices(batch * hkv, heads_at_once):
            kc, vc = keys[heads, None].to(dtype), values[heads, None].to(dtype)
            for rows in _slices(sq, rows_at_once):
                seen = visible(sq, sk, causal, rows=torch.arange(rows.start, rows.stop, device=q.device))
                out[heads, :, rows], lse[heads, :, rows] = _rows(queries[heads, :, rows].to(dtype), kc, vc, seen, scale)

    out = out.unflatten(0, (batch, hkv)).reshape(batch, hq, sq, dim_v).transpose(1, 2)
    return out, lse.reshape(batch, hq, sq)


def _rows(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The formula: q (n, g, rows, D), k (n, 1, Sk, D), v (n, 1, Sk, Dv), seen (rows, Sk) -> O and LSE of these rows."""
    s = (q @ k.mT * scale).masked_fill(~seen, -math.inf)
    row_max = s.amax(-1, keepdim=True)
    alive = row_max > -math.inf
    p = torch.exp(s - torch.where(alive, row_max, 0.0))
    row_sum = p.sum(-1, keepdim=True)
    o = p @ v / torch.where(alive, row_sum, 1.0)
    return o, (row_max + torch.log(torch.where(alive, row_sum, 1.0)))[..., 0]


def _slices(length: int, step: int) -> list[slice]:
    return [slice(at, min(at + step, length)) for at in range(0, length, step)]


def gradients(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    dlse: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ, dK, dV) of `attention` for the gradient `do` (B, Sq, Hq, Dv) of O and, if given, `dlse` (B, Hq, Sq) of LSE.

        dV = P^T dO,   dP = dO V^T,   dS = P * (dP - rowsum(dO * O) + dLSE),   dQ = scale * dS K,   dK = scale * dS^T Q

    dK and dV are sums over the query heads of a group. A query without a key and a key without a query have gradients
    of 0, exactly. All scores of a head are held at once.
    """
    group = q.shape[2] // max(k.shape[2], 1)
    scale = 1.0 / math.sqrt(q.shape[3]) if softmax_scale is None else float(softmax_scale)
    dq, dk, dv = (torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (q, k, v))
    if not k.shape[1]:
        return dq, dk, dv
    seen = visible(q.shape[1], k.shape[1], causal, device=q.device)
    for batch in range(q.shape[0]):
        for head in range(q.shape[2]):
            kv = head // group
            qh, doh = (t[batch, :, head].to(dtype) for t in (q, do))
            kh, vh = (t[batch, :, kv].to(dtype) for t in (k, v))
            p = _probabilities(qh @ kh.mT * scale, seen)
            delta = (doh * (p @ vh)).sum(-1, keepdim=True)
            if dlse is not None:
                delta = delta - dlse[batch, head, :, None].to(dtype)
            ds = p * (doh @ vh.mT - delta)
            dq[batch, :, head] = scale * ds @ kh
            dk[batch, :, kv] += scale * ds.mT @ qh
            dv[batch, :, kv] += p.mT @ doh
    return dq, dk, dv


def _probabilities(s: Tensor, seen: Tensor) -> Tensor:
    s = s.masked_fill(~seen, -math.inf)
    row_max = s.amax(-1, keepdim=True)
    p = torch.exp(s - torch.where(row_max > -math.inf, row_max, 0.0))
    row_sum = p.sum(-1, keepdim=True)
    return p / torch.where(row_sum > 0, row_sum, 1.0)
