"""Packed calls do, to the bit, what the instructions do one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa3.emulator.isa import decode
from fa3.emulator.pack import MIN_CHAIN, Instruction, pack
from fa3.emulator.program import Register
from fa3.emulator.warp import LANES
from fa3.sass.ptx_code import Statement

OPCODES = (
    "add.f32",
    "mul.f32",
    "max.f32",
    "sub.f32",
    "add.s32",
    "xor.b32",
    "selp.b32",
    "setp.lt.f32",
    "cvt.rn.bf16x2.f32",
)
ROWS = 7


class Registers:
    """As much of a warp as elementwise instructions see."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        r = rng.normal(size=(ROWS, LANES)).astype(np.float32)
        self.views = {"f4": r, "u4": r.view(np.uint32), "i4": r.view(np.int32), "p": rng.random((ROWS, LANES)) < 0.5}


def instruction(opcode: str, rows: list[int]) -> Instruction:
    what = decode(Statement(opcode, ("%r0", "%r0", "%r0")[: 1 + 2]))
    assert what is not None
    banks = ["p" if view == "p" else "r" for view in (what.result, *what.operands)]
    result, *operands = [Register(bank, row) for bank, row in zip(banks, rows, strict=False)]
    return Instruction(what, result, tuple(operands))


def one_by_one(run: list[Instruction], registers: Any, mask: Any) -> None:
    for i in run:
        value = i.what.function(*[registers.views[v][r.row] for v, r in zip(i.what.operands, i.operands, strict=True)])
        target = registers.views[i.what.result][i.result.row]
        np.copyto(target, value, where=True if mask is None else mask)


programs = st.lists(
    st.tuples(st.sampled_from(OPCODES), st.lists(st.integers(0, ROWS - 1), min_size=4, max_size=4)), max_size=40
)


@given(programs, st.integers(0, 99), st.booleans())
def test_packed_calls_equal_single_steps(program: list[Any], seed: int, masked: bool) -> None:
    run = [instruction(opcode, rows) for opcode, rows in program]
    packed, single = Registers(seed), Registers(seed)
    mask = np.random.default_rng(seed).random(LANES) < 0.5 if masked else None
    with np.errstate(all="ignore"):
        for call in pack(run):
            call(packed, mask)  # type: ignore[arg-type]
        one_by_one(run, single, mask)
    for view in ("u4", "p"):
        np.testing.assert_array_equal(packed.views[view], single.views[view])


def chain(opcode: str, length: int, in_place: bool) -> list[Instruction]:
    """total = total + x_i; either in one register or in a new one at each step."""
    results = [0] * length if in_place else list(range(100, 100 + length))
    starts = [0, *results]
    return [instruction(opcode, [results[i], starts[i], 1 + i]) for i in range(length)]


@pytest.mark.parametrize("opcode", ["add.f32", "max.f32"])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_sum_over_a_row_is_one_call(opcode: str, in_place: bool) -> None:
    assert len(pack(chain(opcode, 64, in_place))) == 1
    assert len(pack(chain(opcode, MIN_CHAIN - 1, in_place))) == MIN_CHAIN - 1


def test_equal_instructions_without_dependence_are_one_call() -> None:
    assert len(pack([instruction("mul.f32", [10 + i, i, i]) for i in range(10)])) == 1


@given(st.lists(st.integers(0, ROWS - 1), min_size=MIN_CHAIN, max_size=20), st.integers(0, 99), programs)
def test_chains_among_other_instructions(inputs: list[int], seed: int, program: list[Any]) -> None:
    """A long sum whose inputs are changed in between by other instructions."""
    others = [instruction(opcode, rows) for opcode, rows in program]
    run: list[Instruction] = []
    for i, row in enumerate(inputs):
        run.append(instruction("add.f32", [0, 0, row]))
        run += others[i : i + 1]
    packed, single = Registers(seed), Registers(seed)
    with np.errstate(all="ignore"):
        for call in pack(run):
            call(packed, None)  # type: ignore[arg-type]
        one_by_one(run, single, None)
    np.testing.assert_array_equal(packed.views["u4"], single.views["u4"])
    np.testing.assert_array_equal(packed.views["p"], single.views["p"])
