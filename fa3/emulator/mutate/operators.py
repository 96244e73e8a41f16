"""All operators: each looks through a program and plants one sort of fault wherever it can.

mbarriers.py   mbarriers: their initialisation, arrivals, bytes, waits
warpgroups.py  what joins warps and guards registers: named barriers, WGMMA groups, bulk groups, fences
cursors.py     the start and the advance of the rings' cursors
bounds.py      bounds of loops and tiles, limits of masks, coordinates of boxes
chain.py       what joins CTAs and kernels: dependent launches, counters, sums in global memory
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fa3.emulator.mutate import bounds, chain, cursors, mbarriers, warpgroups
from fa3.emulator.mutate.analysis import Analysis
from fa3.emulator.mutate.mutant import Mutant
from fa3.emulator.program import Program

Operator = Callable[[Analysis], Iterator[Mutant]]

ALL: tuple[Operator, ...] = (
    *mbarriers.OPERATORS, *warpgroups.OPERATORS, *cursors.OPERATORS, *bounds.OPERATORS, *chain.OPERATORS,
)  # fmt: skip


def mutants(program: Program) -> list[Mutant]:
    """Every mutant of a program, in a fixed order."""
    analysis = Analysis(program)
    return [mutant for operator in ALL for mutant in operator(analysis)]
