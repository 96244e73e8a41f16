"""The machine: clusters of CTAs on a few SMs, a queue of warps that can run, and operations that are under way.

It runs one thing at a time, which one is up to the policy. Its memory is the process's own: what a kernel writes to
global memory is in the tensors afterwards.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fa3.emulator import tma, wgmma
from fa3.emulator.blocks import Code
from fa3.emulator.cluster import Cluster, exited
from fa3.emulator.cta import Cta
from fa3.emulator.cuda_abi import CLUSTER
from fa3.emulator.faults import Fault
from fa3.emulator.memory import SHARED_BASE, Global
from fa3.emulator.observe import Observer
from fa3.emulator.operands import DTYPES
from fa3.emulator.operations import NO_WORDS, Group, Operation, Words
from fa3.emulator.policy import make_policy
from fa3.emulator.program import Program
from fa3.emulator.sync import BulkWait
from fa3.emulator.warp import Warp

if TYPE_CHECKING:
    from fa3.emulator.host import Launch
    from fa3.sass.ptx_code import Statement

MAX_STATEMENTS = 200_000_000
"""A run that executes more (per warp) is taken for endless."""
PARAM_ALIGN = 64


class Deadlock(Fault):
    """Nothing can run and nothing is under way, but `warps` have not exited."""

    def __init__(self, warps: list[Warp]) -> None:
        lines = [f"warp {w.index} of CTA {w.cta.number} waits for {w.waiting} at {w.at.source}" for w in warps]
        super().__init__("deadlock", "no warp can go on:\n  " + "\n  ".join(lines))
        self.warps = warps


class Machine:
    """One launch. `resident`: how many CTAs run at the same time, in whole clusters, of which one runs in any case."""

    def __init__(
        self,
        code: Code,
        launch: Launch,
        policy: str = "random",
        seed: int = 0,
        observers: Sequence[Observer] = (),
        resident: int = 4,
    ) -> None:
        self.code, self.program, self.launch = code, code.program, launch
        self.policy = make_policy(policy, seed)
        self.observers = tuple(observers)
        self.resident = resident
        self.memory = Global()
        self.symbols: dict[str, int] = {"__dynamic_shmem__0": SHARED_BASE}
        self.clusters: list[Cluster] = []
        self.explicit_cluster = CLUSTER in launch.attributes or prod(launch.cluster) > 1
        self.runnable: list[Warp] = []
        self.pending: list[Operation | Group] = []
        self.pollers: list[Warp] = []
        """Warps that look at global memory until somebody changes it."""
        self.executed = 0
        """Statements, summed over the warps."""
        self.numbers: dict[str, Any] = {}
        self._issues: dict[Operation, wgmma.Issue] = {}
        self._words: dict[Hashable, Words] = {}
        self._descriptors: dict[int, tma.Descriptor] = {}
        self._params: dict[Hashable, Any] = {}
        self._buffers: list[Any] = []
        self._map_memory()

    @property
    def ctas(self) -> list[Cta]:
        """Those that were started, in that order."""
        return [cta for cluster in self.clusters for cta in cluster.ctas]

    # ---- memory and parameters
    def _map_memory(self) -> None:
        for allocation in self.launch.allocations:
            self.memory.add(allocation.name, allocation.address, allocation.nbytes, allocation.writable)
        for param, value in zip(self.program.params, self.launch.params, strict=True):
            buffer = ctypes.create_string_buffer(len(value) + PARAM_ALIGN)
            address = -(-ctypes.addressof(buffer) // PARAM_ALIGN) * PARAM_ALIGN
            ctypes.memmove(address, value, len(value))
            self._buffers.append(buffer)
            self.symbols[param.name] = address
            self.memory.add(f"parameter {param.name.rsplit('_', 1)[-1]}", address, len(value), writable=False)

    def param(self, name: str, offset: int, size: int, view: str, signed: bool) -> Any:
        """A kernel parameter, or a part of one, extended with zeros or its sign to the register's width."""
        key = (name, offset, size, view, signed)
        if key not in self._params:
            raw = ctypes.string_at(self.symbols[name] + offset, size)
            dtype = np.dtype(DTYPES[view])
            value = int.from_bytes(raw, "little", signed=signed) % (1 << 8 * dtype.itemsize)
            self._params[key] = dtype.type(value)
        return self._params[key]

    def descriptor(self, address: int) -> tma.Descriptor:
        """The TMA descriptor at an address in parameter or global memory."""
        if address not in self._descriptors:
            base, window = self.memory.window(address, address + 128, False)
            self._descriptors[address] = tma.Descriptor.decode(bytes(window[address - base : address - base + 128]))
        return self._descriptors[address]

    def known_words(self, key: Hashable) -> Words | None:
        return self._words.get(key)

    def words(self, key: Hashable, addresses: NDArray[np.int64]) -> Words:
        """The unique 4-byte words of shared addresses; computed once for each key. Empty if nobody watches."""
        if not self.observers:
            return NO_WORDS
        if key not in self._words:
            self._words[key] = np.unique(addresses // 4)
        return self._words[key]

    # ---- operations
    def issue(self, operation: Operation) -> None:
        """A copy starts. When it takes effect is up to the policy."""
        operation.warp.cta.under_way += 1
        for observer in self.observers:
            observer.issued(operation.warp, operation)
        if self.policy.immediate:
            while not operation.done:
                self._advance(operation)
        else:
            self.pending.append(operation)

    def issue_mma(self, operation: Operation, issue: wgmma.Issue) -> None:
        """A WGMMA starts. It takes effect with its group, or at once."""
        for observer in self.observers:
            observer.issued(operation.warp, operation)
        self._issues[operation] = issue
        operation.warp.open["wgmma"].append(operation)
        if self.policy.immediate:
            self._execute_mma(operation.warp, [operation])

    def commit(self, warp: Warp, at: Statement, kind: Any) -> None:
        """Closes a group over everything that the warp started since the last one."""
        group = Group(kind, warp, warp.committed[kind], warp.open[kind])
        warp.committed[kind] += 1
        warp.open[kind] = []
        warp.groups[kind].append(group)
        for observer in self.observers:
            observer.committed(warp, at, group)
        if kind == "wgmma":
            if self.policy.mma_at_once():
                for older in warp.groups["wgmma"]:
                    self.finish_mma(older)
            elif self.policy.mma_between():
                self.pending.append(group)

    def finish_mma(self, group: Group) -> None:
        """A group of WGMMA takes effect, if it has not yet."""
        waiting = [operation for operation in group.operations if not operation.done]
        if waiting:
            self._execute_mma(group.warp, waiting)

    def _execute_mma(self, warp: Warp, operations: list[Operation]) -> None:
        issues = [self._issues.pop(operation) for operation in operations]
        try:
            wgmma.execute(issues, warp.cta.shared, warp.registers, warp.index % 4)
        except Fault as fault:
            raise _located(fault, warp, _first_bad(operations, issues).at) from None
        for operation in operations:
            operation.effects.clear()
            for observer in self.observers:
                observer.executed(operation)

    def _advance(self, operation: Operation) -> None:
        """The next effect of a copy."""
        try:
            if operation.target is not operation.warp.cta and operation.target.running == 0:
                raise exited(operation.target)
            operation.advance()
        except Fault as fault:
            raise _located(fault, operation.warp, operation.at) from None
        cta = operation.warp.cta
        if isinstance(operation.warp.waiting, BulkWait):
            self.wake([operation.warp])
        if operation.done:
            for observer in self.observers:
                observer.executed(operation)
            cta.under_way -= 1
            cta.try_finish()

    # ---- the loop
    def wake(self, waiters: list[Warp]) -> None:
        """These warps may look again whether they can go on."""
        for warp in waiters:
            if warp.waiting is not None:
                warp.waiting = None
                self.runnable.append(warp)
        waiters.clear()

    def run(self) -> Machine:
        """Until every CTA of the grid is finished. Fault or Deadlock if that cannot be."""
        for observer in self.observers:
            observer.started(self)
        with np.errstate(all="ignore"):
            self._start_clusters()
            while self.runnable or self.pending:
                if self.pending and (not self.runnable or self.policy.operation_first()):
                    self._run_operation()
                else:
                    self._run_warp()
        blocked = [warp for cta in self.ctas for warp in cta.warps if not warp.exited]
        if blocked:
            raise Deadlock(blocked)
        for observer in self.observers:
            observer.ended(self)
        return self

    def _run_operation(self) -> None:
        choice = self.pending.pop(self.policy.pick_operation(len(self.pending)))
        if isinstance(choice, Group):
            for group in choice.warp.groups["wgmma"]:
                if group.number <= choice.number:
                    self.finish_mma(group)
            return
        self._advance(choice)
        if not choice.done:
            self.pending.append(choice)

    def _run_warp(self) -> None:
        warp = self.runnable.pop(self.policy.pick_warp(self.runnable))
        before = warp.executed
        try:
            warp.run(self.policy.blocks())
        except Fault as fault:
            raise _located(fault, warp, warp.at) from None
        self.executed += warp.executed - before
        if warp.executed > MAX_STATEMENTS:
            raise _located(Fault("endless", f"more than {MAX_STATEMENTS} instructions"), warp, warp.at)
        if warp.waiting is None and not warp.exited:
            self.runnable.append(warp)

    def _start_clusters(self) -> None:
        size = prod(self.launch.cluster)
        live = sum(1 for cluster in self.clusters if not cluster.done)
        while len(self.clusters) * size < prod(self.launch.grid) and (not live or (live + 1) * size <= self.resident):
            cluster = Cluster(self, len(self.clusters))
            live += 1
            self.clusters.append(cluster)
            self.runnable += [warp for cta in cluster.ctas for warp in cta.warps]

    def cta_finished(self, cta: Cta) -> None:
        """The last CTA of a cluster ends all of them, for those who watch: until then others may reach into it."""
        if cta.cluster.done:
            for ended in cta.cluster.ctas:
                for observer in self.observers:
                    observer.finished(ended)
            self._start_clusters()


def _located(fault: Fault, warp: Warp, at: Statement) -> Fault:
    """The fault with who did it and where, which the innermost level does not know."""
    if fault.warp is None:
        fault.warp, fault.at = warp, fault.at or at
    return fault


def _first_bad(operations: list[Operation], issues: list[wgmma.Issue]) -> Operation:
    """The first of a group of WGMMA that is a fault by itself. The run is over, so that the registers do not matter."""
    for operation, issue in zip(operations, issues, strict=True):
        try:
            warp = operation.warp
            wgmma.execute([issue], warp.cta.shared, warp.registers, warp.index % 4)
        except Fault:
            return operation
    return operations[0]


def run(
    program: Program | Code,
    launch: Launch,
    *,
    policy: str = "random",
    seed: int = 0,
    observers: Sequence[Observer] = (),
    resident: int = 4,
) -> Machine:
    """Executes a launch and returns the machine as it ended.

    Raises Fault (with `.warp` and `.at`) where the program does what has no meaning, Deadlock where it cannot go on,
    and Unsupported for instructions that the emulator does not know.
    """
    code = program if isinstance(program, Code) else Code(program)
    return Machine(code, launch, policy, seed, observers, resident).run()
