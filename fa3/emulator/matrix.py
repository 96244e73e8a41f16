"""`ldmatrix` and `stmatrix`: 8x8 matrices of 16-bit elements between shared memory and the registers of a warp.

Lane 8 i + r gives the address of row r of matrix i. Register i of lane l holds elements 2 (l % 4) and 2 (l % 4) + 1 of
row l // 4 of matrix i; with `.trans`, of column l // 4. Source: PTX ISA, "ldmatrix" and "stmatrix".
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa3.emulator.memory import Shared

Words = NDArray[np.uint32]

ROWS = 8
ROW_BYTES = 16
LANES = 32


def load_matrices(shared: Shared, addresses: NDArray[Any], count: int, transpose: bool) -> Words:
    """`ldmatrix.x<count>`: (32,) addresses, of which the first 8 count are used -> (count, 32) registers.

    Fault("misaligned") if a row is not on a multiple of 16 bytes, Fault("out of bounds").
    """
    rows = shared.gather(addresses[: ROWS * count], ROW_BYTES)
    return (_transposed(rows) if transpose else rows).view(np.uint32).reshape(count, LANES)


def store_matrices(shared: Shared, addresses: NDArray[Any], values: Words, transpose: bool) -> None:
    """`stmatrix.x<count>`: (count, 32) registers to the rows at the first 8 count of (32,) addresses. Same faults."""
    rows = np.ascontiguousarray(values).view(np.uint8).reshape(-1, ROW_BYTES)
    shared.scatter(addresses[: len(rows)], _transposed(rows) if transpose else rows)


def _transposed(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(8 count, 16) bytes: each matrix of 8x8 halves with rows and columns exchanged."""
    matrices = rows.view(np.uint16).reshape(-1, ROWS, ROWS)
    return np.ascontiguousarray(matrices.transpose(0, 2, 1)).view(np.uint8).reshape(-1, ROW_BYTES)
