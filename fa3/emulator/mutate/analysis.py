"""What the operators need to know of a program: who defines a register, and what the registers of a ring's cursor are.

A cursor (`fa3.pipeline.cursor`) is a stage and a phase. Compiled, `advance` is always the same five statements:

    add.s32  next, stage, 1;            the stage behind
    setp.eq  wraps, next, STAGES;
    selp     one, 1, 0, wraps;          and  selp back, -STAGES, 0, wraps;
    add.s32  stage, back, next;
    xor.b32  phase, phase, one;
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from fa3.emulator.operands import integer
from fa3.emulator.program import Program
from fa3.sass.ptx_code import Statement


@dataclass(frozen=True)
class Advance:
    """One `advance` in the text: indices of its comparison and of the statements that write stage and phase."""

    wraps: int
    stage: int
    phase: int
    stage_register: str
    phase_register: str


@dataclass(frozen=True)
class Analysis:
    """Facts about a program, found on demand."""

    program: Program

    @property
    def statements(self) -> tuple[Statement, ...]:
        return self.program.statements

    @cached_property
    def definitions(self) -> dict[str, list[int]]:
        """Register -> indices of the statements that write it."""
        found = defaultdict(list)
        for index, at in enumerate(self.statements):
            for register in at.writes:
                found[register].append(index)
        return found

    @cached_property
    def uses(self) -> dict[str, list[int]]:
        """Register -> indices of the statements that read it."""
        found = defaultdict(list)
        for index, at in enumerate(self.statements):
            for register in dict.fromkeys(at.reads):
                found[register].append(index)
        return found

    def of(self, *openings: str) -> Iterator[int]:
        """Indices of the statements whose opcode begins so."""
        return (index for index, at in enumerate(self.statements) if at.opcode.startswith(openings))

    def the_definition(self, register: str) -> Statement | None:
        """What writes the register, if that is one statement."""
        places = self.definitions.get(register, ())
        return self.statements[places[0]] if len(places) == 1 else None

    def constant(self, operand: str) -> int | None:
        """The value of a literal, or of a register that only `mov` of a literal writes."""
        value = integer(operand)
        if value is None and (at := self.the_definition(operand)) and at.opcode.startswith("mov."):
            value = integer(at.operands[1])
        return value

    # ---- cursors
    @cached_property
    def advances(self) -> list[Advance]:
        """All advances of cursors."""
        return [found for index in self.of("xor.b32") if (found := self._advance(index))]

    def _advance(self, index: int) -> Advance | None:
        phase, old, one = self.statements[index].operands
        select = self.the_definition(one)
        if phase != old or select is None or select.operands[1:3] != ("1", "0"):
            return None
        (wraps,) = self.definitions[select.operands[3]]
        following = self.statements[wraps].operands[1]
        add = self.the_definition(following)
        if add is None or add.opcode != "add.s32":
            return None
        stage = add.operands[1]
        places = [i for i in self.definitions[stage] if following in self.statements[i].operands[1:]]
        return Advance(wraps, places[0], index, stage, phase) if len(places) == 1 else None

    @cached_property
    def phases(self) -> dict[str, list[int]]:
        """Registers that hold the phase of a cursor, with the waits (indices) that use each, inverted or not."""
        found = defaultdict(list)
        for index in self.of("mbarrier.try_wait"):
            parity = self.statements[index].operands[2]
            at = self.the_definition(parity)
            inverted = at is not None and at.opcode == "xor.b32" and at.operands[2] == "1" and at.operands[1] != parity
            found[at.operands[1] if inverted and at else parity].append(index)
        return dict(found)

    def starts(self, register: str) -> list[int]:
        """Statements that set a register to a constant, or to a copy of one, before its loop."""
        return [
            index
            for index in self.definitions[register]
            if self.statements[index].opcode.startswith("mov.")
            and self.initial(self.statements[index].operands[1]) is not None
        ]

    def initial(self, operand: str) -> int | None:
        """The constant that an operand holds when it is first copied: itself, or what its first definition says."""
        value = integer(operand)
        if value is None and (places := self.definitions.get(operand)):
            first = self.statements[places[0]]
            if first.opcode.startswith("mov."):
                value = integer(first.operands[1])
        return value

    # ---- dependence
    def slice_of(self, register: str) -> frozenset[int]:
        """Indices of all statements that a register's value depends on."""
        found: set[int] = set()
        waiting = [register]
        seen = {register}
        while waiting:
            for index in self.definitions.get(waiting.pop(), ()):
                found.add(index)
                more = [name for name in self.statements[index].reads if name not in seen]
                seen.update(more)
                waiting += more
        return frozenset(found)

    def flow_from(self, *registers: str) -> frozenset[int]:
        """Indices of all statements that registers' values go into, through registers only."""
        found: set[int] = set()
        waiting = list(registers)
        seen = set(waiting)
        while waiting:
            for index in self.uses.get(waiting.pop(), ()):
                at = self.statements[index]
                found.add(index)
                more = [] if at.opcode.startswith(("ld.", "wgmma")) else [w for w in at.writes if w not in seen]
                seen.update(more)
                waiting += more
        return frozenset(found)

    def depends_on(self, register: str, openings: Iterable[str]) -> bool:
        """Whether the value comes, among others, from a statement whose opcode begins so."""
        return any(self.statements[index].opcode.startswith(tuple(openings)) for index in self.slice_of(register))
