"""A program as basic blocks of steps that can be executed.

A block is entered at its start only and left at its end only. It is a list of steps: runs of elementwise instructions,
packed (`fa3.emulator.pack`), and single instructions of all other kinds (`fa3.emulator.special`). An instruction that
may have to wait is a block of its own, so that waiting means to come back to the block.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fa3.emulator import isa, special
from fa3.emulator.isa import Elementwise
from fa3.emulator.operands import BANK_VIEW, Operands, Source, parts, unsupported
from fa3.emulator.pack import Call, Instruction, pack
from fa3.emulator.program import Program, Register
from fa3.sass.ptx_code import Statement

if TYPE_CHECKING:
    from fa3.emulator.warp import Warp

Run = Callable[["Warp", Any], "bool | None"]
"""Executes a step for a warp in the lanes of a mask (None: all). True: the warp has to wait, and must come again."""
ENDS = ("bra", "ret", "exit")


@dataclass(frozen=True, eq=False)
class Step:
    """A run of elementwise instructions (`kind` is "math"), or one other instruction (`kind` is its name)."""

    kind: str
    first: int
    """Index of its first statement in the program."""
    statements: tuple[Statement, ...]
    reads: int
    writes: int
    """Registers as sets of bits; bit n is the n-th register that the program declares."""
    run: Run


@dataclass(frozen=True, eq=False)
class Block:
    """`following` is the block behind it; `target` where its branch goes, if it ends with one."""

    first: int
    steps: tuple[Step, ...]
    branch: Statement | None
    predicate: int | None
    """Row of the branch's predicate."""
    target: int
    following: int


