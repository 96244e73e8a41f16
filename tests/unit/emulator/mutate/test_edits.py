"""Programs with a statement more, or an operand moved, otherwise do what they did."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa3.emulator import machine
from fa3.emulator.mutate.edits import (
    changed,
    flipped_operand,
    shifted_operand,
    with_before,
    with_operand,
    with_register,
)
from fa3.emulator.program import Program
from fa3.sass.ptx_code import Statement

from ..assembler import launch_of
from .ring import arguments, program

PROGRAM = program()
LENGTH = len(PROGRAM.statements)
INTEGERS = [
    (index, position)
    for index, at in enumerate(PROGRAM.statements)
    if at.opcode in ("add.s32", "setp.eq.b32", "setp.lt.s32", "setp.ge.s32", "shl.b32")
    for position in range(1, len(at.operands))
]


def computes(changed_program: Program) -> bool:
    """Whether it still copies its source."""
    given_arguments: list[Any] = arguments()
    launch: Any = launch_of(changed_program, given_arguments)
    machine.run(changed_program, launch, policy="late")
    return bool((given_arguments[0] == given_arguments[1]).all())


@settings(max_examples=40)
@given(st.integers(0, LENGTH - 1))
def test_a_statement_in_front_of_another_moves_all_branches(index: int) -> None:
    more, name = with_register(PROGRAM)
    added = Statement("mov.b32", (name, "7"))
    result = with_before(more, index, [added], PROGRAM.statements[index])
    assert len(result.statements) == LENGTH + 1 and result.statements[index] == added
    assert computes(result)


@pytest.mark.parametrize("label", PROGRAM.labels)
def test_a_branch_goes_to_what_was_put_in_front_of_its_target(label: str) -> None:
    index = PROGRAM.labels[label]
    added = Statement("nop")
    result = with_before(PROGRAM, index, [added], PROGRAM.statements[index])
    assert result.statements[result.labels[label]] is added


@settings(max_examples=40)
@given(st.sampled_from(INTEGERS))
def test_an_operand_that_is_moved_by_nothing_changes_nothing(place: tuple[int, int]) -> None:
    assert computes(shifted_operand(PROGRAM, *place, 0))


@pytest.mark.parametrize("amount", [1, -3])
def test_a_literal_is_moved_in_place_and_a_register_by_one_more_statement(amount: int) -> None:
    literal = next(i for i, at in enumerate(PROGRAM.statements) if at.opcode == "setp.eq.b32")
    result = shifted_operand(PROGRAM, literal, 2, amount)
    assert len(result.statements) == LENGTH and result.statements[literal].operands[2] == str(2 + amount)

    register = next(i for i, at in enumerate(PROGRAM.statements) if at.opcode == "setp.lt.s32")
    result = shifted_operand(PROGRAM, register, 2, amount)
    add, compare = result.statements[register : register + 2]
    assert add.operands == (compare.operands[2], "%r5", str(amount))
    assert result.registers[compare.operands[2]].bank == "r" and compare.operands[2] not in PROGRAM.registers


def test_a_bit_that_is_flipped_twice_is_as_before() -> None:
    wait = next(i for i, at in enumerate(PROGRAM.statements) if at.opcode.startswith("mbarrier.try_wait"))
    once = flipped_operand(PROGRAM, wait, 2)
    assert once.statements[wait].opcode == "xor.b32"
    assert computes(flipped_operand(once, wait + 1, 2))


def test_changes_leave_the_program_as_it_was() -> None:
    before = PROGRAM.statements
    other = with_operand(before[0], 5, "x")
    result = changed(PROGRAM, {0: other, 3: other})
    assert PROGRAM.statements is before and other.operands == (*before[0].operands, "x")
    assert [i for i in range(LENGTH) if result.statements[i] is not before[i]] == [0, 3]


def test_the_ring_copies() -> None:
    assert computes(PROGRAM)
    assert np.array_equal(arguments()[1], np.zeros(160, np.float32))
