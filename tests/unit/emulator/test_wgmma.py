"""WGMMA against float64 products, with operands and fragments placed by the maps of `fa3.layouts`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa3.config.table import FORWARD
from fa3.emulator import wgmma
from fa3.emulator.faults import Fault
from fa3.emulator.memory import SHARED_BASE, Shared
from fa3.emulator.wgmma import ALL_TYPES, Issue, Mma
from fa3.layouts import fragments
from fa3.layouts.smem import k_major, mn_major
from tests.unit.emulator.wgmma_cases import (
    SIZE,
    a_registers_of,
    accumulator_of,
    addresses_of,
    descriptor,
    fragment_of,
    put,
)


def small_integers(rng, *shape):
    return rng.integers(-4, 5, shape).astype(np.float64)


def product_case(n, k, kind, quarter, in_registers, a_major=k_major, b_major=k_major, accumulate=True):
    """Runs A B + D on small integers, which no order of summation rounds; returns what came out, and what should."""
    rng = np.random.default_rng(n + k)
    a, b, d = small_integers(rng, 64, k), small_integers(rng, n, k), small_integers(rng, 64, n)
    bits, step = 8 * SIZE[kind], 32 // SIZE[kind]
    a_layout, b_layout = a_major(64, k, bits), b_major(n, k, bits)
    shared = Shared(a_layout.bytes + b_layout.bytes + 2048)
    a_base = SHARED_BASE
    b_base = SHARED_BASE + -(-a_layout.bytes // 1024) * 1024
    put(shared, b_layout, b_base, b, kind)
    registers = np.full((n // 2 + k + 8, 32), 0x7FC0DEAD, np.uint32)
    where = accumulator_of(n, quarter)
    registers[3 : 3 + n // 2] = d.T.reshape(-1)[where].astype(np.float32).view(np.uint32)
    first_a = 3 + n // 2
    if in_registers:
        words = a_registers_of(a, kind, quarter)
        registers[first_a : first_a + len(words)] = words
    else:
        put(shared, a_layout, a_base, a, kind)
    issues = []
    for i, k0 in enumerate(range(0, k, step)):
        rows = tuple(range(first_a + 4 * i, first_a + 4 * i + 4)) if in_registers else None
        mma = Mma(n, step, kind, kind, tuple(range(3, 3 + n // 2)), rows, a_major is mn_major, b_major is mn_major)
        a_bits = None if in_registers else descriptor(a_layout, a_base, k0, a_major is mn_major)
        issues.append(Issue(mma, a_bits, descriptor(b_layout, b_base, k0, b_major is mn_major), accumulate or i > 0))
    untouched = np.delete(registers, range(3, 3 + n // 2), axis=0)
    wgmma.execute(issues, shared, registers, quarter)
    assert np.array_equal(np.delete(registers, range(3, 3 + n // 2), axis=0), untouched)
    expected = a @ b.T + (d if accumulate else 0)
    return registers[3 : 3 + n // 2].view(np.float32), expected.T.reshape(-1)[where]


SCORES = sorted({(row.tile_n, row.head_dim) for row in FORWARD})
OUTPUTS = sorted({(row.head_dim_v, row.tile_n) for row in FORWARD})


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize(("n", "k"), SCORES)
def test_scores_of_every_tile(n, k, kind):
    """S = Q K^T: both operands in shared memory, k-major."""
    got, expected = product_case(n, k, kind, quarter=n % 3, in_registers=False, accumulate=False)
    assert np.array_equal(got, expected)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize(("n", "k"), OUTPUTS)
def test_outputs_of_every_tile(n, k, kind):
    """O += P V: P in registers, V mn-major."""
    got, expected = product_case(n, k, kind, quarter=n % 4, in_registers=True, b_major=mn_major)
    assert np.array_equal(got, expected)


@pytest.mark.parametrize("in_registers", [False, True])
@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
@pytest.mark.parametrize(("n", "k"), [(128, 128), (96, 64), (224, 32)])
def test_8_bit_products(n, k, kind, in_registers):
    """Small integers need no more than 13 bits."""
    got, expected = product_case(n, k, kind, quarter=2, in_registers=in_registers)
    assert np.array_equal(got, expected)


@pytest.mark.parametrize("quarter", range(4))
@pytest.mark.parametrize(("a_major", "b_major"), [(k_major, k_major), (mn_major, mn_major), (mn_major, k_major)])
@pytest.mark.parametrize("k", [16, 48, 64])
def test_majors_and_quarters(quarter, a_major, b_major, k):
    for n in (8, 24, 256):
        got, expected = product_case(n, k, "bf16", quarter, False, a_major, b_major)
        assert np.array_equal(got, expected)


def test_tf32_uses_the_upper_bits_of_fp32():
    """Four-byte elements lie as two 16-bit ones do, and a register holds one of them."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((64, 8)).astype(np.float32), rng.standard_normal((16, 8)).astype(np.float32)
    layout = k_major(16, 8, 32)
    shared = Shared(2048)
    shared.write_at(SHARED_BASE + addresses_of(layout)[..., None] + np.arange(4), b.view(np.uint8).reshape(16, 8, 4))
    registers = np.zeros((16, 32), np.uint32)
    for register in range(4):
        for lane in range(32):
            registers[8 + register, lane] = a.view(np.uint32)[
                lane // 4 + 8 * (register & 1), lane % 4 + 4 * (register >> 1)
            ]
    mma = Mma(16, 8, "tf32", "tf32", tuple(range(8)), (8, 9, 10, 11))
    wgmma.execute([Issue(mma, None, descriptor(layout, SHARED_BASE, 0, False), False)], shared, registers, 0)
    cut = [(x.view(np.uint32) & 0xFFFFE000).view(np.float32).astype(np.float64) for x in (a, b)]
    expected = (cut[0] @ cut[1].T).T.reshape(-1)[accumulator_of(16, 0)]
    assert np.allclose(registers[:8].view(np.float32), expected, rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------------------------------------ groups
@st.composite
def groups(draw):
    """Instructions with two sets of accumulators, one of them scattered, in any order, with any signs and flags."""
    sets = [tuple(range(8, 24)), (60, 3, 25, 61, 4, 26, 62, 5, 27, 63, 6, 28, 64, 7, 29, 30)]
    issues = []
    for _ in range(draw(st.integers(1, 6))):
        in_registers = draw(st.booleans())
        rows = tuple(draw(st.permutations(range(40, 56)))[:4]) if in_registers else None
        mma = Mma(32, 16, "f16", "f16", draw(st.sampled_from(sets)), rows, False, draw(st.booleans()),
                  draw(st.booleans()), draw(st.booleans()))  # fmt: skip
        part = draw(st.integers(0, 3))
        issues.append((mma, None if in_registers else part, draw(st.integers(0, 3)), draw(st.booleans())))
    return issues


@settings(max_examples=60)
@given(groups(), st.integers(0, 3), st.booleans())
def test_a_group_is_its_instructions_one_after_the_other(group, quarter, truncated):
    rng = np.random.default_rng(3)
    a, b, b_mn = small_integers(rng, 64, 64), small_integers(rng, 32, 64), small_integers(rng, 32, 64)
    shared = Shared(32 * 1024)
    a_layout, b_layout, mn_layout = k_major(64, 64, 16), k_major(32, 64, 16), mn_major(32, 64, 16)
    bases = SHARED_BASE, SHARED_BASE + 8192, SHARED_BASE + 16384
    for layout, base, values in zip((a_layout, b_layout, mn_layout), bases, (a, b, b_mn), strict=True):
        put(shared, layout, base, values, "f16")
    registers = rng.integers(-4, 5, (72, 32)).astype(np.float32)
    registers = registers.view(np.uint32)
    registers[40:56] = rng.integers(-4, 5, (16, 64)).astype(np.float16).view(np.uint32)
    model = registers.copy()
    issues = []
    for mma, a_part, b_part, accumulate in group:
        b_layout_now, b_base, values = (mn_layout, bases[2], b_mn) if mma.b_mn_major else (b_layout, bases[1], b)
        a_bits = None if a_part is None else descriptor(a_layout, bases[0], 16 * a_part, False)
        issues.append(Issue(mma, a_bits, descriptor(b_layout_now, b_base, 16 * b_part, mma.b_mn_major), accumulate))
        slow_mma(issues[-1], a_part, b_part, a, values, model, quarter)
    wgmma.execute(issues, shared, registers, quarter, ALL_TYPES if truncated else ())
    assert (registers.view(np.float32) == model.view(np.float32)).all()


def slow_mma(issue, a_part, b_part, a, b, registers, quarter):
    """One instruction in float64, on the register matrix of a warp."""
    mma = issue.mma
    if a_part is None:
        where = fragment_of(fragments.a_operand_16(16), quarter)
        elements = registers[list(mma.a_registers)].T.copy().view(np.float16).T  # (elements, lanes)
        a_now = np.zeros((64, 16))
        a_now[where % 64, where // 64] = elements
    else:
        a_now = a[:, 16 * a_part : 16 * a_part + 16]
    product = a_now @ b[:, 16 * b_part : 16 * b_part + 16].T
    sign = -1 if mma.negate_a != mma.negate_b else 1
    where, rows = accumulator_of(mma.n, quarter), list(mma.accumulators)
    old = registers[rows].view(np.float32) if issue.accumulate else 0
    registers[rows] = np.float32(old + sign * product[where % 64, where // 64]).view(np.uint32)


def test_operands_are_read_again_once_they_were_written():
    layout = k_major(64, 64, 16)
    shared = Shared(32 * 1024)
    ones = np.ones((64, 64))
    put(shared, layout, SHARED_BASE, ones, "bf16")
    put(shared, layout, SHARED_BASE + 8192, ones, "bf16")
    mma = Mma(64, 16, "bf16", "bf16", tuple(range(32)), None)
    issue = Issue(mma, *(descriptor(layout, SHARED_BASE + offset, 16, False) for offset in (0, 8192)), False)

    def result(quarter):
        registers = np.zeros((32, 32), np.uint32)
        wgmma.execute([issue], shared, registers, quarter)
        return set(registers.view(np.float32).reshape(-1).tolist())

    assert result(0) == result(3) == {16.0}
    put(shared, layout, SHARED_BASE + 16384, 5 * ones, "bf16")
    assert result(0) == {16.0}
    put(shared, layout, SHARED_BASE + 8192, 2 * ones, "bf16")
    assert result(0) == result(1) == {32.0}
    put(shared, layout, SHARED_BASE, 3 * ones, "bf16")
    assert result(1) == {96.0}


def test_infinities_and_nan_come_through():
    layout = k_major(8, 16, 16)
    shared = Shared(4096)
    b = np.ones((8, 16))
    b[3] = np.inf
    put(shared, layout, SHARED_BASE, b, "bf16")
    registers = np.zeros((8, 32), np.uint32)
    registers[4:8] = 0x3F80BF80  # elements -1 and 1, so that the sum over a row of ones is 0
    mma = Mma(8, 16, "bf16", "bf16", (0, 1, 2, 3), (4, 5, 6, 7))
    for truncated in ((), ALL_TYPES):
        with np.errstate(invalid="ignore"):
            wgmma.execute(
                [Issue(mma, None, descriptor(layout, SHARED_BASE, 0, False), False)], shared, registers, 0, truncated
            )
        columns = accumulator_of(8, 0) // 64
        got = registers[:4].view(np.float32)
        assert np.isnan(got[columns == 3]).all() and (got[columns != 3] == 0).all()


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"n": 12}, "wgmma"),
        ({"n": 264, "accumulators": tuple(range(132))}, "wgmma"),
        ({"k": 32}, "wgmma"),
        ({"a_type": "s8"}, "unsupported"),
        ({"b_type": "e4m3"}, "wgmma"),
        ({"accumulators": tuple(range(31))}, "wgmma"),
        ({"a_registers": (1, 2)}, "wgmma"),
    ],
)
def test_instructions_that_do_not_exist(change, kind):
    right = dict(n=64, k=16, a_type="bf16", b_type="bf16", accumulators=tuple(range(32)), a_registers=None)
    Mma(**right)
    with pytest.raises(Fault) as caught:
        Mma(**{**right, **change})
    assert caught.value.kind == kind
