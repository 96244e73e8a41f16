"""How the registers of an SM are shared out between the roles (`setmaxnreg`).

A CTA starts with the same number of registers for every thread. A role that only steers copies gives most of its own
back, and the math roles take them. The hardware's rules (PTX ISA, `setmaxnreg`): a multiple of 8 between 24 and 256,
executed by whole warpgroups, and only what other warpgroups of the CTA have given back. What the CTA did not get at
launch it never gets, even if the SM has it to spare: who asks for more waits for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

REGISTERS_PER_SM = 65_536
THREADS_PER_WARPGROUP = 128
SMALLEST, LARGEST, GRANULE = 24, 256, 8
ENTRY_LIMIT = 255


@dataclass(frozen=True)
class RegisterBudget:
    """Registers per thread of the producer warpgroup and of each of `math_warpgroups` consumers."""

    load: int
    math: int
    math_warpgroups: int

    def __post_init__(self) -> None:
        for role, count in (("load", self.load), ("math", self.math)):
            if count % GRANULE or not SMALLEST <= count <= LARGEST:
                raise ValueError(
                    f"{role} asks for {count} registers; setmaxnreg takes multiples of {GRANULE} "
                    f"from {SMALLEST} to {LARGEST}"
                )
        if self.total > self.pool:
            raise ValueError(
                f"{self.load} x 128 + {self.math} x 128 x {self.math_warpgroups} = {self.total} registers; "
                f"the CTA starts with {self.pool} and gets no more"
            )
        if not self.load <= self.entry <= self.math:
            raise ValueError(
                f"threads start with {self.entry} registers; load ({self.load}) may only give back and "
                f"math ({self.math}) only take"
            )

    @property
    def total(self) -> int:
        """Registers of the CTA after the exchange."""
        return THREADS_PER_WARPGROUP * (self.load + self.math * self.math_warpgroups)

    @property
    def entry(self) -> int:
        """Registers per thread at launch: the SM's, divided evenly, rounded down to the granule, at most 255."""
        return min(self._even, ENTRY_LIMIT)

    @property
    def pool(self) -> int:
        """Registers that the CTA owns from launch to exit. They come in granules: 256 where 255 are used."""
        return self._even * THREADS_PER_WARPGROUP * (1 + self.math_warpgroups)

    @property
    def _even(self) -> int:
        even = REGISTERS_PER_SM // (THREADS_PER_WARPGROUP * (1 + self.math_warpgroups))
        return min(even // GRANULE * GRANULE, LARGEST)


BUDGETS = {
    1: RegisterBudget(load=56, math=256, math_warpgroups=1),
    2: RegisterBudget(load=24, math=240, math_warpgroups=2),
    3: RegisterBudget(load=32, math=160, math_warpgroups=3),
}
"""Budgets by number of math warpgroups: the largest share for math that leaves the producer enough not to spill."""
