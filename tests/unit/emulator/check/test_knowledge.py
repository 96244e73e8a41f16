"""The verdict on random sequences of accesses and barriers, against a graph of happens-before that is searched."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa3.emulator.check import Names, knowledge
from fa3.emulator.check.knowledge import Events, WarpKnowledge
from fa3.emulator.check.ordering import Order
from fa3.emulator.check.regions import Regions
from fa3.emulator.check.shared_memory import SharedMemory
from fa3.emulator.operations import Group, Operation
from fa3.sass.ptx_code import Statement

WARPS, PIECES, BARRIERS = 2, 6, 1
FIRST_WORD = 256
Action = Literal["read", "write", "arrive", "wait", "fence", "load", "land", "store", "join", "meet"]
RACES = {"overwritten while read", "read before it arrived", "written twice at once", "no proxy fence"}


class Thing(SimpleNamespace):
    """Something with attributes that can be a key."""

    __hash__ = object.__hash__


class Event(NamedTuple):
    """What warp `warp` does: with pieces [piece, piece + length) of memory, or barrier `barrier`."""

    action: Action
    warp: int
    piece: int = 0
    length: int = 1
    barrier: int = 0

    @property
    def pieces(self) -> range:
        return range(self.piece, min(self.piece + self.length, PIECES))


# ------------------------------------------------------------------------------------------------ the checker
class Fed:
    """Order and SharedMemory, told events by hand. A barrier completes a phase with every arrival; load number i
    reports to a barrier of its own, which all waits for barrier 0 ask, too. The warps are in one CTA, or in the CTAs of
    a cluster; memory and barriers are those of the first."""

    def __init__(self, ctas: int = 1) -> None:
        self.order = Order()
        self.memory = SharedMemory(Names("k"), self.order, Regions())
        machine = Thing(launch=Thing(smem_bytes=64))
        self.cluster: Any = Thing(ctas=[])
        for rank in range(ctas):
            cta = Thing(machine=machine, warps=[None] * (WARPS // ctas), rank=rank, cluster=self.cluster)
            self.cluster.ctas.append(cta)
        self.cta: Any = self.cluster.ctas[0]
        self.warps: list[Any] = [Thing(cta=self.cluster.ctas[i % ctas], index=i // ctas) for i in range(WARPS)]
        self.named: Any = Thing(number=1, generation=0, arrived=0)
        self.loads: list[Operation] = []
        self.stores: list[Operation] = []

    def racing(self, number: int, event: Event) -> bool:
        """Whether this event is found to race with an earlier one."""
        before = sum(finding.count for finding in self.memory.report)
        at = Statement(event.action, line=number)
        getattr(self, event.action)(self.warps[event.warp], at, event)
        return sum(finding.count for finding in self.memory.report) > before

    def _words(self, event: Event) -> Any:
        return FIRST_WORD + np.array(event.pieces, np.int64)

    def _access(self, warp: Any, at: Statement, event: Event, write: bool) -> None:
        if warp.cta is self.cta:
            self.memory.shared(warp, at, 4 * self._words(event), 4, write)
        else:
            self.order.remote(warp, at, self.cta, 4 * self._words(event), 4, write)
            self.memory.remote(warp, at, self.cta, 4 * self._words(event), 4, write)

    def read(self, warp: Any, at: Statement, event: Event) -> None:
        self._access(warp, at, event, False)

    def write(self, warp: Any, at: Statement, event: Event) -> None:
        self._access(warp, at, event, True)

    def fence(self, warp: Any, at: Statement, event: Event) -> None:
        self.order.fenced(warp, Statement("fence.proxy.async"))

    def _barrier(self, number: int) -> Any:
        return Thing(address=8 * number, cta=self.cta)

    def arrive(self, warp: Any, at: Statement, event: Event) -> None:
        release = Statement("mbarrier.arrive.release.cluster.shared::cluster.b64", line=at.line)
        self.order.arrived(warp, release, self._barrier(event.barrier), 1, 0)
        self.order.completed(self._barrier(event.barrier))

    def wait(self, warp: Any, at: Statement, event: Event) -> None:
        self.order.passed(warp, at, self._barrier(event.barrier), 0)

    def load(self, warp: Any, at: Statement, event: Event) -> None:
        load = Operation("tma.load", warp, at, [], writes=self._words(event), barrier=self._barrier(0), target=self.cta)
        self.order.issued(warp, load)
        self.memory.issued(warp, load)
        self.loads.append(load)

    def land(self, warp: Any, at: Statement, event: Event) -> None:
        if self.loads:
            self.order.transferred(self.loads.pop(0), self._barrier(0), 4)
            self.order.completed(self._barrier(0))

    def store(self, warp: Any, at: Statement, event: Event) -> None:
        store = Operation("tma.store", warp, at, [], reads=self._words(event))
        self.order.issued(warp, store)
        self.memory.issued(warp, store)
        self.stores.append(store)

    def join(self, warp: Any, at: Statement, event: Event) -> None:
        mine = [store for store in self.stores if store.warp is warp]
        self.order.joined(warp, at, [Group("bulk", warp, 0, mine)], True)

    def meet(self, warp: Any, at: Statement, event: Event) -> None:
        """All warps meet."""
        if len(self.cluster.ctas) > 1:
            for other in self.warps:
                self.order.cluster_arrived(other, Statement("barrier.cluster.arrive"), Thing(cluster=self.cluster))
            self.order.cluster_completed(Thing(cluster=self.cluster))
            for other in self.warps:
                self.order.cluster_passed(other, at, Thing(cluster=self.cluster))
            return
        for other in self.warps:
            self.named.arrived = 32 * other.index
            self.order.entered(other, at, self.named, 32 * WARPS, True)
        self.named.generation += 1
        for other in self.warps:
            self.order.left(other, at, self.named)


# ------------------------------------------------------------------------------------------------ the model
@dataclass
class Node:
    """A node of the graph: what lies before it, and, if it is an access, what it touches."""

    before: frozenset[int]
    fence: bool = False
    pieces: frozenset[int] = frozenset()
    write: bool = False
    engine: bool = False


@dataclass
class Graph:
    """Happens-before, with a node for every single step."""

    nodes: list[Node] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    published: dict[int, int] = field(default_factory=dict)
    loads: list[int] = field(default_factory=list)
    stores: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.last = self.last or [self._node(set()) for _ in range(WARPS)]

    def clone(self) -> Graph:
        return replace(
            self, nodes=[*self.nodes], last=[*self.last], published={**self.published}, loads=[*self.loads],
            stores=[*self.stores],
        )  # fmt: skip

    def _node(self, after: set[int], **options: Any) -> int:
        before = frozenset(after).union(*(self.nodes[node].before for node in after))
        self.nodes.append(Node(before, **options))
        return len(self.nodes) - 1

    def _step(self, warp: int, *after: int, **options: Any) -> int:
        self.last[warp] = self._node({self.last[warp], *after}, **options)
        return self.last[warp]

    def racing(self, event: Event) -> bool:
        access = self._take(event)
        return access is not None and any(self._races(access, other) for other in range(len(self.nodes)))

    def _take(self, event: Event) -> int | None:
        """Adds the event; returns the node of its access."""
        warp, pieces = event.warp, frozenset(event.pieces)
        if event.action in ("read", "write"):
            return self._step(warp, pieces=pieces, write=event.action == "write")
        if event.action in ("load", "store"):
            start = self._step(warp)
            node = self._node({start}, pieces=pieces, write=event.action == "load", engine=True)
            self.loads += [node] * (event.action == "load")
            self.stores += [(warp, node)] * (event.action == "store")
            return node
        if event.action == "fence":
            self._step(warp, fence=True)
        elif event.action == "arrive":
            self.published[event.barrier] = self._step(warp)
        elif event.action == "wait" and event.barrier in self.published:
            self._step(warp, self.published[event.barrier])
        elif event.action == "land" and self.loads:
            self.published[0] = self.loads.pop(0)
        elif event.action == "join":
            self._step(warp, *(node for who, node in self.stores if who == warp))
        elif event.action == "meet":
            node = self._node(set(self.last))
            self.last = [node] * WARPS
        return None

    def _races(self, new: int, old: int) -> bool:
        a, b = self.nodes[old], self.nodes[new]
        if old == new or not a.pieces & b.pieces or not (a.write or b.write):
            return False
        if old not in b.before:
            return True
        if not b.engine or a.engine or not a.write:
            return False
        return not any(old in self.nodes[n].before for n in b.before if self.nodes[n].fence)


# ------------------------------------------------------------------------------------------------ tests
ACTIONS = st.sampled_from("read write write arrive wait wait fence load load land land store join meet".split())
EVENTS = st.lists(
    st.builds(
        Event,
        ACTIONS,
        st.integers(0, WARPS - 1),
        st.integers(0, PIECES - 1),
        st.integers(1, 2),
        st.integers(0, BARRIERS - 1),
    ),
    min_size=8,
    max_size=40,
)


@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize("limit", [512, 4])
def test_first_race_is_that_of_the_graph(limit: int, ctas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few events at a time, those that nothing depends on are given out again all the time. A store reads the
    shared memory of its own CTA, so that among several only the first starts any."""
    monkeypatch.setattr(knowledge.Events.__init__, "__defaults__", (limit,))

    @settings(max_examples=150, deadline=None)
    @given(EVENTS, st.sampled_from((0, 3, 99)))
    def agrees(events: list[Event], patience: int) -> None:
        """Of the events that race, so many are left out, so that longer sequences without a race come up, too."""
        fed, graph = Fed(ctas), Graph()
        for number, event in enumerate(events):
            event = event._replace(warp=0) if event.action == "store" and ctas > 1 else event
            expected = graph.clone().racing(event)
            if expected and patience:
                patience -= 1
                continue
            graph.racing(event)
            assert fed.racing(number, event) == expected, f"{event}, number {number} of {events}"
            if expected:  # what is behind a race need not be found one by one
                assert fed.memory.report.kinds <= RACES
                return

    agrees()


