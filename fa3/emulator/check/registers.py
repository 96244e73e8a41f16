"""Registers that are read before anybody wrote them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fa3.emulator.check.checker import Checker, site_of
from fa3.emulator.check.in_flight import MMA
from fa3.emulator.check.names import Names
from fa3.emulator.check.register_sets import RegisterNames

if TYPE_CHECKING:
    from fa3.emulator.blocks import Step
    from fa3.emulator.machine import Machine
    from fa3.emulator.warp import Mask, Warp


@dataclass(slots=True)
class Written:
    """Registers that some lane of a warp has written, and the steps that were looked at."""

    registers: int = 0
    seen: set[int] = field(default_factory=set)


class Uninitialised(Checker):
    """A register counts as written once any lane has written it; a step is looked at when a warp first comes to it."""

    def __init__(self, names: Names) -> None:
        super().__init__(names)
        self._warps: defaultdict[Warp, Written] = defaultdict(Written)
        self._registers = RegisterNames()

    def started(self, machine: Machine) -> None:
        self._registers = RegisterNames(machine.program)

    def stepping(self, warp: Warp, step: Step, mask: Mask | None) -> None:
        mine = self._warps[warp]
        if step.first in mine.seen:
            return
        mine.seen.add(step.first)
        missing = (step.reads if step.kind != MMA else self._read_by_mma(warp, step)) & ~mine.registers
        if missing:
            self._found(warp, step, missing, mine.registers)
        mine.registers |= step.writes | missing  # each is reported where it is read first

    def _read_by_mma(self, warp: Warp, step: Step) -> int:
        """Without the accumulators if scale-d is false: then they are only written."""
        at = step.statements[0]
        scale: Any = warp.cta.machine.code.operands.source(at.operands[3], "p", at)(warp)
        return step.reads if bool(scale.any()) else step.reads & ~self._registers.all_of(at.operands[0])

    def _found(self, warp: Warp, step: Step, missing: int, written: int) -> None:
        for at in step.statements:
            read, writes = self._registers.used(at)
            if step.kind == MMA:
                read |= writes
            if read & missing & ~written:
                text = self._registers.text(read & missing & ~written)
                happened = f"{self.warp(warp)} reads {text}, which it has never written."
                self.find("uninitialised register", site_of(warp, at), happened)
            written |= writes

    def exited(self, warp: Warp) -> None:
        self._warps.pop(warp, None)
