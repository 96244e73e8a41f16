"""What `cp.reduce.async.bulk` does to each element: `old` in global memory, `new` from shared memory.

Source: PTX ISA, "cp.reduce.async.bulk" and "cp.reduce.async.bulk.tensor".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa3.emulator import numerics
from fa3.emulator.faults import Fault

Bytes = NDArray[np.uint8]

_INTEGERS: dict[str, type[Any]] = {
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64,
    "b32": np.uint32, "b64": np.uint64,
}  # fmt: skip
_ON_INTEGERS: dict[str, Callable[..., Any]] = {
    "add": np.add, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
_ON_FLOATS: dict[str, Callable[..., Any]] = {"add": np.add, "min": np.fmin, "max": np.fmax}


def combine(operation: str, dtype: str, old: Bytes, new: Bytes) -> Bytes:
    """`old` operation `new`, element by element, of bytes whose last axis is contiguous.

    Sums are rounded to nearest even. fp32 sums flush subnormal operands and results to zero, 16-bit sums do not.
    Fault("unsupported") for an operation that the type does not have, or that is not modelled (inc, dec).
    """
    if dtype in _INTEGERS and operation in _ON_INTEGERS:
        kind = _INTEGERS[dtype]
        return _bytes(_ON_INTEGERS[operation](old.view(kind), new.view(kind)))
    function = _ON_FLOATS.get(operation)
    if function is not None and dtype == "f32":
        flush = numerics.flush if operation == "add" else np.asarray
        return _bytes(flush(function(flush(old.view(np.float32)), flush(new.view(np.float32)))))
    if function is not None and dtype in _SMALL_FLOATS:
        widen, narrow = _SMALL_FLOATS[dtype]
        return _bytes(narrow(function(widen(old.view(np.uint16)), widen(new.view(np.uint16)))))
    raise Fault("unsupported", f"the reduction .{operation} of .{dtype} in global memory")


# An fp32 sum of two 16-bit numbers, rounded again, is the sum rounded once: fp32 has more than twice their bits.
_SMALL_FLOATS = {
    "f16": (numerics.widen_f16, numerics.f16),
    "bf16": (numerics.widen_bf16, numerics.bf16),
}


def _bytes(values: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(values).view(np.uint8)
