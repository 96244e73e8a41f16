"""Listens to the machine and notes what every warp does, in a form that does not depend on the order of the run."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fa3.emulator.faults import Unsupported
from fa3.emulator.observe import Addresses, Observer
from fa3.emulator.timing import events as e
from fa3.emulator.timing.ops import lower, read_counts
from fa3.sass.ptx_code import Statement

if TYPE_CHECKING:
    from fa3.emulator.blocks import Step
    from fa3.emulator.cta import Cta
    from fa3.emulator.machine import Machine
    from fa3.emulator.operations import Group, Operation
    from fa3.emulator.sync import MBarrier, NamedBarrier
    from fa3.emulator.warp import Warp

PREDICATED = 8
"""A branch over at most so many statements becomes predicates, as those around an elected lane's do."""
WAVEFRONT = 128
"""Bytes that pass between an SM's shared memory, or its L1, and its lanes in a cycle."""
_ELSEWHERE = ("bar", "barrier", "mbarrier", "wgmma", "cp", "fence", "membar", "ld", "st", "atom", "red")
_FENCES = ("setmaxnreg", "griddepcontrol")
_MATRIX = ("ldmatrix", "stmatrix")
_SHAPE = re.compile(r"m64n(\d+)k(\d+)\.\w+\.(\w+)")
_BITS = {"bf16": 16, "f16": 16, "e4m3": 8, "e5m2": 8, "tf32": 32}


