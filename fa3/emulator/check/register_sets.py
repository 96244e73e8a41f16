"""Sets of registers as integers: bit n is the n-th register that a program declares (`fa3.emulator.blocks.Step`)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fa3.emulator.program import Program
from fa3.sass.ptx_code import Statement

_REGISTER = re.compile(r"%[A-Za-z_][\w@]*")
_NO_RESULT = frozenset(
    "st red bra bar barrier ret exit trap fence membar setmaxnreg prefetch cp stmatrix nop griddepcontrol".split()
)
_NO_RESULT_OF = ("mbarrier.init", "mbarrier.inval", "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group")


class RegisterNames:
    """The registers of a program and their numbers."""

    def __init__(self, program: Program | None = None) -> None:
        self.names: list[str] = list(program.registers) if program else []
        self._numbers = {name: number for number, name in enumerate(self.names)}

    def bits(self, names: Iterable[str]) -> int:
        result = 0
        for name in names:
            number = self._numbers.get(name)
            if number is not None:
                result |= 1 << number
        return result

    def used(self, at: Statement) -> tuple[int, int]:
        """(read, written) by a statement."""
        has_result = at.name not in _NO_RESULT and not at.opcode.startswith(_NO_RESULT_OF) and at.operands
        written = _REGISTER.findall(at.operands[0]) if has_result and not at.operands[0].startswith("[") else []
        rest = at.operands[1:] if written else at.operands
        read = [name for operand in rest for name in _REGISTER.findall(operand)]
        if at.predicate:
            read.append(at.predicate)
        return self.bits(read), self.bits(written)

    def all_of(self, operand: str) -> int:
        """The registers that an operand names."""
        return self.bits(_REGISTER.findall(operand))

    def text(self, registers: int, most: int = 4) -> str:
        """`%r1, %r2 and 6 more`."""
        numbers = [n for n in range(registers.bit_length()) if registers >> n & 1]
        shown = [self.names[n] if n < len(self.names) else f"register {n}" for n in numbers[:most]]
        more = len(numbers) - len(shown)
        return ", ".join(shown) + (f" and {more} more" if more else "")
