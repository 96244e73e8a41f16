"""What the machine tells those who watch it: checkers, recorders of timelines, counters.

An observer sees the events in the order in which the machine does them, which is one of the orders that a GPU could
have chosen. Nothing it does changes the run. `at` is always the PTX statement, with its Python line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fa3.emulator.blocks import Step
    from fa3.emulator.cta import Cta
    from fa3.emulator.machine import Machine
    from fa3.emulator.operations import Group, Operation
    from fa3.emulator.sync import ClusterBarrier, MBarrier, NamedBarrier
    from fa3.emulator.warp import Warp
    from fa3.sass.ptx_code import Statement

Addresses = NDArray[np.int64]


class Observer:
    """Ignores everything; to be derived from."""

    def started(self, machine: Machine) -> None:
        """Before the first instruction."""

    def stepping(self, warp: Warp, step: Step, mask: NDArray[np.bool_] | None) -> None:
        """The warp is about to execute a step, in the lanes of `mask` (None: all). Not told again when it has to wait
        and tries again, except that a wait which did not pass is told by `blocked`."""

    # ---- memory, by threads (the generic proxy)
    def shared(self, warp: Warp, at: Statement, addresses: Addresses, nbytes: int, write: bool) -> None:
        """The active lanes read or write `nbytes` at these shared addresses (ld, st, ldmatrix, stmatrix)."""

    def remote(self, warp: Warp, at: Statement, cta: Cta, addresses: Addresses, nbytes: int, write: bool) -> None:
        """Likewise at addresses in the shared memory of another CTA of the cluster."""

    def memory(self, warp: Warp, at: Statement, addresses: Addresses, nbytes: int, write: bool) -> None:
        """Likewise in global memory. An atomic operation, in any memory, is told twice, as a read and as a write."""

    def fenced(self, warp: Warp, at: Statement) -> None:
        """A fence or a membar; `at.opcode` says which."""

    # ---- asynchronous operations (the async proxy)
    def issued(self, warp: Warp, operation: Operation) -> None:
        """An asynchronous operation was started. From now on it may take effect at any time."""

    def executed(self, operation: Operation) -> None:
        """It has taken effect; a store not when shared memory was read, but when global memory has been written."""

    def committed(self, warp: Warp, at: Statement, group: Group) -> None:
        """The warp closed a group of operations (`group.kind` is "wgmma" or "bulk")."""

    def joined(self, warp: Warp, at: Statement, groups: Sequence[Group], read: bool) -> None:
        """A wait_group passed, and covers these groups, oldest first, which no earlier wait covered (for
        `wait_group.read`: their sources have been read, that is all; a wait without it covers them once more)."""

    # ---- barriers
    def initialised(self, warp: Warp, at: Statement, barrier: MBarrier) -> None:
        """mbarrier.init."""

    def arrived(self, warp: Warp, at: Statement, barrier: MBarrier, count: int, expected: int) -> None:
        """`count` arrivals, and `expected` bytes announced, before their effect on the barrier, which may be one of
        another CTA of the cluster."""

    def transferred(self, operation: Operation, barrier: MBarrier, nbytes: int) -> None:
        """An operation reports bytes, before their effect on the barrier."""

    def completed(self, barrier: MBarrier) -> None:
        """The barrier's phase `barrier.phases - 1` is complete."""

    def passed(self, warp: Warp, at: Statement, barrier: MBarrier, parity: int) -> None:
        """A wait for an mbarrier's phase of this parity has passed."""

    def entered(self, warp: Warp, at: Statement, barrier: NamedBarrier, threads: int, sync: bool) -> None:
        """bar.sync (`sync`) or bar.arrive, once for each warp and visit, before its effect."""

    def left(self, warp: Warp, at: Statement, barrier: NamedBarrier) -> None:
        """The warp goes on behind its bar.sync."""

    def cluster_arrived(self, warp: Warp, at: Statement, barrier: ClusterBarrier) -> None:
        """barrier.cluster.arrive, before its effect."""

    def cluster_completed(self, barrier: ClusterBarrier) -> None:
        """The generation `barrier.generation - 1` is over."""

    def cluster_passed(self, warp: Warp, at: Statement, barrier: ClusterBarrier) -> None:
        """barrier.cluster.wait has passed."""

    def blocked(self, warp: Warp, at: Statement) -> None:
        """The warp has to wait at this statement (told once for each time it goes to sleep); `warp.waiting` says for
        what."""

    # ---- ends
    def exited(self, warp: Warp) -> None:
        """All lanes have returned."""

    def finished(self, cta: Cta) -> None:
        """All warps of the CTA's cluster have exited and no operation of them is under way."""

    def ended(self, machine: Machine) -> None:
        """After the last CTA."""
