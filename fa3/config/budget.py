"""What a row costs an SM: shared memory, registers and threads, summed before anything is compiled.

The compiler accepts a kernel with too much shared memory without a word, and the launch then fails with `invalid
argument`. So every row is checked here, and the error shows the arithmetic.
"""

from __future__ import annotations

from typing import get_args

from fa3.layouts.smem import SWIZZLE_ALIGNMENT, Buffer, SharedMemoryPlan, shared_k, shared_o, shared_q, shared_v
from fa3.pipeline.registers import BUDGETS, RegisterBudget
from fa3.pipeline.schedule import RoleSchedule, load_and_math
from fa3.pipeline.topology import Edge, Topology

from .types import ROWS_OF_WARPGROUP, STRATEGY_FIELDS, ForwardConfig

ELEMENT_BITS = 16
STRATEGIES = {name: get_args(kind) for name, kind in STRATEGY_FIELDS.items()}
"""Field of a row -> what it may say."""
TILE_SLOTS = 2
"""Numbers of tiles under way from the load warp to the math warpgroups."""


def forward_schedule(config: ForwardConfig) -> RoleSchedule:
    """One `load` warpgroup and one `math` warpgroup for each 64 query rows."""
    return load_and_math(config.math_warpgroups)


def forward_topology(config: ForwardConfig) -> Topology:
    """The edges of the forward: the tile's number, Q for each warpgroup of its own, K and V for all."""
    schedule = forward_schedule(config)
    math = tuple(role.name for role in schedule.roles[1:])
    rows = shared_q(ROWS_OF_WARPGROUP, config.head_dim, ELEMENT_BITS).bytes
    keys = shared_k(config.tile_n, config.head_dim, ELEMENT_BITS, 1).bytes
    values = shared_v(config.tile_n, config.head_dim_v, ELEMENT_BITS, 1).bytes
    return Topology.of(
        schedule,
        Edge("tile", "load", math, stages=TILE_SLOTS),
        Edge("q", "load", math, stages=len(math), bytes=rows, private=True),
        Edge("k", "load", math, stages=config.stages, bytes=keys),
        Edge("v", "load", math, stages=config.stages, bytes=values),
    )


def forward_smem(config: ForwardConfig) -> SharedMemoryPlan:
    """The buffers of a CTA in the order in which the kernel lays them out.

    Raises SharedMemoryError, with the sum written out, if they exceed what a CTA of sm_90 can have.
    """
    groups = config.math_warpgroups
    swizzled = {
        "q": shared_q(ROWS_OF_WARPGROUP, config.head_dim, ELEMENT_BITS, groups).bytes,
        "k": shared_k(config.tile_n, config.head_dim, ELEMENT_BITS, config.stages).bytes,
        "v": shared_v(config.tile_n, config.head_dim_v, ELEMENT_BITS, config.stages).bytes,
        "o": shared_o(ROWS_OF_WARPGROUP, config.head_dim_v, ELEMENT_BITS, groups).bytes,
    }
    if config.store == "direct":
        del swizzled["o"]
    return SharedMemoryPlan.of(
        [
            Buffer("barriers", forward_topology(config).bytes, 8),
            Buffer("tiles", 4 * TILE_SLOTS, 4),
            *(Buffer(name, size, SWIZZLE_ALIGNMENT) for name, size in swizzled.items()),
        ]
    ).check()


def forward_registers(config: ForwardConfig) -> RegisterBudget:
    """The shares of the load and math warpgroups.

    Raises ValueError for a number of math warpgroups that no budget exists for.
    """
    groups = config.math_warpgroups
    if groups not in BUDGETS:
        raise ValueError(f"tile_m {config.tile_m} makes {groups} math warpgroups; budgets exist for {list(BUDGETS)}")
    return BUDGETS[groups]


def check_forward(config: ForwardConfig) -> ForwardConfig:
    """Returns the config if an SM can hold it.

    Raises ValueError otherwise; it names the field, or shows the sum that does not fit.
    """
    for name, choices in STRATEGIES.items():
        if getattr(config, name) not in choices:
            raise ValueError(f"{name} is {getattr(config, name)!r}; it must be one of {', '.join(choices)}")
    if config.stages < 1:
        raise ValueError(f"stages is {config.stages}; a ring has at least one")
    if config.tile_m % ROWS_OF_WARPGROUP or config.tile_m < ROWS_OF_WARPGROUP:
        raise ValueError(f"tile_m is {config.tile_m}; it must be a multiple of {ROWS_OF_WARPGROUP}")
    if config.tile_n % 16 or not 16 <= config.tile_n <= 256:
        raise ValueError(f"tile_n is {config.tile_n}; it must be a multiple of 16 from 16 to 256")
    for name in ("head_dim", "head_dim_v"):
        if getattr(config, name) % 32 or not 32 <= getattr(config, name) <= 256:
            raise ValueError(f"{name} is {getattr(config, name)}; a tile is padded to a multiple of 32 up to 256")
    forward_registers(config)
    forward_smem(config)
    return config
