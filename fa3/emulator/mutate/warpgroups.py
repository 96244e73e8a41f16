"""Faults at what joins warps and guards registers: named barriers, WGMMA and bulk groups, fences, register budgets."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from fa3.emulator.mutate.analysis import Analysis
from fa3.emulator.mutate.edits import shifted_operand, with_operand
from fa3.emulator.mutate.mutant import EARLY, NAMED, NO_BARRIER, REGISTERS, STUCK, SUMS, UNORDERED, Mutant
from fa3.emulator.operands import integer

FENCE = frozenset(("no proxy fence",))
BUDGET = frozenset(("register budget",))
UNCOMMITTED = frozenset(("wgmma never committed", "wgmma never waited for"))
UNFINISHED = frozenset(("copy never committed", "copy never waited for"))
WARP, WARPGROUP = 32, 128


# ------------------------------------------------------------------------------------------------ named barriers
def barrier_removed(a: Analysis) -> Iterator[Mutant]:
    """The CTA's barrier publishes the mbarriers; turns order the warpgroups; the others order accesses."""
    inits = tuple(a.of("mbarrier.init"))
    for index in a.of("bar.sync", "barrier.sync"):
        at = a.statements[index]
        if at.operands[0] == "0":
            yield Mutant("bar.sync removed", index, at, partial(a.program.without, index), NO_BARRIER, inits)
        else:
            kinds = NAMED | STUCK | UNORDERED | FENCE | SUMS
            yield Mutant("bar.sync removed", index, at, partial(a.program.without, index), kinds)


def turn_not_given(a: Analysis) -> Iterator[Mutant]:
    for index in a.of("bar.arrive", "barrier.arrive"):
        at = a.statements[index]
        yield Mutant("bar.arrive removed", index, at, partial(a.program.without, index), STUCK | NAMED)


def barrier_threads(a: Analysis) -> Iterator[Mutant]:
    """One warp more or less, or a warpgroup more."""
    for index in a.of("bar.sync", "barrier.sync", "bar.arrive", "barrier.arrive"):
        at = a.statements[index]
        threads = integer(at.operands[1]) if len(at.operands) > 1 else a.program.threads
        if threads is None:
            continue
        for more in (WARP, -WARP, WARPGROUP):
            other = with_operand(at, 1, str(threads + more))
            yield Mutant(
                f"barrier threads {more:+d}", index, at, partial(a.program.replaced, index, other),
                NAMED | STUCK | UNORDERED, detail=f"{threads} -> {threads + more} threads",
            )  # fmt: skip


def barrier_number(a: Analysis) -> Iterator[Mutant]:
    """The next barrier, which is somebody else's: whoever meets there is concerned."""
    everyone = tuple(a.of("bar.sync", "barrier.sync", "bar.arrive", "barrier.arrive"))
    for index in everyone:
        at = a.statements[index]
        build = partial(shifted_operand, a.program, index, 0, 1)
        yield Mutant("barrier number +1", index, at, build, NAMED | STUCK | UNORDERED | FENCE, everyone)


# ------------------------------------------------------------------------------------------------ WGMMA
def mma_fence_removed(a: Analysis) -> Iterator[Mutant]:
    for index in a.of("wgmma.fence"):
        at = a.statements[index]
        kinds = frozenset(("no wgmma.fence",))
        yield Mutant("wgmma.fence removed", index, at, partial(a.program.without, index), kinds)


def mma_commit_removed(a: Analysis) -> Iterator[Mutant]:
    for index in a.of("wgmma.commit_group"):
        at = a.statements[index]
        kinds = UNCOMMITTED | REGISTERS | UNORDERED
        yield Mutant("wgmma.commit_group removed", index, at, partial(a.program.without, index), kinds)


def mma_wait(a: Analysis) -> Iterator[Mutant]:
    """None, for one group less, and, where that can be, for one group more, which costs time only."""
    for index in a.of("wgmma.wait_group"):
        at = a.statements[index]
        kinds = REGISTERS | UNORDERED | UNCOMMITTED
        yield Mutant("wgmma.wait_group removed", index, at, partial(a.program.without, index), kinds)
        left = integer(at.operands[0]) or 0
        deeper = partial(a.program.replaced, index, with_operand(at, 0, str(left + 1)))
        yield Mutant("wgmma.wait_group +1", index, at, deeper, kinds, detail=f"{left} -> {left + 1} groups left")
        if left:
            stricter = partial(a.program.replaced, index, with_operand(at, 0, str(left - 1)))
            yield Mutant(
                "wgmma.wait_group -1", index, at, stricter, frozenset(),
                detail=f"{left} -> {left - 1} groups left", harmless=True,
            )  # fmt: skip


# ------------------------------------------------------------------------------------------------ bulk copies, fences
def bulk_commit_removed(a: Analysis) -> Iterator[Mutant]:
    for index in a.of("cp.async.bulk.commit_group"):
        at = a.statements[index]
        kinds = UNFINISHED | UNORDERED | SUMS
        yield Mutant("bulk commit_group removed", index, at, partial(a.program.without, index), kinds)


def bulk_wait(a: Analysis) -> Iterator[Mutant]:
    """None, and for one group less."""
    for index in a.of("cp.async.bulk.wait_group"):
        at = a.statements[index]
        kinds = UNFINISHED | UNORDERED | SUMS
        yield Mutant("bulk wait_group removed", index, at, partial(a.program.without, index), kinds)
        left = integer(at.operands[0]) or 0
        deeper = partial(a.program.replaced, index, with_operand(at, 0, str(left + 1)))
        yield Mutant("bulk wait_group +1", index, at, deeper, kinds, detail=f"{left} -> {left + 1} groups left")


def proxy_fence_removed(a: Analysis) -> Iterator[Mutant]:
    for index in a.of("fence.proxy"):
        yield Mutant("fence.proxy removed", index, a.statements[index], partial(a.program.without, index), FENCE)


def warp_barrier_removed(a: Analysis) -> Iterator[Mutant]:
    for index in a.of("bar.warp.sync"):
        at = a.statements[index]
        yield Mutant("bar.warp.sync removed", index, at, partial(a.program.without, index), UNORDERED | EARLY | SUMS)


# ------------------------------------------------------------------------------------------------ registers
def register_budget(a: Analysis) -> Iterator[Mutant]:
    """Not asked for, or eight registers more or less."""
    for index in a.of("setmaxnreg"):
        at = a.statements[index]
        yield Mutant("setmaxnreg removed", index, at, partial(a.program.without, index), BUDGET)
        registers = integer(at.operands[0]) or 0
        for more in (8, -8):
            other = partial(a.program.replaced, index, with_operand(at, 0, str(registers + more)))
            detail = f"{registers} -> {registers + more} registers"
            yield Mutant(f"setmaxnreg {more:+d}", index, at, other, BUDGET, detail=detail)


OPERATORS = (
    barrier_removed, turn_not_given, barrier_threads, barrier_number, mma_fence_removed, mma_commit_removed, mma_wait,
    bulk_commit_removed, bulk_wait, proxy_fence_removed, warp_barrier_removed, register_budget,
)  # fmt: skip
