"""Registers that a WGMMA under way owns: accumulators and A operands, until the wait that covers their group.

PTX ISA, "wgmma.mma_async": to access them before is undefined, except that a WGMMA of the same shape may go on
accumulating in the same registers. Whether the hardware has finished early does not matter, so the checker goes by
commits and waits only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fa3.emulator.check.checker import Checker, site_of
from fa3.emulator.check.names import Names
from fa3.emulator.check.places import short
from fa3.emulator.check.register_sets import RegisterNames

if TYPE_CHECKING:
    from fa3.emulator.blocks import Step
    from fa3.emulator.machine import Machine
    from fa3.emulator.operations import Group, Operation
    from fa3.emulator.warp import Mask, Warp
    from fa3.sass.ptx_code import Statement

MMA = "wgmma.mma_async"


@dataclass
class Flying:
    """The WGMMA of a warp that no wait has covered yet. `accumulators` and `operands` are unions of their registers."""

    open: list[Operation] = field(default_factory=list)
    groups: dict[Group, list[Operation]] = field(default_factory=dict)
    accumulators: int = 0
    operands: int = 0
    forgiven: set[Operation] = field(default_factory=set)
    """Those whose registers were touched, which was reported once."""

    @property
    def all(self) -> list[Operation]:
        return [operation for group in self.groups.values() for operation in group] + self.open

    def sum_up(self) -> None:
        self.accumulators = self.operands = 0
        for operation in self.all:
            if operation not in self.forgiven:
                self.accumulators |= operation.registers_written
                self.operands |= operation.registers_read

    def forgive(self, hit: int) -> None:
        """Says no more of the WGMMA that own these registers."""
        self.forgiven.update(o for o in self.all if (o.registers_written | o.registers_read) & hit)
        self.sum_up()


class InFlight(Checker):
    """Registers touched too early, and WGMMA that is never committed or waited for."""

    def __init__(self, names: Names) -> None:
        super().__init__(names)
        self._warps: dict[Warp, Flying] = {}
        self._registers = RegisterNames()

    def started(self, machine: Machine) -> None:
        self._registers = RegisterNames(machine.program)

    def stepping(self, warp: Warp, step: Step, mask: Mask | None) -> None:
        flying = self._warps.get(warp)
        if flying is None or step.kind == MMA:
            return
        touched = step.reads | step.writes
        if flying.accumulators & touched:
            self._touched(warp, step, flying, flying.accumulators, "accumulator in flight")
        if flying.operands & touched:
            self._touched(warp, step, flying, flying.operands, "A registers in flight")

    def _touched(self, warp: Warp, step: Step, flying: Flying, hidden: int, kind: str) -> None:
        """The first statement of the step that touches one of these registers; what comes later follows from it."""
        for at in step.statements:
            read, written = self._registers.used(at)
            hit = (read | written) & hidden
            if hit:
                does = "writes" if written & hidden else "reads"
                self._found(kind, warp, at, does, hit, flying)
                flying.forgive(hit)
                return

    def issued(self, warp: Warp, operation: Operation) -> None:
        if operation.kind != "wgmma":
            return
        flying = self._warps.setdefault(warp, Flying())
        written, read = operation.registers_written, operation.registers_read
        if written & flying.accumulators:
            for other in flying.all:
                common = written & other.registers_written
                if common and (written != other.registers_written or operation.at.opcode != other.at.opcode):
                    self._found("accumulator in flight", warp, operation.at, "accumulates in", common, flying)
                    break
        if read & flying.accumulators:
            common = read & flying.accumulators
            self._found("accumulator in flight", warp, operation.at, "takes as its A operand", common, flying)
        if written & flying.operands:
            common = written & flying.operands
            self._found("A registers in flight", warp, operation.at, "accumulates in", common, flying)
        flying.open.append(operation)
        flying.accumulators |= written
        flying.operands |= read

    def committed(self, warp: Warp, at: Statement, group: Group) -> None:
        flying = self._warps.get(warp)
        if flying and group.kind == "wgmma":
            flying.groups[group], flying.open = flying.open, []

    def joined(self, warp: Warp, at: Statement, groups: Sequence[Group], read: bool) -> None:
        flying = self._warps.get(warp)
        if flying is None or not groups or groups[0].kind != "wgmma":
            return
        for group in groups:
            flying.groups.pop(group, None)
        flying.sum_up()
        if not flying.groups and not flying.open:
            del self._warps[warp]

    def exited(self, warp: Warp) -> None:
        flying = self._warps.pop(warp, None)
        if flying is None:
            return
        who = self.warp(warp)
        if flying.open:
            site = site_of(warp, flying.open[0].at)
            self.find("wgmma never committed", site, f"{who} ends without a commit of this WGMMA.")
        for group in flying.groups.values():
            if group:
                site = site_of(warp, group[0].at)
                self.find("wgmma never waited for", site, f"{who} ends without a wait for this WGMMA.")

    def _found(self, kind: str, warp: Warp, at: Statement, does: str, hit: int, flying: Flying) -> None:
        owner = next(o for o in reversed(flying.all) if (o.registers_written | o.registers_read) & hit)
        what = "accumulators" if kind.startswith("acc") else "A operand"
        happened = (
            f"{self.warp(warp)} {does} {self._registers.text(hit)}, {what} of the WGMMA at "
            f"{short(owner.at)}, which no wait_group has covered."
        )
        self.find(kind, site_of(warp, at), happened, site_of(warp, owner.at))
