"""List scheduling: in which order, and when, one warp alone issues the instructions of a stretch of straight-line code.

Every cycle the oldest instruction whose operands are ready and whose pipe is free. Reads wait for the results that they
need; a write after a read or a write only keeps its place behind it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fa3.emulator.timing.cost import Cost
from fa3.emulator.timing.events import Event, Math, WaitGroup
from fa3.emulator.timing.ops import Op


class Issued(NamedTuple):
    """An instruction, or else the event at `position` of the stretch, and when it was issued."""

    time: float
    op: Op | None
    position: int


@dataclass
class Marker:
    """An event among the instructions. It is passed when `missing` more of the instructions `needs` have been issued,
    counting only those of kind `only` if that is given. If it is a `gate`, what the PTX has behind it comes later."""

    position: int
    needs: range
    only: str
    missing: int
    gate: bool


class Issue:
    """One stretch: `Math`, WGMMA waits, and arrivals. Of a wait's exponentials a share goes before it
    (`Cost.early_wait`)."""

    def __init__(self, stretch: Sequence[Event], cost: Cost) -> None:
        self.cost = cost
        self.ops: list[Op] = []
        self.markers: list[Marker] = []
        for position, event in enumerate(stretch):
            if isinstance(event, Math):
                self.ops += event.code.ops
            else:
                self._mark(position, isinstance(event, WaitGroup))
        self.units = [cost.units[op.kind] for op in self.ops]
        self.followers: list[list[tuple[int, float]]] = [[] for _ in self.ops]
        """For each instruction those that depend on it, and how long after its issue they may follow."""
        self.blockers = [0] * len(self.ops)
        self._depend()
        for marker in self.markers:
            for index in range(marker.needs.stop, len(self.ops)) if marker.gate else ():
                self.blockers[index] += 1
        self.ready_at = [0.0] * len(self.ops)
        self.waiting: list[tuple[float, int]] = []
        """Instructions without blockers, by the time when their operands are ready."""
        self.end = 0.0
        """When the last result is there; valid after `run`."""

    def _mark(self, position: int, gate: bool) -> None:
        here = len(self.ops)
        since = max((marker.needs.stop for marker in self.markers if marker.gate), default=0)
        exponentials = sum(op.kind == "mufu" for op in self.ops[since:]) if gate else 0
        missing = math.ceil(self.cost.early_wait * exponentials) if exponentials else here - since
        self.markers.append(Marker(position, range(since, here), "mufu" if exponentials else "", missing, gate))

    def _depend(self) -> None:
        writer: dict[str, int] = {}
        readers: dict[str, list[int]] = {}
        for index, op in enumerate(self.ops):
            before: dict[int, float] = {}
            for name in op.writes:
                before.update(dict.fromkeys(readers.pop(name, ()), 0.0))
                if name in writer:
                    before[writer[name]] = 0.0
            for name in op.reads:
                if name in writer:
                    before[writer[name]] = self.units[writer[name]].latency
                readers.setdefault(name, []).append(index)
            writer.update(dict.fromkeys(op.writes, index))
            for other, latency in before.items():
                self.followers[other].append((index, latency))
            self.blockers[index] += len(before)

    def run(self) -> list[Issued]:
        """Everything in the order of issue."""
        issued: list[Issued] = []
        for index, blockers in enumerate(self.blockers):
            if not blockers:
                heapq.heappush(self.waiting, (0.0, index))
        self._pass_markers(0.0, issued)
        ready: dict[str, list[int]] = {}
        free_at: dict[str, float] = {}
        time = 0.0
        while self.waiting or any(ready.values()):
            while self.waiting and self.waiting[0][0] <= time:
                index = heapq.heappop(self.waiting)[1]
                heapq.heappush(ready.setdefault(self.units[index].pipe, []), index)
            free = [queue[0] for pipe, queue in ready.items() if queue and free_at.get(pipe, 0.0) <= time]
            if not free:
                later = [free_at[pipe] for pipe, queue in ready.items() if queue]
                time = min([*later, *(at for at, _ in self.waiting[:1])])
                continue
            oldest = min(free)
            unit = self.units[oldest]
            heapq.heappop(ready[unit.pipe])
            free_at[unit.pipe] = time + unit.cycles
            issued.append(Issued(time, self.ops[oldest], -1))
            self._release(oldest, time, issued)
            time += self.cost.issue if unit.cycles else 0.0
        self.end = max(self.end, time)
        return issued

    def _release(self, index: int, time: float, issued: list[Issued]) -> None:
        """What an issued instruction sets free: its followers, and events that waited for it."""
        self.end = max(self.end, time + self.units[index].latency)
        for follower, latency in self.followers[index]:
            self._unblock(follower, time + latency)
        for marker in self.markers:
            if index in marker.needs and marker.only in ("", self.ops[index].kind):
                marker.missing -= 1
        self._pass_markers(time, issued)

    def _unblock(self, index: int, time: float) -> None:
        self.blockers[index] -= 1
        self.ready_at[index] = max(self.ready_at[index], time)
        if not self.blockers[index]:
            heapq.heappush(self.waiting, (self.ready_at[index], index))

    def _pass_markers(self, time: float, issued: list[Issued]) -> None:
        """Passes events in their order, as long as the next one waits for nothing."""
        while self.markers and self.markers[0].missing <= 0:
            marker = self.markers.pop(0)
            issued.append(Issued(time, None, marker.position))
            for index in range(marker.needs.stop, len(self.ops)) if marker.gate else ():
                self._unblock(index, time)
