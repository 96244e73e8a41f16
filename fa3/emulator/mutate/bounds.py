"""Faults of extents: bounds of loops and tiles, limits of masks, coordinates of boxes.

A bound is an integer comparison that depends on the problem's sizes (a kernel parameter), and on which a branch or a
selection depends. Comparisons of one register with many constants are unrolled copies of one bound, such as a mask's,
one for each column of a score tile: there the limit in the register is moved, and of a mask also one comparison.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial

from fa3.emulator.mutate.analysis import Analysis
from fa3.emulator.mutate.edits import shifted_operand, with_before, with_operand, with_register
from fa3.emulator.mutate.judge import line_of
from fa3.emulator.mutate.mutant import BYTES, EARLY, NAMED, STUCK, SUMS, UNEVEN, UNORDERED, VALUES, Mutant
from fa3.emulator.operands import integer, parts
from fa3.emulator.program import Program
from fa3.sass.ptx_code import Statement

ROWS = 64
"""Rows that a box is moved by: one warpgroup's, or the half of a block of keys or more."""
COLUMNS_OF_A_MASK = 8
"""Comparisons of one register with constants, from which on they are taken for a mask's."""
COLUMN = 0.75
"""Which one of a mask's comparisons is moved, as a part of all: in blocks before the last, only the right half of the
columns is ever cut."""
_COORDINATES = re.compile(r"\{([^}]*)\}")

EXTENT = STUCK | UNEVEN | VALUES | EARLY | UNORDERED | BYTES | NAMED | SUMS | {
    "out of bounds", "endless", "counter", "wrong block", "wrong mask"
}  # fmt: skip
"""A role does more or less than the others, or than there is to do."""
BARRIERS, COPIES = ("mbarrier.", "bar."), ("cp.async.bulk", "cp.reduce.async.bulk", "st.global", "ld.acquire", "red.")
HIDDEN = VALUES | {"wrong mask"}


def bound(a: Analysis) -> Iterator[Mutant]:
    """One less, and one more. The compiler tests the condition of a `while` twice, in front of the loop and at its end;
    both are moved."""
    twins = _twins(a)
    for index in bounds(a):
        if index in twins.values():
            continue
        at, places = a.statements[index], [index, *([twins[index]] if index in twins else [])]
        anchors = tuple(dict.fromkeys(anchor for place in places for anchor in bounded(a, place)))
        for more in (1, -1):
            build = partial(_shifted, a.program, places, more)
            detail = f"{at.opcode.split('.')[1]} {at.operands[2]} {more:+d}"
            yield Mutant(f"bound {more:+d}", index, at, build, EXTENT, anchors, detail=detail)


def _shifted(program: Program, places: Sequence[int], more: int) -> Program:
    for index in sorted(places, reverse=True):  # a statement more moves those behind it
        program = shifted_operand(program, index, 2, more)
    return program


def _twins(a: Analysis) -> dict[int, int]:
    """The test at the end of a loop -> the test of the same condition in front of it."""
    found = {}
    entries = {(line_of(a.statements[i]), a.statements[i].operands[1]): i for i in a.of("setp.ge.s32")}
    for index in a.of("setp.lt.s32"):
        at = a.statements[index]
        entry = entries.get((line_of(at), at.operands[1]))
        branches = [a.statements[i] for i in a.uses[at.operands[0]] if a.statements[i].name == "bra"]
        if entry is not None and any(entry < a.program.labels[branch.target] <= index for branch in branches):
            found[index] = entry
    return found


def bounds(a: Analysis) -> Iterator[int]:
    """Indices of the comparisons that are bounds."""
    columns = {index for comparisons in many(a).values() for index in comparisons}
    for index in a.of("setp."):
        at = a.statements[index]
        if not at.opcode.endswith(("s32", "u32", "b32")) or index in columns or not _decides(a, at.operands[0]):
            continue
        if any(a.depends_on(name, ("ld.param",)) for name in at.operands[1:3]):
            yield index


def _decides(a: Analysis, predicate: str) -> bool:
    """Whether a branch or a selection depends on it. The compiler's correction of a division by -1 is none."""
    for index in a.uses[predicate]:
        at = a.statements[index]
        if at.name == "bra" or (at.name == "selp" and at.operands[1:3] != ("-1", "0")):
            return True
        if at.opcode in ("or.pred", "and.pred", "not.pred") and _decides(a, at.operands[0]):
            return True
    return False


def bounded(a: Analysis, index: int) -> tuple[int, ...]:
    """What a bound is about: barriers and copies in the loop, or behind the branch, that it decides; for a number that
    is selected, those in the loops that count it; and copies to and from places that are computed behind the branch."""
    found: set[int] = set()
    computed: set[str] = set()
    for use in a.flow_from(a.statements[index].operands[0]):
        for part in _decided(a, use):
            found.update(part)
            if not any(a.statements[i].opcode.startswith(BARRIERS) for i in part):
                computed.update(name for i in part for name in a.statements[i].writes)
    hidden = [i for comparisons in masks(a).values() for i in comparisons if i in found]
    placed = [i for i in a.flow_from(*computed) if a.statements[i].opcode.startswith(COPIES)]
    inside = [i for i in found if a.statements[i].opcode.startswith(BARRIERS + COPIES)]
    return (*sorted({*inside, *placed}), *scores(a, hidden))


