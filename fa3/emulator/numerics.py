"""Floating-point instructions that numpy does not have: conversions, approximations, the fused multiply-add.

All functions take arrays of any shape, so that a run of equal instructions is one call. They do not silence numpy's
warnings, which the machine switches off once for a whole run (`np.errstate(all="ignore")`).

Sources: PTX ISA, "cvt", "ex2", "lg2", "rcp", "fma", "prmt"; OCP 8-bit Floating Point Specification (e4m3, e5m2).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Halves = NDArray[np.uint16]
Words = NDArray[np.uint32]

NAN_16 = 0x7FFF
"""What `cvt` makes of any NaN, in f16 and bf16."""

SMALLEST_NORMAL = np.float32(2.0**-126)


# ------------------------------------------------------------------------------------------------ to 16 bits
def bf16x2(high: Any, low: Any) -> Words:
    """`cvt.rn.bf16x2.f32`: two fp32 to nearest-even bf16, `high` in bits 31:16. NaN becomes 0x7fff."""
    pair = _pair(high, low)
    bits = pair.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    if _has_nan(pair):
        rounded[np.isnan(pair)] = NAN_16 << 16
    return _join(rounded.view(np.uint16)[..., 1::2])


def f16x2(high: Any, low: Any) -> Words:
    """`cvt.rn.f16x2.f32`: two fp32 to nearest-even f16, `high` in bits 31:16. NaN becomes 0x7fff."""
    pair = _pair(high, low)
    rounded = pair.astype(np.float16).view(np.uint16)
    if _has_nan(pair):
        rounded[np.isnan(pair)] = NAN_16
    return _join(rounded)


def bf16(value: Any) -> Halves:
    """`cvt.rn.bf16.f32`."""
    return (bf16x2(value, value) & 0xFFFF).astype(np.uint16)


def f16(value: Any) -> Halves:
    """`cvt.rn.f16.f32`."""
    return (f16x2(value, value) & 0xFFFF).astype(np.uint16)


def _pair(high: Any, low: Any, dtype: type = np.float32) -> NDArray[Any]:
    """(..., 2): low, high, as they lie in a little-endian word."""
    high, low = np.asarray(high, dtype), np.asarray(low, dtype)
    shape = high.shape if high.shape == low.shape else np.broadcast_shapes(high.shape, low.shape)
    pair = np.empty((*shape, 2), dtype)
    pair[..., 0] = low
    pair[..., 1] = high
    return pair


def _has_nan(values: Floats) -> bool:
    """One call where `isnan` and `any` are two: the maximum of numbers with a NaN among them is NaN."""
    largest = np.maximum.reduce(values, axis=None)
    return bool(largest != largest)


def _join(halves: Halves) -> Words:
    """(..., 2) halves, low first -> words."""
    words: Words = np.ascontiguousarray(halves).view(np.uint32)[..., 0]
    return words


# ------------------------------------------------------------------------------------------------ to 8 bits
def e4m3x2(high: Any, low: Any) -> Halves:
    """`cvt.rn.satfinite.e4m3x2.f32`: to nearest-even, at most +-448 (infinities too); NaN becomes 0x7f."""
    return _join_bytes(_narrow(_pair(high, low), _encode_e4m3()))


def e5m2x2(high: Any, low: Any) -> Halves:
    """`cvt.rn.satfinite.e5m2x2.f32`: to nearest-even, at most +-57344 (infinities too); NaN becomes 0x7f."""
    return _join_bytes(_narrow(_pair(high, low), _encode_e5m2()))


def _join_bytes(pair: Bytes) -> Halves:
    halves: Halves = pair.view(np.uint16)[..., 0]
    return halves


def _narrow(values: Floats, table: Bytes) -> Bytes:
    """Looks 8-bit codes up by the upper half of each value, whose last bit also says that something was cut off.

    That is rounding to odd, to 8 significant bits; a second rounding, to 4 bits or fewer, then comes out as if it were
    the only one.
    """
    bits = values.view(np.uint32)
    index = bits >> 16
    index |= (bits & 0xFFFF) != 0
    return table[index]


@cache
def _encode_e4m3() -> Bytes:
    return _encoding(_decode_e4m3(), largest=0x7E)


@cache
def _encode_e5m2() -> Bytes:
    return _encoding(_decode_e5m2(), largest=0x7B)


def _encoding(decode: Floats, largest: int) -> Bytes:
    """The code of every number with 16 bits of fp32. `largest` is the code of the greatest finite value."""
    values = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
    finite = decode[: largest + 1].astype(np.float64)
    middles = (finite[1:] + finite[:-1]) / 2
    sizes = np.minimum(np.abs(values), finite[-1])
    codes = np.searchsorted(middles, sizes)  # a tie goes to the smaller neighbour here
    ties = sizes == middles[np.minimum(codes, largest - 1)]
    codes += ties & (codes % 2 == 1)
    codes |= np.signbit(values).astype(np.int64) << 7
    codes[np.isnan(values)] = 0x7F
    return codes.astype(np.uint8)


# ------------------------------------------------------------------------------------------------ to fp32
def widen_bf16(halves: Halves) -> Floats:
    """bf16 codes -> fp32."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


