"""How many cycles a launch would take, from emulating three small CTAs of it.

A CTA's time is linear in its key blocks once its pipeline runs, so that

    one tile of n blocks      first + n * block
    each further tile         next + n * block

where a block counts for less if only some warpgroups see it (causal masks, the last query rows). What a GPU takes
longer for each tile than its timeline is added (`Cost.tile`, `Cost.cut`).

The three constants come from replays of one tile of 6 blocks, one of 12, and two of 6 in a row. Each is replayed in
several grains (`Cost.chunk`), and the mean counts: how warpgroups fall into step with each other hangs on a few cycles,
and can make some per cent of difference, which `Prediction.spread` states.

The launch is then played through: each SM starts with the tile of its own number, and who is done draws the next. The
tiles are taken with the longest first; the kernel does so within sections of heads, which matters only where these do
not fill the GPU.

The inputs of the emulated CTAs are N(0, 1). How often `rising` scales O depends on them, and on how far into a sequence
a block lies: long sequences do it less often than the first dozen blocks, which makes the prediction slightly too slow.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from fa3.config.types import ROWS_OF_WARPGROUP, ForwardConfig, KernelKey
from fa3.emulator.timing.cost import Cost
from fa3.emulator.timing.events import Trace
from fa3.emulator.timing.recorder import Recorder
from fa3.emulator.timing.replay import replay
from fa3.emulator.timing.schedule import Scheduler
from fa3.emulator.timing.timeline import Timeline

GRAINS = (12, 14, 16, 19)
FEW, MANY = 6, 12
"""Key blocks of the emulated tiles."""
SMS = 132
"""Of an H100 SXM or H200."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Size:
    """A forward problem, without what the kernel's key says."""

    batch: int
    heads: int
    """Query heads."""
    seqlen_q: int
    seqlen_k: int

    def __post_init__(self) -> None:
        if min(self.batch, self.heads, self.seqlen_q, self.seqlen_k) < 1:
            raise ValueError(f"{self}: all of them must be at least 1")


class Tile(NamedTuple):
    """What one tile has to do."""

    blocks: int
    """Key blocks that some of its rows see."""
    work: float
    """The same, averaged over its warpgroups: one that passes over a block leaves its share of the SM to the others.
    Half of `blocks` at least, as one warpgroup alone cannot fill an SM."""
    cut: bool
    """Whether its last block reaches past the last key."""


@dataclass(frozen=True)
class TileTimes:
    """Cycles of a CTA by what it has to do."""

    first: float
    """The first tile, without its blocks: start, first loads, epilogue."""
    next: float
    """Each further tile, without its blocks."""
    block: float
    """Each key block."""
    cut: float = 0.0
    """Each tile whose last block is cut."""
    spread: float = 0.0
    """(largest - smallest) / mean of `block` over the grains."""

    def of(self, tile: Tile) -> float:
        """What a tile takes besides `first` or `next`."""
        return self.block * tile.work + self.cut * tile.cut

    def cycles(self, tiles: Sequence[Tile]) -> float:
        """Of a CTA that gets these tiles one after the other."""
        return self.first + self.next * (len(tiles) - 1) + sum(map(self.of, tiles))


@dataclass(frozen=True)
class Prediction:
    """What a launch would take."""

    kernel: str
    size: Size
    cycles: float
    """Of the whole launch."""
    times: TileTimes
    tiles: int
    blocks: int
    """Key blocks of all tiles."""
    ctas: int
    spread: float
    """How far replays that differ in their grain lie apart: differences between predictions below it mean nothing."""
    tensor_utilisation: float
    """Share of the GPU's peak over the launch, counting whole blocks, also where a mask hides a part of them."""
    timeline: Timeline = field(repr=False)
    """The emulated CTA with one tile of `MANY` blocks."""

    def microseconds(self, clock_mhz: float) -> float:
        return self.cycles / clock_mhz


