"""Conversions against torch's casts and exact rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fa3.emulator import numerics

SPECIAL = (
    0x00000000, 0x80000000, 0x3F800000, 0x7F800000, 0xFF800000,  # 0, -0, 1, inf, -inf
    0x7FC00000, 0xFFFFFFFF, 0x7F800001, 0xFF800001,  # NaN, also with its only bit at the far end
    0x00000001, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF,  # subnormal, the smallest normal, the largest
    0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF,  # ties of bf16 to both sides, and beside them
    0x3F801000, 0x3F803000, 0x477FF000, 0x477FEFFF, 0x33000000, 0x33000001, 0x33800000,  # the same for f16
    0x3F880000, 0x3F980000, 0x43E80000, 0x43E80001, 0x3A800000, 0x3A800001,  # the same for e4m3
    0x3F900000, 0x3FB00000, 0x47700000, 0x37000000, 0x37000001,  # and for e5m2
)  # fmt: skip
BITS = st.one_of(st.sampled_from(SPECIAL), st.integers(0, 2**32 - 1))
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, max_side=5)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.fixture(autouse=True)
def quiet():
    with np.errstate(all="ignore"):
        yield


@st.composite
def operands(draw, count=2):
    """fp32 arrays of one shape, with the bits that conversions stumble over."""
    arrays = hnp.arrays(np.uint32, draw(SHAPES), elements=BITS)
    return [draw(arrays).view(np.float32) for _ in range(count)]


def cast(values, dtype, largest=None):
    """torch's cast as codes; `largest` is where a saturating one ends. Any NaN is 0x7f..f."""
    values = np.asarray(values, np.float32)
    source = torch.from_numpy(values.reshape(-1).copy())
    if largest is not None:
        source = source.clamp(-largest, largest)
    size = torch.empty(0, dtype=dtype).element_size()
    codes = source.to(dtype).view(torch.uint8).numpy().view(f"u{size}").reshape(values.shape).copy()
    codes[np.isnan(values)] = 0x7FFF if size == 2 else 0x7F
    return codes


PACKED = [
    (numerics.bf16x2, torch.bfloat16, None, 16),
    (numerics.f16x2, torch.float16, None, 16),
    (numerics.e4m3x2, torch.float8_e4m3fn, 448.0, 8),
    (numerics.e5m2x2, torch.float8_e5m2, 57344.0, 8),
]
IDS = ["bf16", "f16", "e4m3", "e5m2"]


@pytest.mark.parametrize(("convert", "dtype", "largest", "bits"), PACKED, ids=IDS)
@given(operands())
def test_packed_conversions_are_torchs(convert, dtype, largest, bits, pair):
    high, low = pair
    packed = convert(high, low)
    assert packed.dtype == {16: np.uint32, 8: np.uint16}[bits] and packed.shape == high.shape
    assert np.array_equal(packed >> bits, cast(high, dtype, largest))
    assert np.array_equal(packed & ((1 << bits) - 1), cast(low, dtype, largest))


@pytest.mark.parametrize(("convert", "dtype", "largest", "bits"), PACKED, ids=IDS)
def test_every_tie_and_its_neighbours(convert, dtype, largest, bits):
    """All numbers halfway between two codes, and the next fp32 on both sides of each."""
    codes = torch.arange(1 << (bits - 1), dtype=torch.int32).to(torch.int16 if bits == 16 else torch.uint8)
    exact = codes.view(dtype).float().numpy().astype(np.float64)
    exact = exact[np.isfinite(exact)]
    ties = ((exact[1:] + exact[:-1]) / 2).astype(np.float32)
    near = np.concatenate([ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(0))])
    assert np.array_equal(convert(near, -near) >> bits, cast(near, dtype, largest))
    assert np.array_equal(convert(near, -near) & ((1 << bits) - 1), cast(-near, dtype, largest))


@given(operands())
def test_single_conversions(pair):
    assert np.array_equal(numerics.bf16(pair[0]), cast(pair[0], torch.bfloat16))
    assert np.array_equal(numerics.f16(pair[0]), cast(pair[0], torch.float16))


def test_operands_broadcast_and_may_be_numbers():
    high = np.array([[1.0], [2.0]], np.float32)
    assert numerics.bf16x2(high, np.float32(0.5)).tolist() == [[0x3F803F00], [0x40003F00]]
    assert numerics.f16x2(1.0, 2.0) == 0x3C004000


@pytest.mark.parametrize(
    ("widen", "dtype", "codes"),
    [
        (numerics.widen_bf16, torch.bfloat16, np.arange(1 << 16, dtype=np.uint16)),
        (numerics.widen_f16, torch.float16, np.arange(1 << 16, dtype=np.uint16)),
        (numerics.widen_e4m3, torch.float8_e4m3fn, np.arange(256, dtype=np.uint8)),
        (numerics.widen_e5m2, torch.float8_e5m2, np.arange(256, dtype=np.uint8)),
    ],
    ids=IDS,
)
def test_every_code_widens_as_torch_does(widen, dtype, codes):
    expected = torch.from_numpy(codes.view(f"i{codes.itemsize}")).view(dtype).float().numpy()
    wide = widen(codes)
    assert wide.dtype == np.float32
    assert np.array_equal(wide, expected, equal_nan=True)
    assert np.array_equal(np.signbit(wide)[expected == 0], np.signbit(expected)[expected == 0])


