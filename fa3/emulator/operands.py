"""Operands of PTX instructions: from text to something that a warp can be asked for.

A *source* is a function of the warp that returns an array over the 32 lanes (or something that broadcasts to it). The
views of the register banks are named by numpy's short type codes: `u4`, `i4`, `f4` are the 32-bit bank as unsigned,
signed and float; `u8`, `i8` the 64-bit bank; `u2`, `i2` the 16-bit bank; `p` the predicates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fa3.emulator.faults import Unsupported
from fa3.emulator.program import Program, Register
from fa3.sass.ptx_code import Statement

if TYPE_CHECKING:
    from fa3.emulator.warp import Warp

Source = Callable[["Warp"], Any]

VIEWS = {
    "pred": "p", "b16": "u2", "u16": "u2", "s16": "i2", "b32": "u4", "u32": "u4", "s32": "i4", "f32": "f4",
    "b64": "u8", "u64": "u8", "s64": "i8",
}  # fmt: skip
"""Type of an instruction -> view of the operand's bank."""
DTYPES: dict[str, type] = {
    "u1": np.uint8, "i1": np.int8, "u2": np.uint16, "i2": np.int16, "u4": np.uint32, "i4": np.int32, "f4": np.float32,
    "u8": np.uint64, "i8": np.int64, "p": np.bool_,
}  # fmt: skip
BANK_VIEW = {"r": "u4", "d": "u8", "h": "u2", "p": "p"}
"""Bank -> its view as plain bits."""
VIEW_BANK = {"u4": "r", "i4": "r", "f4": "r", "u8": "d", "i8": "d", "u2": "h", "i2": "h", "p": "p"}
"""View -> the bank that it is of."""
_FLOAT = re.compile(r"0[fF]([0-9a-fA-F]{8})$")
_INTEGER = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)U?$")
_ADDRESS = re.compile(r"\[\s*([^\s\]+]+)\s*(?:\+\s*(-?\w+))?\s*\]$")
SPECIAL = {"%tid.x", "%tid.y", "%tid.z", "%laneid", "%warpid", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x"} | {
    "%nctaid.y", "%nctaid.z", "%ntid.x", "%ntid.y", "%ntid.z", "%cluster_ctarank", "%cluster_nctarank",
    "%is_explicit_cluster", "%lanemask_lt",
}  # fmt: skip
SPECIAL |= {f"%{of}.{axis}" for of in ("cluster_ctaid", "cluster_nctaid", "clusterid", "nclusterid") for axis in "xyz"}


def unsupported(at: Statement, what: str = "the emulator does not know this instruction") -> Unsupported:
    """The error for an instruction that cannot be run, with both of its lines."""
    error = Unsupported(f"{what}: `{at}`, PTX line {at.line}, {at.source or 'no Python line'}")
    error.at = at
    return error


def parts(operand: str) -> list[str]:
    """`{a, b}` -> a, b; anything else is its only part."""
    if operand.startswith("{"):
        return [part.strip() for part in operand.strip("{}").split(",")]
    return [operand]


def integer(operand: str) -> int | None:
    """The value of an integer literal, or None."""
    return int(operand.rstrip("U"), 0) if _INTEGER.match(operand) else None


class Operands:
    """Resolves the operands of one program's instructions."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.params = {param.name: param.size for param in program.params}
        self.numbers = {name: number for number, name in enumerate(program.registers)}

    def register(self, name: str) -> Register | None:
        return self.program.registers.get(name)

    def need_register(self, name: str, at: Statement, view: str | None = None) -> Register:
        """Unsupported if there is no register of this name, or it is not of the bank of `view`."""
        found = self.register(name)
        if found is None:
            raise unsupported(at, f"operand {name} is no register")
        if view is not None:
            self.need_bank(found, name, view, at)
        return found

    def need_bank(self, register: Register, name: str, view: str, at: Statement) -> None:
        """Unsupported if a register is wider or narrower than what the instruction wants there."""
        if register.bank != VIEW_BANK[view]:
            raise unsupported(at, f"register {name} is not as wide as the instruction's operand")

    def constant(self, operand: str, view: str) -> Any | None:
        """A literal as a numpy scalar of the view's type, or None if it is no literal."""
        if found := _FLOAT.match(operand):
            bits = np.uint32(int(found[1], 16))
            return bits.view(np.float32) if view == "f4" else bits
        value = integer(operand)
        if value is None:
            return None
        if view == "p":
            return np.bool_(value)
        dtype = np.dtype(DTYPES[view])
        if dtype.kind == "f":
            return dtype.type(value)
        return np.array(value % (1 << 8 * dtype.itemsize), f"u{dtype.itemsize}").view(dtype)[()]

    def source(self, operand: str, view: str, at: Statement) -> Source:
        """What the operand is for an instruction that reads it as `view`."""
        if operand.startswith("!"):
            inner = self.source(operand[1:], view, at)
            return lambda warp: ~inner(warp)
        if register := self.register(operand):
            self.need_bank(register, operand, view, at)
            row = register.row
            return lambda warp: warp.views[view][row]
        value = self.constant(operand, view)
        if value is not None:
            return lambda warp: value
        dtype = DTYPES[view]
        if operand in SPECIAL:
            return lambda warp: warp.special(operand).astype(dtype)
        if operand in self.params or operand == "__dynamic_shmem__0":
            return lambda warp: dtype(warp.cta.machine.symbols[operand])
        raise unsupported(at, f"operand {operand} is unknown")

    def address(self, operand: str, at: Statement) -> Source:
        """`[%rd1+16]` as an array of int64 (shared) or uint64 (global) over the lanes."""
        found = _ADDRESS.match(operand)
        if not found:
            raise unsupported(at, f"address {operand} is not understood")
        register = self.register(found[1])
        wide = register is None or register.bank == "d"
        base = self.source(found[1], "u8" if wide else "u4", at)
        offset = int(found[2] or "0", 0)
        if wide:
            step = np.uint64(offset % (1 << 64))
            return lambda warp: base(warp) + step
        return lambda warp: base(warp).astype(np.int64) + offset

    def bits(self, names: Sequence[str]) -> int:
        """Registers as a set of bits, one for each register of the program."""
        result = 0
        for name in names:
            if name in self.numbers:
                result |= 1 << self.numbers[name]
        return result
