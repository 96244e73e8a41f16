"""Bulk copies without a descriptor: a contiguous range, the same on both sides.

Source: PTX ISA, "cp.async.bulk" and "cp.reduce.async.bulk": addresses and size are multiples of 16 bytes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fa3.emulator.faults import Fault
from fa3.emulator.memory import Global, Shared
from fa3.emulator.reductions import combine

ALIGNMENT = 16


def load(memory: Global, source: int, nbytes: int) -> NDArray[np.uint8]:
    """Reads a range of global memory. Fault("out of bounds" or "misaligned")."""
    _check("global", source, nbytes)
    return _window(memory, source, nbytes, write=False).copy()


def store(memory: Global, target: int, data: NDArray[np.uint8], reduce: str | None = None, dtype: str = "") -> None:
    """Writes a range of global memory, or combines it with what is there: reduce="add", dtype="f32".

    Fault("out of bounds", "misaligned" or "read only").
    """
    _check("global", target, len(data))
    view = _window(memory, target, len(data), write=True)
    view[:] = data if reduce is None else combine(reduce, dtype, view, data)


def to_shared(shared: Shared, address: int, data: NDArray[np.uint8]) -> None:
    """Writes a range of shared memory. Fault("out of bounds" or "misaligned")."""
    _check("shared", address, len(data))
    shared.require(address, address + len(data), "bulk copy")
    shared.bytes[address : address + len(data)] = data
    shared.touch(address, address + len(data))


def from_shared(shared: Shared, address: int, nbytes: int) -> NDArray[np.uint8]:
    """Reads a range of shared memory. Fault("out of bounds" or "misaligned")."""
    _check("shared", address, nbytes)
    shared.require(address, address + nbytes, "bulk copy")
    return shared.bytes[address : address + nbytes].copy()


def _window(memory: Global, lo: int, nbytes: int, write: bool) -> NDArray[np.uint8]:
    base, whole = memory.window(lo, lo + nbytes, write)
    return whole[lo - base : lo - base + nbytes]


def _check(space: str, address: int, nbytes: int) -> None:
    if address % ALIGNMENT or nbytes % ALIGNMENT or nbytes < 0:
        raise Fault(
            "misaligned", f"a bulk copy of {nbytes} bytes at {space} address {address:#x}: both must be multiples of 16"
        )
