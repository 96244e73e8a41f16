"""The judge of the GPU tests of the backward, on the CPU: accepts what kernels do, rejects what broken ones do."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import fa3
from fa3 import reference
from tests.gpu import reproduce
from tests.gpu.cases import Case
from tests.gpu.gradient_cases import DO_LAYOUTS, GradientCase
from tests.gpu.gradient_checking import (
    check_gradient_tensors,
    check_gradients_of,
    gradient_verdict,
    gradients,
)
from tests.gpu.gradient_oracle import expect_gradients
from tests.gpu.guard import BORDER
from tests.gpu.strategies import gradient_cases

TILE = 48
ORDINARY = GradientCase(
    Case(90, 70, 32, 40, batch=2, heads_kv=2, group=2, causal=True, layouts=("packed", "cut", "narrow"), seed=1),
    do_layout="odd_rows",
    incoming="both",
)
Spoil = Callable[[Tensor, Tensor, Tensor], None]


def _do_nothing(dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    pass


class Emulated(torch.autograd.Function):
    """What the kernels do: float32 sums, O, P, dS and the gradients rounded, key block after key block."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, spoil: Spoil, drop: int
    ) -> tuple[Tensor, Tensor]:
        exact, lse = reference.attention(q, k, v, scale, causal, torch.float32)
        o = exact.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = scale, causal, spoil, drop
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:
        scale, causal, spoil, drop = ctx.options
        q, k, v, o, lse = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do
        group, seqlen_k = q.shape[2] // k.shape[2], k.shape[1]
        found = [torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v)]
        kh, vh = (x.repeat_interleave(group, 2).float().transpose(1, 2) for x in (k, v))
        qh, oh, doh = (x.float().transpose(1, 2) for x in (q, o, do))
        delta = (doh * oh).sum(-1, keepdim=True) - (0.0 if dlse is None else dlse[..., None])
        safe = torch.where(torch.isneginf(lse), math.inf, lse)[..., None]
        seen = reference.visible(q.shape[1], seqlen_k, causal)
        dq, dk, dv = torch.zeros_like(qh), torch.zeros_like(kh), torch.zeros_like(vh)
        for first in range(0, seqlen_k - drop, TILE):
            tile = slice(first, min(first + TILE, seqlen_k - drop))
            p = torch.exp((qh @ kh[:, :, tile].mT * scale).masked_fill(~seen[:, tile], -math.inf) - safe)
            ds = (p * (doh @ vh[:, :, tile].mT - delta)).to(q.dtype).float()
            dv[:, :, tile] = p.to(q.dtype).float().mT @ doh
            dk[:, :, tile] = ds.mT @ qh
            dq += ds @ kh[:, :, tile]
        grouped = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
        for into, x, factor in zip(found, (dq, *grouped), (scale, scale, 1.0), strict=True):
            into.copy_((x * factor).transpose(1, 2))
        if dlse is None:  # P of a single key is 1, whatever its score
            found[0][:, seen.sum(1) == 1] = 0.0
            found[1].mul_(seqlen_k != 1)
        spoil(*found)
        return *found, None, None, None, None


def emulated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: bool,
    deterministic: bool,
    spoil: Spoil = _do_nothing,
    drop: int = 0,
) -> tuple[Tensor, Tensor]:
    return Emulated.apply(q, k, v, 1 / math.sqrt(q.shape[-1]) if scale is None else scale, causal, spoil, drop)


@settings(max_examples=40)
@given(problem=gradient_cases(longest=260))
def test_what_kernels_do_is_right(problem):
    check_gradients_of(problem, "cpu", emulated)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(70, 1), (70, 150), (1, 60)])
def test_the_oracle_agrees_with_the_specification(dtype, causal, seqlen_q, seqlen_k):
    case = Case(seqlen_q, seqlen_k, 32, 40, heads_kv=2, group=3, dtype=dtype)
    q, k, v, do, dlse = GradientCase(case, incoming="both").inputs("cpu")
    expected = expect_gradients(q, k, v, do, dlse, -0.4, causal)
    for one, exact in zip(expected, reference.gradients(do, q, k, v, -0.4, causal, dlse), strict=True):
        torch.testing.assert_close(one.exact, exact)


def test_the_deviation_is_that_of_many_roundings():
    """Over many seeds the error of a kernel, in standard deviations, is about one and never far above."""
    squares = []
    for seed in range(6):
        problem = GradientCase(Case(130, 150, 32, 32, heads_kv=2, causal=True, seed=seed))
        q, k, v, do, _ = problem.inputs("cpu")
        expected = expect_gradients(q, k, v, do, None, None, True)
        got = gradients((q, k, v), do, causal=True, attention=emulated)
        for one, gradient in zip(expected, got, strict=True):
            alive = ~one.dead
            squares.append((((gradient.double() - one.exact) / one.deviation)[alive] ** 2).mean())
    typical = float(torch.stack(squares).mean().sqrt())
    assert 0.4 < typical < 1.1


