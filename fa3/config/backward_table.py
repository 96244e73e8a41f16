"""The rows of the backward, and the choice of a row for a problem."""

from __future__ import annotations

from typing import Any

from .backward import BackwardConfig
from .table import MAX_HEAD_DIM

WIDE: dict[str, Any] = {"design": "shared", "tile_m": 64, "stages_ds": 1}
THREE: dict[str, Any] = {**WIDE, "tile_n": 96, "math_warpgroups": 3}
TWO: dict[str, Any] = {**WIDE, "tile_n": 80, "stages_do": 1, "dq_store": "direct", "scores_ahead": True}

# What decided: ratios to flash-attn-4 in one interleaved run on an H200, bf16, at 1k, 4k, 16k (where all were run).
# - start of dQ's sum, 64 causal: stored 1.02 .99 .99, cleared .97 .98 1.00; 128 causal: stored 1.02 1.02 .98, cleared
#   .99 1.01 1.00; 128 full: cleared 1.00 1.01 1.00, stored .98 .96 .96
# - 64 causal, stored, order: heads 1.02 .99 .99, sections .98 .97 .96
# - 128 full: tile_m 80 1.00 1.01 1.00, 64 1.00 .98 .97
# - 256 full, 1k and 16k: S ahead 1.28 1.24, in time 1.21 1.18
# - 192 full and causal, 4k: dV first, S in time .97 1.03, S ahead .95 1.02; dQ first, S ahead .75 .84
# - (192, 128) full, 4k: dV first, S in time .95, S ahead .91; dQ first, S ahead .94
# `docs/performance.md` has what was tried and is in no row.
BACKWARD: tuple[BackwardConfig, ...] = (
    BackwardConfig(64, 64, causal=False, tile_m=128, tile_n=128, dq_gemm="rows"),
    BackwardConfig(64, 64, causal=True, tile_m=128, tile_n=128, dq_gemm="rows", dq_start="stored"),
    BackwardConfig(96, 96, causal=False, tile_m=64, tile_n=128, dq_gemm="lone"),
    BackwardConfig(96, 96, causal=True, tile_m=64, tile_n=128, dq_gemm="lone", dq_start="stored", order="sections"),
    BackwardConfig(128, 128, causal=False, tile_m=80, tile_n=128, overlap_dq=False),
    BackwardConfig(128, 128, causal=True, tile_m=64, tile_n=128, dq_start="stored", order="sections"),
    BackwardConfig(192, 128, causal=False, **THREE),
    BackwardConfig(192, 128, causal=True, order="sections", **THREE),
    BackwardConfig(192, 192, causal=False, stages_do=1, **THREE),
    BackwardConfig(192, 192, causal=True, stages_do=1, order="sections", **THREE),
    BackwardConfig(256, 256, causal=False, **TWO),
    BackwardConfig(256, 256, causal=True, order="sections", **TWO),
)
"""Rows in the order in which they are tried: the first that is wide enough wins."""


def backward_config(head_dim: int, head_dim_v: int, causal: bool) -> BackwardConfig:
    """The narrowest row that holds `head_dim` and `head_dim_v` columns.

    Raises ValueError if a dimension is not a multiple of 8 between 8 and 256.
    """
    for name, dim in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if dim % 8 or not 8 <= dim <= MAX_HEAD_DIM:
            raise ValueError(f"{name} is {dim}; it must be a multiple of 8 from 8 to {MAX_HEAD_DIM}")
    for row in BACKWARD:
        if row.causal == causal and row.head_dim >= head_dim and row.head_dim_v >= head_dim_v:
            return row
    raise AssertionError("the table has a row of 256 for every mask")