def test_a_load_hands_over_what_came_before_it_only() -> None:
    """Warp 0 writes on behind the start of its load; who waits for the load has not waited for that."""
    fed = Fed()
    events = [Event("write", 0, 0), Event("load", 0, 3), Event("write", 0, 1), Event("land", 0), Event("wait", 1)]
    assert not any(fed.racing(number, event) for number, event in enumerate(events))
    assert not fed.racing(5, Event("read", 1, 0)) and fed.racing(6, Event("read", 1, 1))


def test_a_writer_that_comes_after_the_first_read() -> None:
    """What overlaps is looked up once; a region that is first written later counts, too."""
    fed = Fed()
    events = [Event("read", 0, 0), Event("meet", 0), Event("write", 1, 0, 2)]
    assert not any(fed.racing(number, event) for number, event in enumerate(events))
    assert fed.racing(3, Event("read", 0, 0))


def test_events_are_given_out_again() -> None:
    live, forgotten = 0b0101, []
    events = Events(lambda: live, forgotten.append, limit=4)
    first = [events.new() for _ in range(4)]
    assert first == [1, 4, 16, 64]
    assert events.new() == 16 and forgotten == [0b1111]


def test_more_events_when_all_are_alive() -> None:
    events = Events(lambda: (1 << 64) - 1, lambda kept: None, limit=4)
    assert len({events.new() for _ in range(20)}) == 20
    assert events.happened & 1 << 2 * 19


def test_a_lane_speaks_for_itself() -> None:
    warp = WarpKnowledge(Events(lambda: 0, lambda kept: None))
    all_lanes, one = warp.access((1 << 32) - 1), warp.access(1)
    assert not warp.release(1) & all_lanes and warp.release(1) & one
    warp.join()
    assert warp.release(1) & all_lanes


def test_a_lane_waits_for_itself() -> None:
    warp = WarpKnowledge(Events(lambda: 0, lambda kept: None))
    warp.acquire(1, 4)
    assert warp.by_threads(1) & 4 and not warp.by_threads(2) & 4
    warp.join()
    assert warp.by_threads(2) & 4