def _unwritten(dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    dk[-1, -1, -1, -1] = math.nan


def _overrun(dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    dv.as_strided((1,), (1,), dv.storage_offset() + dv.numel()).fill_(0.0)


def _underrun(dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    dq.as_strided((1,), (1,), dq.storage_offset() - 1).fill_(math.nan)


def _one_row(dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    dq[0, 63, 1] *= 1.06


def _one_element(dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    dk[0, 33, 1, 2] += 0.1 * dk.abs().max()


def _blind_row(dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    dq[1, 5, 3, 7] = 1e-6


def _swapped_heads(dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    dv.copy_(dv.flip(2))


def _scaled_twice(dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    dk.mul_(1 / math.sqrt(32))


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (_unwritten, "dK: 1 of"),
        (_overrun, "after an output"),
        (_underrun, "before an output"),
        (_one_row, "dQ:"),
        (_one_element, "dK:"),
        (_blind_row, "must be 0"),
        (_swapped_heads, "dV:"),
        (_scaled_twice, "dK:"),
    ],
)
def test_broken_gradients_are_named(spoil, word):
    assert gradient_verdict(ORDINARY, "cpu", emulated) is None
    complaint = gradient_verdict(ORDINARY, "cpu", partial(emulated, spoil=spoil))
    assert complaint is not None
    assert word in complaint


@pytest.mark.parametrize("seqlen_k", [150, 500])
def test_one_forgotten_key_among_many_is_seen(seqlen_k):
    problem = GradientCase(Case(128, seqlen_k, 64, 64, heads_kv=4, seed=3))
    complaint = gradient_verdict(problem, "cpu", partial(emulated, drop=1))
    assert complaint is not None


def test_lse_without_its_gradient_is_seen():
    """The gradient of LSE dropped, as if nobody had asked for it."""

    def deaf(*arguments):
        o, lse = emulated(*arguments)
        return o, lse.detach() + 0.0 * lse

    complaint = gradient_verdict(ORDINARY, "cpu", deaf)
    assert complaint is not None
    assert complaint.startswith("dQ")


def test_gradients_from_elsewhere_are_noticed():
    class Copied(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            return tensors

        @staticmethod
        def backward(ctx, *grads):
            return tuple(x.clone() for x in grads)

    complaint = gradient_verdict(ORDINARY, "cpu", lambda q, k, v, *rest: emulated(*Copied.apply(q, k, v), *rest))
    assert complaint is not None
    assert "torch.empty" in complaint


@pytest.mark.parametrize("name", sorted(DO_LAYOUTS))
def test_a_layout_of_do_keeps_the_shape(name):
    x = torch.randn(2, 5, 3, 8, dtype=torch.bfloat16)
    y = DO_LAYOUTS[name](x)
    assert y.shape == x.shape and y.dtype == x.dtype
    assert torch.equal(x, y) or name.startswith("expanded")


def test_a_case_comes_back_from_its_reproducer():
    text = ORDINARY.reproducer.split("reproduce ")[1].strip("'")
    assert reproduce.read(text) == ORDINARY
    assert reproduce.read(ORDINARY.case.reproducer.split("reproduce ")[1].strip("'")) == ORDINARY.case


def test_small_cases_of_the_backward_can_be_chosen_by_width():
    cases = reproduce.chosen(["--small-backward", "64,192"])
    assert {each.case.head_dim for each in cases} == {64, 192}
    assert len(reproduce.chosen(["--small-backward"])) > len(cases)


@pytest.mark.parametrize("incoming", ["o", "both"])
def test_the_real_kernels_on_the_emulator(incoming):
    """The checks of the GPU tests with the emulator in the place of the GPU; only the fences are missing."""
    problem = GradientCase(Case(70, 90, 64, 64, group=2, causal=True, layouts=("cut",) * 3), "odd_rows", incoming)
    q, k, v, do, dlse = problem.inputs("cpu")
    with fa3.emulate():
        got = gradients((q, k, v), do, dlse, causal=True)
    check_gradient_tensors((q, k, v), got, do, dlse, causal=True)


@pytest.mark.parametrize("incoming", ["o", "lse", "both"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "causal"), [(40, 24, True), (24, 1, False), (24, 1, True)])
def test_queries_of_one_key_on_the_emulator(incoming, seqlen_q, seqlen_k, causal):
    """dQ is 0 where only O has a gradient, and scale * dLSE * k where LSE has one."""
    problem = GradientCase(Case(seqlen_q, seqlen_k, 64, 64, group=2, causal=causal), incoming=incoming)
    q, k, v, do, dlse = problem.inputs("cpu")
    with fa3.emulate():
        got = gradients((q, k, v), do, dlse, causal=causal)
    check_gradient_tensors((q, k, v), got, do, dlse, causal=causal)


# ---- the host code between autograd and the kernels, with kernels that compute by the reference


@pytest.mark.parametrize("wanted", ["qkv", "q", "kv"])
@pytest.mark.parametrize("layout", ["contiguous", "odd_rows"])
def test_everything_that_the_backward_allocates_is_guarded(stand_in, layout, wanted):
    problem = GradientCase(Case(70, 90, 64, 64, group=2, causal=True), layout, "both", wanted=wanted)
    assert gradient_verdict(problem, "cpu") is None
    sums_and_turns = [
        x
        for arguments in stand_in.calls
        for x in arguments
        if isinstance(x, Tensor) and (x.dim() == 5 or (x.dim() == 3 and x.dtype == torch.int32))
    ]
    assert bool(sums_and_turns) == ("q" in wanted)
    assert all(x.untyped_storage().nbytes() > 2 * BORDER * x.element_size() for x in sums_and_turns)


def test_a_gradient_that_no_kernel_writes_is_seen(stand_in, monkeypatch):
    def lazy(self, key, *arguments):
        pass

    monkeypatch.setattr(type(stand_in), "_backward", lazy)
    complaint = gradient_verdict(GradientCase(Case(70, 90, 64, 64)), "cpu")
    assert complaint is not None
    assert "not finite" in complaint
