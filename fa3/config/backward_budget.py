"""What a row of the backward costs an SM: shared memory, registers and threads, summed before anything is compiled."""

from __future__ import annotations

from typing import get_args

from fa3.layouts.smem import SWIZZLE_ALIGNMENT, Buffer, SharedMemoryPlan, k_major
from fa3.pipeline.registers import BUDGETS, RegisterBudget
from fa3.pipeline.schedule import RoleSchedule, load_writer_and_math
from fa3.pipeline.topology import Edge, Topology

from .backward import ALL, BACKWARD_STRATEGY_FIELDS, BackwardConfig, Wanted
from .budget import ELEMENT_BITS
from .types import ROWS_OF_WARPGROUP as ROWS

ROW_BYTES = 4
"""Of one fp32 number: LSE or D of a query row."""
ROWS_ALIGNMENT = 128
VECTORS = 512
"""fp32 numbers in 16 bytes of every thread of a warpgroup."""

FEWER_ACCUMULATORS = RegisterBudget(load=40, math=232, math_warpgroups=2)


def backward_schedule(config: BackwardConfig) -> RoleSchedule:
    """`load` and `dq_writer` share a warpgroup; then one `math` warpgroup for each 64 keys."""
    return load_writer_and_math("dq_writer", config.math_warpgroups)


def backward_topology(config: BackwardConfig, wanted: Wanted = ALL) -> Topology:
    """The edges of the backward: K and V once, Q with LSE and dO with D for each step; dQ back to the writer."""
    schedule = backward_schedule(config)
    math = tuple(role.name for role in schedule.roles if role.name.startswith("math"))
    edges = [
        Edge("k", "load", math, stages=1, bytes=_tile(config.tile_n, config.head_dim)),
        Edge("v", "load", math, stages=1, bytes=_tile(config.tile_n, config.head_dim_v)),
        Edge("q", "load", math, stages=config.stages_q, bytes=_with_rows(config.tile_m, config.head_dim)),
        Edge("do", "load", math, stages=config.stages_do, bytes=_with_rows(config.tile_m, config.head_dim_v)),
    ]
    if exchanges(config, wanted):
        dS = _tile(config.tile_n, config.tile_m)
        edges.append(Edge("k_peer", "load", math, stages=1, bytes=_tile(config.tile_n, config.dims_of_dq)))
        edges.append(Edge("ds_peer", math[0], math, stages=1, bytes=dS, across=True))
    if config.dq_store == "staged" and "q" in wanted:
        edges.append(Edge("dq", math[: config.dq_parts], ("dq_writer",), stages=config.dq_parts * config.stages_dq))
    return Topology.of(schedule, *edges)


def exchanges(config: BackwardConfig, wanted: Wanted) -> bool:
    """Whether two CTAs exchange dS."""
    return config.cluster == 2 and "q" in wanted


def backward_smem(config: BackwardConfig, wanted: Wanted = ALL) -> SharedMemoryPlan:
    """The buffers of a CTA in the order in which the kernel lays them out; without those that serve other gradients
    than the wanted ones.

    Raises SharedMemoryError, with the sum written out, if they exceed what a CTA of sm_90 can have.
    """
    c = config
    swizzled = {
        "k": k_major(c.key_rows, c.head_dim, ELEMENT_BITS, c.key_slabs).bytes,
        "v": k_major(c.key_rows, c.head_dim_v, ELEMENT_BITS, c.key_slabs).bytes,
        "q": k_major(c.tile_m, c.head_dim, ELEMENT_BITS, c.stages_q).bytes,
        "do": k_major(c.tile_m, c.head_dim_v, ELEMENT_BITS, c.stages_do).bytes,
        **_exchanged(c),
    }
    if exchanges(c, wanted):
        swizzled["k_peer"] = k_major(c.tile_n, c.dims_of_dq, ELEMENT_BITS, 1).bytes
        swizzled["ds_peer"] = swizzled["ds"]
    if c.dq_store == "staged":
        swizzled["dq"] = 4 * c.dq_piece * c.dq_parts * c.stages_dq
    for name in swizzled.keys() - _needed(c, wanted):
        del swizzled[name]
    return SharedMemoryPlan.of(
        [
            Buffer("barriers", backward_topology(c, wanted).bytes, 8),
            Buffer("lse", ROW_BYTES * c.tile_m * c.stages_q, ROWS_ALIGNMENT),
            Buffer("delta", ROW_BYTES * c.tile_m * c.stages_do, ROWS_ALIGNMENT),
            *(Buffer(name, size, SWIZZLE_ALIGNMENT) for name, size in swizzled.items()),
        ]
    ).check()


def _needed(c: BackwardConfig, wanted: Wanted) -> set[str]:
    """The tiles' buffers that the gradients are computed from. In design `registers` dS is exchanged for dQ alone."""
    needed = {"k", "v", "q", "do"}
    if "v" in wanted:
        needed.add("p")
    if "q" in wanted or ("k" in wanted and c.design != "registers"):
        needed.add("ds")
    if "q" in wanted:
        needed |= {"dq", "k_peer", "ds_peer"}
    return needed


