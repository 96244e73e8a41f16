"""A missing wgmma.fence, found in the text of a program, on every path and without a run.

PTX ISA, "wgmma.fence": it must stand before the first wgmma.mma_async, and between any access to a register and a
wgmma.mma_async that takes the register as accumulator or as part of A. WGMMA of one shape in a row need none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fa3.emulator.check.advice import advice_for
from fa3.emulator.check.names import Names
from fa3.emulator.check.places import Place, short
from fa3.emulator.check.register_sets import RegisterNames
from fa3.emulator.check.report import Finding
from fa3.emulator.program import Program
from fa3.sass.ptx_code import Statement

KIND = "no wgmma.fence"
MMA, FENCE = "wgmma.mma_async", "wgmma.fence"


def find_unfenced(program: Program, names: Names) -> list[Finding]:
    """A finding for each wgmma.mma_async that some path reaches without the fence that it needs."""
    flow = _Flow(program)
    findings = []
    for index in flow.mmas:
        dirty = flow.before(index)
        hit = dirty & (flow.operands(index) | flow.no_fence)
        if hit:
            findings.append(_finding(flow, index, hit, names))
    return findings


def _finding(flow: _Flow, index: int, hit: int, names: Names) -> Finding:
    at = flow.statements[index]
    place = Place.of("the warps that execute it", -1, at)
    if hit & ~flow.no_fence:
        hit &= ~flow.no_fence
        touch = flow.last_touch(index, hit)
        happened = (
            f"{flow.registers.text(hit)} of this WGMMA are used at {short(touch)}, and there is a path from there "
        )
        happened += "to the WGMMA without a wgmma.fence."
        other = Place.of("the same warps", -1, touch) if touch else None
    else:
        happened, other = "There is a path from the start of the kernel to this WGMMA without a wgmma.fence.", None
    return Finding(KIND, names.kernel, place, happened, advice_for(KIND), other)


@dataclass
class _Flow:
    """Registers of WGMMA that were touched since the last wgmma.fence on some path, for every place of a program."""

    program: Program

    @cached_property
    def statements(self) -> tuple[Statement, ...]:
        return self.program.statements

    @cached_property
    def registers(self) -> RegisterNames:
        return RegisterNames(self.program)

    @cached_property
    def no_fence(self) -> int:
        """A bit beside those of the registers: no wgmma.fence so far."""
        return 1 << len(self.registers.names)

    @cached_property
    def mmas(self) -> list[int]:
        return [i for i, at in enumerate(self.statements) if at.opcode.startswith(MMA)]

    def operands(self, index: int) -> int:
        """Accumulators, and A if it is in registers."""
        accumulators, a = self.statements[index].operands[:2]
        return self.registers.all_of(accumulators) | (self.registers.all_of(a) if a.startswith("{") else 0)

    @cached_property
    def _watched(self) -> int:
        result = 0
        for index in self.mmas:
            result |= self.operands(index)
        return result

    @cached_property
    def _touched(self) -> list[int]:
        """For each statement the watched registers that it touches as an ordinary instruction."""
        used = [(0, 0) if at.name == "wgmma" else self.registers.used(at) for at in self.statements]
        return [(read | written) & self._watched for read, written in used]

    @cached_property
    def _entries(self) -> list[int]:
        """What is dirty at the start of each block: the least solution over all paths."""
        graph = self.program.body.graph
        entries = [0] * len(graph.blocks)
        if entries:
            entries[0] = self.no_fence
        todo = set(graph.reachable)
        while todo:
            number = todo.pop()
            block = graph.blocks[number]
            out = self._through(entries[number], block.start, block.end)
            for following in block.successors:
                if out & ~entries[following]:
                    entries[following] |= out
                    todo.add(following)
        return entries

    def _through(self, dirty: int, start: int, end: int) -> int:
        for index in range(start, end):
            dirty = 0 if self.statements[index].opcode.startswith(FENCE) else dirty | self._touched[index]
        return dirty

    def before(self, index: int) -> int:
        """What is dirty in front of a statement."""
        graph = self.program.body.graph
        number = graph.block_of[index]
        if number not in graph.reachable:
            return 0
        return self._through(self._entries[number], graph.blocks[number].start, index)

    def last_touch(self, index: int, hit: int) -> Statement | None:
        """A statement that touches one of the registers, with a path from it without a fence."""
        graph = self.program.body.graph
        seen: set[int] = set()
        todo = [(graph.block_of[index], index)]
        while todo:
            number, end = todo.pop(0)
            found = self._back(graph.blocks[number].start, end, hit)
            if isinstance(found, Statement):
                return found
            if found and number not in seen:
                seen.add(number)
                todo += [(before, graph.blocks[before].end) for before in graph.predecessors[number]]
        return None

    def _back(self, start: int, end: int, hit: int) -> Statement | bool:
        """The last touch in a block; True if the search must go on in front of it, False if a fence stands there."""
        for index in range(end - 1, start - 1, -1):
            if self.statements[index].opcode.startswith(FENCE):
                return False
            if self._touched[index] & hit:
                return self.statements[index]
        return True
