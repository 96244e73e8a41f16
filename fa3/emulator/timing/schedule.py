"""One warp's events as it would execute them after ptxas: straight-line code in order of issue, cut into chunks.

ptxas reorders within a stretch of straight-line code, and fills the latency of one chain with another; list scheduling
(`fa3.emulator.timing.issue`) imitates that. It also moves a `wgmma.wait_group` up between the exponentials in front of
it, and mixes what follows the wait with those that remain. So a stretch may contain such waits, and arrivals at
mbarriers.

The result is a list of *chunks* of some 16 instructions with the time that each takes alone (`span`, stalls included)
and its demand for every pipe, which the replay weighs against that of other warps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fa3.emulator.timing.cost import PIPES, Cost
from fa3.emulator.timing.events import Arrive, Event, Math, Mma, WaitGroup
from fa3.emulator.timing.issue import Issue, Issued
from fa3.emulator.timing.ops import FREE
from fa3.sass.listing import Source

DESCRIPTOR_OPS = 8
"""So few instructions in front of a WGMMA only step its descriptors."""


class Chunk(NamedTuple):
    """A few instructions in a row."""

    span: float
    use: tuple[tuple[int, float], ...]
    """(index in `PIPES`, cycles)."""
    ops: int
    label: str
    at: Source | None


Item = Chunk | Event


@dataclass
class Scheduler:
    """Schedules for one cost model. Stretches of the same code are scheduled once; their barriers may differ."""

    cost: Cost
    known: dict[tuple[object, ...], list[Chunk | int]] = field(default_factory=dict)

    def items(self, events: Sequence[Event]) -> list[Item]:
        """One warp's list with chunks in the place of `Math`."""
        items: list[Item] = []
        for stretch, following in _with_following(_stretches(events)):
            if isinstance(following, Mma) and _is_address_arithmetic(stretch):
                continue
            if any(isinstance(event, Math) for event in stretch):
                items += (place if isinstance(place, Chunk) else stretch[place] for place in self._layout(stretch))
            else:
                items += stretch
        return items

    def _layout(self, stretch: Sequence[Event]) -> list[Chunk | int]:
        """Chunks, and the positions in the stretch of the events between them."""
        key = tuple(event.code if isinstance(event, Math) else type(event) for event in stretch)
        layout = self.known.get(key)
        if layout is None:
            issue = Issue(stretch, self.cost)
            layout = self.known[key] = list(_cut(issue.run(), issue.end, self.cost))
        return layout


def _stretches(events: Iterable[Event]) -> Iterator[list[Event]]:
    """Runs of instructions, WGMMA waits and arrivals; every other event by itself."""
    stretch: list[Event] = []
    for event in events:
        if isinstance(event, Math | Arrive) or (isinstance(event, WaitGroup) and event.kind == "wgmma"):
            stretch.append(event)
            continue
        if stretch:
            yield stretch
            stretch = []
        yield [event]
    if stretch:
        yield stretch


def _with_following(stretches: Iterable[list[Event]]) -> Iterator[tuple[list[Event], Event | None]]:
    """Each stretch with the event behind it."""
    before: list[Event] | None = None
    for stretch in stretches:
        if before is not None:
            yield before, stretch[0]
        before = stretch
    if before is not None:
        yield before, None


def _is_address_arithmetic(stretch: Sequence[Event]) -> bool:
    """What makes the descriptors of one WGMMA out of those of the last; `Cost.mma_issue` counts it."""
    return all(isinstance(event, Math) for event in stretch) and (
        sum(len(event.code.ops) for event in stretch if isinstance(event, Math)) <= DESCRIPTOR_OPS
    )


def _cut(issued: Sequence[Issued], end: float, cost: Cost) -> Iterator[Chunk | int]:
    """Chunks follow each other without gaps: what a warp waits for its own results counts to the chunk before."""
    begin, some = 0.0, list[Issued]()
    for each in issued:
        if some and (each.op is None or len(some) >= cost.chunk):
            yield _chunk(some, each.time - begin, cost)
            begin, some = each.time, []
        if each.op is None:
            yield each.position
        elif each.op.kind != FREE:
            some.append(each)
    if some:
        yield _chunk(some, end - begin, cost)


def _chunk(some: Sequence[Issued], span: float, cost: Cost) -> Chunk:
    use = dict.fromkeys(PIPES, 0.0)
    use["issue"] = cost.issue * len(some)
    labels: Counter[str] = Counter()
    for each in some:
        assert each.op is not None
        unit = cost.units[each.op.kind]
        use[unit.pipe] += unit.cycles
        labels[each.op.label] += 1
    label = labels.most_common(1)[0][0]
    at = next(each.op.at for each in some if each.op is not None and each.op.label == label)
    return Chunk(span, tuple((i, use[p]) for i, p in enumerate(PIPES) if use[p]), len(some), label, at)