def predict(kernel: KernelKey | ForwardConfig, size: Size, cost: Cost | None = None, sms: int = SMS) -> Prediction:
    """Predicts a launch. Compiles the kernel if need be, and emulates it for about a second; again with other sizes or
    costs it takes milliseconds.

    Args:
        kernel: a key, or a row of the table (in bf16).
        size: the problem; the head dimensions are those of the row.
        cost: the cost model.
        sms: SMs of the GPU.

    Raises:
        ValueError: the row does not fit an SM, or the GPU has no SM.
    """
    if sms < 1:
        raise ValueError(f"sms is {sms}; a GPU with at least one SM is wanted")
    key = kernel if isinstance(kernel, KernelKey) else KernelKey(kernel, "bf16")
    cost = cost or Cost()
    config = key.config
    tiles = tiles_of(config, size)
    cut = -size.seqlen_k % config.tile_n
    times = tile_times(key, cost.with_constants(launch=0.0, tile=0.0, cut=0.0), cut)
    times = replace(times, first=times.first + cost.tile, next=times.next + cost.tile, cut=cost.cut)
    cycles = cost.launch + _play(times, tiles, sms)
    blocks = sum(tile.blocks for tile in tiles)
    flops = 2 * blocks * config.tile_m * config.tile_n * (config.head_dim + config.head_dim_v)
    peak = 2 * cost.mma_rate_16 * sms * cycles
    ctas = min(sms, len(tiles))
    timeline = replay(traces(key, cut)[1], cost)
    return Prediction(key.name, size, cycles, times, len(tiles), blocks, ctas, times.spread, flops / peak, timeline)


def tiles_of(config: ForwardConfig, size: Size) -> list[Tile]:
    """The tiles of a launch, the longest first."""
    last = math.ceil(size.seqlen_k / config.tile_n)
    cut = size.seqlen_k % config.tile_n != 0
    each = []
    for row in range(0, size.seqlen_q, config.tile_m):
        blocks = [_seen(config, size, row + ROWS_OF_WARPGROUP * group) for group in range(config.math_warpgroups)]
        work = max(statistics.fmean(blocks), max(blocks) / 2)
        each.append(Tile(max(blocks), work, cut and max(blocks) == last))
    return sorted(each * (size.batch * size.heads), reverse=True)


def _seen(config: ForwardConfig, size: Size, first_row: int) -> int:
    """Key blocks that the warpgroup of these rows sees."""
    if first_row >= size.seqlen_q:
        return 0
    last_row = min(first_row + ROWS_OF_WARPGROUP, size.seqlen_q) - 1
    keys = size.seqlen_k + (last_row + 1 - size.seqlen_q if config.causal else 0)
    return max(0, math.ceil(keys / config.tile_n))


@lru_cache(maxsize=1024)
def tile_times(key: KernelKey, cost: Cost, cut: int = 0) -> TileTimes:
    """The constants of a kernel. `cut`: so many keys are missing in the last block of a tile."""
    found = []
    for grain in GRAINS:
        scheduler = Scheduler(replace(cost, chunk=grain))
        few, many, two = (replay(trace, scheduler=scheduler).end for trace in traces(key, cut))
        found.append((few, two, (many - few) / (MANY - FEW)))
    few, two, block = (statistics.fmean(each) for each in zip(*found, strict=True))
    blocks = [each for _, _, each in found]
    spread = (max(blocks) - min(blocks)) / block
    (tile,) = tiles_of(key.config, Size(1, 1, key.config.tile_m, FEW * key.config.tile_n - cut))
    return TileTimes(few - tile.work * block, two - few - tile.work * block, block, spread=spread)


@lru_cache(maxsize=64)
def traces(key: KernelKey, cut: int = 0) -> tuple[Trace, Trace, Trace]:
    """CTAs with one tile of `FEW` blocks, one of `MANY`, and two of `FEW`."""
    return emulate_tiles(key, FEW, 1, cut), emulate_tiles(key, MANY, 1, cut), emulate_tiles(key, FEW, 2, cut)


def emulate_tiles(key: KernelKey, blocks: int, tiles: int, cut: int = 0) -> Trace:
    """What one CTA does with so many equal tiles of so many blocks, each of a head of its own."""
    from fa3.emulator.backend import record  # needs the compiler, which replays alone do not

    config = key.config
    generator = torch.Generator().manual_seed(0)

    def random(length: int, width: int) -> torch.Tensor:
        return torch.randn(1, length, tiles, width, generator=generator).to(DTYPES[key.dtype])

    keys = blocks * config.tile_n - cut
    scale = (-1.0 if key.negative_scale else 1.0) / math.sqrt(config.head_dim)
    run = record(
        random(config.tile_m, config.head_dim), random(keys, config.head_dim), random(keys, config.head_dim_v),
        scale, config.causal, config=config, sms=1,
    )  # fmt: skip
    recorder = Recorder()
    run.replay(policy="early", observers=[recorder])
    return recorder.traces[0]


def _play(times: TileTimes, tiles: Sequence[Tile], sms: int) -> float:
    """When the last SM is done, if who is free takes the next tile."""
    ends = [times.cycles([tile]) for tile in tiles[:sms]]
    heapq.heapify(ends)
    for tile in tiles[sms:]:
        heapq.heapreplace(ends, ends[0] + times.next + times.of(tile))
    return max(ends)
