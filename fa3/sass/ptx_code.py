"""PTX as data: the statements of a kernel's body with their labels, registers and control flow.

As much of PTX as the guard against frozen phases and the emulator need. Braces in inline assembly open a scope of their
own for registers and labels (`P1`, `LAB_WAIT`), so both are renamed here to be unique.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

from fa3.sass import flow
from fa3.sass.errors import ParseError
from fa3.sass.listing import Source


@dataclass(frozen=True)
class Statement:
    """`@!%p1 add.s32 %r1, %r2, 4;` as predicate, opcode, operands."""

    opcode: str
    operands: tuple[str, ...] = ()
    predicate: str = ""
    source: Source | None = None
    """The Python line. Where the compiler names none (column 0), that of the statement before."""
    target: str = ""
    """The label of a branch, unique over the body."""
    negated: bool = False
    """Whether the predicate is `@!`."""
    line: int = 0
    """The line of the PTX text."""

    def __str__(self) -> str:
        predicate = f"@{'!' * self.negated}{self.predicate} " if self.predicate else ""
        return f"{predicate}{self.opcode} {self.target or ', '.join(self.operands)}".rstrip()

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.split(".", 1)[0]

    @property
    def writes(self) -> tuple[str, ...]:
        """Registers of the first operand, unless that is an address or the instruction has no result."""
        if self.name in _NO_RESULT or not self.operands or self.operands[0].startswith("["):
            return ()
        return tuple(_REGISTER.findall(self.operands[0]))

    @property
    def reads(self) -> tuple[str, ...]:
        """Registers of the other operands and of the predicate."""
        first = 1 if self.writes else 0
        return tuple(_REGISTER.findall(" ".join((*self.operands[first:], self.predicate))))


@dataclass(frozen=True)
class Body:
    """The statements of a kernel. `labels` maps a label to the index of the statement behind it."""

    statements: tuple[Statement, ...]
    labels: dict[str, int]
    registers: dict[str, str] = field(default_factory=dict)
    """Every declared register and its type: `%r17` -> `b32`, `%P1@3` -> `pred`."""

    @cached_property
    def graph(self) -> flow.Graph:
        return flow.build([self._step(statement) for statement in self.statements])

    def _step(self, statement: Statement) -> flow.Step:
        conditional = bool(statement.predicate)
        if statement.name == "bra":
            if statement.target not in self.labels:
                raise ParseError(f"the PTX jumps to {statement.target}, which it does not define")
            return flow.Step(falls=conditional, targets=(self.labels[statement.target],))
        if statement.name == "brx":
            raise ParseError("the PTX has an indirect jump (brx.idx); its targets are unknown")
        return flow.Step(falls=conditional or statement.name not in ("ret", "exit", "trap"))


# A register is %name, or a name that an inline assembly block declares; the latter get a % when scopes are resolved.
_REGISTER = re.compile(r"%[A-Za-z_][\w.@]*")
_NO_RESULT = frozenset("st red bra bar barrier ret exit trap fence membar wgmma setmaxnreg prefetch cp".split())
_ENTRY = re.compile(r"^\s*(?:\.visible\s+|\.weak\s+)?\.entry\b", re.MULTILINE)
_LOC = re.compile(r"^[ \t]*\.loc\s+(\d+)\s+(\d+)\s+(\d+)[^\n]*$", re.MULTILINE)
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', re.MULTILINE)
_INLINE = re.compile(r"// begin inline asm\n.*?// end inline asm", re.DOTALL)
_LABEL = re.compile(r"\s*([$\w]+):(?!:)")
_WORD = re.compile(r"(?<![%\w.$])([A-Za-z_]\w*)(?![\w.:(])")


def parse_body(ptx: str) -> Body:
    """The body of the first kernel in a PTX module."""
    entry = _ENTRY.search(ptx)
    if not entry:
        raise ParseError("no kernel (.entry) in the PTX")
    files: dict[str, str] = dict(_FILE.findall(ptx))
    # In inline assembly the compiler counts on from the line of the call; those lines are nobody's.
    text = _INLINE.sub(lambda assembly: _LOC.sub("", assembly[0]), ptx[entry.end() :])
    text = re.sub(r"//[^\n]*", "", text)
    text = _LOC.sub(r".loc \1 \2 \3;", text)
    start = re.search(r"^\s*\{", text, re.MULTILINE)
    if not start:
        raise ParseError("the kernel has no body")
    reader = _Reader(text, files, first_line=ptx.count("\n", 0, entry.end()) + 1)
    reader.read(start.end())
    return Body(tuple(reader.statements), reader.labels, reader.registers)


@dataclass
class _Scope:
    number: int
    names: set[str] = field(default_factory=set)


class _Reader:
    """Walks through the text of a body once, statement by statement."""

    def __init__(self, text: str, files: dict[str, str], first_line: int) -> None:
        self.text, self.files = text, files
        self.line, self.counted_to = first_line, 0
        self.registers: dict[str, str] = {}
        self.statements: list[Statement] = []
        self.labels: dict[str, int] = {}
        self.source: Source | None = None
        self.scopes = [_Scope(0)]
        self.opened = 0

    def read(self, at: int) -> None:
        space = re.compile(r"[\s;]*")
        while True:
            at = space.match(self.text, at).end()  # type: ignore[union-attr]
            if at >= len(self.text):
                raise ParseError("the kernel's body does not end")
            if self.text[at] == "{":
                self._open(at)
                at += 1
            elif self.text[at] == "}":
                self.scopes.pop()
                at += 1
                if not self.scopes:
                    return
            elif label := _LABEL.match(self.text, at):
                self.labels[self._label(label[1])] = len(self.statements)
                at = label.end()
            else:
                end = self.text.find(";", at)
                if end < 0:
                    raise ParseError("a statement without an end")
                self._count_lines(at)
                self._statement(self.text[at:end])
                at = end + 1

    def _count_lines(self, at: int) -> None:
        self.line += self.text.count("\n", self.counted_to, at)
        self.counted_to = at

    def _open(self, at: int) -> None:
        """A new scope; what it declares and labels is known from its whole text, as a branch may go forward."""
        self.opened += 1
        inside = self.text[at + 1 : self._close(at)]
        names = set(re.findall(r"(?:^|[;{}])\s*([A-Za-z_]\w*):(?!:)", inside))
        for declared in re.findall(r"\.reg\s+\.\w+\s+([^;]+);", inside):
            names.update(name.strip() for name in declared.split(",") if not name.strip().startswith("%"))
        self.scopes.append(_Scope(self.opened, names))

    def _close(self, at: int) -> int:
        depth = 0
        for end in range(at, len(self.text)):
            depth += {"{": 1, "}": -1}.get(self.text[end], 0)
            if depth == 0:
                return end
        raise ParseError("a brace without its twin")

    def _label(self, name: str) -> str:
        scope = next((scope for scope in reversed(self.scopes) if name in scope.names), self.scopes[0])
        return f"{name}@{scope.number}"

    def _rename(self, match: re.Match[str]) -> str:
        scope = next((scope for scope in reversed(self.scopes) if match[1] in scope.names), None)
        return f"%{match[1]}@{scope.number}" if scope else match[1]

    def _statement(self, text: str) -> None:
        words = text.split(None, 1)
        if words[0] == ".loc":
            number, line, column = words[1].split()
            if column != "0" or self.source is None:
                self.source = Source(self.files.get(number, f"file {number}"), int(line))
            return
        if words[0] == ".reg":
            self._declare(words[1])
            return
        if words[0].startswith("."):
            return
        predicate, negated = "", False
        if words[0].startswith("@"):
            predicate, negated = _WORD.sub(self._rename, words[0][1:].lstrip("!")), words[0].startswith("@!")
            words = words[1].split(None, 1)
        opcode, rest = words[0], words[1] if len(words) > 1 else ""
        operands: tuple[str, ...] = ()
        target = ""
        if opcode.split(".")[0] == "bra":
            target = self._label(rest.strip())
        else:
            operands = tuple(_WORD.sub(self._rename, operand) for operand in _split(rest))
        self.statements.append(Statement(opcode, operands, predicate, self.source, target, negated, self.line))

    def _declare(self, text: str) -> None:
        """`.b32 %r<3>` declares %r0 to %r2; inline assembly declares single names."""
        kind, names = text.split(None, 1)
        for name in names.split(","):
            if many := re.fullmatch(r"(%\w+)<(\d+)>", name.strip()):
                self.registers.update({f"{many[1]}{i}": kind[1:] for i in range(int(many[2]))})
            else:
                self.registers[_WORD.sub(self._rename, name.strip())] = kind[1:]


def _split(text: str) -> list[str]:
    """Splits at commas that are not inside brackets or braces."""
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    return [*parts, text[start:].strip()] if text.strip() else []
