"""Instructions between the lanes of a warp, and between lanes and memory.

PTX ISA, sections "shfl.sync", "vote.sync", "elect.sync", "mapa", "getctarank", "ld", "st", "atom", "red", "ldmatrix"
and "stmatrix".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fa3.emulator.faults import Fault
from fa3.emulator.matrix import load_matrices, store_matrices
from fa3.emulator.memory import OFFSET_BITS, OFFSET_MASK
from fa3.emulator.operands import BANK_VIEW, DTYPES, VIEWS, Operands, Source, parts, unsupported
from fa3.emulator.program import Register
from fa3.emulator.sync import PollWait
from fa3.emulator.warp import LANES, Mask
from fa3.sass.ptx_code import Statement

if TYPE_CHECKING:
    from fa3.emulator.blocks import Run
    from fa3.emulator.cta import Cta
    from fa3.emulator.warp import Warp

_LANE = np.arange(LANES)
ALL = np.ones(LANES, np.bool_)


def need_whole_warp(mask: Mask | None, at: Statement) -> None:
    """Fault unless all 32 lanes are here together, as `.sync` with a full mask and `.aligned` demand."""
    if mask is not None:
        raise Fault("divergence", f"`{at.opcode}` is executed by {int(mask.sum())} of the warp's 32 lanes")


def over_lanes(value: Any) -> Any:
    """One value for each lane: most operands have them, literals and kernel parameters do not."""
    return value if isinstance(value, np.ndarray) else np.full(LANES, value)


def put(target: Any, value: Any, mask: Mask | None) -> None:
    """Writes a register in the lanes of the mask."""
    if mask is None:
        target[...] = value
    else:
        np.copyto(target, value, where=mask)


# ------------------------------------------------------------------------------------------------ lanes
def _shfl(at: Statement, operands: Operands) -> Run:
    mode = at.opcode.split(".")[2]
    if mode not in _SHUFFLES:
        raise unsupported(at)
    target, _, predicate = at.operands[0].partition("|")
    result = operands.need_register(target, at, "u4").row
    flag = operands.register(predicate)
    value, b, c = (operands.source(text, "u4", at) for text in at.operands[1:4])
    lane_of = _SHUFFLES[mode]

    def run(warp: Warp, mask: Mask | None) -> None:
        need_whole_warp(mask, at)
        step, clamp = (np.asarray(x(warp)).astype(np.int64) for x in (b, c))
        segment = (clamp >> 8) & 31
        source, inside = lane_of(step & 31, (_LANE & segment) | (clamp & 31 & ~segment), _LANE & segment, segment)
        warp.views["u4"][result] = over_lanes(value(warp))[np.where(inside, source, _LANE)]
        if flag:
            warp.views["p"][flag.row] = inside

    return run


_SHUFFLES: dict[str, Callable[..., tuple[Any, Any]]] = {
    "up": lambda b, last, first, segment: (_LANE - b, _LANE - b >= last),
    "down": lambda b, last, first, segment: (_LANE + b, _LANE + b <= last),
    "bfly": lambda b, last, first, segment: (_LANE ^ b, (_LANE ^ b) <= last),
    "idx": lambda b, last, first, segment: (first | (b & ~segment), (first | (b & ~segment)) <= last),
}


def _vote(at: Statement, operands: Operands) -> Run:
    mode = at.opcode.split(".")[2]
    result = operands.need_register(at.operands[0], at)
    view = BANK_VIEW[result.bank]
    predicate = operands.source(at.operands[1], "p", at)
    functions: dict[str, Callable[[Any], Any]] = {
        "any": np.any, "all": np.all, "uni": lambda p: np.all(p == p[0]),
        "ballot": lambda p: np.uint32(int((p.astype(np.int64) << _LANE).sum())),
    }  # fmt: skip
    if mode not in functions:
        raise unsupported(at)

    def run(warp: Warp, mask: Mask | None) -> None:
        need_whole_warp(mask, at)
        warp.views[view][result.row] = functions[mode](over_lanes(predicate(warp)))

    return run


def _elect(at: Statement, operands: Operands) -> Run:
    """The lowest lane that is here is elected."""
    leader, _, predicate = at.operands[0].partition("|")
    who, flag = operands.register(leader), operands.need_register(predicate, at)

    def run(warp: Warp, mask: Mask | None) -> None:
        here = ALL if mask is None else mask
        first = int(np.argmax(here))
        put(warp.views["p"][flag.row], first == _LANE, mask)
        if who:
            put(warp.views["u4"][who.row], np.uint32(first), mask)

    return run


# ------------------------------------------------------------------------------------------------ addresses
def _mapa(at: Statement, operands: Operands) -> Run:
    result = operands.need_register(at.operands[0], at)
    view = BANK_VIEW[result.bank]
    address, rank = operands.source(at.operands[1], view, at), operands.source(at.operands[2], "u4", at)

    def run(warp: Warp, mask: Mask | None) -> None:
        ranks, target = active(rank(warp), mask), warp.views[view][result.row]
        found = warp.cta.cluster.mapped(warp.cta, active(address(warp), mask), ranks).astype(target.dtype)
        if mask is None:
            target[:] = found
        else:
            target[mask] = found

    return run


def _getctarank(at: Statement, operands: Operands) -> Run:
    result = operands.need_register(at.operands[0], at, "u4").row
    register = operands.register(at.operands[1])
    address = operands.source(at.operands[1], BANK_VIEW[register.bank] if register else "u4", at)

    def run(warp: Warp, mask: Mask | None) -> None:
        windows = over_lanes(address(warp)).astype(np.int64) >> OFFSET_BITS
        put(warp.views["u4"][result], np.where(windows == 0, warp.cta.rank, windows - 1).astype(np.uint32), mask)

    return run


# ------------------------------------------------------------------------------------------------ memory
Space = Literal["cta", "cluster", "global"]


def space_of(at: Statement) -> Space:
    """The memory that a load, a store or an atomic operation accesses."""
    spaces = [mod for mod in at.opcode.split(".")[1:] if mod.split("::")[0] in ("shared", "global")]
    if len(spaces) != 1:
        raise unsupported(at, "only shared and global memory are emulated")
    if spaces[0] == "global":
        return "global"
    return "cluster" if spaces[0] == "shared::cluster" else "cta"


def _space(at: Statement) -> tuple[Space, str, int]:
    """(memory, type, vector length) of a load or store."""
    mods = at.opcode.split(".")[1:]
    vector = next((int(mod[1:]) for mod in mods if mod in ("v2", "v4", "v8")), 1)
    return space_of(at), mods[-1], vector


def _load(at: Statement, operands: Operands) -> Run:
    space, kind, count = _space(at)
    registers = [operands.need_register(name, at) for name in parts(at.operands[0])]
    size = int(kind[1:]) // 8
    read = DTYPES[("i" if kind[0] == "s" else "u") + str(size)]
    views = [BANK_VIEW[register.bank] for register in registers]
    address = operands.address(at.operands[1], at)
    if len(registers) != count:
        raise unsupported(at)
    if "acquire" in at.opcode.split("."):
        return _poll(at, space, address, registers, size)
    may_poll = "relaxed" in at.opcode.split(".") and space == "global" and (count, size) == (1, 4)
    poll = _poll(at, space, address, registers, size) if may_poll else None

    def run(warp: Warp, mask: Mask | None) -> bool | None:
        if poll is not None and mask is not None and mask.sum() == 1:
            return poll(warp, mask)
        raw = _gather(warp, at, space, active(address(warp), mask), size * count)
        columns: Any = np.ascontiguousarray(raw).view(read)
        for i, (register, view) in enumerate(zip(registers, views, strict=True)):
            target = warp.views[view][register.row]
            if mask is None:
                target[:] = columns[:, i].astype(target.dtype)
            else:
                target[mask] = columns[:, i].astype(target.dtype)
        return None

    return run


def _poll(at: Statement, space: Space, address: Source, registers: list[Register], size: int) -> Run:
    """A load of one lane that polls. Who finds the same value a second time waits for a change of global memory."""
    if space != "global" or len(registers) != 1 or size != 4:
        raise unsupported(at)

    def run(warp: Warp, mask: Mask | None) -> bool:
        where = active(address(warp), mask)
        if len(where) != 1:
            raise unsupported(at, "only one lane may poll")
        value = int(_gather(warp, at, "global", where, size).view(np.uint32)[0, 0])
        if warp.polled == (int(where[0]), value):
            warp.waiting = PollWait(*warp.polled)
            warp.cta.machine.pollers.append(warp)
            return True
        warp.polled = int(where[0]), value
        put(warp.views["u4"][registers[0].row], np.uint32(value), mask)
        return False

    return run


def _store(at: Statement, operands: Operands) -> Run:
    space, kind, count = _space(at)
    size = int(kind[1:]) // 8
    stored, address = stored_values(at, size, operands), operands.address(at.operands[0], at)
    if len(parts(at.operands[1])) != count:
        raise unsupported(at)

    def run(warp: Warp, mask: Mask | None) -> None:
        _scatter(warp, at, space, active(address(warp), mask), stored(warp, mask))

    return run


def stored_values(at: Statement, size: int, operands: Operands) -> Callable[[Warp, Mask | None], Any]:
    """What a store of elements of `size` bytes writes: a function that gives (lanes, bytes)."""
    names, written = parts(at.operands[1]), DTYPES[f"u{size}"]
    sources = [operands.source(name, _stored_view(name, size, operands), at) for name in names]

    def values(warp: Warp, mask: Mask | None) -> Any:
        columns = [active(source(warp), mask).astype(written) for source in sources]
        return np.stack(columns, axis=1).view(np.uint8).reshape(len(columns[0]), size * len(names))

    return values


def _stored_view(name: str, size: int, operands: Operands) -> str:
    register = operands.register(name)
    return BANK_VIEW[register.bank] if register else f"u{size}"


def active(value: Any, mask: Mask | None) -> Any:
    lanes = over_lanes(value)
    return lanes if mask is None else lanes[mask]


def _gather(warp: Warp, at: Statement, space: Space, addresses: Any, nbytes: int) -> Any:
    if space == "cluster":
        data = np.empty((len(addresses), nbytes), np.uint8)
        for cta, lanes, places in by_cta(warp, addresses):
            _tell_shared(warp, at, cta, places, nbytes, False)
            data[lanes] = cta.shared.gather(places, nbytes)
        return data
    _tell(warp, at, space, addresses, nbytes, False)
    memory: Any = warp.cta.shared if space == "cta" else warp.cta.machine.memory
    return memory.gather(addresses, nbytes)


def _scatter(warp: Warp, at: Statement, space: Space, addresses: Any, data: Any) -> None:
    if space == "cluster":
        for cta, lanes, places in by_cta(warp, addresses):
            _tell_shared(warp, at, cta, places, data.shape[1], True)
            cta.shared.scatter(places, data[lanes])
        return
    _tell(warp, at, space, addresses, data.shape[1], True)
    memory: Any = warp.cta.shared if space == "cta" else warp.cta.machine.memory
    memory.scatter(addresses, data)
    if space == "global" and warp.cta.machine.pollers:
        warp.cta.machine.wake(warp.cta.machine.pollers)


def by_cta(warp: Warp, addresses: Any) -> Iterator[tuple[Cta, Any, Any]]:
    """Addresses of `.shared::cluster` by CTA: (CTA, which of them, where they are there)."""
    addresses = addresses.astype(np.int64)
    windows = addresses >> OFFSET_BITS
    for window in np.unique(windows):
        lanes = windows == window
        yield warp.cta.cluster.reached(warp.cta, int(window)), lanes, addresses[lanes] & OFFSET_MASK


def _tell(warp: Warp, at: Statement, space: Space, addresses: Any, nbytes: int, write: bool) -> None:
    for observer in warp.cta.machine.observers:
        (observer.shared if space == "cta" else observer.memory)(warp, at, addresses, nbytes, write)


def _tell_shared(warp: Warp, at: Statement, cta: Cta, addresses: Any, nbytes: int, write: bool) -> None:
    for observer in warp.cta.machine.observers:
        if cta is warp.cta:
            observer.shared(warp, at, addresses, nbytes, write)
        else:
            observer.remote(warp, at, cta, addresses, nbytes, write)


# ------------------------------------------------------------------------------------------------ atomics
_ATOMIC: dict[str, Callable[..., Any]] = {
    "add": lambda old, b: old + b, "min": min, "max": max, "exch": lambda old, b: b,
    "and": lambda old, b: old & b, "or": lambda old, b: old | b, "xor": lambda old, b: old ^ b,
    "inc": lambda old, b: old * 0 if old >= b else old + type(old)(1),
    "dec": lambda old, b: b if old == 0 or old > b else old - type(old)(1),
    "cas": lambda old, b, c: c if old == b else old,
}  # fmt: skip


def _atom(at: Statement, operands: Operands) -> Run:
    """Lane after lane, in order: one of the orders that the hardware may choose."""
    mods = at.opcode.split(".")
    has_result = mods[0] == "atom"
    operation = next((mod for mod in mods if mod in _ATOMIC), None)
    view = VIEWS.get(mods[-1])
    if operation is None or view is None:
        raise unsupported(at)
    if at.operands[-1].startswith("{"):
        return _add_vectors(at, operands, view)
    space = space_of(at)
    result = operands.need_register(at.operands[0], at, view).row if has_result else None
    place, *rest = at.operands[has_result:]
    if len(rest) != 1 + (operation == "cas"):
        raise unsupported(at)
    address, function = operands.address(place, at), _ATOMIC[operation]
    sources = [operands.source(text, view, at) for text in rest]

    def run(warp: Warp, mask: Mask | None) -> None:
        addresses, dtype = over_lanes(address(warp)), DTYPES[view]
        values = [over_lanes(source(warp)) for source in sources]
        for lane in _LANE if mask is None else np.flatnonzero(mask):
            where = addresses[lane : lane + 1]
            old = _gather(warp, at, space, where, dtype().itemsize).view(dtype)[0, 0]
            new: Any = np.array([function(old, *(value[lane] for value in values))], dtype)
            _scatter(warp, at, space, where, new.view(np.uint8).reshape(1, -1))
            if result is not None:
                warp.views[view][result, lane] = old

    return run


def _add_vectors(at: Statement, operands: Operands, view: str) -> Run:
    """`red.global.add.v2/.v4.f32`: each element is added by itself, and subnormal sums are kept."""
    if at.name != "red" or view != "f4" or "add" not in at.opcode.split("."):
        raise unsupported(at)
    address = operands.address(at.operands[0], at)
    sources = [operands.source(name, "f4", at) for name in parts(at.operands[1])]

    def run(warp: Warp, mask: Mask | None) -> None:
        addresses = active(address(warp), mask)
        values = np.stack([active(source(warp), mask) for source in sources], axis=1)
        order = np.argsort(addresses, kind="stable")
        if len(addresses) > 1 and (np.diff(np.asarray(addresses)[order].astype(np.int64)) < 4 * len(sources)).any():
            raise unsupported(at, "lanes that add to the same place")
        old = _gather(warp, at, "global", addresses, 4 * len(sources)).view(np.float32)
        new = np.ascontiguousarray(old + values)
        _scatter(warp, at, "global", addresses, new.view(np.uint8).reshape(len(addresses), -1))

    return run


# ------------------------------------------------------------------------------------------------ matrices
def _matrix_form(at: Statement, registers: str, operands: Operands) -> tuple[Any, bool]:
    mods = at.opcode.split(".")
    rows = np.array([operands.need_register(name, at, "u4").row for name in parts(registers)])
    if "m8n8" not in mods or mods[-1] != "b16" or len(rows) not in (1, 2, 4):
        raise unsupported(at)
    return rows, "trans" in mods


def _matrix_addresses(source: Source, warp: Warp, at: Statement, count: int, write: bool) -> Any:
    addresses = over_lanes(source(warp))
    _tell(warp, at, "cta", addresses[: 8 * count], 16, write)
    return addresses


def _ldmatrix(at: Statement, operands: Operands) -> Run:
    rows, transpose = _matrix_form(at, at.operands[0], operands)
    address = operands.address(at.operands[1], at)

    def run(warp: Warp, mask: Mask | None) -> None:
        need_whole_warp(mask, at)
        addresses = _matrix_addresses(address, warp, at, len(rows), write=False)
        warp.registers[rows] = load_matrices(warp.cta.shared, addresses, len(rows), transpose)

    return run


def _stmatrix(at: Statement, operands: Operands) -> Run:
    rows, transpose = _matrix_form(at, at.operands[1], operands)
    address = operands.address(at.operands[0], at)

    def run(warp: Warp, mask: Mask | None) -> None:
        need_whole_warp(mask, at)
        addresses = _matrix_addresses(address, warp, at, len(rows), write=True)
        store_matrices(warp.cta.shared, addresses, warp.registers[rows], transpose)

    return run


TABLE: dict[str, Callable[[Statement, Operands], Run]] = {
    "shfl.sync": _shfl, "vote.sync": _vote, "elect.sync": _elect, "ld": _load, "st": _store, "atom": _atom,
    "red": _atom, "mapa": _mapa, "getctarank": _getctarank, "ldmatrix": _ldmatrix, "stmatrix": _stmatrix,
}  # fmt: skip
