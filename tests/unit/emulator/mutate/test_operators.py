"""The operators find every place, and change it as they say."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest

from fa3.emulator.mutate.analysis import Advance, Analysis
from fa3.emulator.mutate.bounds import bounds
from fa3.emulator.mutate.operators import mutants

from ..assembler import assemble
from .ring import BODY, program

PROGRAM = program()
MUTANTS = mutants(PROGRAM)


def count(pattern: str) -> int:
    """How often the kernel's text holds it."""
    return len(re.findall(pattern, BODY))


def of(operator: str) -> list:
    return [mutant for mutant in MUTANTS if mutant.operator == operator]


@pytest.mark.parametrize(
    ("operator", "pattern"),
    {
        "init removed": r"mbarrier\.init",
        "init count +1": r"mbarrier\.init",
        "init count -1": r"mbarrier\.init",
        "init fence removed": "fence.mbarrier_init",
        "arrival removed": "mbarrier.arrive.shared",
        "arrival doubled": "mbarrier.arrive.shared",
        "wait removed": "mbarrier.try_wait",
        "wait for the other parity": "mbarrier.try_wait",
        "bar.sync removed": "bar.sync",
        "barrier threads +128": "bar.sync",
        "barrier number +1": "bar.sync",
        "bound +1": r"setp.(lt|ge).s32",
        "ring wraps late": r"setp.eq.b32 %p\d, %r\d+, 2",
    }.items(),
)
def test_every_place_is_found(operator: str, pattern: str) -> None:
    assert len(of(operator)) == count(pattern)


def test_every_mutant_is_another_program() -> None:
    assert all(mutant.build().statements != PROGRAM.statements for mutant in MUTANTS)
    assert PROGRAM.statements == program().statements


def test_places_are_told_by_line() -> None:
    lines = Counter(mutant.at.source.line for mutant in of("wait removed"))
    assert lines == {10: 1, 20: 1}


def test_a_removed_wait_passes_at_once() -> None:
    mutant = of("wait removed")[0]
    at = mutant.build().statements[mutant.index]
    assert at.opcode == "setp.eq.b32" and at.operands == ("%p4", "0", "0")


def test_counts_come_from_literals_and_from_registers() -> None:
    assert [mutant.detail for mutant in of("init count +1")] == ["1 -> 2 arrivals"] * 4
    build = of("init count -1")[0].build()
    assert next(at.operands[1] for at in build.statements if at.opcode.startswith("mbarrier.init")) == "0"


def test_a_barrier_of_all_threads_gets_a_number_of_them() -> None:
    (mutant,) = of("barrier threads -32")
    assert mutant.build().statements[mutant.index].operands == ("0", "32")


# ---------------------------------------------------------------------------------------------------------- cursors
def test_the_cursor_is_found() -> None:
    analysis = Analysis(PROGRAM)
    assert analysis.phases.keys() == {"%r11"} and len(analysis.phases["%r11"]) == 2
    assert {(a.stage_register, a.phase_register) for a in analysis.advances} == {("%r10", "%r11")}
    for advance in analysis.advances:
        assert isinstance(advance, Advance)
        written = [PROGRAM.statements[i].operands[0] for i in (advance.stage, advance.phase)]
        assert written == ["%r10", "%r11"]


def test_a_start_is_changed_alone() -> None:
    """The stage's start is the phase's as well, by a copy, which keeps its value."""
    (phase,), (stage,) = of("initial phase"), of("initial stage")
    moves = [[str(at) for at in m.build().statements if at.opcode == "mov.b32" and at.operands[0] in ("%r10", "%r11")]
             for m in (phase, stage)]  # fmt: skip
    assert moves == [["mov.b32 %r10, 0", "mov.b32 %r11, 1"], ["mov.b32 %r10, 1", "mov.b32 %r11, 0"]]


def test_what_stands_still_is_not_written() -> None:
    for mutant in of("phase stands still"):
        assert mutant.at.operands[0] == "%r11"
        assert mutant.build().statements[mutant.index].opcode == "nop"


# ----------------------------------------------------------------------------------------------------------- bounds
TILES = """
  ld.param.b32 %r1, [k_param_0];
  mov.u32 %r2, %ctaid.x;
  setp.ge.s32 %p1, %r2, %r1;
  @%p1 bra END;
  setp.lt.s32 %p2, %r1, 0;
  setp.ne.s32 %p3, %r1, 5;
  and.pred %p4, %p2, %p3;
  selp.b32 %r3, -1, 0, %p4;
  setp.lt.s32 %p5, %r1, 9;
  selp.b32 %r4, %r1, 9, %p5;
  mov.u32 %r5, %tid.x;
  setp.ne.u32 %p6, %r5, 0;
  @%p6 bra END;
END:
"""


def test_bounds_depend_on_parameters_and_decide_something() -> None:
    """Not the correction of a division, and not the question who a thread is."""
    tiles = assemble(TILES, [np.int32(3)])
    assert [str(tiles.statements[i]) for i in bounds(Analysis(tiles))] == [
        "setp.ge.s32 %p1, %r2, %r1",
        "setp.lt.s32 %p5, %r1, 9",
    ]


WHILE = """
  ld.param.b32 %r1, [k_param_0];
  mov.u32 %r2, %ctaid.x;
  .loc 1 7 1
  setp.ge.s32 %p1, %r2, %r1;
  @%p1 bra END;
AGAIN:
  .loc 1 8 1
  add.s32 %r2, %r2, 1;
  .loc 1 7 1
  setp.lt.s32 %p2, %r2, %r1;
  mov.b32 %r3, 0;
  @%p2 bra AGAIN;
END:
"""


def test_the_two_tests_of_a_while_are_moved_together() -> None:
    """`while number < count` is tested in front of the loop and at its end."""
    loop = assemble(WHILE, [np.int32(3)])
    more, less = (m for m in mutants(loop) if m.operator.startswith("bound"))
    for mutant, amount in ((more, "1"), (less, "-1")):
        texts = [str(at) for at in mutant.build().statements if at.name in ("add", "setp")]
        first, ge, step, last, lt = texts
        assert step == "add.s32 %r2, %r2, 1"
        assert ge.startswith("setp.ge") and lt.startswith("setp.lt")
        assert [text.split(", ")[1:] for text in (first, last)] == [["%r1", amount]] * 2
        assert mutant.build().labels["AGAIN@0"] == loop.labels["AGAIN@0"] + 1


def test_the_bound_of_a_loop_is_about_its_barriers() -> None:
    fill = next(m for m in of("bound +1") if str(m.at) == "setp.lt.s32 %p6, %r12, %r5")
    opcodes = {PROGRAM.statements[i].opcode.split(".")[1] for i in fill.anchors}
    assert opcodes == {"try_wait", "arrive", "warp"}
    assert {PROGRAM.statements[i].source.line for i in fill.anchors} == {10, 12}