def _decided(a: Analysis, branch: int) -> list[range]:
    """The statements between a branch and its target, and those of a loop that it leaves."""
    if a.statements[branch].name != "bra":
        return []
    leaves = a.statements[branch + 1].opcode == "bra.uni"  # which closes the loop
    ends = [(i, a.program.labels[a.statements[i].target]) for i in (branch, branch + 1)[: 1 + leaves]]
    return [range(*sorted(pair)) for pair in ends]


# ------------------------------------------------------------------------------------------------ masks
def many(a: Analysis) -> dict[str, list[int]]:
    """Limit -> the comparisons with it, where there are many."""
    found: dict[str, list[int]] = {}
    for index in a.of("setp."):
        at = a.statements[index]
        if at.opcode.endswith("s32") and integer(at.operands[2]) is not None:
            found.setdefault(at.operands[1], []).append(index)
    return {register: places for register, places in found.items() if len(places) >= COLUMNS_OF_A_MASK}


def masks(a: Analysis) -> dict[str, list[int]]:
    """Those that select scores."""
    return {limit: places for limit, places in many(a).items() if scores(a, places)}


def store_limit(a: Analysis) -> Iterator[Mutant]:
    """The others guard stores of columns: one column less, and one more."""
    for limit in many(a).keys() - masks(a).keys():
        (index,) = a.definitions[limit]
        anchors = tuple(i for place in many(a)[limit] for i in bounded(a, place))
        for more in (1, -1):
            build = partial(_moved, a, index, limit, more)
            yield Mutant(f"store limit {more:+d}", index, a.statements[index], build, EXTENT, anchors)


def mask_limit(a: Analysis) -> Iterator[Mutant]:
    """One key less, and one more."""
    for register in masks(a):
        (index,) = a.definitions[register]
        for more in (1, -1):
            build = partial(_moved, a, index, register, more)
            anchors = scores(a, masks(a)[register])
            yield Mutant(f"mask limit {more:+d}", index, a.statements[index], build, HIDDEN, anchors)


def _moved(a: Analysis, index: int, register: str, more: int) -> Program:
    """`register` plus `more`, behind its definition at `index`."""
    at, behind = a.statements[index], a.statements[index + 1]
    add = Statement("add.s32", (register, register, str(more)), source=at.source, line=at.line)
    return with_before(a.program, index + 1, [add], behind)


def mask_column(a: Analysis) -> Iterator[Mutant]:
    """One comparison of each limit."""
    for comparisons in masks(a).values():
        index = comparisons[int(len(comparisons) * COLUMN)]
        at = a.statements[index]
        for more in (1, -1):
            build = partial(shifted_operand, a.program, index, 2, more)
            detail, anchors = f"column {at.operands[2]}", scores(a, comparisons)
            yield Mutant(f"mask column {more:+d}", index, at, build, HIDDEN, anchors, detail=detail)


def scores(a: Analysis, comparisons: list[int]) -> tuple[int, ...]:
    """The WGMMAs whose accumulators are hidden by these comparisons: a mask is wrong where they are."""
    registers = set()
    for index in comparisons:
        for use in a.uses[a.statements[index].operands[0]]:
            registers |= set(a.statements[use].reads)
    return tuple(i for i in a.of("wgmma.mma_async") if registers & set(parts(a.statements[i].operands[0])))


# ------------------------------------------------------------------------------------------------ boxes
def coordinates(a: Analysis) -> Iterator[Mutant]:
    """A box of other rows."""
    for index in a.of("cp.async.bulk.tensor"):
        at = a.statements[index]
        build = partial(_with_other_rows, a.program, index)
        kinds = VALUES | {"out of bounds", "wrong block"}
        yield Mutant(f"box +{ROWS} rows", index, at, build, kinds)


def _with_other_rows(program: Program, index: int) -> Program:
    at = program.statements[index]
    position = next(i for i, operand in enumerate(at.operands) if "{" in operand)
    names = [name.strip() for name in _COORDINATES.search(at.operands[position])[1].split(",")]  # type: ignore[index]
    program, moved = with_register(program)
    add = Statement("add.s32", (moved, names[1], str(ROWS)), source=at.source, line=at.line)
    text = _COORDINATES.sub("{" + ", ".join([names[0], moved, *names[2:]]) + "}", at.operands[position])
    return with_before(program, index, [add], with_operand(at, position, text))


OPERATORS = (bound, store_limit, mask_limit, mask_column, coordinates)
