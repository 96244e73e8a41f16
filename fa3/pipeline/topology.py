"""Who hands what to whom: edges between roles, and the barriers that follow from them.

An edge is a ring of buffers that one role fills and others read. From the roles at its two ends follow the arrive
counts of its barriers, and from its buffers the bytes that one filling brings. Nothing in a kernel repeats these
numbers, so they cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass

from .schedule import RoleSchedule

BARRIERS_PER_STAGE = 2
"""`full` (the buffer has arrived) and `empty` (the buffer is free)."""
BYTES_PER_BARRIER = 8
MAX_TRANSACTION_BYTES = (1 << 20) - 1


@dataclass(frozen=True)
class Edge:
    """A ring from `producer` to `consumers`. `bytes` per filling when the copy engine fills it, 0 when threads do.

    `private`: each consumer has stages of its own (stage i belongs to consumer i, which alone frees it), instead of all
    consumers reading every stage. `producer` may name several roles: the stages are then dealt out to them, the first
    ones to the first role.
    """

    name: str
    producer: str | tuple[str, ...]
    consumers: tuple[str, ...]
    stages: int
    bytes: int = 0
    private: bool = False
    across: bool = False
    """From the producer of one CTA of a pair to the consumers of the other, by bulk copies; and the other way alike."""

    @property
    def producers(self) -> tuple[str, ...]:
        return (self.producer,) if isinstance(self.producer, str) else self.producer

    def fillers(self, stage: int) -> tuple[str, ...]:
        """The roles that fill a stage."""
        return (self.producers[stage // self.stages_of_producer],)

    @property
    def stages_of_producer(self) -> int:
        return self.stages // len(self.producers)


@dataclass(frozen=True)
class EdgePlan:
    """An edge with what its barriers need: arrivals that complete `full` and `empty`, and where its barriers begin."""

    edge: Edge
    full_arrivals: int
    empty_arrivals: int
    first_barrier: int

    @property
    def barriers(self) -> int:
        return BARRIERS_PER_STAGE * self.edge.stages


@dataclass(frozen=True)
class Topology:
    """All edges of a kernel with their barriers laid out one behind the other."""

    plans: tuple[EdgePlan, ...]

    @classmethod
    def of(cls, schedule: RoleSchedule, *edges: Edge) -> Topology:
        """Derives the arrive counts. One lane of every producing warp fills a stage (for TMA it is one warp, together
        with its bytes); one lane of every consuming warp frees it: `wgmma.wait_group` speaks for the waiting warp
        alone, so a single arrival for a warpgroup could free a stage that another of its warps still reads."""
        plans, first = [], 0
        for edge in edges:
            _check(schedule, edge)
            readers = [schedule[name].issuing for name in edge.consumers]
            writers = 1 if edge.across else schedule[edge.producers[0]].issuing
            plan = EdgePlan(edge, writers, readers[0] if edge.private else sum(readers), first)
            plans.append(plan)
            first += plan.barriers
        names = [edge.name for edge in edges]
        if len(set(names)) != len(names):
            raise ValueError(f"edge names must differ: {names}")
        return cls(tuple(plans))

    def __getitem__(self, name: str) -> EdgePlan:
        for plan in self.plans:
            if plan.edge.name == name:
                return plan
        raise KeyError(f"no edge {name!r}; edges: {[plan.edge.name for plan in self.plans]}")

    @property
    def barriers(self) -> int:
        return sum(plan.barriers for plan in self.plans)

    @property
    def bytes(self) -> int:
        return BYTES_PER_BARRIER * self.barriers


def _check(schedule: RoleSchedule, edge: Edge) -> None:
    if edge.stages < 1:
        raise ValueError(f"edge {edge.name!r} has {edge.stages} stages; it needs at least one")
    if not edge.consumers:
        raise ValueError(f"edge {edge.name!r} has no consumer")
    for name in set() if edge.across else set(edge.producers) & set(edge.consumers):
        raise ValueError(f"edge {edge.name!r}: role {name!r} would wait for itself")
    if len(set(edge.consumers)) != len(edge.consumers):
        raise ValueError(f"edge {edge.name!r} has a consumer twice: {edge.consumers}")
    for name in (*edge.producers, *edge.consumers):
        schedule[name]
    issuing = {schedule[name].issuing for name in edge.producers}
    if edge.bytes > 0 and issuing != {1} and not edge.across:
        raise ValueError(
            f"edge {edge.name!r} is filled by TMA: {edge.producer!r} must issue from one warp, "
            f"not {max(issuing)}, or the bytes are announced several times"
        )
    if not isinstance(edge.producer, str) and edge.stages % len(edge.producer):
        raise ValueError(f"edge {edge.name!r} has {edge.stages} stages for {len(edge.producer)} producers")
    if len(issuing) != 1:
        raise ValueError(f"edge {edge.name!r}: its producers must have equally many warps")
    if edge.private and edge.stages != len(edge.consumers):
        raise ValueError(f"edge {edge.name!r} is private: {edge.stages} stages for {len(edge.consumers)} consumers")
    if edge.private and len({schedule[name].issuing for name in edge.consumers}) != 1:
        raise ValueError(f"edge {edge.name!r} is private: its consumers must have equally many warps")
    if edge.bytes % 16 or not 0 <= edge.bytes <= MAX_TRANSACTION_BYTES:
        raise ValueError(
            f"edge {edge.name!r} brings {edge.bytes} bytes; TMA moves multiples of 16, "
            f"and an mbarrier counts to {MAX_TRANSACTION_BYTES}"
        )
