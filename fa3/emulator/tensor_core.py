"""How Hopper's tensor cores add: in fixed point, truncated, and with 13 bits only for 8-bit operands.

Of one instruction, every product and the accumulator are shifted to the largest exponent among them, cut off behind
`FRACTION_BITS` binary places, and added exactly; the sum is cut off behind `RESULT_BITS`. An exponent is that of the
factors as they stand: 1.5 x 1.5 counts as 2^0. So the accumulator of an 8-bit product itself keeps 13 bits, and long
sums lose what is small.

Measured on an H200: of 256 + 2^-5 and 256 + 2^-6, the second is 256. The rule in full is that of MMA-Sim (P. Xie and
others, arXiv 2511.10909), which its authors found to agree with the hardware to the bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]

FRACTION_BITS = {"e4m3": 13, "e5m2": 13, "bf16": 25, "f16": 25, "tf32": 25}
RESULT_BITS = {"e4m3": 13, "e5m2": 13, "bf16": 23, "f16": 23, "tf32": 23}
_SMALLEST = {"e4m3": -6, "e5m2": -14, "f16": -14, "bf16": -126, "tf32": -126, "f32": -126}
"""Exponent of the smallest normal number, which subnormal ones share."""


def fused_dot_add(a: Matrix, b: Matrix, c: Matrix, a_type: str, b_type: str) -> Matrix:
    """a b + c as one wgmma instruction computes it: fp32 arrays (m, k), (k, n) and (m, n) -> (m, n)."""
    largest = _exponents(a, a_type).T[:, :, None] + _exponents(b, b_type)[:, None, :]
    unit = np.maximum(np.maximum.reduce(largest, axis=0), _exponents(c, "f32")) - FRACTION_BITS[a_type]
    scale = np.ldexp(1.0, -unit.astype(np.int32))
    total = _sum_of_products(a, b, scale, a_type) + np.trunc(c * scale)
    return _cut(total / scale, RESULT_BITS[a_type]).astype(np.float32)


def _sum_of_products(a: Matrix, b: Matrix, scale: NDArray[np.float64], kind: str) -> NDArray[Any]:
    """Of each product in units of 1 / scale, the integer part; their sums. It is exact in fp32 for 8-bit operands: 32
    integers below 2^16. A scale beyond 2^100 then belongs to a sum of zeros."""
    dtype: type[Any] = np.float64
    if FRACTION_BITS[kind] == 13:
        dtype, scale = np.float32, np.minimum(scale, 2.0**100)
    products = a.T.astype(dtype)[:, :, None] * b.astype(dtype)[:, None, :]
    products *= scale.astype(dtype)
    total: NDArray[Any] = np.trunc(products, out=products).sum(axis=0)
    return total


def _exponents(values: Matrix, kind: str) -> NDArray[np.int16]:
    """The power of two of each value; of a zero, one that no other value reaches."""
    exponents = np.maximum(np.frexp(values)[1] - 1, _SMALLEST[kind])
    exponents[values == 0] = -126
    return exponents.astype(np.int16)


def _cut(values: NDArray[Any], bits: int) -> NDArray[Any]:
    """Towards zero, to `bits` binary places of an fp32 significand."""
    last = np.maximum(np.frexp(values)[1] - 1, -126) - bits
    return np.ldexp(np.trunc(np.ldexp(values, -last)), last)
