"""Named barriers of a CTA, and the turnstiles built on them.

The hardware has 16 barriers; 0 is the barrier of the whole CTA. The others are given out by event, never by number, so
that two events cannot meet on one barrier by accident.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .call_site import call_site
from .registers import THREADS_PER_WARPGROUP

LAST_BARRIER = 15


@dataclass(frozen=True)
class BarrierNames:
    """Events in a fixed order; each gets a consecutive range of hardware barriers, one for each warpgroup it has."""

    events: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        if any(count < 1 for _, count in self.events):
            raise ValueError(f"{self.events}: every event needs at least one barrier")
        if sum(count for _, count in self.events) > LAST_BARRIER:
            raise ValueError(f"{self.events}: a CTA has {LAST_BARRIER} named barriers")
        names = [name for name, _ in self.events]
        if len(set(names)) != len(names):
            raise ValueError(f"barrier events must differ: {names}")

    def first(self, event: str) -> int:
        """The hardware barrier of the event's first warpgroup."""
        barrier = 1
        for name, count in self.events:
            if name == event:
                return barrier
            barrier += count
        raise KeyError(f"no barrier event {event!r}; events: {[name for name, _ in self.events]}")


@dataclass(frozen=True)
class WarpgroupBarrier:
    """Joins the 128 threads of one warpgroup; each warpgroup has its own."""

    first: int
    warpgroup: Int32

    @call_site
    def join(self):
        cute.arch.barrier(barrier_id=self.first + self.warpgroup, number_of_threads=THREADS_PER_WARPGROUP)


@dataclass(frozen=True)
class CommonBarrier:
    """Joins all threads of several warpgroups."""

    barrier: int
    warpgroups: int

    @call_site
    def join(self):
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=self.warpgroups * THREADS_PER_WARPGROUP)


@dataclass(frozen=True)
class PingPong:
    """Warpgroups take turns: `wait` until it is mine, `give` it to the next one in the circle.

    Barrier i stands for "it is warpgroup i's turn" and joins the 128 threads that give it with the 128 that wait. While
    one warpgroup issues to the tensor cores, the others do the rest of their work (FlashAttention-3, section 3.1).
    Every warpgroup must take equally many turns. One arrival is left over when a kernel ends; the PTX ISA is silent on
    that, CUTLASS' ordered barriers end so too, and it was seen to be harmless on an H200.
    """

    first: int
    warpgroup: Int32
    warpgroups: int

    @call_site
    @cute.jit
    def open(self):
        """Before the first turn: warpgroup 0 may begin."""
        if self.warpgroup == self.warpgroups - 1:
            self.give()

    @call_site
    @cute.jit
    def wait(self):
        cute.arch.barrier(barrier_id=self.first + self.warpgroup, number_of_threads=2 * THREADS_PER_WARPGROUP)

    @call_site
    @cute.jit
    def give(self):
        following = self.warpgroup + 1
        following = following - self.warpgroups * Int32(following == self.warpgroups)
        cute.arch.barrier_arrive(barrier_id=self.first + following, number_of_threads=2 * THREADS_PER_WARPGROUP)


@dataclass(frozen=True)
class NoTurn:
    """The identity twin of `PingPong`: everyone may always go."""

    def open(self):
        pass

    def wait(self):
        pass

    def give(self):
        pass


def make_turns(kind: str, first: int, warpgroup: Int32, warpgroups: int) -> PingPong | NoTurn:
    """`pingpong` with at least two warpgroups, else nothing: a lone warpgroup would wait for itself."""
    if cutlass.const_expr(kind == "pingpong" and warpgroups > 1):
        return PingPong(first, warpgroup, warpgroups)
    return NoTurn()


@call_site
@cute.jit
def meet_cluster():
    """Every thread of the cluster that has not ended: what each wrote before, all can read after."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