def widen_f16(halves: Halves) -> Floats:
    """f16 codes -> fp32."""
    return halves.view(np.float16).astype(np.float32)


def widen_e4m3(codes: Bytes) -> Floats:
    """e4m3 codes -> fp32. There is no infinity; 0x7f and 0xff are NaN."""
    return _decode_e4m3()[codes]


def widen_e5m2(codes: Bytes) -> Floats:
    """e5m2 codes -> fp32."""
    return _decode_e5m2()[codes]


def widen_tf32(words: Words) -> Floats:
    """What the tensor cores use of an fp32 operand: the last 13 bits are cut off."""
    return (words & 0xFFFFE000).view(np.float32)


@cache
def _decode_e4m3() -> Floats:
    table = _decoding(exponent_bits=4, fraction_bits=3, bias=7)
    table[[0x7F, 0xFF]] = np.nan
    return table


@cache
def _decode_e5m2() -> Floats:
    table = _decoding(exponent_bits=5, fraction_bits=2, bias=15)
    table[[0x7C, 0xFC]] = np.inf, -np.inf
    table[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    return table


def _decoding(exponent_bits: int, fraction_bits: int, bias: int) -> Floats:
    """The value of every 8-bit code as if there were no special ones."""
    code = np.arange(256)
    exponent = (code >> fraction_bits) & ((1 << exponent_bits) - 1)
    fraction = (code & ((1 << fraction_bits) - 1)) / (1 << fraction_bits)
    size = np.ldexp(fraction + (exponent > 0), np.maximum(exponent, 1) - bias)
    return np.where(code & 0x80, -size, size).astype(np.float32)


# ------------------------------------------------------------------------------------------------ arithmetic
def ex2_ftz(value: Any) -> Floats:
    """`ex2.approx.ftz.f32`, here rounded to nearest: 2^value. Results below 2^-126 are 0."""
    value = np.asarray(value, np.float32)
    power = np.asarray(np.exp2(value.astype(np.float64)).astype(np.float32))
    np.copyto(power, 0, where=value < -126)
    return power


def lg2_ftz(value: Any) -> Floats:
    """`lg2.approx.ftz.f32`, here rounded to nearest: -inf for 0 and subnormal numbers, NaN below."""
    return np.log2(flush(np.asarray(value, np.float32)).astype(np.float64)).astype(np.float32)


def rcp_ftz(value: Any) -> Floats:
    """`rcp.approx.ftz.f32`, here rounded to nearest. Subnormal operands count as 0, subnormal results become 0."""
    return flush(np.reciprocal(flush(np.asarray(value, np.float32))))


def flush(value: Floats) -> Floats:
    """`.ftz`: subnormal numbers become zeros of their sign."""
    return value * (np.abs(value) >= SMALLEST_NORMAL)


def fma(a: Any, b: Any, c: Any) -> Floats:
    """`fma.rn.f32`: a b + c, rounded once.

    The product is exact in fp64. The sum is rounded to odd there (an inexact sum gets an odd last bit), so that
    rounding it again, to fp32, is the only rounding that counts (Boldo and Melquiond, 2008).
    """
    product = np.multiply(a, b, dtype=np.float64)
    addend = np.asarray(c, np.float64)
    total = np.asarray(product + addend)
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    bits = total.view(np.int64)
    even_and_inexact = (error != 0) & (bits & 1 == 0) & np.isfinite(total) & np.isfinite(error)
    away = (error > 0) == (total > 0)
    bits += np.where(even_and_inexact, np.where(away, 1, -1), 0)
    return total.astype(np.float32)


def prmt(a: Any, b: Any, selector: Any) -> Words:
    """`prmt.b32` in its default mode: of the eight bytes of b:a, each 4-bit field of `selector` picks one.

    Bit 3 of a field asks for eight copies of the byte's sign bit in place of the byte.
    """
    both = _pair(b, a, np.uint32).view(np.uint8)
    fields = (np.asarray(selector, np.uint32)[..., None] >> _FIELDS) & 0xF
    if fields.ndim == 1:  # one selector for all, as compilers write it
        picked = both[..., fields & 7]
    else:
        shape = np.broadcast_shapes(both.shape[:-1], fields.shape[:-1])
        both, fields = np.broadcast_to(both, (*shape, 8)), np.broadcast_to(fields, (*shape, 4))
        picked = np.take_along_axis(both, (fields & 7).astype(np.intp), axis=-1)
    if (fields > 7).any():
        picked = np.where(fields > 7, (picked >> 7) * np.uint8(0xFF), picked)
    words: Words = np.ascontiguousarray(picked).view(np.uint32)[..., 0]
    return words


_FIELDS = np.arange(0, 16, 4, dtype=np.uint32)
