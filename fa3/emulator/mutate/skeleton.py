"""How a kernel synchronises, without what it computes: for comparing kernels that should do so alike."""

from __future__ import annotations

import re

from fa3.emulator.mutate.analysis import Analysis
from fa3.emulator.mutate.judge import Line, line_of
from fa3.emulator.program import Program

_SYNCHRONISING = ("mbarrier.", "bar.", "barrier.", "fence.", "wgmma.", "cp.async.", "setmaxnreg.", "elect.")
_TYPE = re.compile(r"\.(bf16|f16)\b")

Skeleton = list[tuple[str, tuple[int | None, ...], Line]]
"""Opcode without the element type, the operands that are constants (None for others), and the Python line."""


def skeleton(program: Program) -> Skeleton:
    """The synchronising statements of a program in their order."""
    a = Analysis(program)
    return [
        (_TYPE.sub("", at.opcode), tuple(a.constant(operand) for operand in at.operands), line_of(at))
        for at in program.statements
        if at.opcode.startswith(_SYNCHRONISING)
    ]
