"""Instructions that start something, and those that wait for it: TMA, bulk copies, WGMMA.

PTX ISA, sections "cp.async.bulk", "cp.async.bulk.tensor", "cp.reduce.async.bulk", "st.async" and "Asynchronous
Warpgroup Level Matrix Multiply-Accumulate". What they do to memory is in `tma.py`, `bulk.py` and `wgmma.py`; here they
are decoded and handed to the machine, which decides when they take effect.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fa3.emulator import bulk, tma
from fa3.emulator.faults import Fault
from fa3.emulator.operands import Operands, Source, integer, parts, unsupported
from fa3.emulator.operations import Kind, Operation, Words
from fa3.emulator.special_lanes import active, by_cta, need_whole_warp, stored_values
from fa3.emulator.special_sync import lanes_here, uniform
from fa3.emulator.sync import BulkWait, MBarrier
from fa3.emulator.warp import Mask
from fa3.emulator.wgmma import Issue, Mma, operand_addresses
from fa3.sass.ptx_code import Statement

if TYPE_CHECKING:
    from fa3.emulator.blocks import Run
    from fa3.emulator.cta import Cta
    from fa3.emulator.warp import Warp

_REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
_TENSOR = re.compile(r"\[\s*(\S+?)\s*,\s*\{([^}]*)\}\s*\]$")


def _lane(source: Source, warp: Warp, lane: int) -> int:
    value = np.asarray(source(warp))
    return int(value if value.ndim == 0 else value[lane])


# ------------------------------------------------------------------------------------------------ destinations
class _Destination:
    """Where a copy to shared memory goes, and the barrier that it reports to: `[dst]` and `[mbar]`, of one CTA; with
    `.multicast::cluster` the same places in each CTA whose bit is set in the mask behind them."""

    def __init__(self, at: Statement, operands: Operands, barrier: int) -> None:
        """`barrier` is the number of the operand `[mbar]`."""
        mods = at.opcode.split(".")
        self.at, self.anywhere = at, "shared::cluster" in mods
        self.target, self.where = operands.address(at.operands[0], at), operands.address(at.operands[barrier], at)
        self.mask = operands.source(at.operands[barrier + 1], "u2", at) if "multicast::cluster" in mods else None

    def read(self, warp: Warp, lane: int) -> list[tuple[Cta, int, MBarrier]]:
        """(CTA, address there, barrier there) of every copy."""
        target, where = _lane(self.target, warp, lane), _lane(self.where, warp, lane)
        if self.mask is not None:
            ranks = _ranks(_lane(self.mask, warp, lane))
            mapped = [warp.cta.cluster.mapped(warp.cta, [target, where], rank).tolist() for rank in ranks]
            return [self._reach(warp, *places) for places in mapped]
        if not self.anywhere:
            return [(warp.cta, target, warp.cta.mbarrier(where))]
        return [self._reach(warp, target, where)]

    def _reach(self, warp: Warp, target: int, where: int) -> tuple[Cta, int, MBarrier]:
        cta, address = warp.cta.reach(target)
        owner, place = warp.cta.reach(where)
        if owner is not cta:
            raise Fault(
                "cluster",
                f"`{self.at.opcode}` writes in CTA rank {cta.rank} and reports to a barrier of CTA rank {owner.rank}; "
                f"both must be in one CTA",
            )
        return cta, address, cta.mbarrier(place)


def _ranks(mask: int) -> list[int]:
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]


# ------------------------------------------------------------------------------------------------ TMA
class _TensorOperand:
    """`[descriptor, {c0, c1, ...}]`."""

    def __init__(self, text: str, at: Statement, operands: Operands) -> None:
        found = _TENSOR.match(text)
        if not found:
            raise unsupported(at)
        self.descriptor = operands.source(found[1], "u8", at)
        self.coordinates = [operands.source(name.strip(), "i4", at) for name in found[2].split(",")]

    def read(self, warp: Warp, lane: int) -> tuple[tma.Descriptor, tuple[int, ...]]:
        descriptor = warp.cta.machine.descriptor(_lane(self.descriptor, warp, lane))
        coordinates = tuple(_lane(source, warp, lane) for source in self.coordinates)
        if len(coordinates) != len(descriptor.dims):
            raise Fault("tma", f"{len(coordinates)} coordinates for a descriptor of {len(descriptor.dims)} dimensions")
        return descriptor, coordinates


def _tensor(at: Statement, operands: Operands) -> Run:
    mods = at.opcode.split(".")
    if "im2col" in mods:
        raise unsupported(at)
    spaces = [mod for mod in mods if mod.split("::")[0] in ("shared", "global")]
    return _tensor_load(at, operands) if spaces[0].startswith("shared") else _tensor_store(at, operands, mods)


def _tensor_load(at: Statement, operands: Operands) -> Run:
    tensor, destination = _TensorOperand(at.operands[1], at, operands), _Destination(at, operands, 2)

    def run(warp: Warp, mask: Mask | None) -> None:
        for lane in lanes_here(mask):
            descriptor, coordinates = tensor.read(warp, lane)
            for target, address, barrier in destination.read(warp, lane):
                _start_tensor_load(warp, at, descriptor, coordinates, target, address, barrier)

    return run


def _start_tensor_load(
    warp: Warp,
    at: Statement,
    d: tma.Descriptor,
    coordinates: tuple[int, ...],
    target: Cta,
    address: int,
    barrier: MBarrier,
) -> None:
    machine = warp.cta.machine

    def take_effect() -> None:
        tma.to_shared(target.shared, d, address, tma.load_box(machine.memory, d, coordinates))
        _report_bytes(operation, barrier)

    operation = Operation("tma.load", warp, at, [take_effect], barrier=barrier, nbytes=d.bytes, target=target)
    operation.writes = tma.shared_words(d, address)
    operation.global_range = tma.global_range(d, coordinates)
    machine.issue(operation)


def _report_bytes(operation: Operation, barrier: MBarrier) -> None:
    for observer in operation.warp.cta.machine.observers:
        observer.transferred(operation, barrier, operation.nbytes)
    barrier.transfer(operation.nbytes)


def _tensor_store(at: Statement, operands: Operands, mods: list[str]) -> Run:
    """Stores and reductions. They sit on the warp's uniform datapath: a converged warp starts one, however many of its
    lanes execute the instruction."""
    reduction = next((mod for mod in mods if mod in _REDUCTIONS), None) if mods[1] == "reduce" else None
    kind: Kind = "tma.reduce" if reduction else "tma.store"
    tensor, source = _TensorOperand(at.operands[0], at, operands), operands.address(at.operands[1], at)

    def run(warp: Warp, mask: Mask | None) -> None:
        machine, shared = warp.cta.machine, warp.cta.shared
        for operand in (source, tensor.descriptor, *tensor.coordinates):
            uniform(operand(warp), mask, at)
        lane = int(lanes_here(mask)[0])
        descriptor, coordinates = tensor.read(warp, lane)
        address = _lane(source, warp, lane)
        box: list[Any] = []
        effects: list[Callable[[], None]] = [
            lambda: box.append(tma.from_shared(shared, descriptor, address)),
            lambda: tma.store_box(machine.memory, descriptor, coordinates, box.pop(), reduction),
        ]
        operation = Operation(kind, warp, at, effects, nbytes=descriptor.bytes)
        operation.reads = tma.shared_words(descriptor, address)
        operation.global_range = tma.global_range(descriptor, coordinates)
        warp.open["bulk"].append(operation)
        machine.issue(operation)

    return run


# ------------------------------------------------------------------------------------------------ bulk copies
def _bulk(at: Statement, operands: Operands) -> Run:
    """Contiguous bytes. Every active lane starts its own."""
    mods = at.opcode.split(".")
    spaces = [mod for mod in mods if mod.split("::")[0] in ("shared", "global")]
    reduction = next((mod for mod in mods if mod in _REDUCTIONS), None) if mods[1] == "reduce" else None
    if spaces[0].startswith("shared"):
        if reduction:
            raise unsupported(at)
        return _bulk_load(at, operands) if spaces[1] == "global" else _bulk_send(at, operands)
    kind: Kind = "bulk.reduce" if reduction else "bulk.store"
    target, source = operands.address(at.operands[0], at), operands.address(at.operands[1], at)
    size, dtype = operands.source(at.operands[2], "u4", at), mods[-1]

    def run(warp: Warp, mask: Mask | None) -> None:
        machine, shared = warp.cta.machine, warp.cta.shared
        for lane in lanes_here(mask):
            to, start, nbytes = (_lane(x, warp, lane) for x in (target, source, size))
            box: list[Any] = []

            def read(start: int = start, nbytes: int = nbytes, box: list[Any] = box) -> None:
                box.append(bulk.from_shared(shared, start, nbytes))

            def write(to: int = to, box: list[Any] = box) -> None:
                bulk.store(machine.memory, to, box.pop(), reduction, dtype)

            operation = Operation(kind, warp, at, [read, write], nbytes=nbytes, global_range=(to, to + nbytes))
            operation.reads = np.arange(start // 4, (start + nbytes) // 4)
            warp.open["bulk"].append(operation)
            machine.issue(operation)

    return run


def _bulk_load(at: Statement, operands: Operands) -> Run:
    source, size = operands.address(at.operands[1], at), operands.source(at.operands[2], "u4", at)
    destination = _Destination(at, operands, 3)

    def run(warp: Warp, mask: Mask | None) -> None:
        for lane in lanes_here(mask):
            start, nbytes = _lane(source, warp, lane), _lane(size, warp, lane)
            for target, to, barrier in destination.read(warp, lane):
                _start_bulk_load(warp, at, target, to, start, nbytes, barrier)

    return run


def _start_bulk_load(
    warp: Warp, at: Statement, target: Cta, to: int, start: int, nbytes: int, barrier: MBarrier
) -> None:
    machine = warp.cta.machine

    def take_effect() -> None:
        bulk.to_shared(target.shared, to, bulk.load(machine.memory, start, nbytes))
        _report_bytes(operation, barrier)

    operation = Operation("bulk.load", warp, at, [take_effect], barrier=barrier, nbytes=nbytes, target=target)
    operation.writes = np.arange(to // 4, (to + nbytes) // 4)
    operation.global_range = (start, start + nbytes)
    machine.issue(operation)


def _bulk_send(at: Statement, operands: Operands) -> Run:
    """From one's own shared memory into that of a CTA of the cluster."""
    source, size = operands.address(at.operands[1], at), operands.source(at.operands[2], "u4", at)
    destination = _Destination(at, operands, 3)

    def run(warp: Warp, mask: Mask | None) -> None:
        for lane in lanes_here(mask):
            start, nbytes = _lane(source, warp, lane), _lane(size, warp, lane)
            for target, to, barrier in destination.read(warp, lane):
                _start_bulk_send(warp, at, target, to, start, nbytes, barrier)

    return run