class Code:
    """Blocks by the index of their first statement, each made when it is first entered."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.operands = Operands(program)
        self.starts = _starts(program)
        self._ends = dict(zip(self.starts, [*self.starts[1:], len(program.statements)], strict=True))
        self._blocks: dict[int, Block] = {}

    def block(self, first: int) -> Block:
        found = self._blocks.get(first)
        if found is None:
            found = self._blocks[first] = self._make(first)
        return found

    def check(self) -> None:
        """Makes all blocks. Raises Unsupported for the first instruction that cannot be run."""
        for first in self.starts:
            self.block(first)

    def with_program(self, program: Program) -> Code:
        """For a program that differs in single statements: blocks without a difference are shared."""
        code = Code(program)
        changed = {
            i
            for i, (old, new) in enumerate(zip(self.program.statements, program.statements, strict=True))
            if old is not new
        }
        for first, block in self._blocks.items():
            end = self._ends[first]
            if code._ends.get(first) == end and changed.isdisjoint(range(first, end)):
                code._blocks[first] = block
        return code

    def _make(self, first: int) -> Block:
        end = self._ends[first]
        statements = self.program.statements[first:end]
        branch = statements[-1] if _name(statements[-1]) in ENDS else None
        body = statements[:-1] if branch else statements
        target, predicate = -1, None
        if branch is not None and branch.opcode.startswith("bra"):
            if branch.target not in self.program.labels:
                raise unsupported(branch, "a branch to an unknown label")
            target = self.program.labels[branch.target]
        if branch is not None and branch.predicate:
            predicate = self.operands.need_register(branch.predicate, branch).row
        return Block(first, tuple(self._steps(first, body)), branch, predicate, target, end)

    def _steps(self, first: int, statements: Sequence[Statement]) -> list[Step]:
        steps: list[Step] = []
        run: list[Instruction] = []
        begun = first
        for index, at in enumerate(statements, first):
            if at.predicate:
                raise unsupported(at, "only branches may be predicated")
            instructions = self.elementwise(at)
            if instructions is None:
                steps += self._math(begun, run, statements[begun - first : index - first])
                run, begun = [], index + 1
                if at.opcode != "nop":
                    steps.append(self._special(index, at))
            else:
                run += instructions
        steps += self._math(begun, run, statements[begun - first :])
        return steps

    def _math(self, first: int, run: list[Instruction], statements: Sequence[Statement]) -> list[Step]:
        if not run:
            return []
        calls = pack(run)
        reads, writes = 0, 0
        for at in statements:
            read, written = self._uses(at)
            reads |= read & ~writes
            writes |= written
        return [Step("math", first, tuple(statements), reads, writes, _runner(calls))]

    def _special(self, index: int, at: Statement) -> Step:
        kind, run = special.decode(at, self.operands)
        reads, writes = self._uses(at)
        return Step(kind, index, (at,), reads, writes, run)

    def _uses(self, at: Statement) -> tuple[int, int]:
        """Registers that a statement reads and writes."""
        written = _written(at)
        rest = at.operands[1:] if written else at.operands
        read = [name for operand in rest for name in _REGISTER.findall(operand)]
        if at.opcode.startswith("wgmma.mma_async"):
            read += written
        return self.operands.bits(read), self.operands.bits(written)

    # ---- elementwise
    def elementwise(self, at: Statement) -> list[Instruction] | None:
        """The statement as elementwise instructions, or None if it is of another kind."""
        if at.opcode.startswith("mov.") and any(operand.startswith("{") for operand in at.operands):
            return self._vector_move(at)
        if at.opcode.startswith("ld.param"):
            return self._load_param(at)
        what = isa.decode(at)
        if what is None:
            return None
        if len(at.operands) != 1 + len(what.operands):
            raise unsupported(at, f"{len(at.operands)} operands where {1 + len(what.operands)} are expected")
        result = self.operands.need_register(at.operands[0], at, what.result)
        texts = list(at.operands[1:])
        if what.operands[-1] == "p" and at.name == "setp" and texts[-1].startswith("!"):
            texts[-1], what = texts[-1][1:], _negated(what)
        elif at.name == "cvt":
            what = self._of_low_bits(what, at)
        operands = tuple(self._operand(text, view, at) for text, view in zip(texts, what.operands, strict=True))
        return [Instruction(what, result, operands)]

    def _of_low_bits(self, what: Elementwise, at: Statement) -> Elementwise:
        """A conversion of an integer may read a register that is wider than its type."""
        register = self.operands.register(at.operands[1])
        if register and register.bank != "p" and at.opcode.rsplit(".", 1)[1] in isa.INTEGERS:
            view = BANK_VIEW[register.bank]
            if view[1] > what.operands[0][1]:
                return replace(what, name=f"{what.name} {view}", operands=(view,))
        return what

    def _operand(self, text: str, view: str, at: Statement) -> Register | Source:
        if text.startswith("!"):
            raise unsupported(at)
        register = self.operands.register(text)
        if register is None:
            return self._fixed(text, view, at)
        self.operands.need_bank(register, text, view, at)
        return register

    def _fixed(self, text: str, view: str, at: Statement) -> Source:
        """A literal or special operand; equal ones are one object, so that instructions with them pack together."""
        key = (text, view)
        if key not in self._sources:
            self._sources[key] = self.operands.source(text, view, at)
        return self._sources[key]

    @property
    def _sources(self) -> dict[tuple[str, str], Source]:
        return self.operands.__dict__.setdefault("fixed", {})

    def _load_param(self, at: Statement) -> list[Instruction]:
        found = re.fullmatch(r"\[(\w+)(?:\+(\d+))?\]", at.operands[1])
        if not found or found[1] not in self.operands.params:
            raise unsupported(at)
        name, offset = found[1], int(found[2] or 0)
        kind = at.opcode.rsplit(".", 1)[1]
        size, names = int(kind[1:]) // 8, parts(at.operands[0])
        if offset + size * len(names) > self.operands.params[name]:
            raise unsupported(at, f"a load past the {self.operands.params[name]} bytes of the parameter")
        loads = []
        for i, part in enumerate(names):
            register = self.operands.need_register(part, at)
            view = BANK_VIEW[register.bank]
            source = _param_source(name, offset + i * size, size, view, kind[0] == "s")
            loads.append(Instruction(Elementwise(f"mov.{view}", view, (view,), _same), register, (source,)))
        return loads

    def _vector_move(self, at: Statement) -> list[Instruction]:
        """`mov.b32 %r, {%h, %h}` joins registers, low half first; `mov.b64 {%r, %r}, %rd` takes one apart."""
        joined, split = at.operands[1].startswith("{"), at.operands[0].startswith("{")
        names = parts(at.operands[1 if joined else 0])
        registers = [self.operands.need_register(name, at) if name != "_" else None for name in names]
        whole = self.operands.need_register(at.operands[0 if joined else 1], at)
        if joined == split or len(names) != 2 or None in registers[: 2 * joined]:
            raise unsupported(at)
        part, view = BANK_VIEW[next(r for r in registers if r is not None).bank], BANK_VIEW[whole.bank]
        if joined:
            low, high = (r for r in registers if r is not None)
            return [Instruction(_join(part, view), whole, (low, high))]
        return [
            Instruction(_split(part, view, half), register, (whole,))
            for half, register in enumerate(registers)
            if register is not None
        ]


# A register is %name; scoped names carry their scope behind an @. Special registers are in no bank.
_REGISTER = re.compile(r"%[A-Za-z_][\w@]*")
_NO_RESULT = frozenset(
    "st red bra bar barrier ret exit trap fence membar setmaxnreg prefetch cp stmatrix nop griddepcontrol".split()
)
_NO_RESULT_OF = ("mbarrier.init", "mbarrier.inval", "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group")


def _written(at: Statement) -> list[str]:
    if _name(at) in _NO_RESULT or at.opcode.startswith(_NO_RESULT_OF) or not at.operands:
        return []
    return _REGISTER.findall(at.operands[0])


def _name(at: Statement) -> str:
    return at.opcode.split(".", 1)[0]


def _starts(program: Program) -> list[int]:
    """Where blocks begin: at labels, behind branches, and before and behind what may wait."""
    starts = {0, *program.labels.values()}
    for i, at in enumerate(program.statements):
        if _name(at) in ENDS:
            starts.add(i + 1)
        elif special.may_wait(at):
            starts |= {i, i + 1}
    return sorted(start for start in starts if start < len(program.statements))


def _negated(what: Elementwise) -> Elementwise:
    """A comparison that is joined with `!p`. It is another function, so that p is still seen as a register it reads."""
    function = what.function
    return replace(what, name=f"{what.name} !", function=lambda a, b, p: function(a, b, ~p))


def _runner(calls: list[Call]) -> Run:
    def run(warp: Warp, mask: Any) -> None:
        for call in calls:
            call(warp, mask)

    return run


def _same(a: Any) -> Any:
    return a


def _param_source(name: str, offset: int, size: int, view: str, signed: bool) -> Source:
    return lambda warp: warp.cta.machine.param(name, offset, size, view, signed)


def _join(part: str, view: str) -> Elementwise:
    bits = 8 * int(part[1])
    dtype = {"u4": "uint32", "u8": "uint64"}[view]
    return Elementwise(
        f"join.{view}", view, (part, part), lambda low, high: low.astype(dtype) | (high.astype(dtype) << bits)
    )


def _split(part: str, view: str, half: int) -> Elementwise:
    bits = 8 * int(part[1]) * half
    dtype = {"u2": "uint16", "u4": "uint32"}[part]
    return Elementwise(f"split{half}.{view}", part, (view,), lambda whole: (whole >> bits).astype(dtype))


__all__ = ["Block", "Code", "Register", "Step"]
