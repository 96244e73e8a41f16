"""The model's twin of `fa3.pipeline.ring`: the same four operations, as steps of a program.

The cursor is the one that kernels use, and so are the arrive counts and bytes (`EdgePlan`): a wrong number in the
topology is a deadlock or an overwritten buffer here. `tests/unit/pipeline/test_ring_twin.py` holds the two texts
against each other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fa3.pipeline.cursor import Cursor
from fa3.pipeline.schedule import Role, RoleSchedule
from fa3.pipeline.topology import EdgePlan

from .machine import Actor, Machine
from .steps import Arrive, Begin, Bring, Done, Program, Read, Wait
from .things import Buffer, MBarrier, Thing

BOXES = 2
"""The copy engine brings an item in this many parts, which may land at different times."""


def warps(role: Role) -> tuple[Actor, ...]:
    """The issuing warps of a role, by name."""
    if role.issuing == 1:
        return (role.name,)
    return tuple(f"{role.name}.{i}" for i in range(role.issuing))


@dataclass(frozen=True)
class ModelRing:
    """An edge with the warps at its ends. Operations return the steps that one warp takes."""

    plan: EdgePlan
    producers: tuple[Actor, ...]
    consumers: tuple[tuple[Actor, ...], ...]

    @classmethod
    def of(cls, schedule: RoleSchedule, plan: EdgePlan) -> ModelRing:
        edge = plan.edge
        writers = tuple(warp for name in edge.producers for warp in warps(schedule[name]))
        return cls(plan, writers, tuple(warps(schedule[name]) for name in edge.consumers))

    # What is shared

    def full(self, stage: int) -> str:
        return f"{self.plan.edge.name}.full[{stage}]"

    def empty(self, stage: int) -> str:
        return f"{self.plan.edge.name}.empty[{stage}]"

    def buffer(self, stage: int) -> str:
        return f"{self.plan.edge.name}[{stage}]"

    def things(self) -> dict[str, Thing]:
        """Twin of `init_barriers`, and the buffers beside it."""
        found: dict[str, Thing] = {}
        for stage in range(self.plan.edge.stages):
            found[self.full(stage)] = MBarrier(self.plan.full_arrivals)
            found[self.empty(stage)] = MBarrier(self.plan.empty_arrivals)
            found[self.buffer(stage)] = Buffer()
        return found

    def readers(self, stage: int) -> frozenset[Actor]:
        """The warps that read a stage: those of its owner if the edge is private, else all."""
        groups = (self.consumers[stage],) if self.plan.edge.private else self.consumers
        return frozenset(warp for group in groups for warp in group)

    # What a producer does

    def acquire(self, cursor: Cursor) -> Program:
        steps: Program = [Wait(barrier=self.empty(cursor.stage), parity=cursor.phase ^ 1)]
        if self.plan.edge.bytes > 0:
            steps.append(Arrive(barrier=self.full(cursor.stage), bytes=self.plan.edge.bytes))
        return steps

    def fill(self, cursor: Cursor, item: int) -> Program:
        """Asks the copy engine for the item; an edge without bytes is written by the producer's own threads."""
        buffer, readers = self.buffer(cursor.stage), self.readers(cursor.stage)
        if self.plan.edge.bytes > 0:
            return [Begin(buffer=buffer, item=item, size=self.plan.edge.bytes, readers=readers)]
        parts = len(self.producers)
        return [Begin(buffer=buffer, item=item, size=parts, readers=readers), Bring(buffer=buffer, item=item)]

    def commit(self, cursor: Cursor) -> Program:
        return [Arrive(barrier=self.full(cursor.stage))]

    # What a consumer does

    def wait(self, cursor: Cursor) -> Program:
        return [Wait(barrier=self.full(cursor.stage), parity=cursor.phase)]

    def read(self, cursor: Cursor, item: int) -> Program:
        buffer = self.buffer(cursor.stage)
        return [Read(buffer=buffer, item=item), Done(buffer=buffer)]

    def pass_over(self, cursor: Cursor) -> Program:
        return [Done(buffer=self.buffer(cursor.stage))]

    def release(self, cursor: Cursor) -> Program:
        return [Arrive(barrier=self.empty(cursor.stage))]

    # Whole programs

    def producer(self, items: int) -> Program:
        """Each producing warp: items 0, 1, ... in the ring's order."""
        program, cursor = [], Cursor.start(self.plan.edge.stages)
        for item in range(items):
            program += self.acquire(cursor) + self.fill(cursor, item)
            if self.plan.edge.bytes == 0:
                program += self.commit(cursor)
            cursor = cursor.advance()
        return program

    def consumer(self, warp: Actor, items: int, passed_over: Collection[int] = ()) -> Program:
        """One consuming warp: every item that is meant for it, in order. It does not look at those passed over."""
        program: Program = []
        cursor = Cursor.start(self.plan.edge.stages)
        for item in range(items):
            if warp in self.readers(cursor.stage):
                look = self.pass_over(cursor) if item in passed_over else self.read(cursor, item)
                program += self.wait(cursor) + look + self.release(cursor)
            cursor = cursor.advance()
        return program

    def engines(self, items: int) -> dict[Actor, Program]:
        """The copy engine, as one actor for each stage: transfers to different stages may overtake one another."""
        if self.plan.edge.bytes == 0:
            return {}
        programs: dict[Actor, Program] = {}
        sizes = _parts(self.plan.edge.bytes)
        for item in range(items):
            stage = item % self.plan.edge.stages
            buffer, full = self.buffer(stage), self.full(stage)
            programs.setdefault(f"tma {buffer}", []).extend(
                Bring(buffer=buffer, item=item, size=size, barrier=full) for size in sizes
            )
        return programs


def _parts(bytes: int) -> list[int]:
    """`bytes` in up to BOXES parts of whole 16 bytes."""
    first = bytes // BOXES // 16 * 16
    return [first, bytes - first] if first else [bytes]


def ring_machine(ring: ModelRing, items: int, passed_over: Sequence[Collection[int]] = ()) -> Machine:
    """A machine with one ring: all its warps, and `items` items. `passed_over`: for each consumer, what it skips."""
    programs: dict[Actor, Program] = {warp: ring.producer(items) for warp in ring.producers}
    programs |= ring.engines(items)
    for index, group in enumerate(ring.consumers):
        skipped = passed_over[index] if passed_over else ()
        programs |= {warp: ring.consumer(warp, items, skipped) for warp in group}
    return Machine(programs, ring.things())
