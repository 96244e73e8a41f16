"""The model's twin of `fa3.pipeline.barriers.PingPong`: turns on the tensor cores, as steps of a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fa3.pipeline.registers import THREADS_PER_WARPGROUP
from fa3.pipeline.schedule import WARPS_PER_WARPGROUP

from .machine import Actor, Machine
from .steps import Come, Enter, Leave, Program, Stay, Step
from .things import NamedBarrier, TensorCores, Thing

CORES = "tensor cores"


def turn(warpgroup: int) -> str:
    """The barrier that means "it is this warpgroup's turn"."""
    return f"turn[{warpgroup}]"


@dataclass(frozen=True)
class ModelTurns:
    """The turnstile as one warp, or one whole warpgroup, of `warpgroup` sees it; `threads` is how many that is."""

    warpgroup: int
    warpgroups: int
    threads: int = THREADS_PER_WARPGROUP

    def open(self) -> Program:
        return self.give() if self.warpgroup == self.warpgroups - 1 else []

    def wait(self) -> Program:
        barrier = turn(self.warpgroup)
        return [
            Come(barrier=barrier, size=self.threads, threads=2 * THREADS_PER_WARPGROUP, wait=True),
            Stay(barrier=barrier),
        ]

    def give(self) -> Program:
        following = (self.warpgroup + 1) % self.warpgroups
        return [Come(barrier=turn(following), size=self.threads, threads=2 * THREADS_PER_WARPGROUP)]

    def work(self) -> Program:
        """One block's work for a lone warpgroup, without turns."""
        return [Step("gemm"), Step("softmax")]

    def program(self, turns: int) -> Program:
        """`turns` times: GEMMs when it is our turn, softmax while it is not."""
        gemm, softmax = self.work()
        program = self.open()
        for _ in range(turns):
            program += [*self.wait(), Enter(cores=CORES), gemm, Leave(cores=CORES), *self.give(), softmax]
        return program


def turns_machine(turns: Sequence[int], warps: int = 1) -> Machine:
    """Warpgroup i takes `turns[i]` turns. `warps`: actors that each warpgroup is split into, 1 or 4."""
    if warps not in (1, WARPS_PER_WARPGROUP):
        raise ValueError(f"a warpgroup is modelled as 1 or {WARPS_PER_WARPGROUP} actors, not {warps}")
    groups = [[f"math{i}" if warps == 1 else f"math{i}.{w}" for w in range(warps)] for i in range(len(turns))]
    programs: dict[Actor, Program] = {}
    for i, group in enumerate(groups):
        side = ModelTurns(i, len(turns), THREADS_PER_WARPGROUP // warps)
        programs |= {warp: side.program(turns[i]) for warp in group}
    things: dict[str, Thing] = {turn(i): NamedBarrier() for i in range(len(turns))}
    things[CORES] = TensorCores(tuple(tuple(group) for group in groups))
    return Machine(programs, things)