def _exchanged(c: BackwardConfig) -> dict[str, int]:
    """What the math warpgroups exchange: dS (query, key), or P and dS (key, query)."""
    if c.design == "registers":
        return {"ds": k_major(c.tile_m, ROWS, ELEMENT_BITS, c.key_slabs * c.stages_ds).bytes}
    one = k_major(c.tile_n, c.tile_m, ELEMENT_BITS, 1).bytes
    return {"p": one, "ds": one}


def backward_registers(config: BackwardConfig, wanted: Wanted = ALL) -> RegisterBudget:
    """The shares of the warpgroup of `load` and `dq_writer`, and of the math warpgroups.

    Without dK or dV two math warpgroups lack an accumulator. Some of its registers go to the load warps, which without
    them spill in some of these kernels.
    """
    groups = config.math_warpgroups
    if groups not in BUDGETS:
        raise ValueError(f"math_warpgroups is {groups}; budgets exist for {list(BUDGETS)}")
    return BUDGETS[groups] if groups != 2 or {"k", "v"} <= set(wanted) else FEWER_ACCUMULATORS


def check_backward(config: BackwardConfig) -> BackwardConfig:
    """Returns the config if an SM can hold it. Raises ValueError otherwise; it names the field, or shows the sum."""
    c = config
    for name, kind in BACKWARD_STRATEGY_FIELDS.items():
        if getattr(c, name) not in get_args(kind):
            raise ValueError(f"{name} is {getattr(c, name)!r}; it must be one of {', '.join(get_args(kind))}")
    for name in ("stages_q", "stages_do", "stages_ds", "stages_dq", "dq_pieces"):
        if getattr(c, name) < 1:
            raise ValueError(f"{name} is {getattr(c, name)}; there is at least one")
    if c.tile_m % 16 or not 16 <= c.tile_m <= 128:
        raise ValueError(f"tile_m is {c.tile_m}; it must be a multiple of 16 from 16 to 128")
    if c.scores_ahead and c.design == "registers":
        raise ValueError("scores_ahead is True; in design 'registers' it costs registers that are not there")
    (_check_registers if c.design == "registers" else _check_shared)(c)
    for name in ("head_dim", "head_dim_v"):
        if getattr(c, name) % 32 or not 32 <= getattr(c, name) <= 256:
            raise ValueError(f"{name} is {getattr(c, name)}; a tile is padded to a multiple of 32 up to 256")
    if c.dq_store == "direct" and c.dq_start != "cleared":
        raise ValueError(
            f"dq_store is 'direct': only the dQ writer can store the first part, dq_start is {c.dq_start!r}"
        )
    if c.design == "pairs" and (c.dq_store != "direct" or c.dims_of_dq != ROWS * c.math_warpgroups):
        raise ValueError(
            f"design 'pairs' has dq_store 'direct', and {ROWS} dimensions of dQ for each of {c.math_warpgroups} "
            f"warpgroups of two CTAs; dq_store is {c.dq_store!r}, head_dim {c.head_dim}"
        )
    if c.dq_slice % (c.dq_pieces * VECTORS):
        raise ValueError(f"dq_pieces is {c.dq_pieces}; a slice of {c.dq_slice} has pieces of a multiple of {VECTORS}")
    backward_registers(c)
    backward_smem(c)
    return c


def _check_registers(c: BackwardConfig) -> None:
    """Each warpgroup has its 64 keys, and one part of dQ."""
    if c.tile_n != ROWS * c.math_warpgroups:
        wanted = f"for {c.math_warpgroups} warpgroups it must be {ROWS * c.math_warpgroups}"
        raise ValueError(f"tile_n is {c.tile_n}; {wanted}")
    slices = 1 if c.dq_gemm == "lone" else c.math_warpgroups
    rows = c.head_dim if c.dq_gemm == "transposed" else c.tile_m
    if rows != ROWS * slices:
        what = "head_dim" if c.dq_gemm == "transposed" else "tile_m"
        raise ValueError(f"dq_gemm is {c.dq_gemm!r}: {what} is {rows}, it must be {ROWS * slices}")


def _check_shared(c: BackwardConfig) -> None:
    """64 queries are the rows of S; its columns, the keys, are shared out, and so are the dimensions of dK and dQ."""
    groups = c.math_warpgroups
    if c.tile_m != ROWS or c.stages_ds != 1 or c.dq_gemm != "transposed":
        raise ValueError(f"design 'shared' has tile_m {ROWS}, stages_ds 1 and dq_gemm 'transposed'; got {c}")
    if c.tile_n % 16 or c.tile_n % (8 * groups):
        raise ValueError(f"tile_n is {c.tile_n}; it must be a multiple of 16, and of 8 for each of {groups} warpgroups")
    if c.head_dim % (ROWS * groups) or c.head_dim_v % ROWS:
        raise ValueError(f"head_dim is {c.head_dim}; it must be a multiple of {ROWS} for each of {groups} warpgroups")


def _tile(rows: int, columns: int) -> int:
    return rows * columns * ELEMENT_BITS // 8


def _with_rows(rows: int, columns: int) -> int:
    """A tile, and one fp32 number for each of its rows."""
    return _tile(rows, columns) + ROW_BYTES * rows
