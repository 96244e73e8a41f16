"""Small problems that make a forward kernel do all that it can do.

deep      one tile of all rows: the rings of two stages go around several times
wide      several tiles in one CTA, with odd numbers of key blocks; one row in the last, so that warpgroups have none
edge      tiles of two key blocks, fewer columns than the kernel is padded to; under a causal mask a tile of rows that
          see no key
sections  heads in two sections of different size, under a causal mask
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from fa3 import reference
from fa3.config.types import ROWS_OF_WARPGROUP, KernelKey
from fa3.emulator.backend import record
from fa3.emulator.host import Launch
from fa3.emulator.mutate.bounds import COLUMN
from fa3.emulator.mutate.case import DTYPES, SEED, Case, Output

O_TOLERANCE, LSE_TOLERANCE = 2**-5, 2**-12
"""Absolute; o is below 4 and rounded to 16 bits, lse is float32."""


@dataclass(frozen=True)
class Shape:
    """A problem of one batch."""

    name: str
    rows: int
    keys: int
    heads: int = 1
    narrow: bool = False
    """Whether the head dimensions are 8 less than what the kernel is padded to."""
    sections: bool = False
    """Whether the heads are taken in two sections (`fa3.kernels.parts.tiles.TileSpace`), of two heads and of one."""


def shapes(key: KernelKey) -> tuple[Shape, ...]:
    """Their lengths are chosen so that every bound and every mask limit decides somewhere."""
    c = key.config
    m, n = c.tile_m, c.tile_n
    if not c.causal:
        return (
            Shape("deep", rows=m, keys=3 * n + moved_column(n)),
            Shape("wide", rows=m + 1, keys=2 * n + moved_column(n) - 1, heads=2),
            Shape("edge", rows=m + ROWS_OF_WARPGROUP - 8, keys=2 * n - 1, heads=2, narrow=True),
            Shape("short", rows=m + 8, keys=n - 1),
        )
    return (
        Shape("deep", rows=m, keys=_keys_for_the_mask(m, n, 3 * n, m - 1, last=True)),
        Shape("wide", rows=3 * m + 1, keys=_keys_for_the_mask(m, n, 2 * n, m, last=False)),
        Shape("edge", rows=2 * m + ROWS_OF_WARPGROUP - 8, keys=n + 4, narrow=True),
        Shape("sections", rows=m + 8, keys=n + 4, heads=3, sections=True),
    )


def _keys_for_the_mask(m: int, n: int, more_than: int, rows: int, last: bool) -> int:
    """Keys with which `moved_column` decides in rows of both halves of a thread: in the `last` block of a warpgroup, or
    in the one before.

    `rows`: the rows behind the first row of a tile, so that it sees the keys below `keys - rows`. A thread compares its
    limit minus 0, 2, 4 or 6 with the column; with a distance of 4 (mod 16), rows on both sides of a multiple of 8 do.
    """
    column = moved_column(n)
    for keys in range(more_than + 1, more_than + n + 1):
        for first_row in range(0, m, ROWS_OF_WARPGROUP):
            first = (keys - rows + first_row) % n  # limit of the warpgroup's first row, within a block
            in_one_block = 1 <= first <= n - ROWS_OF_WARPGROUP + 1
            if (column - first) % 16 == 4 and first < column <= first + ROWS_OF_WARPGROUP - 8 and in_one_block == last:
                return keys
    return more_than + n // 2 + 1  # none does; a tile that no shipped kernel has


def moved_column(tile_n: int) -> int:
    """The constant of the comparison that `fa3.emulator.mutate.bounds.mask_column` moves."""
    index = int(tile_n // 4 * COLUMN)  # of `tile_n / 4` comparisons: two in eight columns
    return 8 * (index // 2) + index % 2 + 1


@cache
def case(key: KernelKey, shape: Shape) -> Case:
    """One CTA does all of it."""
    random = torch.Generator().manual_seed(SEED)
    c, less = key.config, 8 * shape.narrow

    def tensor(length: int, heads: int, dim: int) -> Tensor:
        return torch.randn(1, length, heads, dim - less, generator=random).to(DTYPES[key.dtype])

    q = tensor(shape.rows, shape.heads, c.head_dim)
    k = tensor(shape.keys, shape.heads, c.head_dim)
    v = tensor(shape.keys, shape.heads, c.head_dim_v)
    scale = (-1 if key.negative_scale else 1) / math.sqrt(c.head_dim)
    o, lse = reference.attention(q, k, v, scale, c.causal)
    run = record(q, k, v, softmax_scale=scale, causal=c.causal, config=c, sms=1)
    if run.key != key:
        raise ValueError(f"{key.name} does not serve {shape}; {run.key.name} does")
    if shape.sections:
        one = record(q[:, :, :1], k[:, :, :1], v[:, :, :1], softmax_scale=scale, causal=c.causal, config=c, sms=1)
        _set_sections(run.launch, one.launch)
    return Case(shape, run, (Output("o", o, O_TOLERANCE), Output("lse", lse, LSE_TOLERANCE)))


BOUNDARY, BOUNDARY_HEAD, SECTIONS = 11, 12, slice(13, 21)
"""Parameters of the kernel: fields of the TileSpace. Each divisor takes two."""


def _set_sections(three: Launch, one: Launch) -> None:
    """Makes the heads of a launch, two tiles each, two sections. Only 32 MiB of keys and values would do it by
    themselves. The host code writes divisors for sections of n and of n + 1 heads; those for one head fit."""
    three.params[SECTIONS] = one.params[SECTIONS]
    three.params[BOUNDARY], three.params[BOUNDARY_HEAD] = (4).to_bytes(4, "little"), (2).to_bytes(4, "little")
