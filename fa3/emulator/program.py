"""A compiled kernel as the emulator sees it: statements, registers in banks, parameters.

A register file is one matrix per bank, a row for each register and a column for each lane. Registers of 32 bits hold
integers and floats alike (the compiler declares them `.b32`), so that a row is viewed as whatever an instruction wants.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from fa3.emulator.faults import Unsupported
from fa3.emulator.sync import WARP_THREADS
from fa3.sass.ptx_code import Body, Statement, parse_body

BANKS = {
    "pred": "p", "b8": "h", "b16": "h", "u16": "h", "s16": "h", "b32": "r", "u32": "r", "s32": "r", "f32": "r",
    "b64": "d", "u64": "d", "s64": "d",
}  # fmt: skip
"""Declared type -> bank: predicates, 16, 32 and 64 bits."""
BYTES = {
    "b8": 1,
    "u8": 1,
    "s8": 1,
    "b16": 2,
    "u16": 2,
    "s16": 2,
    "b32": 4,
    "u32": 4,
    "s32": 4,
    "f32": 4,
} | dict.fromkeys(("b64", "u64", "s64", "f64"), 8)
"""Type -> bytes."""


class Register(NamedTuple):
    """Row `row` of a bank."""

    bank: str
    row: int


class Param(NamedTuple):
    """A kernel parameter: its name in the PTX, bytes, alignment in bytes."""

    name: str
    size: int
    align: int


@dataclass(frozen=True)
class Program:
    """One kernel. Statements may be replaced one by one, which is how faults are planted."""

    name: str
    params: tuple[Param, ...]
    threads: int
    body: Body
    cluster: tuple[int, int, int] | None = None
    """CTAs of a cluster, where the PTX says so (.reqnctapercluster)."""

    @classmethod
    def parse(cls, ptx: str) -> Program:
        """The first kernel of a PTX module. ParseError or Unsupported if it cannot be read."""
        entry = re.search(r"\.entry\s+(\w+)\s*\(([^)]*)\)", ptx)
        threads = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", ptx)
        if not entry or not threads:
            raise Unsupported("a kernel without .entry or .reqntid")
        params = tuple(_param(text) for text in entry[2].split(",") if text.strip())
        x, y, z = _sizes(threads)
        cluster = re.search(r"\.reqnctapercluster\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", ptx)
        if x * y * z % WARP_THREADS:
            raise Unsupported(f"{x * y * z} threads, which are no whole warps of {WARP_THREADS}")
        return cls(entry[1], params, x * y * z, _returning(parse_body(ptx)), _sizes(cluster) if cluster else None)

    @property
    def statements(self) -> tuple[Statement, ...]:
        return self.body.statements

    @property
    def labels(self) -> dict[str, int]:
        """Label -> index of the statement behind it."""
        return self.body.labels

    @cached_property
    def registers(self) -> dict[str, Register]:
        """Name -> row of a bank."""
        rows: dict[str, Register] = {}
        counts = dict.fromkeys(BANKS.values(), 0)
        for name, kind in self.body.registers.items():
            if kind not in BANKS:
                raise Unsupported(f"register {name} of type .{kind}")
            bank = BANKS[kind]
            rows[name] = Register(bank, counts[bank])
            counts[bank] += 1
        return rows

    @cached_property
    def bank_sizes(self) -> dict[str, int]:
        sizes = dict.fromkeys(BANKS.values(), 0)
        for bank, _ in self.registers.values():
            sizes[bank] += 1
        return sizes

    def replaced(self, index: int, statement: Statement) -> Program:
        """The same program with another statement at `index`."""
        statements = (*self.statements[:index], statement, *self.statements[index + 1 :])
        return self._with(replace(self.body, statements=statements))

    def without(self, index: int) -> Program:
        """The same program with nothing at `index`. Branches and line numbers stay."""
        return self.replaced(index, replace(self.statements[index], opcode="nop", operands=(), target="", predicate=""))

    def _with(self, body: Body) -> Program:
        return replace(self, body=body)


def _sizes(found: re.Match[str]) -> tuple[int, int, int]:
    x, y, z = (int(size) for size in found.groups(default="1"))
    return x, y, z


def _returning(body: Body) -> Body:
    """With a `ret` where the text simply ends, or ends with a label."""
    end = len(body.statements)
    if end and body.statements[-1].name in ("ret", "exit") and end not in body.labels.values():
        return body
    last = body.statements[-1] if end else Statement("ret")
    return replace(body, statements=(*body.statements, Statement("ret", source=last.source, line=last.line)))


_POINTER = r"(?:\.ptr(?:\s+\.(?:global|const|local|shared))?(?:\s+\.align\s+\d+)?\s+)?"
_PARAM = re.compile(rf"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+{_POINTER}(\w+)(?:\[(\d+)\])?")


def _param(text: str) -> Param:
    found = _PARAM.search(text)
    if not found or found[2] not in BYTES:
        raise Unsupported(f"parameter {text.strip()[:80]!r}")
    align, kind, name, count = found.groups()
    size = BYTES[kind]
    return Param(name, size * int(count or 1), int(align or size))