def _start_bulk_send(
    warp: Warp, at: Statement, target: Cta, to: int, start: int, nbytes: int, barrier: MBarrier
) -> None:
    box: list[Any] = []

    def read() -> None:
        box.append(bulk.from_shared(warp.cta.shared, start, nbytes))

    def write() -> None:
        bulk.to_shared(target.shared, to, box.pop())
        _report_bytes(operation, barrier)

    operation = Operation("bulk.send", warp, at, [read, write], barrier=barrier, nbytes=nbytes, target=target)
    operation.reads = np.arange(start // 4, (start + nbytes) // 4)
    operation.writes = np.arange(to // 4, (to + nbytes) // 4)
    warp.cta.machine.issue(operation)


# ------------------------------------------------------------------------------------------------ st.async
def _store_async(at: Statement, operands: Operands) -> Run:
    """What the lanes store into one CTA, and report to one barrier, is one operation."""
    mods = at.opcode.split(".")
    if "shared::cluster" not in mods or "mbarrier::complete_tx::bytes" not in mods or mods[-1][1:] not in ("32", "64"):
        raise unsupported(at)
    address, where = operands.address(at.operands[0], at), operands.address(at.operands[2], at)
    stored = stored_values(at, int(mods[-1][1:]) // 8, operands)

    def run(warp: Warp, mask: Mask | None) -> None:
        data, barriers = stored(warp, mask), active(where(warp), mask).astype(np.int64)
        for target, lanes, places in by_cta(warp, active(address(warp), mask)):
            for name in np.unique(barriers[lanes]):
                owner, barrier = warp.cta.reach(int(name))
                if owner is not target:
                    raise Fault("cluster", f"`{at.opcode}` writes in one CTA and reports to a barrier of another")
                chosen = barriers[lanes] == name
                _start_store_async(warp, at, target, places[chosen], data[lanes][chosen], target.mbarrier(barrier))

    return run


def _start_store_async(warp: Warp, at: Statement, target: Cta, places: Any, data: Any, barrier: MBarrier) -> None:
    def take_effect() -> None:
        target.shared.scatter(places, data)
        _report_bytes(operation, barrier)

    operation = Operation("st.async", warp, at, [take_effect], barrier=barrier, nbytes=data.size, target=target)
    operation.writes = np.unique(places[:, None] // 4 + np.arange(data.shape[1] // 4))
    warp.cta.machine.issue(operation)


def _commit(at: Statement, operands: Operands) -> Run:
    def run(warp: Warp, mask: Mask | None) -> None:
        warp.cta.machine.commit(warp, at, "bulk")

    return run


def _wait(at: Statement, operands: Operands) -> Run:
    """All but the `n` youngest groups: their sources have been read (`.read`), or they are complete."""
    left, reading = integer(at.operands[0]), "read" in at.opcode.split(".")
    if left is None:
        raise unsupported(at)

    def run(warp: Warp, mask: Mask | None) -> bool:
        groups = warp.groups["bulk"]
        covered = groups[: max(0, len(groups) - left)]
        missing = [g for g in covered if any(len(o.effects) > int(reading) for o in g.operations)]
        if missing:
            warp.waiting = BulkWait(tuple(missing))
            return True
        if reading:
            covered = [group for group in covered if not group.was_read]
            for group in covered:
                group.was_read = True
        else:
            del groups[: len(covered)]
        for observer in warp.cta.machine.observers:
            observer.joined(warp, at, covered, reading)
        return False

    return run


# ------------------------------------------------------------------------------------------------ WGMMA
_MMA = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.f32\.(\w+)\.(\w+)$")
_ITEM_BYTES = {"bf16": 2, "f16": 2, "e4m3": 1, "e5m2": 1}


def _mma(at: Statement, operands: Operands) -> Run:
    form = _MMA.match(at.opcode)
    if not form or form[3] not in _ITEM_BYTES or form[4] not in _ITEM_BYTES:
        raise unsupported(at)
    mma = _decode_mma(at, form, operands)
    a = None if mma.a_registers else operands.source(at.operands[1], "u8", at)
    b, scale = operands.source(at.operands[2], "u8", at), operands.source(at.operands[3], "p", at)
    accumulators = operands.bits(parts(at.operands[0]))
    a_registers = operands.bits(parts(at.operands[1])) if mma.a_registers else 0
    flops = 2 * 64 * mma.n * mma.k

    def run(warp: Warp, mask: Mask | None) -> None:
        need_whole_warp(mask, at)
        issue = Issue(
            mma, None if a is None else uniform(a(warp), None, at), uniform(b(warp), None, at),
            bool(uniform(scale(warp), None, at)),
        )  # fmt: skip
        operation = Operation("wgmma", warp, at, [lambda: None], flops=flops)
        operation.registers_read, operation.registers_written = a_registers, accumulators
        if warp.cta.machine.observers:
            operation.reads = _words(warp, issue)
        warp.cta.machine.issue_mma(operation, issue)

    return run


def _decode_mma(at: Statement, form: re.Match[str], operands: Operands) -> Mma:
    """Operands: accumulators, A, B, scale-d, imm-scale-a, imm-scale-b, and for 16-bit types imm-trans-a (if A is in
    shared memory) and imm-trans-b."""
    in_registers = at.operands[1].startswith("{")
    flags = [integer(text) for text in at.operands[4:]]
    if None in flags or len(flags) < 2:
        raise unsupported(at)
    transposed = [bool(flag) for flag in flags[2:]]
    if in_registers or not transposed:
        transposed = [False, *transposed]
    rows = tuple(operands.need_register(name, at, "u4").row for name in parts(at.operands[0]))
    a = tuple(operands.need_register(name, at, "u4").row for name in parts(at.operands[1])) if in_registers else None
    return Mma(
        n=int(form[1]), k=int(form[2]), a_type=form[3], b_type=form[4], accumulators=rows, a_registers=a,
        a_mn_major=transposed[0], b_mn_major=transposed[-1] if len(transposed) > 1 else False,
        negate_a=flags[0] == -1, negate_b=flags[1] == -1,
    )  # fmt: skip


def _words(warp: Warp, issue: Issue) -> Words:
    """Words of shared memory that the warp's quarter of the product reads: all of B, and its 16 rows of A."""
    mma, quarter, machine = issue.mma, warp.index % 4, warp.cta.machine
    key = ("wgmma", issue.a, issue.b, mma.n, mma.k, mma.a_mn_major, mma.b_mn_major, quarter)
    if (found := machine.known_words(key)) is not None:
        return found
    b = operand_addresses(issue.b, mma.n, mma.k, _ITEM_BYTES[mma.b_type], mma.b_mn_major)
    touched = [np.unique(b // 4)]
    if issue.a is not None:
        a = operand_addresses(issue.a, 64, mma.k, _ITEM_BYTES[mma.a_type], mma.a_mn_major)
        touched.append(np.unique(a[16 * quarter : 16 * quarter + 16] // 4))
    return machine.words(key, 4 * np.concatenate(touched))


def _mma_commit(at: Statement, operands: Operands) -> Run:
    def run(warp: Warp, mask: Mask | None) -> None:
        need_whole_warp(mask, at)
        warp.cta.machine.commit(warp, at, "wgmma")

    return run


def _mma_wait(at: Statement, operands: Operands) -> Run:
    left = integer(at.operands[0])
    if left is None:
        raise unsupported(at)

    def run(warp: Warp, mask: Mask | None) -> None:
        need_whole_warp(mask, at)
        groups = warp.groups["wgmma"]
        covered = groups[: max(0, len(groups) - left)]
        for group in covered:
            warp.cta.machine.finish_mma(group)
        del groups[: len(covered)]
        for observer in warp.cta.machine.observers:
            observer.joined(warp, at, covered, False)

    return run


def _mma_fence(at: Statement, operands: Operands) -> Run:
    def run(warp: Warp, mask: Mask | None) -> None:
        need_whole_warp(mask, at)
        for observer in warp.cta.machine.observers:
            observer.fenced(warp, at)

    return run


TABLE: dict[str, Callable[[Statement, Operands], Run]] = {
    "cp.async.bulk.tensor": _tensor, "cp.reduce.async.bulk.tensor": _tensor,
    "cp.async.bulk.commit_group": _commit, "cp.async.bulk.wait_group": _wait,
    "cp.async.bulk": _bulk, "cp.reduce.async.bulk": _bulk, "st.async": _store_async,
    "wgmma.mma_async": _mma, "wgmma.commit_group": _mma_commit, "wgmma.wait_group": _mma_wait,
    "wgmma.fence": _mma_fence,
}  # fmt: skip
