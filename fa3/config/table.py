"""The tuned rows of the forward, and the choice of a row for a problem.

Each row was measured on an H200 against its neighbours (tile sizes, ping-pong, the way O is stored; 2026-11-30, bf16,
1k to 16k tokens); the comments say what decided. `benchmarks/results/` has the measurement of the rows themselves.
"""

from __future__ import annotations

from .types import DType, ForwardConfig, KernelKey

MAX_HEAD_DIM = 256

FORWARD: tuple[ForwardConfig, ...] = (
    # Three warpgroups of 64 rows: 6 to 23 % faster than two at head dim 64. 192 x 144, 160 and 192 spill.
    ForwardConfig(64, 64, causal=False, tile_m=192, tile_n=128),
    ForwardConfig(64, 64, causal=True, tile_m=192, tile_n=128),
    # P stays in registers only up to 192 x 112; 128 x 160 is 6 % slower, 192 x 128 spills.
    ForwardConfig(96, 96, causal=False, tile_m=192, tile_n=112),
    ForwardConfig(96, 96, causal=True, tile_m=128, tile_n=128),
    # tile_n = tile_m leaves one block on the diagonal: 96, 112 and 144 cost 8-13 % under a causal mask. Without one,
    # 160 and 176 are 1 % faster at 16k and 4-8 % slower at 1k, which they do not divide. There ping-pong costs 0-4 %,
    # at head dim 256 0-2 %; with the mask it is within 2 % either way.
    ForwardConfig(128, 128, causal=False, tile_m=128, tile_n=128, turns="free"),
    ForwardConfig(128, 128, causal=True, tile_m=128, tile_n=128),
    ForwardConfig(192, 128, causal=False, tile_m=128, tile_n=112),
    ForwardConfig(192, 128, causal=True, tile_m=128, tile_n=112),
    # 128 x 80 leaves room to stage O: 2 % faster than 128 x 112 without a mask, 4 % slower with a causal one.
    ForwardConfig(192, 192, causal=False, tile_m=128, tile_n=80),
    ForwardConfig(192, 192, causal=True, tile_m=128, tile_n=112, store="direct"),
    # 128 x 80 fills shared memory to the last kilobytes, so O goes straight from registers.
    ForwardConfig(256, 256, causal=False, tile_m=128, tile_n=80, turns="free", store="direct"),
    ForwardConfig(256, 256, causal=True, tile_m=128, tile_n=80, store="direct"),
)
"""Rows in the order in which they are tried: the first that is wide enough wins."""


def forward_config(head_dim: int, head_dim_v: int, causal: bool) -> ForwardConfig:
    """The narrowest row that holds `head_dim` and `head_dim_v` columns.

    Raises ValueError if a dimension is not a multiple of 8 between 8 and 256.
    """
    for name, dim in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if dim % 8 or not 8 <= dim <= MAX_HEAD_DIM:
            raise ValueError(f"{name} is {dim}; it must be a multiple of 8 from 8 to {MAX_HEAD_DIM}")
    for row in FORWARD:
        if row.causal == causal and row.head_dim >= head_dim and row.head_dim_v >= head_dim_v:
            return row
    raise AssertionError("the table has a row of 256 for every mask")


def forward_key(head_dim: int, head_dim_v: int, causal: bool, dtype: DType, negative_scale: bool = False) -> KernelKey:
    """The key of the kernel that runs a problem of these dimensions."""
    return KernelKey(forward_config(head_dim, head_dim_v, causal), dtype, negative_scale)