def test_tf32_loses_thirteen_bits():
    words = np.array([0x3F800000, 0x3F801FFF, 0xBF803FFF], np.uint32)
    assert numerics.widen_tf32(words).view(np.uint32).tolist() == [0x3F800000, 0x3F800000, 0xBF802000]


# ------------------------------------------------------------------------------------------------ approximations
def flushed(value):
    """One number, subnormal ones as zero."""
    value = np.float32(value)
    return np.float32(np.copysign(0, value)) if abs(value) < 2.0**-126 else value


@given(operands(1))
def test_reciprocals_are_rounded_once_and_flushed(operand):
    for x, y in zip(operand[0].reshape(-1), np.asarray(numerics.rcp_ftz(operand[0])).reshape(-1), strict=True):
        expected = flushed(np.float32(1 / np.float64(flushed(x))))
        assert np.array_equal(y, expected, equal_nan=True) and (np.isnan(y) or np.signbit(y) == np.signbit(expected))


JUST_BELOW = float(np.nextafter(np.float32(-126), np.float32(-127)))


@example(-126.0)
@example(JUST_BELOW)
@example(-126.5)
@given(st.one_of(st.floats(-160, 140, width=32), BITS.map(lambda b: float(np.uint32(b).view(np.float32)))))
def test_powers_of_two(x):
    y = numerics.ex2_ftz(np.array([x], np.float32))[0]
    if np.isnan(x):
        assert np.isnan(y)
    elif x < -126:
        assert y == 0
    else:
        exact = 2.0**x if x < 200 else np.inf
        assert y == np.float32(exact) or abs(float(y) - exact) <= 2.0**-23 * exact


@given(st.one_of(st.floats(0, width=32), BITS.map(lambda b: float(np.uint32(b).view(np.float32)))))
def test_logarithms(x):
    y = numerics.lg2_ftz(np.array([x], np.float32))[0]
    x = float(flushed(x))
    if np.isnan(x) or x < 0:
        assert np.isnan(y)
    else:
        expected = -np.inf if x == 0 else np.log2(x)
        assert y == np.float32(expected)


# ------------------------------------------------------------------------------------------------ fma
def nearest(exact: Fraction) -> np.float32:
    """The fp32 nearest to a rational number, ties to even: the best of the neighbours of a first guess."""
    guess = np.float32(float(exact))
    if not np.isfinite(guess):
        guess = np.float32(np.copysign(np.finfo(np.float32).max, guess))
    around = [np.nextafter(guess, np.float32(side)) for side in (-np.inf, np.inf)]
    candidates = [c for c in (guess, *around) if np.isfinite(c)]
    distance = {c: abs(Fraction(float(c)) - exact) for c in candidates}
    return min(candidates, key=lambda c: (distance[c], int(c.view(np.uint32)) & 1))


@given(FINITE, FINITE, FINITE)
def test_fma_is_rounded_once(a, b, c):
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    got = numerics.fma(*(np.array([x], np.float32) for x in (a, b, c)))[0]
    if abs(exact) >= Fraction(2) ** 128 - Fraction(2) ** 103:
        assert got == np.copysign(np.float32(np.inf), np.float32(exact > 0) - np.float32(0.5))
    else:
        assert got == nearest(exact)


@given(
    st.integers(-(2**12), 2**12), st.integers(-(2**12), 2**12), st.integers(-60, 60), st.sampled_from([-1.0, 0.0, 1.0])
)
def test_fma_where_a_second_rounding_shows(i, j, exponent, c):
    """Products close to the middle of two fp32, with something added that fp64 cannot see."""
    a, b = np.float32(1 + i * 2.0**-12), np.float32(1 + j * 2.0**-12)
    small = np.float32(c * 2.0 ** (-70 + exponent // 6))
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(small))
    assert numerics.fma(np.array([a]), np.array([b]), np.array([small]))[0] == nearest(exact)


def test_fma_example_and_special_values():
    a = np.float32(1 + 2.0**-12)  # a * a is the middle of two fp32, and the even one is below it
    assert numerics.fma(a, a, np.float32(0)) == np.float32(1 + 2.0**-11)
    above = np.float32(1 + 2.0**-11 + 2.0**-23)
    assert numerics.fma(a, a, np.float32(2.0**-80)) == above
    assert numerics.fma(a, a, np.float32(0.75 * 2.0**-52)) == above  # the sum in fp64 is odd already, and too large
    inf = np.float32(np.inf)
    assert numerics.fma(inf, np.float32(2), np.float32(1)) == inf and np.isnan(numerics.fma(inf, 1, -inf))


# ------------------------------------------------------------------------------------------------ prmt
def slow_prmt(a, b, selector):
    pool = [a >> 8 * i & 0xFF for i in range(4)] + [b >> 8 * i & 0xFF for i in range(4)]
    result = 0
    for i in range(4):
        field = selector >> 4 * i & 0xF
        byte = pool[field & 7]
        if field & 8:
            byte = 0xFF if byte & 0x80 else 0
        result |= byte << 8 * i
    return result


WORD = st.integers(0, 2**32 - 1)


@given(st.lists(st.tuples(WORD, WORD, WORD), min_size=1, max_size=5))
def test_prmt(rows):
    a, b, selector = np.array(rows, np.uint32).T
    assert numerics.prmt(a, b, selector).tolist() == [slow_prmt(*row) for row in rows]
    assert numerics.prmt(a, b, selector[0]).tolist() == [slow_prmt(x, y, rows[0][2]) for x, y, _ in rows]
