"""O and LSE against float64: every row of the table around its tiles, and hundreds of random problems."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, seed, settings

from fa3.config.table import FORWARD
from fa3.config.types import ForwardConfig
from tests.conftest import GPU_SEED
from tests.gpu.cases import Case
from tests.gpu.checking import call, check, check_tensors
from tests.gpu.strategies import cases


@settings(settings.get_profile("gpu"))
@seed(GPU_SEED)
@given(case=cases())
def test_random_problems(device, case):
    """Any lengths, widths, heads, mask, scale and layout. Failing prints the line that repeats the case."""
    check(case, device)


def _row_name(row: ForwardConfig) -> str:
    return f"d{row.head_dim}v{row.head_dim_v}-{'causal' if row.causal else 'full'}"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("row", FORWARD, ids=_row_name)
def test_every_row_around_its_tiles(device, row, dtype):
    """One tile more or less, one element more or less, in both directions."""
    queries = [1, row.tile_m - 1, row.tile_m, row.tile_m + 1, 2 * row.tile_m + 1]
    keys = [1, row.tile_n - 1, row.tile_n, row.tile_n + 1, 3 * row.tile_n, 5 * row.tile_n - 1]
    for at, (seqlen_q, seqlen_k) in enumerate(itertools.product(queries, keys)):
        check(_of_row(row, dtype, seqlen_q, seqlen_k, seed=at), device)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
@pytest.mark.parametrize("row", FORWARD, ids=_row_name)
def test_every_row_with_other_scales(device, row, scale):
    """A negative scale has a kernel of its own, zero makes every visible key count alike, two makes rows sharp."""
    check(_of_row(row, "bf16", row.tile_m + 3, 2 * row.tile_n + 5, scale=scale), device)


def test_every_head_dim(device):
    for dim in range(8, 257, 8):
        check(
            Case(129, 200, dim, dim, heads_kv=2, causal=dim % 16 == 0, layouts=("narrow", "narrow", "narrow")), device
        )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 16])
def test_grouped_heads(device, group, causal):
    check(Case(150, 190, 128, 128, batch=2, heads_kv=2, group=group, causal=causal), device)


@pytest.mark.parametrize("causal", [False, True])
def test_more_tiles_than_multiprocessors(device, causal):
    """Every CTA runs several tiles, so that state left over from one would show in the next."""
    check(Case(777, 777, 64, 64, batch=3, heads_kv=60, causal=causal), device)
    check(Case(1030, 515, 128, 128, batch=2, heads_kv=24, group=2, causal=causal), device)


@pytest.mark.parametrize("causal", [False, True])
def test_scores_far_below_zero_and_far_above(device, causal):
    """One column of q and k carries a score of about +-3000 for all: only differences between scores may matter."""
    for sign in (1.0, -1.0):
        q, k, v = Case(150, 300, 128, 128, heads_kv=2, seed=5).inputs(device)
        q[..., 0], k[..., 0] = 180.0, sign * 180.0
        out, lse = call(q, k, v, None, causal)
        assert torch.isfinite(out).all()
        check_tensors((q, k, v), (out, lse), None, causal)


def test_nan_in_a_visible_value_stays_in_its_head(device):
    q, k, v = Case(100, 200, 64, 64, batch=2, heads_kv=2).inputs(device)
    v[1, 17, 1, 3] = float("nan")
    out, _ = call(q, k, v)
    assert torch.isnan(out[1, :, 1, 3]).all()
    assert torch.isfinite(out[0]).all()
    assert torch.isfinite(out[1, :, 0]).all()


def _of_row(
    row: ForwardConfig, dtype: str, seqlen_q: int, seqlen_k: int, scale: float | None = None, seed: int = 0
) -> Case:
    return Case(
        seqlen_q,
        seqlen_k,
        row.head_dim,
        row.head_dim_v,
        batch=2,
        heads_kv=1,
        group=2,
        causal=row.causal,
        dtype=dtype,
        scale=scale,
        layouts=("packed", "cut", "cut"),
        seed=seed,
    )
