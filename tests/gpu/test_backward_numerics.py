"""dQ, dK, dV against float64: every row of the backward's table around its tiles, and hundreds of random problems."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, seed, settings

from fa3.config.backward import BackwardConfig
from fa3.config.backward_table import BACKWARD
from tests.conftest import GPU_SEED
from tests.gpu.cases import Case
from tests.gpu.gradient_cases import GradientCase
from tests.gpu.gradient_checking import check_gradient_tensors, check_gradients_of, differentiable, gradients, leaves
from tests.gpu.strategies import gradient_cases


@settings(settings.get_profile("gpu"))
@seed(GPU_SEED)
@given(problem=gradient_cases())
def test_random_problems(device, problem):
    """Any lengths, widths, heads, mask, scale and layout. Failing prints the line that repeats the case."""
    check_gradients_of(problem, device)


def _row_name(row: BackwardConfig) -> str:
    return f"d{row.head_dim}v{row.head_dim_v}-{'causal' if row.causal else 'full'}"


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("row", BACKWARD, ids=_row_name)
def test_every_row_around_its_tiles(device, row, dtype, deterministic):
    """One tile more or less, one element more or less, in both directions."""
    queries = [1, row.tile_m - 1, row.tile_m, row.tile_m + 1, 3 * row.tile_m + 1]
    keys = [1, row.tile_n - 1, row.tile_n, row.tile_n + 1, 4 * row.tile_n - 1]
    for at, (seqlen_q, seqlen_k) in enumerate(itertools.product(queries, keys)):
        check_gradients_of(_of_row(row, dtype, seqlen_q, seqlen_k, seed=at, deterministic=deterministic), device)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
@pytest.mark.parametrize("row", BACKWARD, ids=_row_name)
def test_every_row_with_other_scales(device, row, scale):
    """Zero makes dQ and dK vanish and every visible key count alike, two makes rows sharp."""
    check_gradients_of(_of_row(row, "bf16", row.tile_m + 3, 2 * row.tile_n + 5, scale=scale), device)


@pytest.mark.parametrize("incoming", ["lse", "both"])
@pytest.mark.parametrize("row", BACKWARD, ids=_row_name)
def test_every_row_with_a_gradient_of_lse(device, row, incoming):
    check_gradients_of(_of_row(row, "bf16", 2 * row.tile_m + 7, row.tile_n + 9, incoming=incoming), device)


def test_every_head_dim(device):
    for dim in range(8, 257, 8):
        case = Case(129, 200, dim, dim, heads_kv=2, causal=dim % 16 == 0, layouts=("narrow",) * 3)
        check_gradients_of(GradientCase(case, do_layout="narrow"), device)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (256, 256)])
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 16])
def test_grouped_heads(device, group, widths, causal):
    """dK and dV are sums over the group, in float32: no rounding between its heads."""
    check_gradients_of(GradientCase(Case(150, 190, *widths, batch=2, heads_kv=2, group=group, causal=causal)), device)


@pytest.mark.parametrize("causal", [False, True])
def test_more_tiles_than_multiprocessors(device, causal):
    check_gradients_of(GradientCase(Case(777, 777, 64, 64, batch=3, heads_kv=60, causal=causal)), device)
    check_gradients_of(GradientCase(Case(1030, 515, 128, 128, batch=2, heads_kv=24, group=2, causal=causal)), device)


@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (256, 256)])
def test_long_sequences(device, widths):
    """Many tiles for each CTA, and many CTAs that add into the same rows of dQ."""
    check_gradients_of(GradientCase(Case(4096 + 17, 4096 - 9, *widths, heads_kv=2, causal=True)), device)


@pytest.mark.parametrize("causal", [False, True])
def test_scores_far_below_zero_and_far_above(device, causal):
    """One column of q and k carries a score of about +-3000 for all: only differences between scores may matter."""
    for sign in (1.0, -1.0):
        q, k, v, do, _ = GradientCase(Case(150, 300, 128, 128, heads_kv=2, seed=5)).inputs(device)
        q[..., 0], k[..., 0] = 180.0, sign * 180.0
        got = gradients((q, k, v), do, causal=causal)
        check_gradient_tensors((q, k, v), got, do, causal=causal)


def test_nan_in_a_gradient_stays_in_its_head(device):
    q, k, v, do, _ = GradientCase(Case(100, 200, 64, 64, batch=2, heads_kv=2, group=2)).inputs(device)
    do[1, 17, 3, 5] = float("nan")
    dq, dk, dv = gradients((q, k, v), do)
    assert torch.isnan(dq[1, 17, 3]).all()
    assert torch.isnan(dv[1, :, 1, 5]).all()
    for gradient in (dq, dk, dv):
        assert torch.isfinite(gradient[0]).all()
        assert torch.isfinite(gradient[1, :, 0]).all()
    assert torch.isfinite(dq[1, :17]).all()


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "qv", "kv"])
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_only_the_gradients_that_are_asked_for(device, widths, wanted):
    """Those are right, and the others are not there."""
    case = Case(150, 190, *widths, batch=2, heads_kv=2, group=2, causal=True)
    for incoming in ("o", "both"):
        check_gradients_of(GradientCase(case, incoming=incoming, wanted=wanted), device)
    q, k, v, do, _ = GradientCase(case).inputs(device)
    inputs = [x.requires_grad_(name in wanted) for name, x in zip("qkv", (q, k, v), strict=True)]
    differentiable(*inputs, None, True)[0].backward(do)
    assert "".join(name for name, x in zip("qkv", inputs, strict=True) if x.grad is not None) == wanted


def test_gradients_add_up_in_the_leaves(device):
    """Two backward passes over one graph: the second adds to the first, and nothing of the first was overwritten."""
    q, k, v, do, _ = GradientCase(Case(150, 190, 128, 128, heads_kv=2, causal=True)).inputs(device)
    inputs = leaves(q, k, v)
    out, _ = differentiable(*inputs, None, True, True)
    once = torch.autograd.grad(out, inputs, do, retain_graph=True)
    out.backward(do, retain_graph=True)
    out.backward(do)
    for x, gradient in zip(inputs, once, strict=True):
        assert torch.equal(x.grad, gradient + gradient)


def _of_row(
    row: BackwardConfig,
    dtype: str,
    seqlen_q: int,
    seqlen_k: int,
    scale: float | None = None,
    seed: int = 0,
    incoming: str = "o",
    deterministic: bool = False,
) -> GradientCase:
    case = Case(
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
    return GradientCase(case, do_layout="packed", incoming=incoming, deterministic=deterministic)
