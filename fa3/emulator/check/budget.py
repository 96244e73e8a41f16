"""setmaxnreg: who gives and takes registers, and whether there are enough.

The rules are those of `fa3.pipeline.registers` (PTX ISA, "setmaxnreg"): a multiple of 8 from 24 to 256, executed by
whole warpgroups, and together no more than the CTA got at launch. Who asks for more waits for ever, which the emulator
cannot show by itself: it has all the registers that a program names.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from fa3.emulator.check.checker import Checker, Site
from fa3.emulator.check.names import Names
from fa3.pipeline.registers import ENTRY_LIMIT, GRANULE, LARGEST, REGISTERS_PER_SM, SMALLEST, THREADS_PER_WARPGROUP
from fa3.pipeline.schedule import WARPS_PER_WARPGROUP

if TYPE_CHECKING:
    from fa3.emulator.blocks import Step
    from fa3.emulator.cta import Cta
    from fa3.emulator.machine import Machine
    from fa3.emulator.sync import ClusterBarrier, NamedBarrier
    from fa3.emulator.warp import Mask, Warp
    from fa3.sass.ptx_code import Statement

KIND = "register budget"
Request = tuple[bool, int, "Statement"]
"""Whether registers are taken (else given back), how many per thread are asked for, where."""


class RegisterBudgets(Checker):
    """Compares what the warps asked for with the hardware's rules, and with the plan where it is known."""

    def __init__(self, names: Names) -> None:
        super().__init__(names)
        self._requests: defaultdict[Warp, list[Request]] = defaultdict(list)
        self._first: Statement | None = None
        self._begins: dict[int, Statement | None] = {}
        """Warp (index) -> the first statement behind the CTA's first barrier, where roles part; None until it comes."""

    def started(self, machine: Machine) -> None:
        self._first = machine.program.statements[0]
        self._begins = {}

    def left(self, warp: Warp, at: Statement, barrier: NamedBarrier) -> None:
        self._begins.setdefault(warp.index, None)

    def cluster_passed(self, warp: Warp, at: Statement, barrier: ClusterBarrier) -> None:
        self._begins.setdefault(warp.index, None)

    def stepping(self, warp: Warp, step: Step, mask: Mask | None) -> None:
        if self._begins.get(warp.index, step) is None:
            self._begins[warp.index] = step.statements[0]
        if step.kind == "setmaxnreg":
            at = step.statements[0]
            self._requests[warp].append((".inc" in at.opcode, int(at.operands[0], 0), at))

    def finished(self, cta: Cta) -> None:
        requests = [self._requests.pop(warp, []) for warp in cta.warps]
        threads = 32 * len(requests)
        even = min(REGISTERS_PER_SM // threads // GRANULE * GRANULE, LARGEST)
        if not any(requests) and self.names.registers is None:
            return
        shares, site = [], Site(-1, self._first)
        for first in range(0, len(requests), WARPS_PER_WARPGROUP):
            group = requests[first : first + WARPS_PER_WARPGROUP]
            site = self._warpgroup(first, group, even) or site
            shares.append(group[0][-1][1] if group[0] else even)
            self._planned(first, requests, even)
        total, pool = THREADS_PER_WARPGROUP * sum(shares), threads * even
        if total > pool:
            parts = " + ".join(f"{THREADS_PER_WARPGROUP} x {share}" for share in shares)
            self.find(KIND, site, f"the warpgroups ask for {parts} = {total} registers; the CTA starts with {pool}.")

    def _warpgroup(self, first: int, group: list[list[Request]], even: int) -> Site | None:
        """Checks what four warps asked for; returns where they took registers."""
        said = [[(takes, count, at.line) for takes, count, at in requests] for requests in group]
        taken = None
        if any(one != said[0] for one in said):
            site = next(Site(first + i, requests[0][2]) for i, requests in enumerate(group) if requests)
            self.find(KIND, site, f"the warps of {self.names.role(first)} do not all execute the same setmaxnreg.")
        for takes, count, at in group[0]:
            site = Site(first, at)
            taken = site if takes else taken
            if count % GRANULE or not SMALLEST <= count <= LARGEST:
                what = f"setmaxnreg {count}: multiples of {GRANULE} from {SMALLEST} to {LARGEST} are allowed."
                self.find(KIND, site, what)
            now = min(even, ENTRY_LIMIT)
            if (takes and count < now) or (not takes and count > even):
                does = "takes" if takes else "gives back"
                self.find(KIND, site, f"{self.names.role(first)} {does} registers, from {now} to {count} per thread.")
        return taken

    def _planned(self, first: int, requests: list[list[Request]], even: int) -> None:
        """Compares with the budget of the kernel's configuration, where it is known."""
        own = requests[first]
        planned = (self.names.registers or {}).get(self.names.role(first))
        if planned is None or (own and own[-1][1] == planned):
            return
        role = f"registers per thread; the budget of {self.names.role(first)} is {planned}."
        if own:
            self.find(KIND, Site(first, own[-1][2]), f"{self.names.role(first)} asks for {own[-1][1]} {role}")
            return
        others = [Site(warp, said[-1][2]) for warp, said in enumerate(requests) if said]
        happened = f"{self.names.role(first)} executes no setmaxnreg and stays at {min(even, ENTRY_LIMIT)} {role}"
        self.find(KIND, Site(first, self._begins.get(first) or self._first), happened, others[0] if others else None)
