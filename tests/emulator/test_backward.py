"""Every row of the backward on the emulator: gradients against float64, under the checker, without a GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import fa3
from fa3 import reference
from fa3.config.backward import BackwardConfig
from fa3.config.backward_table import BACKWARD

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LARGEST_ERROR = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
"""Of a whole gradient, relative, where enough numbers come together; other attentions on the same inputs have 2.4e-3
and 3e-4."""
POLICIES = ("early", "late", "random", "starve:0-0", "starve:1-1", "starve:4-7")


def name(row: BackwardConfig) -> str:
    return f"d{row.head_dim}v{row.head_dim_v}-{'causal' if row.causal else 'full'}"


@dataclass(frozen=True)
class Problem:
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    causal: bool
    heads_kv: int = 1
    group: int = 1
    batch: int = 1
    dtype: str = "bf16"
    scale: float | None = None
    dlse: float = 0.0
    deterministic: bool = False
    strided: bool = False

    @classmethod
    def of(cls, row: BackwardConfig, seqlen_q: int, seqlen_k: int, **more: object) -> Problem:
        return cls(seqlen_q, seqlen_k, row.head_dim, row.head_dim_v, row.causal, **more)  # type: ignore[arg-type]

    def inputs(self) -> tuple[Tensor, ...]:
        """q, k, v, dO; `strided`: dO is a view that TMA cannot take."""
        generator = torch.Generator().manual_seed(0)
        heads = self.heads_kv * self.group
        shapes = (
            (self.batch, self.seqlen_q, heads, self.head_dim),
            (self.batch, self.seqlen_k, self.heads_kv, self.head_dim),
            (self.batch, self.seqlen_k, self.heads_kv, self.head_dim_v),
            (self.batch, self.seqlen_q, heads, self.head_dim_v),
        )
        q, k, v, do = (torch.randn(shape, generator=generator).to(DTYPES[self.dtype]) for shape in shapes)
        return q, k, v, do.transpose(1, 3).contiguous().transpose(1, 3) if self.strided else do


def run(
    problem: Problem, policy: str = "random", sms: int = 2, check: bool = True, seed: int = 0
) -> tuple[Tensor, ...]:
    """(dq, dk, dv) through autograd on the emulator; nothing may be found."""
    q, k, v, do = problem.inputs()
    inputs = [t.requires_grad_() for t in (q, k, v)]
    with fa3.emulate(policy=policy, sms=sms, check=check, seed=seed) as emulation:
        o, lse = fa3.flash_attn_func(
            *inputs,
            softmax_scale=problem.scale,
            causal=problem.causal,
            deterministic=problem.deterministic,
            return_lse=True,
        )
        outputs, grads = [o], [do]
        if problem.dlse:
            outputs, grads = [o, lse], [do, torch.full_like(lse, problem.dlse)]
        found = torch.autograd.grad(outputs, inputs, grads)
    assert [run.kernel.split("_bf16")[0].split("_fp16")[0] for run in emulation.runs] == [
        "forward", "backward_prepare", "backward", "backward_finish",
    ]  # fmt: skip
    assert not emulation.findings, "\n".join(map(str, emulation.findings))
    return found


def expected(problem: Problem) -> tuple[Tensor, ...]:
    q, k, v, do = problem.inputs()
    dlse = torch.full((problem.batch, q.shape[2], problem.seqlen_q), problem.dlse) if problem.dlse else None
    return reference.gradients(do, q, k, v, problem.scale, problem.causal, dlse)


def verify(problem: Problem, policy: str = "random", sms: int = 2, check: bool = True) -> None:
    found, exact = run(problem, policy, sms, check), expected(problem)
    limit = LARGEST_ERROR[DTYPES[problem.dtype]]
    for label, got, want in zip(("dq", "dk", "dv"), found, exact, strict=True):
        assert got.shape == want.shape and got.is_contiguous()
        error = ((got.double() - want).norm() / want.norm()).item()
        assert error < limit, f"{label}: {error:.2e} of {problem}"
    blind = ~reference.visible(problem.seqlen_q, problem.seqlen_k, problem.causal).any(1)
    assert (found[0][:, blind] == 0).all(), "a query that sees no key has a gradient of 0, exactly"


@pytest.mark.parametrize("row", BACKWARD, ids=name)
class TestEveryRow:
    def test_tails_and_grouped_heads(self, row: BackwardConfig) -> None:
        """Both lengths end inside a tile, the rings go around, and dK and dV are sums over two heads."""
        verify(Problem.of(row, 2 * row.tile_m + 24, 2 * row.tile_n + 8, group=2))

    def test_more_queries_than_keys(self, row: BackwardConfig) -> None:
        """With a causal mask the first rows, among them whole blocks, see no key."""
        verify(Problem.of(row, 3 * row.tile_m + 8, row.tile_n - 8, dtype="fp16", dlse=0.5), "late")

    def test_narrower_heads(self, row: BackwardConfig) -> None:
        problem = Problem.of(row, 70, 200, batch=2, strided=True)
        verify(replace(problem, head_dim=row.head_dim - 8, head_dim_v=row.head_dim_v - 16), "early", check=False)

    def test_deterministic(self, row: BackwardConfig) -> None:
        """The same bits whoever comes first."""
        problem = Problem.of(row, 3 * row.tile_m, 3 * row.tile_n + 8, deterministic=True)
        first = run(problem, "random", sms=3)
        for seed, sms in ((1, 3), (2, 4)):
            again = run(problem, "random", sms=sms, check=False, seed=seed)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("row", [row for row in BACKWARD if row.head_dim in (64, 256)], ids=name)
def test_every_policy(row: BackwardConfig, policy: str) -> None:
    verify(Problem.of(row, row.tile_m + 1, row.tile_n + 1, heads_kv=2), policy, check=False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [-0.3, 0.2])
def test_other_scales(scale: float, causal: bool) -> None:
    verify(Problem(70, 150, 64, 64, causal, scale=scale))


def test_expanded_gradient() -> None:
    """The gradient of a sum is one number with strides of 0."""
    q, k, v, _ = Problem(40, 70, 64, 64, False).inputs()
    inputs = [t.requires_grad_() for t in (q, k, v)]
    with fa3.emulate():
        found = torch.autograd.grad(fa3.flash_attn_func(*inputs).sum(), inputs)
    want = reference.gradients(torch.ones_like(q), q, k, v)
    for got, exact in zip(found[2:], want[2:], strict=True):  # dO is constant along keys: dS is 0 but for rounding
        assert ((got.double() - exact).norm() / exact.norm()).item() < 4e-3


def test_only_lse() -> None:
    q, k, v, _ = Problem(40, 70, 64, 64, True).inputs()
    inputs = [t.requires_grad_() for t in (q, k, v)]
    with fa3.emulate():
        _, lse = fa3.flash_attn_func(*inputs, causal=True, return_lse=True)
        dq, dk, dv = torch.autograd.grad(lse.sum(), inputs)
    want = reference.gradients(torch.zeros_like(q), q, k, v, causal=True, dlse=torch.ones(1, 1, 40))
    assert (dv == 0).all()
    for got, exact in zip((dq, dk), want[:2], strict=True):
        assert ((got.double() - exact).norm() / exact.norm()).item() < 4e-3


def test_only_what_is_asked_for() -> None:
    q, k, v, do = Problem(40, 70, 64, 64, False).inputs()
    k.requires_grad_()
    with fa3.emulate():
        fa3.flash_attn_func(q, k, v).backward(do)
    assert q.grad is None and v.grad is None and k.grad is not None


def test_compiled_by_torch() -> None:
    torch._dynamo.reset()
    problem = Problem(40, 70, 64, 64, True)
    q, k, v, do = problem.inputs()
    inputs = [t.requires_grad_() for t in (q, k, v)]
    f = torch.compile(lambda *t: fa3.flash_attn_func(*t, causal=True) * 1.0, fullgraph=True, backend="aot_eager")
    with fa3.emulate():
        found = torch.autograd.grad(f(*inputs), inputs, do)
    for got, want in zip(found, expected(problem), strict=True):
        assert ((got.double() - want).norm() / want.norm()).item() < 4e-3


def test_second_derivatives_are_refused() -> None:
    q, k, v, do = Problem(40, 70, 64, 64, False).inputs()
    q.requires_grad_()
    with fa3.emulate():
        (dq,) = torch.autograd.grad(fa3.flash_attn_func(q, k, v), q, do, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives"):
            dq.float().square().sum().backward()


def test_no_key_no_gradient() -> None:
    q, k, v, do = Problem(5, 7, 64, 64, False).inputs()
    k, v = k[:, :0], v[:, :0]
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    with fa3.emulate() as emulation:
        dq, dk, dv = torch.autograd.grad(fa3.flash_attn_func(*inputs), inputs, do)
    assert (dq == 0).all() and dk.shape == k.shape and dv.shape == v.shape and not emulation.runs


def test_the_reference_agrees_with_autograd() -> None:
    q, k, v, do = (t.double() for t in Problem(9, 13, 8, 16, True, group=2, heads_kv=2).inputs())
    inputs = [t.requires_grad_() for t in (q, k, v)]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) / math.sqrt(8)
    scores = scores.masked_fill(~reference.visible(9, 13, True), -math.inf)
    o = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.repeat_interleave(2, 2))
    lse = scores.logsumexp(-1)
    dlse = torch.randn(lse.shape, dtype=torch.float64)
    want = torch.autograd.grad([o, lse], inputs, [do, dlse])
    for got, exact in zip(reference.gradients(do, q, k, v, causal=True, dlse=dlse), want, strict=True):
        torch.testing.assert_close(got, exact)
