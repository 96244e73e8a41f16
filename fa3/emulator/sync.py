"""Barriers: what warps meet at and what asynchronous operations report to (PTX ISA, "mbarrier" and "bar")."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fa3.emulator.faults import Fault

if TYPE_CHECKING:
    from fa3.emulator.cluster import Cluster
    from fa3.emulator.cta import Cta
    from fa3.emulator.operations import Group
    from fa3.emulator.warp import Warp

WARP_THREADS = 32


@dataclass(eq=False)
class MBarrier:
    """A phase is complete when all arrivals of it have come and no announced byte is missing."""

    cta: Cta
    address: int
    count: int
    pending: int = 0
    """Arrivals that the current phase still waits for."""
    tx: int = 0
    """Bytes announced and not yet come; below 0 while bytes came before they were announced."""
    phases: int = 0
    """Completed phases."""
    waiters: list[Warp] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pending = self.count

    def has_passed(self, parity: int) -> bool:
        """Whether a wait for the phase of this parity goes on: the current, incomplete phase has the other parity."""
        return self.phases & 1 != parity

    def arrive(self, count: int, expected: int) -> None:
        """`count` arrivals and `expected` bytes to wait for."""
        if count > self.pending:
            raise Fault(
                "mbarrier arrivals",
                f"{count} arrival(s) where the phase waits for {self.pending} of {self.count} (address {self.address})",
            )
        self.tx += expected
        self.pending -= count
        self._try_complete()

    def transfer(self, nbytes: int) -> None:
        """Bytes that an asynchronous copy has brought."""
        self.tx -= nbytes
        self._try_complete()

    def _try_complete(self) -> None:
        if self.pending == 0 and self.tx == 0:
            self.phases += 1
            self.pending = self.count
            for observer in self.cta.machine.observers:
                observer.completed(self)
            self.cta.machine.wake(self.waiters)


@dataclass(eq=False)
class NamedBarrier:
    """One of the 16 barriers of a CTA, for whole warps. Every generation joins the threads it was asked to join."""

    cta: Cta
    number: int
    generation: int = 0
    arrived: int = 0
    expected: int = 0
    waiters: list[Warp] = field(default_factory=list)

    def arrive(self, threads: int) -> None:
        """A warp arrives at a barrier for `threads` threads."""
        if threads % WARP_THREADS or threads <= 0:
            raise Fault(
                "named barrier", f"barrier {self.number} joins {threads} threads, no multiple of {WARP_THREADS}"
            )
        if self.expected not in (0, threads):
            raise Fault(
                "named barrier",
                f"barrier {self.number} is to join {threads} threads while others wait there to join {self.expected}",
            )
        self.expected = threads
        self.arrived += WARP_THREADS
        if self.arrived == threads:
            self.generation += 1
            self.arrived = self.expected = 0
            self.cta.machine.wake(self.waiters)


@dataclass(eq=False)
class ClusterBarrier:
    """The barrier of a cluster: a generation is over when all threads that have not exited have arrived for it (PTX
    ISA, "barrier.cluster"). Lanes are sets of bits."""

    cluster: Cluster
    generation: int = 0
    arrived: dict[Warp, int] = field(default_factory=dict)
    """The lanes that have arrived in the current generation."""
    inside: dict[Warp, int] = field(default_factory=dict)
    """Those that have arrived and not waited yet."""
    waiters: list[Warp] = field(default_factory=list)

    def arrive(self, warp: Warp, lanes: int) -> None:
        """Fault if a lane has not waited since it last arrived."""
        if lanes & self.inside.get(warp, 0):
            raise Fault("cluster barrier", "a thread arrives at the cluster's barrier again before it has waited there")
        self.arrived[warp] = self.arrived.get(warp, 0) | lanes
        self.inside[warp] = self.inside.get(warp, 0) | lanes
        self.try_complete()

    def has_passed(self, warp: Warp, lanes: int) -> bool:
        """Whether a wait of these lanes goes on. Fault if one of them has not arrived."""
        if lanes & ~self.inside.get(warp, 0):
            raise Fault("cluster barrier", "a thread waits at the cluster's barrier without having arrived there")
        return not lanes & self.arrived.get(warp, 0)

    def leave(self, warp: Warp, lanes: int) -> None:
        """These lanes have waited."""
        self.inside[warp] &= ~lanes

    def missing(self) -> list[Warp]:
        """The warps with threads that have neither arrived nor exited."""
        warps = [warp for cta in self.cluster.ctas for warp in cta.warps]
        return [warp for warp in warps if warp.lanes & ~self.arrived.get(warp, 0)]

    def try_complete(self) -> None:
        """To be called when somebody has arrived or exited."""
        if self.arrived and not self.missing():
            self.generation += 1
            self.arrived.clear()
            for observer in self.cluster.machine.observers:
                observer.cluster_completed(self)
            self.cluster.machine.wake(self.waiters)


@dataclass(frozen=True)
class MBarrierWait:
    """Waiting for an mbarrier's phase of a parity."""

    barrier: MBarrier
    parity: int

    def __str__(self) -> str:
        b = self.barrier
        return (
            f"phase {b.phases} (parity {self.parity}) of the mbarrier at {b.address}: "
            f"{b.pending} of {b.count} arrivals and {b.tx} bytes are missing"
        )


@dataclass(frozen=True)
class NamedBarrierWait:
    """Waiting in bar.sync."""

    barrier: NamedBarrier
    generation: int

    def __str__(self) -> str:
        b = self.barrier
        return f"barrier {b.number}, where {b.arrived} of {b.expected} threads have arrived"


@dataclass(frozen=True)
class ClusterBarrierWait:
    """Waiting in barrier.cluster.wait."""

    barrier: ClusterBarrier

    def __str__(self) -> str:
        missing = [f"warp {warp.index} of CTA rank {warp.cta.rank}" for warp in self.barrier.missing()]
        return f"the cluster's barrier, at which are missing: {', '.join(missing)}"


@dataclass(frozen=True)
class BulkWait:
    """Waiting for bulk copies of its own."""

    groups: tuple[Group, ...]

    def __str__(self) -> str:
        return f"{len(self.groups)} group(s) of bulk copies"


@dataclass(frozen=True)
class PollWait:
    """Looking again and again at a place of global memory, which has not changed."""

    address: int
    value: int

    def __str__(self) -> str:
        return f"something other than {self.value} at the global address {self.address:#x}"


Wait = MBarrierWait | NamedBarrierWait | ClusterBarrierWait | BulkWait | PollWait
