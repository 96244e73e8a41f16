"""Rings of all kinds, and rings with one planted fault each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from fa3.pipeline import Cursor, Edge, Role, RoleSchedule, Topology
from fa3.pipeline.model import Machine, ModelRing, ring_machine
from fa3.pipeline.model.steps import Program


def cast(consumers: int, warps: int, producing: int = 1) -> RoleSchedule:
    """`load` with `producing` issuing warps, then `math0`, ... with `warps` issuing warps each."""
    math = (Role(f"math{i}", 4 + 4 * i, 4, issuing=warps) for i in range(consumers))
    return RoleSchedule((Role("load", 0, 4, issuing=producing), *math))


def ring(
    consumers: int = 2, warps: int = 1, stages: int = 2, bytes: int = 0, private: bool = False, producing: int = 1
) -> ModelRing:
    """The ring `k` from `load` to all consumers, with the arrive counts that `Topology` derives."""
    schedule = cast(consumers, warps, producing)
    edge = Edge("k", "load", tuple(f"math{i}" for i in range(consumers)), stages, bytes, private)
    return ModelRing.of(schedule, Topology.of(schedule, edge)["k"])


@st.composite
def rings(draw: st.DrawFn) -> ModelRing:
    """Any ring: shared or private, filled by TMA or by one or several warps."""
    consumers = draw(st.integers(1, 3))
    private = draw(st.booleans())
    bytes = draw(st.sampled_from((0, 16, 4096)))
    return ring(
        consumers=consumers,
        warps=draw(st.integers(1, 4)),
        stages=consumers if private else draw(st.integers(1, 4)),
        bytes=bytes,
        private=private,
        producing=1 if bytes else draw(st.integers(1, 4)),
    )


@st.composite
def machines(draw: st.DrawFn, fault: Callable[[ModelRing, int], Machine] | None = None) -> Machine:
    """A ring with 0 to 9 items, of which consumers pass some over. With a `fault`: one that is long enough to show."""
    drawn = draw(rings())
    if fault is not None:
        return fault(drawn, 3 * drawn.plan.edge.stages + 3)
    items = draw(st.integers(0, 9))
    passed_over = [draw(st.sets(st.integers(0, max(items - 1, 0)))) for _ in drawn.consumers]
    return ring_machine(drawn, items, passed_over)


# ------------------------------------------------------------------------------------------------------- planted faults


def counts(full: int = 0, empty: int = 0) -> Callable[[ModelRing, int], Machine]:
    """Barriers that wait for so many arrivals more than the topology says."""

    def build(ring: ModelRing, items: int) -> Machine:
        plan = replace(
            ring.plan, full_arrivals=ring.plan.full_arrivals + full, empty_arrivals=ring.plan.empty_arrivals + empty
        )
        return ring_machine(replace(ring, plan=plan), items)

    return build


@dataclass(frozen=True)
class Motionless(Cursor):
    """Forgets to advance."""

    def advance(self) -> Cursor:
        return self


@dataclass(frozen=True)
class Flat(Cursor):
    """Forgets to flip its phase."""

    def advance(self) -> Cursor:
        return Flat((self.stage + 1) % self.stages, self.phase, self.stages)


@dataclass(frozen=True)
class Eager(Cursor):
    """Flips its phase one stage too early."""

    def advance(self) -> Cursor:
        following = (self.stage + 1) % self.stages
        return Eager(following, self.phase ^ int(following == self.stages - 1), self.stages)


Text = Callable[[ModelRing, Cursor, int, str], Program]
"""What a consumer does about one item."""


def right(ring: ModelRing, cursor: Cursor, item: int, warp: str) -> Program:
    return ring.wait(cursor) + ring.read(cursor, item) + ring.release(cursor)


def release_before_wait(ring: ModelRing, cursor: Cursor, item: int, warp: str) -> Program:
    return ring.release(cursor) + ring.wait(cursor) + ring.read(cursor, item)


def release_before_the_last_read(ring: ModelRing, cursor: Cursor, item: int, warp: str) -> Program:
    read, done = ring.read(cursor, item)
    return [*ring.wait(cursor), read, *ring.release(cursor), done]


def no_wait(ring: ModelRing, cursor: Cursor, item: int, warp: str) -> Program:
    return ring.read(cursor, item) + ring.release(cursor)


def no_release(ring: ModelRing, cursor: Cursor, item: int, warp: str) -> Program:
    return ring.wait(cursor) + ring.read(cursor, item)


def one_warp_forgets_to_release(ring: ModelRing, cursor: Cursor, item: int, warp: str) -> Program:
    last = warp == sorted(ring.readers(cursor.stage))[-1]
    return no_release(ring, cursor, item, warp) if last else right(ring, cursor, item, warp)


def passes_over_without_waiting(ring: ModelRing, cursor: Cursor, item: int, warp: str) -> Program:
    """The first lap is not for this consumer. It releases the stages, which is right, but before they have arrived."""
    if item < ring.plan.edge.stages:
        return ring.pass_over(cursor) + ring.release(cursor)
    return right(ring, cursor, item, warp)


def passes_over_without_releasing(ring: ModelRing, cursor: Cursor, item: int, warp: str) -> Program:
    if item < ring.plan.edge.stages:
        return ring.wait(cursor) + ring.pass_over(cursor)
    return right(ring, cursor, item, warp)


def consumers(text: Text = right, start: type[Cursor] = Cursor, phase: int = 0) -> Callable[[ModelRing, int], Machine]:
    """Consumers that do something else about an item, or keep another cursor."""

    def program(ring: ModelRing, items: int, warp: str) -> Program:
        cursor, steps = start(0, phase, ring.plan.edge.stages), []
        for item in range(items):
            if warp in ring.readers(item % ring.plan.edge.stages):
                steps += text(ring, cursor, item, warp)
            cursor = cursor.advance()
        return steps

    def build(ring: ModelRing, items: int) -> Machine:
        found = ring_machine(ring, items)
        changed = {warp: program(ring, items, warp) for group in ring.consumers for warp in group}
        return Machine({**found.programs, **changed}, found.things)

    return build


def producers(
    start: type[Cursor] = Cursor, phase: int = 0, acquires: bool = True
) -> Callable[[ModelRing, int], Machine]:
    """Producers that keep another cursor, or do not wait for the stage to be free."""

    def program(ring: ModelRing, items: int) -> Program:
        cursor, steps = start(0, phase, ring.plan.edge.stages), []
        for item in range(items):
            steps += ring.acquire(cursor)[0 if acquires else 1 :] + ring.fill(cursor, item)
            if ring.plan.edge.bytes == 0:
                steps += ring.commit(cursor)
            cursor = cursor.advance()
        return steps

    def build(ring: ModelRing, items: int) -> Machine:
        found = ring_machine(ring, items)
        return Machine({**found.programs, **{warp: program(ring, items) for warp in ring.producers}}, found.things)

    return build


FAULTS: dict[str, Callable[[ModelRing, int], Machine]] = {
    "producer begins in the other phase": producers(phase=1),
    "consumers begin in the other phase": consumers(phase=1),
    "full waits for one arrival fewer": counts(full=-1),
    "full waits for one arrival more": counts(full=+1),
    "empty waits for one arrival fewer": counts(empty=-1),
    "empty waits for one arrival more": counts(empty=+1),
    "producer forgets to advance": producers(Motionless),
    "producer forgets to flip": producers(Flat),
    "producer flips too early": producers(Eager),
    "producer does not wait": producers(acquires=False),
    "consumers forget to advance": consumers(start=Motionless),
    "consumers forget to flip": consumers(start=Flat),
    "consumers flip too early": consumers(start=Eager),
    "consumers do not wait": consumers(no_wait),
    "consumers do not release": consumers(no_release),
    "one warp does not release": consumers(one_warp_forgets_to_release),
    "release before the wait": consumers(release_before_wait),
    "release before the last read": consumers(release_before_the_last_read),
    "passes over without waiting": consumers(passes_over_without_waiting),
    "passes over without releasing": consumers(passes_over_without_releasing),
}
"""Each takes a right ring and a number of items, and returns its machine with one fault in it."""

NONE_WITH_ONE_STAGE = ("producer flips too early", "consumers flip too early")
"""In a ring of one stage every step is the last of a lap, so these do the right thing."""
