"""Faults between CTAs and between kernels: dependent launches, turns by counters, sums in global memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from fa3.emulator.mutate.analysis import Analysis
from fa3.emulator.mutate.edits import with_operand
from fa3.emulator.mutate.mutant import STUCK, SUMS, VALUES, Mutant
from fa3.emulator.operands import integer

DEPENDENCY = frozenset(("grid dependency",))
TURNS = SUMS | STUCK | VALUES


def dependency(a: Analysis) -> Iterator[Mutant]:
    """Nobody waits for the kernel before; or the next one starts later than it could, which costs time only."""
    for index in a.of("griddepcontrol.wait"):
        at = a.statements[index]
        yield Mutant("griddepcontrol.wait removed", index, at, partial(a.program.without, index), DEPENDENCY)
    for index in a.of("griddepcontrol.launch_dependents"):
        at, build = a.statements[index], partial(a.program.without, index)
        yield Mutant("griddepcontrol.launch removed", index, at, build, frozenset(), harmless=True)


def turn_not_waited_for(a: Analysis) -> Iterator[Mutant]:
    """A comparison with what a counter holds comes out as if the turn had come."""
    for index in a.of("ld.acquire"):
        for use in a.flow_from(*a.statements[index].writes):
            at = a.statements[use]
            if at.opcode.startswith("setp."):
                passed = replace(at, opcode="setp.ne.b32", operands=(at.operands[0], "0", "0"))
                if at.opcode.startswith("setp.ge"):
                    passed = replace(passed, opcode="setp.eq.b32")
                yield Mutant("turn not waited for", use, at, partial(a.program.replaced, use, passed), TURNS, (index,))


def weaker_order(a: Analysis) -> Iterator[Mutant]:
    """A counter that is added to, or looked at, without handing anything over."""
    for opening, strong in (("red.release", ".release"), ("ld.acquire", ".acquire")):
        for index in a.of(opening):
            at = a.statements[index]
            other = replace(at, opcode=at.opcode.replace(strong, ".relaxed"))
            yield Mutant(f"{opening} relaxed", index, at, partial(a.program.replaced, index, other), SUMS)


def count(a: Analysis) -> Iterator[Mutant]:
    """Not counted, and counted twice."""
    for index in a.of("red.release"):
        at = a.statements[index]
        yield Mutant("count removed", index, at, partial(a.program.without, index), TURNS)
        once = a.constant(at.operands[1])
        if once is not None:
            build = partial(a.program.replaced, index, with_operand(at, 1, str(2 * once)))
            yield Mutant("counted twice", index, at, build, TURNS)


def gpu_fence_removed(a: Analysis) -> Iterator[Mutant]:
    for index in a.of("fence.acq_rel"):
        yield Mutant("fence.acq_rel removed", index, a.statements[index], partial(a.program.without, index), SUMS)


def sum_changed(a: Analysis) -> Iterator[Mutant]:
    """Left out, stored over what is there, or of other bytes."""
    for index in a.of("cp.reduce.async.bulk.global", "red.relaxed"):
        at = a.statements[index]
        yield Mutant("sum removed", index, at, partial(a.program.without, index), VALUES)
        if at.opcode.startswith("red."):
            stored = replace(at, opcode="st.global.v4.f32")
        else:
            stored = replace(at, opcode="cp.async.bulk.global.shared::cta.bulk_group")
            nbytes = a.constant(at.operands[2]) or integer(at.operands[2])
            if nbytes:
                half = partial(a.program.replaced, index, with_operand(at, 2, str(nbytes // 2)))
                yield Mutant("half of a sum", index, at, half, VALUES)
        yield Mutant("sum stored", index, at, partial(a.program.replaced, index, stored), SUMS | VALUES)


OPERATORS = (dependency, turn_not_waited_for, weaker_order, count, gpu_fence_removed, sum_changed)
