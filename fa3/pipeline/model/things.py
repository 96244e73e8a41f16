"""What warps share, as immutable values: every change is a new value.

Each of them knows the rules of the hardware, and raises `Fault` where the hardware would go on in silence: an arrival
too many, a buffer that is overwritten unread, a read of what has not arrived.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

MAX_ARRIVALS = (1 << 20) - 1
"""The largest count that `mbarrier.init` takes."""

Owner = Literal["free", "filling", "arrived", "reading"]


class Fault(Exception):
    """A broken rule of the hardware, or of the buffers that it guards."""


@dataclass(frozen=True)
class MBarrier:
    """An `mbarrier`: a phase is complete when `count` arrivals and all announced bytes have come; then the next begins.

    `phase` is the phase under way, from 0; hardware keeps its last bit. `bytes` were announced and have not come yet;
    negative if they came first. Source: PTX ISA, `mbarrier`, "Phase of the mbarrier object".
    """

    count: int
    phase: int = 0
    arrived: tuple[str, ...] = ()
    bytes: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MAX_ARRIVALS:
            raise Fault(f"an mbarrier cannot wait for {self.count} arrivals")

    def passes(self, parity: int) -> bool:
        """Whether a wait with this parity goes through: the last phase of this parity is complete.

        The phase before the first counts as complete, so a fresh barrier passes parity 1.
        """
        return self.phase % 2 != parity

    def arrive(self, who: str, bytes: int = 0) -> MBarrier:
        """One arrival, which may announce `bytes` to come (`mbarrier.arrive.expect_tx`)."""
        if len(self.arrived) == self.count:
            raise Fault(f"{who} is arrival {self.count + 1} of {self.count}, after {', '.join(self.arrived)}")
        return replace(self, arrived=tuple(sorted((*self.arrived, who))), bytes=self.bytes + bytes)._turned()

    def bring(self, bytes: int) -> MBarrier:
        """Announced bytes have come (the copy engine's `complete_tx`)."""
        return replace(self, bytes=self.bytes - bytes)._turned()

    def _turned(self) -> MBarrier:
        if len(self.arrived) == self.count and self.bytes == 0:
            return MBarrier(self.count, self.phase + 1)
        return self


@dataclass(frozen=True)
class Buffer:
    """One stage's memory: which item lies in it, how much of it is still to come, who has not finished reading it."""

    item: int | None = None
    missing: int = 0
    unread: frozenset[str] = frozenset()
    reading: frozenset[str] = frozenset()

    @property
    def owner(self) -> Owner:
        if self.missing:
            return "filling"
        if self.reading:
            return "reading"
        return "arrived" if self.unread else "free"

    def begin(self, who: str, item: int, size: int, readers: frozenset[str]) -> Buffer:
        """The first of `size` parts of `item` may land from now on. Several warps may begin the same item together."""
        if self.item == item:
            return self
        if self.unread:
            raise Fault(f"{who} overwrites item {self.item} with {item}; unread by {', '.join(sorted(self.unread))}")
        if self.missing:
            raise Fault(f"{who} overwrites item {self.item} with {item}; it has not arrived yet")
        return Buffer(item, size, readers)

    def bring(self, size: int) -> Buffer:
        if size > self.missing:
            raise Fault(f"item {self.item} gets {size} more, where {self.missing} are missing")
        return replace(self, missing=self.missing - size)

    def read(self, who: str, item: int) -> Buffer:
        """`who` begins to read. Whoever reads must find the item that it means, whole, and for the first time."""
        if self.item != item:
            raise Fault(f"{who} reads item {self.item}, expected {item}")
        if self.missing:
            raise Fault(f"{who} reads item {item} before it has arrived")
        if who not in self.unread:
            raise Fault(f"{who} reads item {item} a second time, or is none of its readers")
        return replace(self, reading=self.reading | {who})

    def done(self, who: str) -> Buffer:
        """`who` needs the item no more, whether it has read it or not."""
        return replace(self, unread=self.unread - {who}, reading=self.reading - {who})


@dataclass(frozen=True)
class NamedBarrier:
    """One of a CTA's 16 barriers (`bar.sync`, `bar.arrive`): opens when `threads` threads have come, then restarts."""

    threads: int = 0
    arrived: tuple[tuple[str, int], ...] = ()
    waiting: frozenset[str] = frozenset()

    def arrive(self, who: str, size: int, threads: int, wait: bool) -> NamedBarrier:
        """`size` threads come to a barrier of `threads`; with `wait` (`bar.sync`) they stay until it opens."""
        if self.arrived and threads != self.threads:
            raise Fault(f"{who} joins a barrier of {threads} threads; it began with {self.threads}")
        if who in dict(self.arrived):
            raise Fault(f"{who} comes a second time before the barrier has opened")
        came = sum(count for _, count in self.arrived) + size
        if came > threads:
            raise Fault(f"{who} brings {came} threads to a barrier of {threads}")
        if came == threads:
            return NamedBarrier(threads)
        waiting = self.waiting | {who} if wait else self.waiting
        return NamedBarrier(threads, tuple(sorted((*self.arrived, (who, size)))), waiting)


@dataclass(frozen=True)
class TensorCores:
    """What a turnstile guards. `groups` take turns in this order, each with all its warps, one group at a time."""

    groups: tuple[tuple[str, ...], ...]
    turn: int = -1
    entered: frozenset[str] = frozenset()
    inside: frozenset[str] = frozenset()

    def enter(self, who: str) -> TensorCores:
        if self.turn >= 0 and who in self._group(self.turn) and who not in self.entered:
            return replace(self, entered=self.entered | {who}, inside=self.inside | {who})
        if self.inside:
            raise Fault(f"{who} enters while {', '.join(sorted(self.inside))} is inside")
        late = set(self._group(self.turn)) - self.entered if self.turn >= 0 else set()
        if late or who not in self._group(self.turn + 1):
            expected = sorted(late) or self._group(self.turn + 1)
            raise Fault(f"{who} enters out of turn; it is the turn of {', '.join(expected)}")
        return replace(self, turn=self.turn + 1, entered=frozenset({who}), inside=frozenset({who}))

    def leave(self, who: str) -> TensorCores:
        return replace(self, inside=self.inside - {who})

    def _group(self, turn: int) -> tuple[str, ...]:
        return self.groups[turn % len(self.groups)]


Thing = MBarrier | Buffer | NamedBarrier | TensorCores
