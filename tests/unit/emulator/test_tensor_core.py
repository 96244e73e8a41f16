"""Sums as the tensor cores make them, against the rule in exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fa3.emulator import wgmma
from fa3.emulator.memory import SHARED_BASE, Shared
from fa3.emulator.tensor_core import fused_dot_add
from fa3.emulator.wgmma import Issue, Mma
from fa3.layouts.smem import k_major
from tests.unit.emulator.wgmma_cases import SIZE, TORCH, a_registers_of, descriptor, put


def test_special_values_in_truncated_sums():
    a, b, c = np.ones((1, 16), np.float32), np.ones((16, 4), np.float32), np.zeros((1, 4), np.float32)
    b[2], c[0, 3] = (np.inf, -np.inf, np.nan, 1), -np.inf
    with np.errstate(invalid="ignore"):
        got = fused_dot_add(a, b, c, "bf16", "bf16")
    assert np.array_equal(got, [[np.inf, -np.inf, np.nan, -np.inf]], equal_nan=True)


def slow_fused(a, b, c, kind):
    """One element of `fused_dot_add` in exact arithmetic, from the rule's words."""
    smallest = {"e4m3": -6, "e5m2": -14, "f16": -14, "bf16": -126}[kind]
    fraction, result = (13, 13) if SIZE[kind] == 1 else (25, 23)

    def exponent(x, least):
        return max(math.frexp(x)[1] - 1, least) if x else -126

    terms = [(Fraction(float(x)) * Fraction(float(y)), exponent(x, smallest) + exponent(y, smallest))
             for x, y in zip(a, b, strict=True)]  # fmt: skip
    terms.append((Fraction(float(c)), exponent(c, -126)))
    unit = Fraction(2) ** (max(e for _, e in terms) - fraction)
    total = sum(math.trunc(value / unit) for value, _ in terms) * unit
    if total == 0:
        return 0.0
    last = Fraction(2) ** (math.frexp(float(total))[1] - 1 - result)
    return float(math.trunc(total / last) * last)


@settings(max_examples=40)
@given(st.sampled_from(["e4m3", "e5m2", "f16", "bf16"]), st.integers(0, 2**31), st.integers(-30, 30), st.booleans())
def test_truncated_sums(kind, seed, exponent, subnormal):
    rng = np.random.default_rng(seed)
    k = 32 // SIZE[kind]
    if subnormal:  # then the accumulator is about as small
        exponent = {"e4m3": -14, "e5m2": -30, "f16": -30, "bf16": -36}[kind] - abs(exponent) // 3

    def draw(*shape):
        values = rng.standard_normal(shape) * 2.0 ** rng.integers(-8, 5, shape) * (rng.random(shape) < 0.8)
        if subnormal:  # or zero, nearly all of them
            values *= {"e4m3": 2.0**-13, "e5m2": 2.0**-21, "f16": 2.0**-22, "bf16": 2.0**-20}[kind]
        return torch.from_numpy(values).to(TORCH[kind]).float().numpy()

    a, b = draw(3, k), draw(k, 4)
    c = (rng.standard_normal((3, 4)) * 2.0**exponent * rng.integers(0, 2, (3, 4))).astype(np.float32)
    got = fused_dot_add(a, b, c, kind, kind)
    expected = [[slow_fused(a[i], b[:, j], c[i, j], kind) for j in range(4)] for i in range(3)]
    assert np.array_equal(got, expected)


def test_an_8_bit_sum_keeps_13_bits_below_its_largest_term():
    """As measured on an H200, in one k-step: 256 + 2^-5 survives, 256 + 2^-6 is 256."""
    a, b, zero = np.zeros((1, 32), np.float32), np.zeros((32, 1), np.float32), np.zeros((1, 1), np.float32)
    a[0, :2], b[:2, 0] = (16, 2.0**-3), (16, 2.0**-2)
    assert fused_dot_add(a, b, zero, "e4m3", "e4m3") == 256 + 2.0**-5
    a[0, 1] = 2.0**-4
    assert fused_dot_add(a, b, zero, "e4m3", "e4m3") == 256
    assert fused_dot_add(a, b, zero, "f16", "f16") == 256 + 2.0**-6


def test_the_switch_to_plain_fp32():
    layout = k_major(8, 32, 8)
    shared = Shared(4096)
    b = np.full((8, 32), 2.0**-6)
    b[:, 0] = 16
    put(shared, layout, SHARED_BASE, b, "e4m3")
    a = np.ones((64, 32))
    a[:, 0] = 16
    mma = Mma(8, 32, "e4m3", "e4m3", (0, 1, 2, 3), (4, 5, 6, 7))
    issue = Issue(mma, None, descriptor(layout, SHARED_BASE, 0, False), False)
    results = []
    for options in ((), ((),)):
        registers = np.zeros((8, 32), np.uint32)
        registers[4:] = a_registers_of(a, "e4m3", 0)
        wgmma.execute([issue], shared, registers, 0, *options)
        results.append(set(registers[:4].view(np.float32).reshape(-1).tolist()))
    assert results == [{256.0}, {256.0 + 31 * 2.0**-6}]
