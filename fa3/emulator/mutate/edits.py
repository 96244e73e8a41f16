"""Programs with a few statements changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fa3.emulator.operands import integer
from fa3.emulator.program import Program
from fa3.sass.ptx_code import Statement


def with_operand(at: Statement, position: int, text: str) -> Statement:
    """The statement with another operand at `position`; one past the last is added."""
    operands = list(at.operands)
    operands[position : position + 1] = [text]
    return replace(at, operands=tuple(operands))


def changed(program: Program, changes: Mapping[int, Statement]) -> Program:
    """The program with other statements at some indices."""
    for index, statement in changes.items():
        program = program.replaced(index, statement)
    return program


def with_before(program: Program, index: int, added: Sequence[Statement], at: Statement) -> Program:
    """The program with `added` in front of the statement at `index`, and `at` in its place.

    A branch to the old statement goes to the first of the added ones.
    """
    body = program.body
    statements = (*body.statements[:index], *added, at, *body.statements[index + 1 :])
    labels = {name: place + len(added) * (place > index) for name, place in body.labels.items()}
    return replace(program, body=replace(body, statements=statements, labels=labels))


def with_register(program: Program, kind: str = "b32") -> tuple[Program, str]:
    """The program with one more register of a type, and the name of that."""
    registers = program.body.registers
    name = next(name for n in range(len(registers) + 1) if (name := f"%mutant{n}") not in registers)
    return replace(program, body=replace(program.body, registers={**registers, name: kind})), name


def shifted_operand(program: Program, index: int, position: int, amount: int) -> Program:
    """The program in which the statement at `index` takes its operand at `position`, a 32-bit register or a literal,
    plus `amount`."""
    at = program.statements[index]
    text = at.operands[position]
    value = integer(text)
    if value is not None:
        return program.replaced(index, with_operand(at, position, str(value + amount)))
    program, name = with_register(program)
    add = Statement("add.s32", (name, text, str(amount)), source=at.source, line=at.line)
    return with_before(program, index, [add], with_operand(at, position, name))


def flipped_operand(program: Program, index: int, position: int) -> Program:
    """Likewise, with the lowest bit turned over."""
    at = program.statements[index]
    program, name = with_register(program)
    flip = Statement("xor.b32", (name, at.operands[position], "1"), source=at.source, line=at.line)
    return with_before(program, index, [flip], with_operand(at, position, name))
