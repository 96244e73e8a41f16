"""Hand-made lists of events."""

from __future__ import annotations

from collections.abc import Sequence

from fa3.emulator.timing.cost import UNITS, Cost, Unit
from fa3.emulator.timing.events import Arrive, Code, Commit, Event, Join, Load, Math, Mma, Trace, Wait, WaitGroup
from fa3.emulator.timing.ops import Op
from fa3.emulator.timing.timeline import Interval

PLAIN = Cost(
    issue=1.0, mma_queue=64, mma_start=0.0, under_gemm=1.0, mma_issue=1.0, mma_latency=0.0, wait_hit=0.0, wake=0.0,
    arrive=0.0, join=0.0, launch=0.0, load_latency=100.0, load_bandwidth=64.0, copy_issue=0.0,
)  # fmt: skip
"""Nothing costs anything but the units themselves, so that a test can say what must come out."""


def math(kind: str, count: int, label: str = "softmax") -> Math:
    """Independent instructions of one kind."""
    return Math(Code(tuple(Op(kind, (), (f"{kind}{i}",), label) for i in range(count))))


def chain(kind: str, count: int) -> Math:
    """Instructions of which each needs the one before."""
    return Math(Code(tuple(Op(kind, ("x",), ("x",)) for _ in range(count))))


def gemm(count: int, n: int = 128, k: int = 16, bits: int = 16, registers: bool = True) -> list[Event]:
    """A group of WGMMAs, waited for."""
    return [*[Mma(n, k, bits, registers, None)] * count, Commit("wgmma", None), WaitGroup("wgmma", 0, False, None)]


def warpgroups(*lists: Sequence[Event], load: Sequence[Event] = (), counts: dict[int, int] | None = None) -> Trace:
    """A load warpgroup of which only warp 0 does something, and one warpgroup for each list, its warps alike."""
    return Trace([load, [], [], [], *(events for events in lists for _ in range(4))], counts or {})


def turn(own: int, other: int, work: Sequence[Event]) -> list[Event]:
    """Ping-pong: waits for barrier `own`, works, and gives the turn to barrier `other`."""
    return [Join(own, 256, True, None), *work, Join(other, 256, False, None)]


def loads(barrier: int, free: int, count: int, nbytes: int) -> list[Event]:
    """A producer that fills one stage again and again: waits until it is free, announces its bytes, loads."""
    events: list[Event] = []
    for i in range(count):
        events += [Wait(free, i, None), Arrive(barrier, 1, nbytes, None), Load(barrier, nbytes, None)]
    return events


def overlap(a: Sequence[Interval], b: Sequence[Interval], kind_a: str, kind_b: str) -> float:
    """Cycles in which something of `kind_a` in `a` and of `kind_b` in `b` are under way together."""
    return sum(
        max(0.0, min(x.end, y.end) - max(x.start, y.start))
        for x in a
        if x.kind == kind_a
        for y in b
        if y.kind == kind_b
    )


def cost_with(kind: str, **changes: float) -> Cost:
    """`PLAIN` with another unit."""
    unit: Unit = UNITS[kind]._replace(**changes)
    return PLAIN.with_constants(units={**UNITS, kind: unit})
