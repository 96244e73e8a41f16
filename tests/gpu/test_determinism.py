"""The same call gives the same bits, whatever else has run and however often."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.gpu.cases import Case
from tests.gpu.checking import call

REPEATS = 20


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("widths", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_repeated_runs_are_bit_identical(device, widths, causal, dtype):
    """The dynamic scheduler hands tiles out in another order each time; that must not reach the numbers."""
    case = Case(1000, 1100, *widths, batch=2, heads_kv=8, group=2, causal=causal, dtype=dtype)
    inputs = case.inputs(device)
    first = call(*inputs, None, causal)
    for _ in range(REPEATS):
        again = call(*inputs, None, causal)
        assert torch.equal(again[0], first[0])
        assert torch.equal(again[1], first[1])


def test_a_batch_does_not_depend_on_its_neighbours(device):
    q, k, v = Case(500, 700, 128, 128, batch=8, heads_kv=4, group=2).inputs(device)
    out, lse = call(q, k, v, None, True)
    for at in range(8):
        one = slice(at, at + 1)
        alone = call(q[one], k[one], v[one], None, True)
        assert torch.equal(alone[0], out[one])
        assert torch.equal(alone[1], lse[one])


def test_many_small_calls_in_a_row(device):
    """More launches than there are counters to share, none of them waited for."""
    q, k, v = Case(70, 90, 64, 64, heads_kv=2).inputs(device)
    expected = call(q, k, v)
    results = [call(q, k, v) for _ in range(500)]
    for _ in range(40_000):
        last = call(q, k, v)
    for out, lse in [*results, last]:
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])


def test_calls_of_all_kinds_in_turn_do_not_disturb_each_other(device):
    kinds = [
        Case(s, s, d, d, batch=2, heads_kv=2, causal=causal, dtype=dtype, scale=scale)
        for (s, d), causal, dtype, scale in itertools.product(
            [(100, 64), (300, 128), (257, 256)], (False, True), ("bf16", "fp16"), (None, -0.2)
        )
    ]
    inputs = [case.inputs(device) for case in kinds]
    first = [call(*x, case.scale, case.causal) for case, x in zip(kinds, inputs, strict=True)]
    for _ in range(3):
        again = [call(*x, case.scale, case.causal) for case, x in zip(kinds, inputs, strict=True)]
        assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(again, first, strict=True))
