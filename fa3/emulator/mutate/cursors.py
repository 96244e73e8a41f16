"""Faults of the rings' cursors: where they start, and how they advance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from fa3.emulator.mutate.analysis import Analysis
from fa3.emulator.mutate.edits import changed, with_operand
from fa3.emulator.mutate.mutant import BYTES, EARLY, NO_BARRIER, STUCK, UNEVEN, UNORDERED, VALUES, Mutant
from fa3.emulator.operands import integer
from fa3.emulator.program import Program
from fa3.sass.ptx_code import Statement

STRAY = STUCK | EARLY | UNORDERED | BYTES | UNEVEN | VALUES
"""One end of a ring walks it in another order than the other."""


def start(a: Analysis, index: int, other: int) -> Program:
    """The cursor whose register the statement at `index` sets starts with `other`; those that copy it, as before."""
    at = a.statements[index]
    register, source = at.operands
    if integer(source) is None:
        return a.program.replaced(index, with_operand(at, 1, str(other)))
    copies = {
        i: with_operand(a.statements[i], 1, source)
        for i in a.uses[register]
        if a.statements[i].opcode.startswith("mov.") and i - index < 64
    }
    return changed(a.program, {index: with_operand(at, 1, str(other)), **copies})


def phase_start(a: Analysis) -> Iterator[Mutant]:
    """The first lap is taken for an odd one, or an odd one for an even one."""
    for register, waits in a.phases.items():
        for index in a.starts(register):
            build, detail = _other_start(a, index)
            yield Mutant("initial phase", index, a.statements[index], build, STRAY, tuple(waits), detail=detail)


def stage_start(a: Analysis) -> Iterator[Mutant]:
    """The first stage is the second one."""
    phase_of = {advance.stage_register: advance.phase_register for advance in a.advances}
    for register, phase in phase_of.items():
        for index in a.starts(register):
            waits = tuple(a.phases.get(phase, ()))
            build, detail = _other_start(a, index)
            yield Mutant("initial stage", index, a.statements[index], build, STRAY, waits, detail=detail)


def _other_start(a: Analysis, index: int) -> tuple[Callable[[], Program], str]:
    """A start with 1 for 0, and 0 for anything else (a ring whose first stage is filled in front of the loop starts
    its second one there)."""
    now = a.initial(a.statements[index].operands[1])
    other = 0 if now else 1
    return partial(start, a, index, other), f"{now} -> {other}"


def wrap(a: Analysis) -> Iterator[Mutant]:
    """The ring has a stage more than it has."""
    for advance in a.advances:
        at = a.statements[advance.wraps]
        stages = integer(at.operands[2])
        if stages is None:
            continue
        other = with_operand(at, 2, str(stages + 1))
        waits = tuple(a.phases.get(advance.phase_register, ()))
        yield Mutant(
            "ring wraps late", advance.wraps, at, partial(a.program.replaced, advance.wraps, other),
            STRAY | NO_BARRIER | {"out of bounds"}, waits, detail=f"{stages} -> {stages + 1} stages",
        )  # fmt: skip


def stands_still(a: Analysis) -> Iterator[Mutant]:
    """The phase, or the stage, does not change."""
    for advance in a.advances:
        waits = tuple(a.phases.get(advance.phase_register, ()))
        for what, index in (("phase", advance.phase), ("stage", advance.stage)):
            build = partial(a.program.without, index)
            yield Mutant(f"{what} stands still", index, a.statements[index], build, STRAY, waits)
    for register, users in a.phases.items():
        for index in a.definitions[register]:
            if _turns_over(a.statements[index], register):
                build = partial(a.program.without, index)
                yield Mutant("phase stands still", index, a.statements[index], build, STRAY, tuple(users))


def _turns_over(at: Statement, register: str) -> bool:
    return at.opcode == "xor.b32" and at.operands == (register, register, "1")


OPERATORS = (phase_start, stage_start, wrap, stands_still)
