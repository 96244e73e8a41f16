"""Faults between CTAs and between kernels: dependent launches, turns by counters, sums in global memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from fa3.emulator.mutate.analysis import Analysis
from fa3.emulator.mutate.edits import changed, with_operand
from fa3.emulator.mutate.judge import line_of
from fa3.emulator.mutate.mutant import STUCK, SUMS, VALUES, Mutant
from fa3.sass.ptx_code import Statement

DEPENDENCY = frozenset(("grid dependency",))
TURNS = SUMS | STUCK | VALUES
REDUCTION, STORE = "cp.reduce.async.bulk.global", "cp.async.bulk.global.shared::cta"


def dependency(a: Analysis) -> Iterator[Mutant]:
    """Nobody waits for the kernel before; or the next one starts later than it could, which costs time only."""
    for index in a.of("griddepcontrol.wait"):
        at = a.statements[index]
        yield Mutant("griddepcontrol.wait removed", index, at, partial(a.program.without, index), DEPENDENCY)
    for index in a.of("griddepcontrol.launch_dependents"):
        at, build = a.statements[index], partial(a.program.without, index)
        yield Mutant("griddepcontrol.launch removed", index, at, build, frozenset(), harmless=True)


def turn_not_waited_for(a: Analysis) -> Iterator[Mutant]:
    """A wait for a counter, at its two loads in front of a loop and in it, ends as if the turn had come."""
    sites: dict[tuple[str, int], list[int]] = {}
    for index in a.of("ld.acquire"):
        sites.setdefault(line_of(a.statements[index]), []).append(index)
    for loads in sites.values():
        for number in range(0, len(loads), 2):
            pair = loads[number : number + 2]
            tests = [use for load in pair for use in _tests(a, load)]
            build = partial(changed, a.program, {use: _passed(a.statements[use]) for use in tests})
            yield Mutant("turn not waited for", pair[0], a.statements[pair[0]], build, TURNS, (*pair, *tests))


def _tests(a: Analysis, load: int) -> list[int]:
    """The comparisons with what was loaded."""
    found = a.flow_from(*a.statements[load].writes)
    return sorted(use for use in found if a.statements[use].opcode.startswith("setp."))


def _passed(at: Statement) -> Statement:
    """A comparison that finds the count to be large enough."""
    right = "eq" if at.opcode.startswith(("setp.ge", "setp.gt")) else "ne"
    return replace(at, opcode=f"setp.{right}.b32", operands=(at.operands[0], "0", "0"))


def weaker_order(a: Analysis) -> Iterator[Mutant]:
    """A counter that is added to, or looked at, without handing anything over."""
    for opening, strong in (("red.release", ".release"), ("ld.acquire", ".acquire"), ("atom.acquire", ".acquire")):
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
    """Left out, stored over what is there, added to what is not there, or of half of the bytes."""
    for index in a.of(REDUCTION, "red.relaxed", STORE):
        at = a.statements[index]
        yield Mutant("sum removed", index, at, partial(a.program.without, index), VALUES | SUMS)
        if at.opcode.startswith(STORE):
            other, operator = replace(at, opcode=f"{REDUCTION}.shared::cta.bulk_group.add.f32"), "first part added"
        elif at.opcode.startswith(REDUCTION):
            other, operator = replace(at, opcode=f"{STORE}.bulk_group"), "sum stored"
        else:
            vector = ".v4" if ".v4" in at.opcode else ""
            other, operator = replace(at, opcode=f"st.global{vector}.f32"), "sum stored"
        yield Mutant(operator, index, at, partial(a.program.replaced, index, other), SUMS | VALUES)
        nbytes = None if at.opcode.startswith("red.") else a.constant(at.operands[2])
        if nbytes:
            build = partial(a.program.replaced, index, with_operand(at, 2, str(nbytes // 2)))
            yield Mutant("half of a sum", index, at, build, VALUES)


OPERATORS = (dependency, turn_not_waited_for, weaker_order, count, gpu_fence_removed, sum_changed)
