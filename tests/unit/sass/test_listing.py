"""Reading SASS: instructions, source lines, matrix instructions, waits, and where control goes."""

import pytest

from fa3.sass.errors import ParseError
from fa3.sass.listing import (
    Instruction,
    Mma,
    Source,
    instruction_mix,
    mma_of,
    parse_sass,
    register_changes,
    wait_of,
)
from tests.unit.sass.programs import COMMIT, EX2, EXIT, HGMMA, listing, sass, wait


def targets(*lines: str) -> list[tuple[int, ...]]:
    """For every block, where it may continue, as indices of instructions."""
    found = listing(*lines)
    return [tuple(found.graph.blocks[s].start for s in block.successors) for block in found.graph.blocks]


def test_an_instruction_with_all_its_parts():
    text = '\t//## File "/home/reader/softmax.py", line 41 inlined at "/home/reader/forward.py", line 9\n'
    text += "        /*3310*/              @!UP0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR27+0x20], RZ ;"
    (instruction,) = parse_sass(text).instructions
    assert instruction == Instruction(
        0x3310, "SYNCS.ARRIVE.TRANS64.A1T0", "RZ, [UR27+0x20], RZ", "!UP0", Source("/home/reader/softmax.py", 41)
    )
    assert instruction.base == "SYNCS" and str(instruction.source) == "softmax.py:41"


def test_a_source_line_holds_until_the_next_one():
    found = parse_sass(sass("FADD R0, R1, R2", source=True) + "\n        /*0010*/   EXIT ;")
    assert [instruction.source.line for instruction in found.instructions] == [1, 1]


def test_a_listing_without_source_lines():
    assert listing("FADD R0, R1, R2").instructions[0].source is None


def test_no_instruction_is_an_error():
    with pytest.raises(ParseError, match="no instructions"):
        parse_sass("\t.target\tsm_90a\n")


def test_padding_is_dropped():
    found = listing(EX2, EXIT, ".L_x_9:", "BRA `(.L_x_9)", "NOP", "NOP")
    assert [instruction.opcode for instruction in found.instructions] == ["MUFU.EX2", "EXIT"]


def test_a_loop_at_the_end_is_not_padding():
    assert len(listing(".L_x_0:", EX2, "BRA `(.L_x_0)").instructions) == 2


@pytest.mark.parametrize(
    "text, expected",
    [
        ("HGMMA.64x176x16.F32.BF16 R24, gdesc[UR12], RZ, !UPT", Mma("m64n176k16", False, False)),
        ("HGMMA.64x128x16.F32 R24, gdesc[UR12], R24, gsb0", Mma("m64n128k16", False, True)),
        ("HGMMA.64x128x16.F32.BF16 R112, R176, gdesc[UR8].tnspB, R112, gsb0", Mma("m64n128k16", True, True)),
        ("QGMMA.64x64x32.F32.E4M3.E4M3 R24, R8, gdesc[UR4], R24", Mma("m64n64k32", True, False)),
        ("HMMA.16816.F32.BF16 R4, R8, R12, R4", None),
        ("WARPGROUP.ARRIVE", None),
    ],
)
def test_matrix_instructions(text, expected):
    assert mma_of(listing(text).instructions[0]) == expected


def test_waits():
    assert wait_of(listing(wait(1)).instructions[0]) == 1
    assert wait_of(listing("WARPGROUP.ARRIVE").instructions[0]) is None
    assert wait_of(listing("DEPBAR.LE SB0, 0x1").instructions[0]) is None  # not a matrix instruction's barrier


def test_a_wait_in_an_unknown_form_is_an_error():
    with pytest.raises(ParseError, match="DEPBAR"):
        wait_of(listing("WARPGROUP.DEPBAR.LE gsb0, R4").instructions[0])


def test_the_mix_counts_whole_names_only():
    counts = instruction_mix(
        listing(EX2, "MUFU.RCP R1, R2", "BAR.ARV 0x1, 0x100", "BAR.SYNC 0x1", "FADDX R1").instructions
    )
    assert counts["MUFU.EX2"] == 1 and counts["BAR"] == 2 and counts["FADD"] == 0


def test_register_changes():
    found = listing(
        "USETMAXREG.DEALLOC.CTAPOOL 0x18", "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0", "@!P0 BRA `(.L_x_0)", ".L_x_0:"
    )
    assert register_changes(found.instructions) == {"dec": (24,), "inc": (240,)}
    assert register_changes(listing(EX2).instructions) == {"dec": (), "inc": ()}


def test_branches():
    assert targets("@P0 BRA `(.L_x_0)", EX2, ".L_x_0:", EXIT) == [(2, 1), (2,), ()]
    assert targets("BRA `(.L_x_0)", EX2, ".L_x_0:", EXIT) == [(2,), (2,), ()]


def test_a_branch_on_a_uniform_or_divergent_condition_may_fall_through():
    assert targets("BRA.U UP0, `(.L_x_0)", EX2, ".L_x_0:", EXIT)[0] == (2, 1)
    assert targets("BRA.DIV UR4, `(.L_x_0)", EX2, ".L_x_0:", EXIT)[0] == (2, 1)


def test_a_predicated_exit_falls_through_and_a_plain_one_does_not():
    assert targets("@P0 EXIT", EX2, EXIT) == [()]  # one block
    assert targets("EXIT", EX2, EXIT) == [(), ()]


def test_a_bsync_goes_where_its_own_bssy_says():
    program = ["BSSY B0, `(.L_x_1)", "BSSY B1, `(.L_x_2)", "BSYNC B0", EX2, ".L_x_1:", EX2, ".L_x_2:", EXIT]
    assert targets(*program)[0] == (4, 3)


def test_a_call_goes_there_and_comes_back():
    assert targets("CALL.REL.NOINC `(.L_x_0)", EXIT, ".L_x_0:", "RET.REL.NODEC R2 `(.L_x_0)") == [(2, 1), (), ()]


def test_an_indirect_jump_is_an_error():
    with pytest.raises(ParseError, match="indirect"):
        _ = listing("BRX R4 -0x20", EXIT).graph


def test_a_jump_to_nowhere_is_an_error():
    with pytest.raises(ParseError, match="does not define"):
        _ = listing("BRA `(.L_x_7)", HGMMA, COMMIT).graph
