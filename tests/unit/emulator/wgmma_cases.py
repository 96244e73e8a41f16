"""Operands of WGMMA placed by the maps of `fa3.layouts`: in shared memory by its layouts, in registers by fragments."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from fa3.emulator.memory import Shared
from fa3.layouts import fragments
from fa3.layouts.smem import SharedLayout

TORCH = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SIZE = {"bf16": 2, "f16": 2, "e4m3": 1, "e5m2": 1}


# ------------------------------------------------------------------------------------------------ shared memory
@lru_cache(maxsize=64)
def addresses_of(layout: SharedLayout) -> np.ndarray:
    """(rows, columns): the byte address of each element of stage 0. A layout is a sum over its modes, so that a row
    and a column of it are enough; `SharedLayout.byte` is this function for one element."""
    rows, columns = layout.outer[0].size, layout.outer[1].size
    down = np.array([layout.outer(row, 0, 0) for row in range(rows)])
    across = np.array([layout.outer(0, column, 0) for column in range(columns)])
    addresses = layout.swizzle((down[:, None] + across) * (layout.element_bits // 8))
    assert addresses[-1, -1] == layout.byte(rows - 1, columns - 1)
    return addresses


def descriptor(layout: SharedLayout, base: int, k0: int, is_mn_major: bool) -> int:
    """The 64-bit descriptor of the k-block that begins at column k0, its offsets measured on the layout."""
    item = layout.element_bits // 8
    width = layout.line // item
    rows, columns = layout.outer[0].size, layout.outer[1].size

    def step(row: int, column: int) -> int:
        """Bytes to an element before the swizzle; any number where the tile has no such element."""
        inside = row < rows and column < columns
        return layout.outer(row, column, 0) * item if inside else 0x2000

    if is_mn_major:
        cores, along = step(0, 8), step(width, 0)
        leading, stride = (along, cores) if layout.line > 16 else (cores, along)
    else:
        leading, stride = (16 if layout.line > 16 else step(0, width)), step(8, 0)
    swizzle = {16: 0, 128: 1, 64: 2, 32: 3}[layout.line]
    start = base + layout.outer(0, k0, 0) * item
    return start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | swizzle << 62


def put(shared: Shared, layout: SharedLayout, base: int, values: np.ndarray, kind: str) -> None:
    """Writes a tile element by element."""
    codes = torch.from_numpy(values.astype(np.float32)).to(TORCH[kind]).view(torch.uint8).numpy()
    codes = codes.reshape(*values.shape, SIZE[kind])
    shared.write_at(base + addresses_of(layout)[..., None] + np.arange(SIZE[kind]), codes)


# ------------------------------------------------------------------------------------------------ fragments
def fragment_of(layout, quarter: int) -> np.ndarray:
    """(registers, lanes) -> row + 64 column, for one warp of a warpgroup."""
    lanes = np.array([layout(32 * quarter + lane, 0) for lane in range(32)])
    registers = np.array([layout(0, register) for register in range(layout.size // 128)])
    return registers[:, None] + lanes


@lru_cache(maxsize=64)
def accumulator_of(n: int, quarter: int) -> np.ndarray:
    return fragment_of(fragments.accumulator(n), quarter)


def a_registers_of(values: np.ndarray, kind: str, quarter: int) -> np.ndarray:
    """(64, k) -> (k bytes / 8, 32) registers of the A operand."""
    a_operand = fragments.a_operand_16 if SIZE[kind] == 2 else fragments.a_operand_8
    where = fragment_of(a_operand(values.shape[1]), quarter)
    elements = values.T.reshape(-1)[where].astype(np.float32)  # (elements, lanes)
    codes = torch.from_numpy(elements.T.copy()).to(TORCH[kind]).view(torch.uint8).numpy()
    return np.ascontiguousarray(codes.reshape(32, -1).view(np.uint32).T)
