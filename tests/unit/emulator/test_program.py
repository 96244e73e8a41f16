"""What a Program knows of a PTX module."""

from __future__ import annotations

from typing import Any

import pytest

from fa3.emulator import machine
from fa3.emulator.blocks import Code
from fa3.emulator.faults import Fault, Unsupported
from fa3.emulator.program import Param, Program, Register
from fa3.sass.errors import ParseError
from fa3.sass.listing import Source

from .assembler import assemble, launch_of, module

PTX = """
// a comment before all
.version 8.3
.target sm_90a
.address_size 64
.file 1 "a.py"
.file 2 "b.py"
.extern .shared .align 1024 .b8 __dynamic_shmem__0[];
.visible .entry the_kernel(
  .param .align 64 .b8 the_kernel_param_0[128],
  .param .u32 the_kernel_param_1,
  .param .u64 .ptr .global .align 16 the_kernel_param_2,
  .param .b8 the_kernel_param_3,
  .param .f32 the_kernel_param_4
)
.reqntid 64, 2, 1
.minnctapersm 1
{
  .reg .pred %p<3>;
  .reg .b16 %rs<2>;
  .reg .b32 %r<4>, %q;
  .reg .b64 %rd<2>;
  .loc 1 7 0
  mov.u32 %r1, %tid.x;          // before any line with a column
  .loc 1 10 5
  setp.lt.s32 %p1, %r1, 16;
  .loc 2 0 0
  add.s32 %r2, %r1, 1;
  .loc 2 20 3
  @!%p1 bra $L__BB0_2;
  { .reg .pred P1; LAB_WAIT:
    mbarrier.try_wait.parity.shared.b64 P1, [%r2+8], %r1;
    @P1 bra.uni DONE; bra.uni LAB_WAIT;
    DONE: }
  { .reg .pred P1; setp.ne.b32 P1, %r1, 0; LAB_WAIT: @P1 bra LAB_WAIT; }
$L__BB0_2:
  st.shared.v2.b32 [%r3+-8], {%r1, %q};
  ret;
}
.visible .entry another() .reqntid 32 { ret; }
"""


@pytest.fixture(scope="module")
def program() -> Program:
    return Program.parse(PTX)


def test_the_head(program: Program) -> None:
    assert program.name == "the_kernel"
    assert program.threads == 128
    assert program.params == (
        Param("the_kernel_param_0", 128, 64), Param("the_kernel_param_1", 4, 4), Param("the_kernel_param_2", 8, 8),
        Param("the_kernel_param_3", 1, 1), Param("the_kernel_param_4", 4, 4),
    )  # fmt: skip


def test_registers_have_rows_of_their_bank(program: Program) -> None:
    assert program.registers["%p2"] == Register("p", 2)
    assert program.registers["%rs1"] == Register("h", 1)
    assert program.registers["%q"] == Register("r", 4)
    assert program.registers["%rd0"] == Register("d", 0)
    assert program.bank_sizes == {"p": 5, "h": 2, "r": 5, "d": 2}  # two scopes have a P1 of their own


def test_scopes_keep_names_apart(program: Program) -> None:
    try_wait, compare = program.statements[4], program.statements[7]
    first, second = try_wait.operands[0], compare.operands[0]
    assert first != second and {first, second} <= set(program.registers)
    loops = [s for s in program.statements if s.target.startswith("LAB_WAIT")]
    assert [program.labels[s.target] for s in loops] == [4, 8]
    assert [program.statements[5].predicate, loops[1].predicate] == [first, second]


def test_statements(program: Program) -> None:
    branch = program.statements[3]
    assert (branch.opcode, branch.predicate, branch.negated) == ("bra", "%p1", True)
    assert program.labels[branch.target] == len(program.statements) - 2
    assert program.statements[-2].operands == ("[%r3+-8]", "{%r1, %q}")
    assert [str(s).split()[0] for s in program.statements[:3]] == ["mov.u32", "setp.lt.s32", "add.s32"]


def test_lines(program: Program) -> None:
    """The PTX line is counted from 1; a Python line without a column is not one."""
    lines = PTX.split("\n")
    for statement in program.statements:
        assert statement.opcode in lines[statement.line - 1]
    first, second, third, fourth = (statement.source for statement in program.statements[:4])
    assert (second, third, fourth) == (Source("a.py", 10), Source("a.py", 10), Source("b.py", 20))
    assert first in (None, Source("a.py", 7))


def test_replaced_and_without_leave_the_rest_alone(program: Program) -> None:
    changed = program.without(2)
    assert changed.statements[2].opcode == "nop" and changed.statements[2].line == program.statements[2].line
    assert all(a is b for i, (a, b) in enumerate(zip(changed.statements, program.statements, strict=True)) if i != 2)
    assert changed.labels == program.labels and changed.registers == program.registers
    assert program.statements[2].opcode == "add.s32"
    back = changed.replaced(2, program.statements[2])
    assert back.statements == program.statements


def test_without_a_branch_is_no_branch() -> None:
    program = assemble("@%p0 bra $END; mov.b32 %r0, 1;\n$END:")
    Code(program.without(0)).check()
    assert Code(program.without(0)).block(0).branch is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (".reqntid 64, 2, 1", ""),
        (".reqntid 64, 2, 1", ".reqntid 50"),
        (".reg .b64 %rd<2>;", ".reg .f64 %rd<2>;"),
        (".param .f32", ".param .texref"),
        (".param .f32", ".param"),
    ],
)
def test_what_is_not_modelled_is_refused(old: str, new: str) -> None:
    text = PTX[: PTX.index(".visible .entry another")]
    with pytest.raises(Unsupported):
        Program.parse(text.replace(old, new)).registers  # noqa: B018


@pytest.mark.parametrize(
    ("old", "new"),
    [("  ret;\n}", "  ret;\n"), ("  ret;\n", "  ret\n"), ("DONE: }", "DONE: ")],
    ids=["end", "stop", "brace"],
)
def test_what_is_no_ptx_is_an_error(old: str, new: str) -> None:
    text = PTX[: PTX.index(".visible .entry another")]
    with pytest.raises(ParseError):
        Program.parse(text.replace(old, new))


def test_a_branch_to_nowhere_is_refused() -> None:
    with pytest.raises(Unsupported, match="unknown label"):
        Code(assemble("bra $NOWHERE;")).check()


@pytest.mark.parametrize(
    "end", ["", "ret;\n", "@!%p0 bra $END;\nret;\n$END:\n", "bra $END;\n$END:\n", "bra $GO; $END: ret; $GO: bra $END;"]
)
def test_the_end_of_the_text_is_a_return(end: str) -> None:
    program = Program.parse(module("mov.b32 %r0, 1;").replace("  ret;\n", f"  {end}"))
    launch: Any = launch_of(program)
    assert machine.run(program, launch).ctas[0].warps[0].exited


def test_trap_is_a_fault() -> None:
    program = assemble(".loc 1 5 1\n setp.eq.s32 %p0, %tid.x, 7; @!%p0 bra $END; trap; $END:")
    launch: Any = launch_of(program)
    with pytest.raises(Fault, match="trap") as caught:
        machine.run(program, launch)
    assert caught.value.at is not None and caught.value.at.source == Source("kernel.py", 5)
