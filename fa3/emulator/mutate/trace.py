"""What each statement of a kernel has to do with: its edges, as an unchanged run shows them.

An edge is what two parties share: a ring ("k": its barriers, its stages, the copies that fill them and the GEMMs that
read them), an event of named barriers ("turn", "rows"), a buffer ("o"), the CTA's registers ("registers": the
setmaxnreg of all roles), what an earlier kernel has written ("grid"), a sum in global memory or its counters
("dq_accum"), or a batch of WGMMA ("batch 70", by the index of its fence) with the statements that fence it,
commit it and wait for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fa3.emulator.check.names import Names
from fa3.emulator.observe import Addresses, Observer

if TYPE_CHECKING:
    from fa3.emulator.blocks import Step
    from fa3.emulator.machine import Machine
    from fa3.emulator.operations import Group, Operation, Words
    from fa3.emulator.sync import MBarrier, NamedBarrier
    from fa3.emulator.warp import Warp
    from fa3.sass.ptx_code import Statement


class Trace(Observer):
    """`edges`: statement (index) -> names of edges; `reached`: the statements that were executed."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.edges: defaultdict[int, set[str]] = defaultdict(set)
        self.reached: set[int] = set()
        self._index: dict[int, int] = {}
        self._watched: list[tuple[int, int, set[str]]] = []
        """(first address, address behind the last, edges) of tensors in global memory."""
        self._fence: dict[Warp, int] = {}
        self._met: defaultdict[Warp, list[int]] = defaultdict(list)
        """The last named barriers, until something is touched behind them."""
        self._accessed: dict[Warp, int] = {}
        """The last access to shared memory, which bar.warp.sync ends for all lanes."""

    def started(self, machine: Machine) -> None:
        self._index = {id(at): index for index, at in enumerate(machine.program.statements)}
        self._watched = []
        for allocation in machine.launch.allocations:
            name, edges = allocation.name, set()
            if name in self.names.sums | self.names.counters:
                edges.add("sums")
            if name in self.names.earlier:
                edges.add("grid")
            self._watched.append((allocation.address, allocation.address + allocation.nbytes, edges))

    def stepping(self, warp: Warp, step: Step, mask: Any) -> None:
        if step.first not in self.reached:
            self.reached.update(range(step.first, step.first + len(step.statements)))
        if step.kind == "setmaxnreg":
            self.edges[step.first].add("registers")
        if step.kind == "griddepcontrol":
            self.edges[step.first].add("grid")
        if step.kind == "bar.warp.sync" and warp in self._accessed:
            self.edges[step.first].update(self.edges[self._accessed[warp]])

    def _touch(self, at: Statement, *edges: str) -> None:
        self.edges[self._index[id(at)]].update(edge for edge in edges if edge)

    # ---- barriers
    def _ring(self, barrier: MBarrier) -> str:
        plan = self.names.plan(barrier.address)
        return plan.edge if plan else f"mbarrier {barrier.address}"

    def initialised(self, warp: Warp, at: Statement, barrier: MBarrier) -> None:
        self._touch(at, self._ring(barrier))

    def arrived(self, warp: Warp, at: Statement, barrier: MBarrier, count: int, expected: int) -> None:
        self._touch(at, self._ring(barrier))

    def passed(self, warp: Warp, at: Statement, barrier: MBarrier, parity: int) -> None:
        self._touch(at, self._ring(barrier))

    def entered(self, warp: Warp, at: Statement, barrier: NamedBarrier, threads: int, sync: bool) -> None:
        event = self.names.event(barrier.number) or f"named barrier {barrier.number}"
        self._touch(at, event.split(" of ")[0])
        if not event.startswith("turn"):
            self._met[warp].append(self._index[id(at)])
        if event.startswith("rows"):
            self._touch(at, "o")

    def _behind_barrier(self, warp: Warp, edges: set[str]) -> None:
        """A barrier has to do with what its warps touch first behind it."""
        for index in self._met.pop(warp, ()):
            self.edges[index].update(edges)

    # ---- memory
    def _buffers(self, words: Words) -> set[str]:
        """The buffers of the first and the last word; no access touches more than two."""
        if not len(words):
            return set()
        found = {self.names.buffer(4 * int(word)) for word in (words[0], words[-1])}
        return {self.names.rings.get(name, name) for name in found}

    def shared(self, warp: Warp, at: Statement, addresses: Addresses, nbytes: int, write: bool) -> None:
        if len(addresses):
            edges = self._buffers(np.asarray(addresses) // 4)
            self._touch(at, *edges)
            self._behind_barrier(warp, edges)
            self._accessed[warp] = self._index[id(at)]

    def memory(self, warp: Warp, at: Statement, addresses: Addresses, nbytes: int, write: bool) -> None:
        if len(addresses):
            self._touch(at, *self._tensors(int(addresses[0])))

    def _tensors(self, address: int) -> set[str]:
        """The edges of a place in global memory."""
        return next((edges for first, end, edges in self._watched if first <= address < end), set())

    def fenced(self, warp: Warp, at: Statement) -> None:
        """A fence of WGMMA belongs to the batch that follows it, one of the proxies to the buffer that was accessed
        before, and to the staged output; one of the whole GPU to sums."""
        if at.opcode.startswith("wgmma"):
            self._fence[warp] = self._index[id(at)]
        elif at.opcode.startswith("fence.proxy"):
            self._touch(at, "o", *self.edges.get(self._accessed.get(warp, -1), ()))
        elif at.opcode.startswith("fence.acq_rel.gpu"):
            self._touch(at, "sums")

    # ---- asynchronous operations
    def issued(self, warp: Warp, operation: Operation) -> None:
        edges = self._buffers(operation.reads) | self._buffers(operation.writes)
        edges |= self._tensors(operation.global_range[0])
        self._behind_barrier(warp, edges)
        self._touch(operation.at, *edges)
        if operation.kind == "wgmma":
            batch = self._fence.get(warp, -1)
            self._touch(operation.at, f"batch {batch}")
            self.edges[batch].update((*edges, f"batch {batch}"))

    def committed(self, warp: Warp, at: Statement, group: Group) -> None:
        self._joined(at, [group])

    def joined(self, warp: Warp, at: Statement, groups: Sequence[Group], read: bool) -> None:
        self._joined(at, groups)

    def _joined(self, at: Statement, groups: Sequence[Group]) -> None:
        for group in groups:
            for operation in group.operations:
                self._touch(at, *self.edges[self._index[id(operation.at)]])
