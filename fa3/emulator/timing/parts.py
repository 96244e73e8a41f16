"""What the replay is made of: pipes, tensor cores, copy engine, barriers, and the state of a warp.

The hardware knows of warps only by callbacks. Times are in cycles, and every call is made in the order of time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fa3.emulator.timing.cost import PIPES, Cost
from fa3.emulator.timing.events import Mma
from fa3.emulator.timing.timeline import Interval

Wake = Callable[[float], None]
"""Called with the time when what was waited for has happened."""
MUFU = PIPES.index("mufu")


class Lane:
    """The intervals of one warp or unit. What continues the last one is joined to it."""

    def __init__(self) -> None:
        self.intervals: list[Interval] = []

    def add(self, interval: Interval) -> None:
        if interval.end <= interval.start:
            return
        last = self.intervals[-1] if self.intervals else None
        if last and last.end == interval.start and last.kind == interval.kind and last.label == interval.label:
            self.intervals[-1] = last._replace(end=interval.end)
        else:
            self.intervals.append(interval)


class SubPartition:
    """Issue port and pipes of a quarter of the SM, first come first served."""

    def __init__(self) -> None:
        self.free_at = [0.0] * len(PIPES)
        self.mufu = Lane()

    def take(self, time: float, use: tuple[tuple[int, float], ...], slower: float = 1.0) -> float:
        """Occupies pipes from `time` on, `slower` times as long as usual; returns when the last of them is done."""
        end = time
        for pipe, cycles in use:
            free = self.free_at[pipe]
            start = free if free > time else time
            self.free_at[pipe] = done = start + cycles * slower
            if pipe == MUFU:
                self.mufu.add(Interval(start, start + cycles, "mufu"))  # its work, which a slowdown does not add to
            if done > end:
                end = done
        return end


@dataclass
class Product:
    """One WGMMA of a warpgroup. It may run once all `missing` warps have issued it."""

    mma: Mma
    warpgroup: int
    missing: int
    first: bool = False
    """Whether it is the first of its group."""
    ready: float = 0.0
    done: float | None = None
    sleepers: list[Wake] = field(default_factory=list)


class TensorCores:
    """The four tensor cores as one unit: a WGMMA runs on all of them. Each warpgroup's products run in order; among
    warpgroups the one that has waited longest goes first."""

    def __init__(self, cost: Cost, at: Callable[[float, Wake], None]) -> None:
        """`at(time, call)` has `call(time)` made at that time."""
        self.cost, self.at = cost, at
        self.queues: dict[int, deque[Product]] = {}
        self.running = False
        self.lane = Lane()

    def issued(self, product: Product, time: float) -> None:
        """One more warp has issued its part."""
        product.missing -= 1
        if product.missing == 0:
            product.ready = time
            self.queues.setdefault(product.warpgroup, deque()).append(product)
            if not self.running:
                self._start(time)

    def _start(self, time: float) -> None:
        heads = [queue[0] for queue in self.queues.values() if queue]
        if not heads:
            return
        product = min(heads, key=lambda head: (head.ready, head.warpgroup))
        self.queues[product.warpgroup].popleft()
        self.running = True
        mma = product.mma
        start = time + self.cost.mma_start * product.first
        end = start + self.cost.mma_cycles(mma.n, mma.k, mma.bits, mma.registers)
        form = "RS" if mma.registers else "SS"
        self.lane.add(Interval(start, end, "gemm", f"warpgroup {product.warpgroup}, n{mma.n} {form}", mma.at))
        self.at(end, lambda now: self._finish(product, now))

    def _finish(self, product: Product, time: float) -> None:
        self.running = False
        product.done = time
        for wake in product.sleepers:
            wake(time)
        product.sleepers.clear()
        self._start(time)


class Link:
    """One direction of the copy engine: copies follow each other, and each has a latency on top."""

    def __init__(self, bandwidth: float, latency: float, gap: float, kind: str) -> None:
        self.bandwidth, self.latency, self.gap, self.kind = bandwidth, latency, gap, kind
        self.free_at = 0.0
        self.lane = Lane()

    def copy(self, time: float, nbytes: int, at: object, bandwidth: float | None = None) -> tuple[float, float]:
        """When the last byte has been sent, and when it has arrived. `bandwidth`: where this copy has less."""
        cycles = max(self.gap, nbytes / (bandwidth or self.bandwidth))
        start = max(time, self.free_at)
        self.free_at = start + cycles
        arrived = self.free_at + self.latency
        self.lane.add(Interval(arrived - cycles, arrived, self.kind, f"{nbytes} bytes", at))  # type: ignore[arg-type]
        return self.free_at, arrived


class Phases:
    """An mbarrier in time."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.expected = 0
        self.phases = 0
        self.sleepers: list[tuple[int, Wake]] = []

    def arrive(self, count: int, expected: int, time: float) -> None:
        self.pending -= count
        self.expected += expected
        self._try(time)

    def transfer(self, nbytes: int, time: float) -> None:
        self.expected -= nbytes
        self._try(time)

    def _try(self, time: float) -> None:
        if self.pending > 0 or self.expected != 0:
            return
        self.phases += 1
        self.pending += self.count
        awake = [wake for phases, wake in self.sleepers if phases <= self.phases]
        self.sleepers = [sleeper for sleeper in self.sleepers if sleeper[0] > self.phases]
        for wake in awake:
            wake(time)


class Meeting:
    """A named barrier in time."""

    def __init__(self) -> None:
        self.arrived = 0
        self.sleepers: list[Wake] = []

    def arrive(self, threads: int, wake: Wake | None, time: float) -> None:
        """32 more threads, of a warp that sleeps until all have come if it gives a `wake`."""
        self.arrived += 32
        if wake:
            self.sleepers.append(wake)
        if self.arrived >= threads:
            awake, self.sleepers, self.arrived = self.sleepers, [], 0
            for each in awake:
                each(time)


class WarpState:
    """Where a warp is in its list, and its open and unfinished groups of asynchronous operations."""

    def __init__(self, index: int, items: Sequence[Any]) -> None:
        self.index, self.items = index, items
        self.next = 0
        self.products = 0
        """WGMMAs that it has issued."""
        self.last_product: Product | None = None
        self.fresh = True
        """Whether its next WGMMA is the first of a group."""
        self.mma_groups: list[Product | None] = []
        """The last WGMMA of every group."""
        self.stored = (0.0, 0.0)
        """When the stores of the open group have been read, and are complete."""
        self.bulk_groups: list[tuple[float, float]] = []
        self.lane = Lane()
        self.exit: float | None = None
