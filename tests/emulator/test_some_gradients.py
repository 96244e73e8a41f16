"""Backwards that compute only some of dQ, dK and dV: right, clean under the checker, and without the others' work."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

import fa3
from fa3 import reference
from fa3.config.backward import ALL, BackwardConfig, Wanted
from fa3.config.backward_table import backward_config

from .test_backward import DTYPES, LARGEST_ERROR, Problem, name

ROWS = [
    backward_config(64, 64, causal=False),
    backward_config(128, 128, causal=True),
    backward_config(192, 128, causal=True),
    backward_config(256, 256, causal=False),
]
OTHER_ROWS = [backward_config(96, 96, causal=True), backward_config(192, 192, causal=False)]
"""With another way of dQ."""
SOME = [wanted for wanted in get_args(Wanted) if wanted != ALL]


def gradients(
    problem: Problem, wanted: Wanted, policy: str = "random", seed: int = 0, sms: int = 2
) -> tuple[dict[str, Tensor], list[str]]:
    """(name -> gradient, names of the backward's kernels) of a run in which nothing is found."""
    *inputs, do = problem.inputs()
    for tensor, letter in zip(inputs, ALL, strict=True):
        tensor.requires_grad_(letter in wanted)
    with fa3.emulate(policy=policy, sms=sms, check=True, seed=seed) as emulation:
        o, lse = fa3.flash_attn_func(
            *inputs, causal=problem.causal, deterministic=problem.deterministic, return_lse=True
        )
        torch.autograd.backward([o, lse], [do, torch.full_like(lse, problem.dlse)])
    assert not emulation.findings, "\n".join(map(str, emulation.findings))
    found = {letter: t.grad for letter, t in zip(ALL, inputs, strict=True) if t.grad is not None}
    assert "".join(found) == wanted
    return found, [run.kernel for run in emulation.runs[1:]]


CASES = [(row, wanted) for row in ROWS for wanted in SOME] + [
    (row, wanted) for row in OTHER_ROWS for wanted in ("k", "qv")
]


@pytest.mark.parametrize(("row", "wanted"), CASES, ids=lambda x: x if isinstance(x, str) else name(x))
def test_some_gradients(row: BackwardConfig, wanted: Wanted) -> None:
    """Those that are wanted are right; of the others there is no kernel, and no part of the main one."""
    problem = Problem.of(row, 2 * row.tile_m + 24, row.tile_n + 8, group=2, dlse=0.5)
    found, kernels = gradients(problem, wanted)
    assert [kernel.split("_bf16")[0] for kernel in kernels] == [
        "backward_prepare", "backward", *["backward_finish"] * ("q" in wanted)
    ]  # fmt: skip
    assert kernels[1].endswith(f"_only_{wanted}")
    q, k, v, do = problem.inputs()
    dlse = torch.full((1, q.shape[2], problem.seqlen_q), problem.dlse)
    exact = dict(zip(ALL, reference.gradients(do, q, k, v, causal=problem.causal, dlse=dlse), strict=True))
    for letter, got in found.items():
        want = exact[letter]
        assert got.shape == want.shape and got.is_contiguous()
        error = ((got.double() - want).norm() / want.norm()).item()
        assert error < LARGEST_ERROR[DTYPES[problem.dtype]], f"d{letter}: {error:.2e}"


@pytest.mark.parametrize("wanted", ["q", "qv"])
@pytest.mark.parametrize("row", [ROWS[1], ROWS[3]], ids=name)
def test_deterministic_dq_alone(row: BackwardConfig, wanted: Wanted) -> None:
    """The same bits whoever comes first."""
    problem = Problem.of(row, 2 * row.tile_m, 2 * row.tile_n + 8, deterministic=True)
    first, kernels = gradients(problem, wanted, sms=3)
    assert "_ordered_only_" in kernels[1]
    again, _ = gradients(problem, wanted, seed=1, sms=2)
    assert all(torch.equal(first[letter], again[letter]) for letter in wanted)


def test_without_dq_there_is_no_order_to_keep() -> None:
    """One kernel serves both: dK and dV are sums of one CTA."""
    problem = Problem(40, 70, 64, 64, False)
    _, kernels = gradients(problem, "kv")
    _, ordered = gradients(Problem(40, 70, 64, 64, False, deterministic=True), "kv")
    assert kernels == ordered


def test_a_memory_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dQ no fp32 sums are allocated."""
    from fa3.emulator import backend

    allocated = []
    poisoned = backend._poisoned

    def watched(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        allocated.append(tuple(shape))
        return poisoned(shape, strides, dtype)

    monkeypatch.setattr(backend, "_poisoned", watched)
    gradients(Problem(40, 70, 64, 64, False), "v")
    assert allocated == [(1, 40, 1, 64), (1, 1, 40), (1, 1, 128), (1, 1, 128), (1, 70, 1, 64)]


@pytest.mark.parametrize("wanted", ["q", "kv"])
def test_compiled_by_torch(wanted: Wanted) -> None:
    """Under torch.compile the graph's backward asks for the same gradients."""
    torch._dynamo.reset()
    problem = Problem(40, 70, 64, 64, True)
    *inputs, do = problem.inputs()
    for tensor, letter in zip(inputs, ALL, strict=True):
        tensor.requires_grad_(letter in wanted)
    f = torch.compile(lambda *t: fa3.flash_attn_func(*t, causal=True) * 1.0, fullgraph=True, backend="aot_eager")
    with fa3.emulate() as emulation:
        f(*inputs).backward(do)
    assert f"_only_{wanted}" in emulation.runs[2].kernel
    for tensor, letter, want in zip(
        inputs, ALL, reference.gradients(do, *problem.inputs()[:3], causal=True), strict=True
    ):
        assert (tensor.grad is not None) == (letter in wanted)
        if tensor.grad is not None:
            assert ((tensor.grad.double() - want).norm() / want.norm()).item() < 4e-3
