"""A producer and a consumer warpgroup on a ring of two stages, with the consumer's cursor kept in various ways."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

STAGES = 2


@cute.jit
def following(stage: Int32, phase: Int32):
    stage += 1
    if stage == STAGES:
        stage, phase = Int32(0), phase ^ 1
    return stage, phase


@dataclass(frozen=True)
class Bound:
    """The ring as the consumer sees it."""

    full: Any
    empty: Any
    data: Any
    thread: Any

    def wait(self, stage: Int32, phase: Int32):
        cute.arch.mbarrier_wait(self.full + stage, phase)
        return self.data[self.thread, stage]

    def release(self, stage: Int32):
        cute.arch.mbarrier_arrive(self.empty + stage)


@dataclass
class Place:
    """A mutable cursor."""

    stage: Int32
    phase: Int32

    def advance(self):
        self.stage, self.phase = following(self.stage, self.phase)


class PlainPlace:
    """The same without being a dataclass."""

    def __init__(self):
        self.stage, self.phase = Int32(0), Int32(0)


# --- right -----------------------------------------------------------------------------------------------------------


@cute.jit
def rebound_local(ring: Bound, count: Int32):
    stage, phase, total = Int32(0), Int32(0), Float32(0.0)
    for _ in cutlass.range(count, unroll=1):
        total += ring.wait(stage, phase)
        ring.release(stage)
        stage, phase = following(stage, phase)
    return total


@cute.jit
def field_rebound_in_the_loop(ring: Bound, count: Int32):
    place, total = Place(Int32(0), Int32(0)), Float32(0.0)
    for _ in cutlass.range(count, unroll=1):
        total += ring.wait(place.stage, place.phase)
        ring.release(place.stage)
        place.stage, place.phase = following(place.stage, place.phase)
    return total


# --- frozen ----------------------------------------------------------------------------------------------------------


@cute.jit
def release_and_forget(ring: Bound, stage: Int32, phase: Int32):
    ring.release(stage)
    stage, phase = following(stage, phase)


@cute.jit
def helper_that_does_not_return(ring: Bound, count: Int32):
    stage, phase, total = Int32(0), Int32(0), Float32(0.0)
    for _ in cutlass.range(count, unroll=1):
        total += ring.wait(stage, phase)
        release_and_forget(ring, stage, phase)
    return total


@dataclass(frozen=True)
class Reader:
    """A role with its cursor in a field."""

    ring: Bound
    place: Place

    @contextmanager
    def arrived(self):
        yield self.ring.wait(self.place.stage, self.place.phase)
        self.ring.release(self.place.stage)
        self.place.advance()

    def step(self):
        value = self.ring.wait(self.place.stage, self.place.phase)
        self.ring.release(self.place.stage)
        self.place.advance()
        return value


@cute.jit
def with_helper(ring: Bound, count: Int32):
    reader, total = Reader(ring, Place(Int32(0), Int32(0))), Float32(0.0)
    for _ in cutlass.range(count, unroll=1):
        with reader.arrived() as value:
            total += value
    return total


@cute.jit
def field_advanced_by_a_method(ring: Bound, count: Int32):
    reader, total = Reader(ring, Place(Int32(0), Int32(0))), Float32(0.0)
    for _ in cutlass.range(count, unroll=1):
        total += reader.step()
    return total


@cute.jit
def stands_still_in_the_inner_loop(ring: Bound, count: Int32):
    stage, phase, total = Int32(0), Int32(0), Float32(0.0)
    for _ in cutlass.range(count, unroll=1):
        for _ in cutlass.range(count, unroll=1):
            total += ring.wait(stage, phase)
            ring.release(stage)
        stage, phase = following(stage, phase)
    return total


# --- refused ---------------------------------------------------------------------------------------------------------


@cute.jit
def field_of_a_plain_object(ring: Bound, count: Int32):
    place, total = PlainPlace(), Float32(0.0)
    for _ in cutlass.range(count, unroll=1):
        total += ring.wait(place.stage, place.phase)
        ring.release(place.stage)
        place.stage, place.phase = following(place.stage, place.phase)
    return total


RIGHT = (rebound_local, field_rebound_in_the_loop)
FROZEN = (
    helper_that_does_not_return,
    with_helper,
    field_advanced_by_a_method,
    stands_still_in_the_inner_loop,
)


@cute.kernel
def kernel(y: cute.Tensor, count: Int32, consume: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = SmemAllocator()
    full, empty = smem.allocate_array(cutlass.Int64, STAGES), smem.allocate_array(cutlass.Int64, STAGES)
    data = smem.allocate_tensor(Float32, cute.make_layout((128, STAGES)), 128)
    if warp == 0:
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(full + i, 128)
                cute.arch.mbarrier_init(empty + i, 128)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if warp < 4:
        stage, phase = Int32(0), Int32(1)
        for i in cutlass.range(count, unroll=1):
            cute.arch.mbarrier_wait(empty + stage, phase)
            data[thread, stage] = Float32(i)
            cute.arch.mbarrier_arrive(full + stage)
            stage, phase = following(stage, phase)
    else:
        y[thread - 128] = consume(Bound(full, empty, data, thread - 128), count)


@cute.jit
def host(y: cute.Tensor, count: Int32, consume: cutlass.Constexpr, stream):
    kernel(y, count, consume).launch(grid=[1, 1, 1], block=[256, 1, 1], min_blocks_per_mp=1, stream=stream)
