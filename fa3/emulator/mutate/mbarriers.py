"""Faults at mbarriers: their initialisation, arrivals, announced bytes, and waits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from fa3.emulator.mutate.analysis import Analysis
from fa3.emulator.mutate.edits import flipped_operand, with_operand
from fa3.emulator.mutate.mutant import BYTES, EARLY, NO_BARRIER, STUCK, UNEVEN, UNORDERED, Mutant

QUANTUM = 16
"""Bytes; the smallest amount that TMA moves."""
COUNT = frozenset(("arrival count",))


def init_removed(a: Analysis) -> Iterator[Mutant]:
    for index in a.of("mbarrier.init"):
        yield Mutant("init removed", index, a.statements[index], partial(a.program.without, index), NO_BARRIER)


def init_count(a: Analysis) -> Iterator[Mutant]:
    """One arrival more than come, and one less."""
    for index in a.of("mbarrier.init"):
        at = a.statements[index]
        count = a.constant(at.operands[1])
        if count is None:
            continue
        for more, kinds in ((1, COUNT | STUCK | UNEVEN), (-1, COUNT | EARLY | UNORDERED | NO_BARRIER)):
            other = with_operand(at, 1, str(count + more))
            yield Mutant(
                f"init count {more:+d}", index, at, partial(a.program.replaced, index, other), kinds,
                detail=f"{count} -> {count + more} arrivals",
            )  # fmt: skip


def init_fence_removed(a: Analysis) -> Iterator[Mutant]:
    inits = tuple(a.of("mbarrier.init"))
    for index in a.of("fence.mbarrier_init"):
        at = a.statements[index]
        yield Mutant("init fence removed", index, at, partial(a.program.without, index), NO_BARRIER, inits)


def arrival_removed(a: Analysis) -> Iterator[Mutant]:
    for index in a.of("mbarrier.arrive.shared"):
        at = a.statements[index]
        yield Mutant("arrival removed", index, at, partial(a.program.without, index), STUCK | UNEVEN)


def arrival_doubled(a: Analysis) -> Iterator[Mutant]:
    for index in a.of("mbarrier.arrive.shared"):
        at = a.statements[index]
        other = with_operand(at, 2, "2")
        kinds = EARLY | UNORDERED | COUNT
        yield Mutant("arrival doubled", index, at, partial(a.program.replaced, index, other), kinds)


def announcement_removed(a: Analysis) -> Iterator[Mutant]:
    """Neither an arrival nor bytes."""
    for index in a.of("mbarrier.arrive.expect_tx"):
        at = a.statements[index]
        kinds = STUCK | BYTES | UNEVEN
        yield Mutant("announcement removed", index, at, partial(a.program.without, index), kinds)


def announced_bytes(a: Analysis) -> Iterator[Mutant]:
    for index in a.of("mbarrier.arrive.expect_tx"):
        at = a.statements[index]
        nbytes = a.constant(at.operands[2])
        if nbytes is None:
            continue
        for what, other in (
            (f"+{QUANTUM}", nbytes + QUANTUM),
            (f"-{QUANTUM}", nbytes - QUANTUM),
            ("doubled", 2 * nbytes),
        ):
            build = partial(a.program.replaced, index, with_operand(at, 2, str(other)))
            kinds = STUCK | BYTES | UNORDERED
            yield Mutant(f"announced bytes {what}", index, at, build, kinds, detail=f"{nbytes} -> {other} bytes")


def wait_removed(a: Analysis) -> Iterator[Mutant]:
    """It passes at once. A stage is then used, or its arrival made, too early; or the barrier runs ahead of somebody
    who is slow, and who then waits for ever."""
    for index in a.of("mbarrier.try_wait"):
        at = a.statements[index]
        passed = replace(at, opcode="setp.eq.b32", operands=(at.operands[0], "0", "0"))
        kinds = UNORDERED | EARLY | BYTES | STUCK | {"load never waited for"}
        yield Mutant("wait removed", index, at, partial(a.program.replaced, index, passed), kinds)


def wait_parity(a: Analysis) -> Iterator[Mutant]:
    """It waits for the phase before, or after: too little or for ever."""
    for index in a.of("mbarrier.try_wait"):
        at = a.statements[index]
        kinds = UNORDERED | EARLY | BYTES | STUCK
        yield Mutant("wait for the other parity", index, at, partial(flipped_operand, a.program, index, 2), kinds)


OPERATORS = (
    init_removed, init_count, init_fence_removed, arrival_removed, arrival_doubled, announcement_removed,
    announced_bytes, wait_removed, wait_parity,
)  # fmt: skip
