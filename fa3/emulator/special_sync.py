"""Barriers, fences and register budgets.

PTX ISA, sections "mbarrier", "bar, barrier", "barrier.cluster", "membar / fence" and "setmaxnreg".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fa3.emulator.faults import Fault
from fa3.emulator.operands import Operands, integer, unsupported
from fa3.emulator.special_lanes import need_whole_warp, over_lanes, put
from fa3.emulator.sync import ClusterBarrierWait, MBarrier, MBarrierWait, NamedBarrierWait
from fa3.emulator.warp import Mask, lanes_of
from fa3.sass.ptx_code import Statement

if TYPE_CHECKING:
    from fa3.emulator.blocks import Run
    from fa3.emulator.warp import Warp


def uniform(value: Any, mask: Mask | None, at: Statement) -> int:
    """The value that all lanes here have in common. Fault if they differ."""
    array = np.asarray(value)
    if array.ndim == 0:
        return int(array)
    lanes = array if mask is None else array[mask]
    if (lanes != lanes[0]).any():
        raise Fault("divergence", f"`{at.opcode}` needs one operand for the warp, but its lanes have several")
    return int(lanes[0])


def lanes_here(mask: Mask | None) -> Any:
    return range(32) if mask is None else np.flatnonzero(mask)


# ------------------------------------------------------------------------------------------------ mbarrier
def _init(at: Statement, operands: Operands) -> Run:
    address, count = operands.address(at.operands[0], at), operands.source(at.operands[1], "u4", at)

    def run(warp: Warp, mask: Mask | None) -> None:
        addresses, counts = over_lanes(address(warp)), over_lanes(count(warp))
        for lane in lanes_here(mask):
            place, arrivals = int(addresses[lane]), int(counts[lane])
            if place % 8 or not 1 <= arrivals < 1 << 20:
                raise Fault(
                    "mbarrier", f"an mbarrier at {place} for {arrivals} arrivals; 8-byte aligned, 1 to 2^20 - 1"
                )
            warp.cta.shared.require(place, place + 8, "mbarrier")
            barrier = MBarrier(warp.cta, place, arrivals)
            warp.cta.mbarriers[place] = barrier
            for observer in warp.cta.machine.observers:
                observer.initialised(warp, at, barrier)

    return run


def _arrive(at: Statement, operands: Operands) -> Run:
    mods = at.opcode.split(".")
    expects, anywhere = "expect_tx" in mods, "shared::cluster" in mods
    if {"noComplete", "noinc"} & set(mods):
        raise unsupported(at)
    address = operands.address(at.operands[1], at)
    amount = operands.source(at.operands[2], "u4", at) if len(at.operands) > 2 else None
    token = operands.register(at.operands[0])
    if token and anywhere:
        raise unsupported(at, "an arrival at any barrier of the cluster returns no state")

    def run(warp: Warp, mask: Mask | None) -> None:
        addresses = over_lanes(address(warp))
        amounts = over_lanes(amount(warp)) if amount else None
        for lane in lanes_here(mask):
            given = int(amounts[lane]) if amounts is not None else 1
            count, expected = (1, given) if expects else (given, 0)
            cta, place = warp.cta.reach(int(addresses[lane])) if anywhere else (warp.cta, int(addresses[lane]))
            barrier = cta.mbarrier(place)
            if token:
                put(warp.views["u8"][token.row], np.uint64(barrier.phases), mask)
            for observer in warp.cta.machine.observers:
                observer.arrived(warp, at, barrier, count, expected)
            barrier.arrive(count, expected)

    return run


def _try_wait(at: Statement, operands: Operands) -> Run:
    """It suspends until the phase is complete. The time limit is passed over: the loop around it tries again."""
    mods = at.opcode.split(".")
    if "parity" not in mods or "relaxed" in mods:
        raise unsupported(at, "only waits by parity that acquire are emulated")
    result = operands.need_register(at.operands[0], at).row
    address, phase = operands.address(at.operands[1], at), operands.source(at.operands[2], "u4", at)

    def run(warp: Warp, mask: Mask | None) -> bool:
        barrier = warp.cta.mbarrier(uniform(address(warp), mask, at))
        parity = uniform(phase(warp), mask, at) & 1
        if not barrier.has_passed(parity):
            warp.waiting = MBarrierWait(barrier, parity)
            barrier.waiters.append(warp)
            return True
        put(warp.views["p"][result], True, mask)
        for observer in warp.cta.machine.observers:
            observer.passed(warp, at, barrier, parity)
        return False

    return run


# ------------------------------------------------------------------------------------------------ bar
def _bar(at: Statement, operands: Operands) -> Run:
    sync = at.opcode.split(".")[1] == "sync"
    number = operands.source(at.operands[0], "u4", at)
    count = operands.source(at.operands[1], "u4", at) if len(at.operands) > 1 else None

    def run(warp: Warp, mask: Mask | None) -> bool:
        need_whole_warp(mask, at)
        which = uniform(number(warp), mask, at)
        if which >= len(warp.cta.named):
            raise Fault("named barrier", f"barrier {which}; a CTA has barriers 0 to 15")
        barrier = warp.cta.named[which]
        if warp.inside is None:
            threads = uniform(count(warp), mask, at) if count else warp.cta.threads
            for observer in warp.cta.machine.observers:
                observer.entered(warp, at, barrier, threads, sync)
            warp.inside = barrier.generation if sync else None
            barrier.arrive(threads)
        if not sync:
            return False
        if warp.inside == barrier.generation:
            warp.waiting = NamedBarrierWait(barrier, barrier.generation)
            barrier.waiters.append(warp)
            return True
        warp.inside = None
        for observer in warp.cta.machine.observers:
            observer.left(warp, at, barrier)
        return False

    return run


# ------------------------------------------------------------------------------------------------ barrier.cluster
def _cluster_arrive(at: Statement, operands: Operands) -> Run:
    aligned = "aligned" in at.opcode.split(".")

    def run(warp: Warp, mask: Mask | None) -> None:
        if aligned:
            need_whole_warp(mask, at)
        barrier = warp.cta.cluster.barrier
        for observer in warp.cta.machine.observers:
            observer.cluster_arrived(warp, at, barrier)
        barrier.arrive(warp, lanes_of(mask))

    return run


def _cluster_wait(at: Statement, operands: Operands) -> Run:
    aligned = "aligned" in at.opcode.split(".")

    def run(warp: Warp, mask: Mask | None) -> bool:
        if aligned:
            need_whole_warp(mask, at)
        barrier, lanes = warp.cta.cluster.barrier, lanes_of(mask)
        if not barrier.has_passed(warp, lanes):
            warp.waiting = ClusterBarrierWait(barrier)
            barrier.waiters.append(warp)
            return True
        barrier.leave(warp, lanes)
        for observer in warp.cta.machine.observers:
            observer.cluster_passed(warp, at, barrier)
        return False

    return run


# ------------------------------------------------------------------------------------------------ others
def _fence(at: Statement, operands: Operands) -> Run:
    def run(warp: Warp, mask: Mask | None) -> None:
        for observer in warp.cta.machine.observers:
            observer.fenced(warp, at)

    return run


def _setmaxnreg(at: Statement, operands: Operands) -> Run:
    registers = integer(at.operands[0])
    if registers is None:
        raise unsupported(at)

    def run(warp: Warp, mask: Mask | None) -> None:
        need_whole_warp(mask, at)
        warp.setmaxnreg = registers

    return run


def _trap(at: Statement, operands: Operands) -> Run:
    def run(warp: Warp, mask: Mask | None) -> None:
        raise Fault("trap", "the kernel stops itself, as it does where an assertion fails")

    return run


def _nothing(at: Statement, operands: Operands) -> Run:
    """Hints, and what has no meaning for one grid."""
    return lambda warp, mask: None


TABLE: dict[str, Callable[[Statement, Operands], Run]] = {
    "mbarrier.init": _init, "mbarrier.arrive": _arrive, "mbarrier.try_wait": _try_wait,
    "bar.sync": _bar, "bar.arrive": _bar, "barrier.sync": _bar, "barrier.arrive": _bar, "bar.warp.sync": _nothing,
    "barrier.cluster.arrive": _cluster_arrive, "barrier.cluster.wait": _cluster_wait,
    "fence": _fence, "membar": _fence, "setmaxnreg": _setmaxnreg, "trap": _trap,
    "prefetch": _nothing, "griddepcontrol": _nothing, "nanosleep": _nothing,
}  # fmt: skip