class Recorder(Observer):
    """Records all CTAs of a run, or those in `only` by their number in the grid; then see `traces`.

    One recorder is for one run at a time. Policies do not matter; "early" is the quickest.
    """

    def __init__(self, only: Sequence[int] | None = None) -> None:
        self.only = None if only is None else frozenset(only)
        self.traces: dict[int, e.Trace] = {}
        """By the number of the CTA; complete when the CTA has finished."""
        self._begin("", (), {})

    def _begin(self, kernel: str, statements: Sequence[Statement], labels: Mapping[str, int]) -> None:
        self._kernel, self._statements, self._labels = kernel, statements, labels
        self._readers: Counter[str] = read_counts(statements)
        self._code: dict[int, e.Code] = {}
        """By the index of a step's first statement."""
        self._lists: defaultdict[int, defaultdict[int, list[e.Event]]] = defaultdict(lambda: defaultdict(list))
        self._counts: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._behind: dict[tuple[int, int], int] = {}
        """Of each warp, the index of the statement behind its last step."""
        self._atomic = False
        """Whether an atomic instruction is being executed that has not been noted yet."""

    # ---- runs and CTAs
    def started(self, machine: Machine) -> None:
        if prod(machine.launch.cluster) > 1:
            raise Unsupported(f"there is no timeline of clusters; this launch has clusters of {machine.launch.cluster}")
        self.traces = {}
        program = machine.program
        self._begin(machine.launch.kernel, program.statements, program.labels)

    def finished(self, cta: Cta) -> None:
        if self._watches(cta.number):
            lists = self._lists.pop(cta.number, defaultdict(list))
            warps = [lists[warp.index] for warp in cta.warps]
            self.traces[cta.number] = e.Trace(warps, self._counts.pop(cta.number, {}), self._kernel, cta.number)

    def _watches(self, number: int) -> bool:
        return self.only is None or number in self.only

    def _note(self, warp: Warp, event: e.Event) -> None:
        if self._watches(warp.cta.number):
            self._lists[warp.cta.number][warp.index].append(event)

    # ---- instructions
    def stepping(self, warp: Warp, step: Step, mask: NDArray[np.bool_] | None) -> None:
        if not self._watches(warp.cta.number):
            return
        self._note_branch(warp, step)
        name = step.kind.split(".", 1)[0]
        self._atomic = name in ("atom", "red")
        if name in _FENCES:
            self._note(warp, e.Fence(step.kind, step.statements[0].source))
        elif name not in _ELSEWHERE and name not in _MATRIX:
            code = self._code.get(step.first)
            if code is None:
                code = self._code[step.first] = e.Code(lower(step.statements, self._readers))
            self._note(warp, e.Math(code))

    def _note_branch(self, warp: Warp, step: Step) -> None:
        """The warp may have come here by a branch, which then stands behind its last step."""
        who = (warp.cta.number, warp.index)
        behind = self._behind.get(who, step.first)
        self._behind[who] = step.first + len(step.statements)
        if behind != step.first:
            branch = self._statements[behind]
            if branch.name == "bra" and not 0 < self._labels[branch.target] - behind <= PREDICATED:
                self._note(warp, e.Branch(branch.source))

    # ---- memory, by threads
    def shared(self, warp: Warp, at: Statement, addresses: Addresses, nbytes: int, write: bool) -> None:
        passes = _bank_passes(addresses, nbytes)
        self._note(warp, e.Access("shared", passes, not write, at.source))

    def memory(self, warp: Warp, at: Statement, addresses: Addresses, nbytes: int, write: bool) -> None:
        if at.name not in ("atom", "red"):
            passes = len(np.unique(np.asarray(addresses) // WAVEFRONT))
            self._note(warp, e.Access("global", passes, not write, at.source))
        elif self._atomic:
            self._atomic = False  # told for every lane (of vectors for all at once), and as a read and as a write
            passes = len(np.unique(np.asarray(addresses) // WAVEFRONT))
            self._note(warp, e.Access("atomic", passes, at.name == "atom", at.source))

    def fenced(self, warp: Warp, at: Statement) -> None:
        if not at.opcode.startswith("wgmma"):
            self._note(warp, e.Fence(at.opcode, at.source))

    # ---- asynchronous operations
    def issued(self, warp: Warp, operation: Operation) -> None:
        at = operation.at
        if operation.kind == "wgmma":
            self._note(warp, _mma(at))
        elif operation.barrier is not None:
            self._note(warp, e.Load(operation.barrier.address, operation.nbytes, at.source))
        else:
            self._note(warp, e.Store(operation.nbytes, at.source, operation.kind.endswith("reduce")))

    def committed(self, warp: Warp, at: Statement, group: Group) -> None:
        self._note(warp, e.Commit(group.kind, at.source))

    def joined(self, warp: Warp, at: Statement, groups: Sequence[Group], read: bool) -> None:
        self._note(warp, e.WaitGroup("wgmma" if at.name == "wgmma" else "bulk", int(at.operands[0]), read, at.source))

    # ---- barriers
    def initialised(self, warp: Warp, at: Statement, barrier: MBarrier) -> None:
        self._counts[warp.cta.number][barrier.address] = barrier.count

    def arrived(self, warp: Warp, at: Statement, barrier: MBarrier, count: int, expected: int) -> None:
        self._note(warp, e.Arrive(barrier.address, count, expected, at.source))

    def passed(self, warp: Warp, at: Statement, barrier: MBarrier, parity: int) -> None:
        self._note(warp, e.Wait(barrier.address, barrier.phases, at.source))

    def entered(self, warp: Warp, at: Statement, barrier: NamedBarrier, threads: int, sync: bool) -> None:
        self._note(warp, e.Join(barrier.number, threads, sync, at.source))


def _mma(at: Statement) -> e.Mma:
    found = _SHAPE.search(at.opcode)
    if not found:
        raise ValueError(f"cannot read the shape of {at.opcode}")
    n, k, kind = found.groups()
    return e.Mma(int(n), int(k), _BITS[kind], at.operands[1].startswith("{"), at.source)


def _bank_passes(addresses: Addresses, nbytes: int) -> int:
    """Passes through shared memory's 32 banks of 4 bytes: the most different words that one bank is asked for.

    Accesses of 8 and 16 bytes are served a half and a quarter of the warp at a time.
    """
    words = np.unique(np.asarray(addresses)[:, None] // 4 + np.arange(max(1, nbytes // 4)))
    return int(np.bincount(words % 32).max()) if words.size else 0
