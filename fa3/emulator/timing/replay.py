"""Gives times to what the warps of a CTA did: a discrete-event simulation of one SM.

Every warp walks along its list. Code takes what its sub-partition has left over; waits last until what they wait for
has happened, and that happens when other warps, the tensor cores and the copy engine get there. The order of the
functional run does not matter, only who waited for which phase of which barrier. (Which tiles a CTA drew was decided
there.)

The result depends on the trace and the costs alone.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

from fa3.emulator.timing import events as e
from fa3.emulator.timing.cost import SUB_PARTITIONS, WARPS_OF_WARPGROUP, Cost
from fa3.emulator.timing.labels import label
from fa3.emulator.timing.parts import Link, Meeting, Phases, Product, SubPartition, TensorCores, Wake, WarpState
from fa3.emulator.timing.schedule import Chunk, Scheduler
from fa3.emulator.timing.timeline import Interval, Timeline

WAVEFRONT = 128
"""Bytes of one (`Access.wavefronts`)."""


class ReplayError(RuntimeError):
    """The trace cannot end: warps wait for what nobody does."""


def replay(trace: e.Trace, cost: Cost | None = None, scheduler: Scheduler | None = None) -> Timeline:
    """Times one CTA that has its SM to itself.

    Args:
        trace: what its warps did.
        cost: the model; by default `Cost()`.
        scheduler: one for the same costs, to be used for several traces of one kernel.

    Raises:
        ReplayError: the warps wait for each other.
    """
    if scheduler is None:
        scheduler = Scheduler(cost or Cost())
    return Replay(trace, scheduler).run()


class Replay:
    """One simulation; `run` may be called once."""

    def __init__(self, trace: e.Trace, scheduler: Scheduler) -> None:
        self.trace, self.cost = trace, scheduler.cost
        self.queue: list[tuple[float, int, Wake]] = []
        self.numbered = 0
        self.warps = [WarpState(i, scheduler.items(events)) for i, events in enumerate(trace.warps)]
        self.subs = [SubPartition() for _ in range(SUB_PARTITIONS)]
        self.tensor = TensorCores(self.cost, self.at)
        self.products: dict[int, list[Product]] = defaultdict(list)
        """Of each warpgroup, in order."""
        c = self.cost
        self.loads = Link(c.load_bandwidth, c.load_latency, c.copy_issue, "load")
        self.stores = Link(c.store_bandwidth, c.store_latency, c.copy_issue, "store")
        self.data_path_free_at = 0.0
        """Of the path between threads and memory, shared and global."""
        self.adders_free_at = 0.0
        """Of the way of this SM's reductions by threads to the L2."""
        self.mbarriers = {address: Phases(count) for address, count in trace.counts.items()}
        self.meetings: dict[int, Meeting] = defaultdict(Meeting)
        self.last_store = 0.0
        self.actions: dict[type, Callable[[WarpState, Any, float], float | None]] = {
            e.Branch: self._branch, e.Fence: self._fence, e.Wait: self._wait, e.Arrive: self._arrive,
            e.Join: self._join, e.Mma: self._mma, e.Commit: self._commit, e.WaitGroup: self._wait_group,
            e.Load: self._load, e.Store: self._store, e.Access: self._access,
        }  # fmt: skip

    def run(self) -> Timeline:
        for warp in self.warps:
            self.at(0.0, partial(self._advance, warp))
        while self.queue:
            time, _, call = heapq.heappop(self.queue)
            call(time)
        stuck = [warp for warp in self.warps if warp.exit is None]
        if stuck:
            where = "; ".join(f"warp {warp.index} at {warp.items[warp.next]}" for warp in stuck[:4])
            raise ReplayError(f"{len(stuck)} warp(s) wait for ever: {where}")
        end = max([self.last_store, *(warp.exit or 0.0 for warp in self.warps)])
        units = {"tensor cores": self.tensor.lane.intervals}
        units |= {f"MUFU {i}": sub.mufu.intervals for i, sub in enumerate(self.subs)}
        units |= {"TMA load": self.loads.lane.intervals, "TMA store": self.stores.lane.intervals}
        return Timeline(
            [warp.lane.intervals for warp in self.warps], units, end + self.cost.launch, end,
            self.trace.kernel, self.trace.number,
        )  # fmt: skip

    def at(self, time: float, call: Wake) -> None:
        """Has `call` made at a time; calls for the same time are made in the order of asking."""
        self.numbered += 1
        heapq.heappush(self.queue, (time, self.numbered, call))

    # ------------------------------------------------------------------------------------------------ a warp
    def _advance(self, warp: WarpState, now: float) -> None:
        """Goes on from `now`, until it is not this warp's turn any more."""
        while warp.next < len(warp.items):
            item = warp.items[warp.next]
            if type(item) is Chunk:
                end = self._chunk(warp, item, now)
            else:
                after = self.actions[type(item)](warp, item, now)
                if after is None:
                    return
                end = after
            warp.next += 1
            if self.queue and self.queue[0][0] <= end:
                self.at(end, partial(self._advance, warp))
                return
            now = end
        warp.exit = now

    def _wake(self, warp: WarpState, since: float, kind: str, words: str, at: e.Place, delay: float) -> Wake:
        """What ends a wait: the warp goes on `delay` after."""

        def wake(now: float) -> None:
            end = max(since, now + delay)
            warp.lane.add(Interval(since, end, kind, words, at))
            warp.next += 1
            self.at(end, partial(self._advance, warp))

        return wake

    def _spend(self, warp: WarpState, now: float, cycles: float, kind: str, words: str, at: e.Place) -> float:
        warp.lane.add(Interval(now, now + cycles, kind, words, at))
        return now + cycles

    def _chunk(self, warp: WarpState, chunk: Chunk, now: float) -> float:
        slower = self.cost.under_gemm if self.tensor.running else 1.0
        end = self.subs[warp.index % SUB_PARTITIONS].take(now, chunk.use, slower)
        end = max(end, now + chunk.span * slower)
        warp.lane.add(Interval(now, end, chunk.label, "", chunk.at))
        return end

    # ---- one method for each event: returns when the warp goes on, or None if it sleeps
    def _branch(self, warp: WarpState, event: e.Branch, now: float) -> float:
        return self._spend(warp, now, self.cost.branch, "control", "branch", event.at)

    def _fence(self, warp: WarpState, event: e.Fence, now: float) -> float:
        return self._spend(warp, now, self.cost.fence, label(event.at), event.kind, event.at)

    def _wait(self, warp: WarpState, event: e.Wait, now: float) -> float | None:
        barrier = self._mbarrier(event.barrier)
        if barrier.phases >= event.phases:
            return self._spend(warp, now, self.cost.wait_hit, "wait", "mbarrier", event.at)
        wake = self._wake(warp, now, "wait", "mbarrier", event.at, self.cost.wake)
        barrier.sleepers.append((event.phases, wake))
        return None

    def _arrive(self, warp: WarpState, event: e.Arrive, now: float) -> float:
        barrier = self._mbarrier(event.barrier)
        self.at(now + self.cost.arrive, partial(barrier.arrive, event.arrivals, event.expected))
        return self._issue(warp, 1, now, "control", "arrive", event.at)

    def _join(self, warp: WarpState, event: e.Join, now: float) -> float | None:
        meeting = self.meetings[event.number]
        if event.waits:
            wake = self._wake(warp, now, "barrier", f"barrier {event.number}", event.at, self.cost.join)
            meeting.arrive(event.threads, wake, now)
            return None
        meeting.arrive(event.threads, None, now)
        return self._issue(warp, 1, now, "control", f"barrier {event.number}", event.at)

    def _mma(self, warp: WarpState, event: e.Mma, now: float) -> float | None:
        group = warp.index // WARPS_OF_WARPGROUP
        products = self.products[group]
        if warp.products == len(products):
            members = len(self.warps[group * WARPS_OF_WARPGROUP : (group + 1) * WARPS_OF_WARPGROUP])
            products.append(Product(event, group, members, first=warp.fresh))
        blocker = products[warp.products - self.cost.mma_queue] if warp.products >= self.cost.mma_queue else None
        if blocker is not None and blocker.done is None:

            def retry(time: float) -> None:
                warp.lane.add(Interval(now, time, "gemm", "WGMMA queue", event.at))
                self.at(time, partial(self._advance, warp))

            blocker.sleepers.append(retry)
            return None
        product = warp.last_product = products[warp.products]
        warp.products += 1
        warp.fresh = False
        end = self._issue(warp, self.cost.mma_issue, now, "issue", "WGMMA", event.at)
        self.at(end, partial(self.tensor.issued, product))
        return end

    def _commit(self, warp: WarpState, event: e.Commit, now: float) -> float:
        if event.kind == "wgmma":
            warp.mma_groups.append(warp.last_product)
            warp.fresh = True
        else:
            warp.bulk_groups.append(warp.stored)
            warp.stored = (0.0, 0.0)
        return now

    def _wait_group(self, warp: WarpState, event: e.WaitGroup, now: float) -> float | None:
        if event.kind == "bulk":
            covered = warp.bulk_groups[: len(warp.bulk_groups) - event.left]
            end = max([now, *(read if event.reading else done for read, done in covered)])
            return self._spend(warp, now, end - now, "wait", "stores", event.at)
        number = len(warp.mma_groups) - event.left - 1
        product = warp.mma_groups[number] if number >= 0 else None
        if product is None:
            return now
        delay = self.cost.mma_latency
        if product.done is not None:
            return self._spend(warp, now, max(0.0, product.done + delay - now), "gemm", "WGMMA", event.at)
        product.sleepers.append(self._wake(warp, now, "gemm", "WGMMA", event.at, delay))
        return None

    def _load(self, warp: WarpState, event: e.Load, now: float) -> float:
        _, arrived = self.loads.copy(now, event.nbytes, event.at)
        self.at(arrived, partial(self._mbarrier(event.barrier).transfer, event.nbytes))
        return self._spend(warp, now, self.cost.copy_issue, "copy", "load", event.at)

    def _store(self, warp: WarpState, event: e.Store, now: float) -> float:
        bandwidth = self.cost.reduce_bandwidth if event.adds else None
        sent, arrived = self.stores.copy(now, event.nbytes, event.at, bandwidth)
        read, done = warp.stored
        warp.stored = (max(read, sent + self.cost.store_read), max(done, arrived))
        self.last_store = max(self.last_store, arrived)
        return self._spend(warp, now, self.cost.copy_issue, "copy", "store", event.at)

    def _access(self, warp: WarpState, event: e.Access, now: float) -> float:
        c = self.cost
        latency = {"shared": c.shared_latency, "global": c.global_latency, "atomic": c.atomic_latency}[event.space]
        if event.space == "atomic" and not event.waits:
            start = max(now, self.adders_free_at)
            self.adders_free_at = start + event.wavefronts * WAVEFRONT / c.reduce_bandwidth
            return self._spend(warp, now, start + c.issue - now, label(event.at), "reduction", event.at)
        start = max(now, self.data_path_free_at)
        passes = event.wavefronts * (1.0 if event.space == "shared" else c.global_wavefront)
        self.data_path_free_at = start + passes
        end = start + passes + latency if event.waits else start + c.issue
        return self._spend(warp, now, end - now, label(event.at), f"{event.space} access", event.at)

    def _issue(self, warp: WarpState, slots: float, now: float, kind: str, words: str, at: e.Place) -> float:
        """A few instructions that need nothing but issue slots. They slip in between those of others' chunks."""
        cycles = slots * self.cost.issue
        self.subs[warp.index % SUB_PARTITIONS].take(now, ((0, cycles),))
        end = now + cycles
        warp.lane.add(Interval(now, end, kind, words, at))
        return end

    def _mbarrier(self, address: int) -> Phases:
        if address not in self.mbarriers:
            raise ReplayError(f"the trace has no count for the mbarrier at {address}")
        return self.mbarriers[address]
