"""Happens-before, as sets of events.

An *event* is a stretch of a warp's own accesses to shared memory, one asynchronous operation, or one arrival at a
barrier. What somebody knows to lie behind him is a set of events, and a set is one Python integer. Event n has two
bits: bit 2n says that it happened before, bit 2n + 1 that, besides, a proxy fence lies in between, so that the async
proxy (TMA, WGMMA) sees what it wrote (PTX ISA, "Memory Consistency Model", causality order and proxies).

Sets of events pass from warp to warp through barriers: who arrives hands over what he knows, and who waits gets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from fa3.emulator.warp import ALL_LANES

FIRST_LIMIT = 512
"""Events alive at a time before the dead ones are looked for."""


class Events:
    """Gives out events, and takes back those that nothing can depend on any more.

    `live` tells which events must stay, and `forget` takes all others out of every set.
    """

    def __init__(self, live: Callable[[], int], forget: Callable[[int], None], limit: int = FIRST_LIMIT) -> None:
        self.live, self.forget, self.limit = live, forget, limit
        self._free = list(range(limit - 1, -1, -1))
        self.happened = int.from_bytes(b"\x55" * (limit // 4), "little")
        """The even bits of all events."""

    def new(self) -> int:
        """The first bit of a new event."""
        if not self._free:
            self._collect()
        return 1 << 2 * self._free.pop()

    def fenced(self, known: int, but: int = 0) -> int:
        """The same events, seen by the async proxy as well, except for some."""
        return known | (known & self.happened & ~but) << 1

    def _collect(self) -> None:
        live = self.live()
        live = (live | live >> 1) & self.happened
        kept = live | live << 1
        self.forget(kept)
        self._free = [n for n in range(self.limit - 1, -1, -1) if not live >> 2 * n & 1]
        if len(self._free) < self.limit // 2:
            self._free = [*range(2 * self.limit - 1, self.limit - 1, -1), *self._free]
            self.limit *= 2
            self.happened = int.from_bytes(b"\x55" * (self.limit // 4), "little")


def union(sets: Iterable[int]) -> int:
    """Sets of events in one."""
    return reduce(or_, sets, 0)


@dataclass(slots=True)
class Own:
    """A warp's own accesses by certain lanes since the warp last joined: `open` may still grow, `closed` may not."""

    open: int = 0
    closed: int = 0


@dataclass(slots=True)
class WarpKnowledge:
    """What a warp knows. A lane that arrives somewhere speaks for itself: what other lanes have done it hands over only
    if the warp has joined (bar.warp.sync, bar.sync) in between."""

    events: Events
    known: int = 0
    own: dict[int, Own] = field(default_factory=dict)
    """By the lanes that made the accesses."""
    told: dict[int, int] = field(default_factory=dict)
    """Lanes -> what they know from waits that only they have passed."""
    covered: dict[int, int] = field(default_factory=dict)
    """Lanes -> what lay behind them at a releasing fence: relaxed arrivals hand over that, and no more."""

    def access(self, lanes: int) -> int:
        """The event that an access by these lanes belongs to."""
        own = self.own.get(lanes)
        if own is None:
            own = self.own[lanes] = Own()
        if not own.open:
            own.open = self.events.new()
        return own.open

    def mark(self, lanes: int) -> int:
        """A new event of these lanes that never grows, such as an arrival."""
        event = self.events.new()
        if lanes == ALL_LANES:
            self.known |= event
        else:
            self.own.setdefault(lanes, Own()).closed |= event
        return event

    def by_threads(self, lanes: int) -> int:
        """What an access of these lanes comes after. What the warp itself did counts whole, because an access by many
        lanes does not say which lane touched what."""
        known = self._told_to(lanes)
        for own in self.own.values():
            known |= own.open | own.closed
        return known

    def by_engine(self, lanes: int) -> int:
        """What an asynchronous operation that these lanes start comes after."""
        known = self._told_to(lanes)
        for owners, own in self.own.items():
            if not owners & ~lanes:
                known |= own.open | own.closed
        return known

    def release(self, lanes: int) -> int:
        """What these lanes hand over when they arrive somewhere. What they do later is another event."""
        known = self._told_to(lanes)
        for owners, own in self.own.items():
            if not owners & ~lanes:
                own.closed |= own.open
                own.open = 0
                known |= own.closed
        return known

    def acquire(self, lanes: int, known: int) -> None:
        """These lanes have waited for somebody who knew that."""
        if lanes == ALL_LANES:
            self.known |= known
        else:
            self.told[lanes] = self.told.get(lanes, 0) | known

    def cover(self, lanes: int, known: int) -> None:
        """These lanes executed a fence that releases what they know of `known`."""
        self.covered[lanes] = self.covered.get(lanes, 0) | known

    def relaxed(self, lanes: int) -> int:
        """What these lanes hand over when they arrive somewhere without releasing."""
        return union(known for who, known in self.covered.items() if who & lanes)

    @property
    def all(self) -> int:
        """What any lane of the warp knows or has done."""
        mine = union(own.open | own.closed for own in self.own.values())
        return self.known | mine | union(self.told.values())

    def fence(self, lanes: int, but: int = 0) -> None:
        """fence.proxy.async, executed by these lanes; `but` are events that it does not fence."""
        self.known = self.events.fenced(self.known, but)
        for who, known in self.told.items():
            if not who & ~lanes:
                self.told[who] = self.events.fenced(known, but)
        for owners, own in self.own.items():
            if not owners & ~lanes:
                own.closed = self.events.fenced(own.closed | own.open, but)
                own.open = 0

    def join(self) -> None:
        """All lanes of the warp have met, and what each of them did or was told lies behind all."""
        for own in self.own.values():
            self.known |= own.open | own.closed
        self.own.clear()
        for known in self.told.values():
            self.known |= known
        self.told.clear()

    def _told_to(self, lanes: int) -> int:
        known = self.known
        for who, what in self.told.items():
            if not lanes & ~who:
                known |= what
        return known

    # ---- forgetting
    @property
    def growing(self) -> int:
        """Events that may still grow."""
        result = 0
        for own in self.own.values():
            result |= own.open
        return result

    def forget(self, kept: int) -> None:
        self.known &= kept
        self.told = {lanes: known & kept for lanes, known in self.told.items()}
        self.covered = {lanes: known & kept for lanes, known in self.covered.items()}
        for own in self.own.values():
            own.closed &= kept
