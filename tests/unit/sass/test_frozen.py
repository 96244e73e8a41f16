"""The guard against frozen phases, on PTX in the form that the DSL's compiler prints."""

import pytest

from fa3.sass.errors import ParseError
from fa3.sass.frozen import frozen_waits
from fa3.sass.listing import Source
from fa3.sass.ptx_code import parse_body
from tests.unit.sass.programs import kernel, loop
from tests.unit.sass.programs import mbarrier_wait as wait

MOVING = ["add.s32 %r1, %r1, 1;", "setp.eq.b32 %p2, %r1, 2;", "selp.b32 %r3, 1, 0, %p2;", "xor.b32 %r2, %r2, %r3;"]
START = ["mov.b32 %r1, 0;", "mov.b32 %r2, 0;", "mov.b32 %r9, 4;"]


def test_a_phase_that_the_loop_carries():
    assert frozen_waits(kernel(*START, *loop(wait("%r8", "%r2"), *MOVING))) == ()


def test_a_literal_phase_in_a_loop():
    (found,) = frozen_waits(kernel(*START, *loop(wait("%r8", "0"), *MOVING)))
    assert found.parity == "0" and found.address == "[%r8]"
    assert found.source == Source("/home/reader/fa3/pipeline/ring.py", 7)
    assert "in every iteration" in str(found) and "ring.py:7" in str(found)


def test_a_literal_phase_by_way_of_a_register():
    inside = ["mov.b32 %r7, 0;", "xor.b32 %r6, %r7, 1;", wait("%r8", "%r6")]
    assert len(frozen_waits(kernel(*START, *loop(*inside, *MOVING)))) == 1


def test_a_phase_from_outside_the_loop():
    assert len(frozen_waits(kernel(*START, *loop(wait("%r8", "%r2"))))) == 1


def test_twice_around_in_an_iteration():
    """A ring of one stage that is used twice: both parities, at one barrier."""
    assert frozen_waits(kernel(*START, *loop(wait("%r8", "0"), wait("%r8", "1"), *MOVING))) == ()
    three = loop(wait("%r8", "0"), wait("%r8", "1"), wait("%r8", "0"), *MOVING)
    assert len(frozen_waits(kernel(*START, *three))) == 3
    assert len(frozen_waits(kernel(*START, *loop(wait("%r8", "0"), wait("%r9", "1"), *MOVING)))) == 2


def test_a_phase_derived_from_a_moving_one():
    inside = ["xor.b32 %r6, %r2, 1;", wait("%r8", "%r6")]
    assert frozen_waits(kernel(*START, *loop(*inside, *MOVING))) == ()


def test_a_phase_from_a_counter_or_from_memory_moves():
    assert frozen_waits(kernel(*START, *loop("and.b32 %r6, %r9, 1;", wait("%r8", "%r6")))) == ()
    assert frozen_waits(kernel(*START, *loop("ld.shared.b32 %r6, [%r5];", wait("%r8", "%r6")))) == ()


def test_a_wait_outside_loops_may_name_its_phase():
    assert frozen_waits(kernel(*START, wait("%r8", "0"), wait("%r7", "0"), *loop(wait("%r8", "%r2"), *MOVING))) == ()


def test_frozen_in_the_inner_loop_though_the_outer_one_moves_it():
    inner = loop(wait("%r8", "%r2"), name="$L__BB0_2")
    assert len(frozen_waits(kernel(*START, *loop("mov.b32 %r10, 4;", *inner, *MOVING)))) == 1


def test_carried_by_the_inner_loop():
    inner = loop(wait("%r8", "%r2"), *MOVING, name="$L__BB0_2")
    assert frozen_waits(kernel(*START, *loop("mov.b32 %r10, 4;", *inner))) == ()


def test_one_frozen_wait_among_good_ones():
    waits = [wait("%r8", "%r2"), wait("%r7", "1"), wait("%r6", "%r2")]
    (found,) = frozen_waits(kernel(*START, *loop(*waits, *MOVING)))
    assert found.address == "[%r7]"


def test_a_phase_moved_on_one_path_only_moves():
    inside = [wait("%r8", "%r2"), "@%p2 bra $L__BB0_3;", *MOVING, "$L__BB0_3:"]
    assert frozen_waits(kernel(*START, *loop(*inside))) == ()


def test_scopes_keep_labels_and_registers_apart():
    body = parse_body(kernel(wait("%r1", "0"), wait("%r2", "1")))
    waits = [statement for statement in body.statements if statement.name == "mbarrier"]
    assert [statement.operands[0] for statement in waits] == ["%P1@1", "%P1@2"]
    assert {"LAB_WAIT@1", "DONE@1", "LAB_WAIT@2", "DONE@2"} <= set(body.labels)


def test_a_scope_on_one_line():
    text = "{ .reg .pred p; setp.ne.b32 p, %r1, 0; wgmma.mma_async.m64n8k16 {%r2, %r3}, %rd1, %rd2, p, 1; }"
    first, second = parse_body(kernel(text)).statements[:2]
    assert first.writes == ("%p@1",) and first.reads == ("%r1",)
    assert second.operands == ("{%r2, %r3}", "%rd1", "%rd2", "%p@1", "1")


def test_two_results_of_one_instruction():
    (statement, *_) = parse_body(kernel("elect.sync %r1|%p2, -1;")).statements
    assert statement.writes == ("%r1", "%p2")


@pytest.mark.parametrize("text", ["", ".visible .entry f()", kernel("bra $L__BB0_9;").replace("ret;\n}", "")])
def test_broken_ptx_is_an_error(text):
    with pytest.raises(ParseError):
        frozen_waits(text)


def test_a_jump_to_nowhere_is_an_error():
    with pytest.raises(ParseError, match="does not define"):
        frozen_waits(kernel("bra $L__BB0_9;"))
