"""Asynchronous copies: right under every policy where a kernel waits, and different ones where it does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fa3.emulator.blocks import Code
from fa3.emulator.faults import Fault, Unsupported
from fa3.emulator.observe import Observer
from fa3.emulator.sync import BulkWait
from fa3.sass.listing import Source

from .assembler import SHARED, Machine, aligned, assemble, run, tensor_map

RUNS = [("early", 0), ("late", 0), ("random", 1), ("random", 2), ("random", 3), ("starve:0-0", 1)]
TILE = SHARED + 1024
"""Shared address of a tile; the mbarrier is at SHARED."""
POISON = 0xABABABAB
TMA = "cp.async.bulk.tensor"
TO_SHARED = "shared::cta.global.tile.mbarrier::complete_tx::bytes"
TO_GLOBAL = "global.shared::cta.tile.bulk_group"
BULK_LOAD = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes"
BULK_STORE = "cp.async.bulk.global.shared::cta.bulk_group"


def one(body: str, name: str) -> str:
    """A body for one elected lane of the warp."""
    return f"\nelect.sync _|%p15, -1; @!%p15 bra $ONE{name};\n{body}\n$ONE{name}:\n"


INIT = one(f"mbarrier.init.shared.b64 [{SHARED}], 1;", "INIT") + "bar.sync 0;"
WAIT = f"\n$WAIT: mbarrier.try_wait.parity.shared.b64 %p14, [{SHARED}], 0; @!%p14 bra $WAIT;\n"


def expect(nbytes: int) -> str:
    return f"mbarrier.arrive.expect_tx.shared.b64 _, [{SHARED}], {nbytes};"


def words_out(parameter: int, rounds: int, start: int = TILE) -> str:
    """Thread t writes shared words t, t + 32, ... to an array of words."""
    body = f"""
      ld.param.u64 %rd20, [k_param_{parameter}]; mul.wide.u32 %rd21, %tid.x, 4; add.u64 %rd20, %rd20, %rd21;
      mov.u32 %r80, %tid.x; shl.b32 %r80, %r80, 2; add.u32 %r80, %r80, {start};"""
    for i in range(rounds):
        body += f"ld.shared.b32 %r81, [%r80+{128 * i}]; st.global.b32 [%rd20+{128 * i}], %r81;\n"
    return body


def words_in(value: str, rounds: int, start: int = TILE) -> str:
    """Thread t writes `value` + t + 32 i to shared word t + 32 i."""
    body = f"mov.u32 %r80, %tid.x; shl.b32 %r82, %r80, 2; add.u32 %r82, %r82, {start}; add.u32 %r81, %r80, {value};\n"
    for i in range(rounds):
        body += f"st.shared.b32 [%r82+{128 * i}], %r81; add.u32 %r81, %r81, 32;\n"
    return body + "fence.proxy.async.shared::cta; bar.sync 0;\n"


# ------------------------------------------------------------------------------------------------ loads
def box_of(array: Any, box: tuple[int, ...], coordinates: tuple[int, ...]) -> Any:
    """The box at coordinates (in the order of the array's axes), with zeros outside."""
    result = np.zeros(box, array.dtype)
    for index in np.ndindex(*box):
        place = tuple(c + i for c, i in zip(coordinates, index, strict=True))
        if all(0 <= p < n for p, n in zip(place, array.shape, strict=True)):
            result[index] = array[place]
    return result


def swizzled(box: Any, swizzle: int) -> Any:
    """The bytes of a box as they lie at a multiple of 1024: 16-byte pieces change places within their line."""
    flat = np.ascontiguousarray(box).view(np.uint8).reshape(-1)
    result = np.empty_like(flat)
    mask = {0: 0, 32: 0x10, 64: 0x30, 128: 0x70}[swizzle]
    for address in range(len(flat)):
        result[address ^ (address >> 3 & mask)] = flat[address]
    return result


def tma_load(coordinates: str, wait: bool, nbytes: int) -> str:
    rank = len(coordinates.split(","))
    copy = f"{TMA}.{rank}d.{TO_SHARED} [{TILE}], [%rd0, {{{coordinates}}}], [{SHARED}];"
    body = INIT + "mov.b64 %rd0, k_param_0;" + one(f"{expect(nbytes)}\n.loc 1 40 1\n{copy}", "LOAD")
    return body + (WAIT if wait else "")


@pytest.mark.parametrize(("policy", "seed"), RUNS)
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("coordinates", [(0, 0), (5, 16), (-3, -8), (60, 24), (100, 100)])
def test_a_tma_load(policy: str, seed: int, swizzle: int, coordinates: tuple[int, int]) -> None:
    width = (swizzle or 64) // 4
    box = (512 // width, width)
    tensor = aligned(np.arange(64 * 32, dtype=np.uint32).reshape(64, 32))
    out = np.zeros(512, np.uint32)
    body = tma_load(f"{coordinates[1]}, {coordinates[0]}", True, 2048) + words_out(1, 16)
    run(body, tensor_map(tensor, box, swizzle), out, memory=[tensor], policy=policy, seed=seed)
    assert (out.view(np.uint8) == swizzled(box_of(tensor, box, coordinates), swizzle)).all()


@pytest.mark.parametrize(("policy", "seed"), RUNS)
def test_a_tma_load_of_four_dimensions_with_coordinates_in_registers(policy: str, seed: int) -> None:
    tensor = aligned(np.arange(3 * 4 * 5 * 8, dtype=np.float32).reshape(3, 4, 5, 8))
    box = (2, 1, 3, 8)
    out = np.zeros(64, np.uint32)
    body = "mov.u32 %r0, 0; mov.u32 %r1, 3; mov.u32 %r2, -1; mov.u32 %r3, 2;" + tma_load(
        "%r0, %r1, %r2, %r3", True, 192
    )
    run(body + words_out(1, 2), tensor_map(tensor, box), out, memory=[tensor], policy=policy, seed=seed)
    assert (out[:48].view(np.float32).reshape(box) == box_of(tensor, box, (2, -1, 3, 0))).all()


def test_without_a_wait_a_load_is_seen_early_and_not_seen_late() -> None:
    tensor = aligned(np.arange(512, dtype=np.uint32).reshape(8, 64))
    seen = {}
    for policy in ("early", "late"):
        out = np.zeros(512, np.uint32)
        run(
            tma_load("0, 0", False, 2048) + words_out(1, 16),
            tensor_map(tensor, (8, 64)),
            out,
            memory=[tensor],
            policy=policy,
        )
        seen[policy] = out
    assert (seen["early"] == tensor.reshape(-1)).all()
    assert (seen["late"] == POISON).all()


@pytest.mark.parametrize(("policy", "seed"), RUNS)
def test_two_loads_in_any_order_complete_one_phase(policy: str, seed: int) -> None:
    """One TMA load and one bulk load, the bytes of both announced in one arrival behind them."""
    tensor, line = aligned(np.arange(32, dtype=np.uint32).reshape(2, 16)), aligned(np.arange(100, 132, dtype=np.uint32))
    copies = f"""
      {TMA}.2d.{TO_SHARED}.L2::cache_hint [{TILE}], [%rd0, {{0, 0}}], [{SHARED}], %rd9;
      {BULK_LOAD} [{TILE + 128}], [%rd1], 128, [{SHARED}];
      {expect(256)}"""
    body = INIT + "mov.b64 %rd0, k_param_0; ld.param.u64 %rd1, [k_param_1];" + one(copies, "LOAD") + WAIT
    out = np.zeros(64, np.uint32)
    done = run(
        body + words_out(2, 2), tensor_map(tensor, (2, 16)), line, out, policy=policy, seed=seed, memory=[tensor]
    )
    assert out.tolist() == [*range(32), *range(100, 132)]
    barrier = done.ctas[0].mbarriers[SHARED]
    assert (barrier.phases, barrier.pending, barrier.tx) == (1, 1, 0)


@pytest.mark.parametrize("policy", ["early", "late"])
@pytest.mark.parametrize(
    ("copy", "kind"),
    [
        (f"{TMA}.2d.{TO_SHARED} [{TILE + 64}], [%rd0, {{0, 0}}], [{SHARED}]", "misaligned"),
        (f"{TMA}.2d.{TO_SHARED} [{SHARED + 4096}], [%rd0, {{0, 0}}], [{SHARED}]", "out of bounds"),
        (f"{TMA}.3d.{TO_SHARED} [{TILE}], [%rd0, {{0, 0, 0}}], [{SHARED}]", "tma"),
        (f"{TMA}.2d.{TO_SHARED} [{TILE}], [%rd0, {{0, 0}}], [{SHARED + 8}]", "mbarrier"),
        (f"{BULK_LOAD} [{TILE}], [%rd1], 24, [{SHARED}]", "misaligned"),
        (f"{BULK_LOAD} [{TILE}], [%rd1+8], 16, [{SHARED}]", "misaligned"),
        (f"{BULK_LOAD} [{TILE}], [%rd1], 4096, [{SHARED}]", "out of bounds"),
        (f"{TMA}.2d.{TO_SHARED} [{TILE}], [%rd2, {{0, 0}}], [{SHARED}]", "out of bounds"),
    ],
)
def test_bad_loads_are_faults_where_they_were_started(copy: str, kind: str, policy: str) -> None:
    tensor = aligned(np.zeros((16, 16), np.uint32))
    body = INIT + "mov.b64 %rd0, k_param_0; ld.param.u64 %rd1, [k_param_1]; mov.u64 %rd2, 4096;"
    body += one(f"{expect(1024)}\n.loc 1 66 1\n{copy};", "LOAD") + f"\n.loc 1 67 1\n{WAIT}"
    with pytest.raises(Fault) as caught:
        run(body, tensor_map(tensor, (16, 16)), tensor, policy=policy)
    assert caught.value.kind == kind
    assert caught.value.at is not None and caught.value.at.source == Source("kernel.py", 66)
    assert caught.value.warp is not None


# ------------------------------------------------------------------------------------------------ stores
def tma_store(y: int, operation: str = "") -> str:
    reduce = f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{operation}.tile.bulk_group"
    opcode = reduce if operation else f"{TMA}.2d.{TO_GLOBAL}"
    return f"{opcode} [%rd0, {{0, {y}}}], [{TILE}]; cp.async.bulk.commit_group;"


@pytest.mark.parametrize(("policy", "seed"), RUNS)
@pytest.mark.parametrize("wait", ["cp.async.bulk.wait_group.read 0;", "cp.async.bulk.wait_group 0;"])
@pytest.mark.parametrize("elected", [True, False])
def test_a_tma_store_that_is_waited_for(policy: str, seed: int, wait: str, elected: bool) -> None:
    """Three tiles through one buffer; the last row is out of bounds. All lanes, or an elected one, start one store."""
    tensor = aligned(np.zeros((11, 8), np.uint32))
    body = "mov.b64 %rd0, k_param_0;"
    for i in range(3):
        start = one(tma_store(4 * i), f"S{i}") if elected else tma_store(4 * i)
        body += words_in(str(1000 * i), 1) + start + wait
    done = run(body, tensor_map(tensor, (4, 8)), memory=[tensor], policy=policy, seed=seed)
    expected = np.concatenate([1000 * i + np.arange(32, dtype=np.uint32) for i in range(3)])[:88]
    assert (tensor.reshape(-1) == expected).all()
    assert done.ctas[0].warps[0].committed["bulk"] == 3


@pytest.mark.parametrize("operation", ["store", "bulk"])
def test_without_a_wait_a_store_takes_what_is_there_when_it_reads(operation: str) -> None:
    seen = {}
    for policy in ("early", "late"):
        tensor = aligned(np.zeros((4, 8), np.uint32))
        store = f"{BULK_STORE} [%rd1], [{TILE}], 128; cp.async.bulk.commit_group;"
        body = "mov.b64 %rd0, k_param_0; ld.param.u64 %rd1, [k_param_1];" + words_in("0", 1)
        body += one(tma_store(0) if operation == "store" else store, "S") + words_in("500", 1)
        run(body, tensor_map(tensor, (4, 8)), tensor, policy=policy)
        seen[policy] = tensor.reshape(-1).tolist()
    assert seen == {"early": list(range(32)), "late": list(range(500, 532))}


@pytest.mark.parametrize(("policy", "seed"), RUNS)
@pytest.mark.parametrize(
    ("dtype", "operation"), [("float32", "add"), ("uint32", "add"), ("int32", "min"), ("uint32", "xor")]
)
def test_tma_reductions(policy: str, seed: int, dtype: str, operation: str) -> None:
    rng = np.random.default_rng(3)
    tensor = aligned(rng.integers(-50, 50, (8, 8)).astype(dtype))
    tiles = [aligned(rng.integers(-50, 50, (4, 8)).astype(dtype)) for _ in range(3)]
    expected = tensor.copy()
    function = {"add": np.add, "min": np.minimum, "xor": np.bitwise_xor}[operation]
    body = "mov.b64 %rd0, k_param_0;" + INIT
    for i, tile in enumerate(tiles):
        row = (0, 3, 6)[i]
        body += f"ld.param.u64 %rd1, [k_param_{i + 1}];"
        body += one(f"{expect(128)} {BULK_LOAD} [{TILE}], [%rd1], 128, [{SHARED}];", f"L{i}")
        body += WAIT.replace("$WAIT", f"$WAIT{i}").replace("], 0;", f"], {i % 2};")
        body += one(tma_store(row, operation), f"R{i}") + "cp.async.bulk.wait_group.read 0;"
        part = expected[row : row + 4]
        part[...] = function(part, tile[: len(part)])
    run(body, tensor_map(tensor, (4, 8)), *tiles, memory=[tensor], policy=policy, seed=seed)
    assert (tensor == expected).all()


@pytest.mark.parametrize(("policy", "seed"), RUNS)
def test_bulk_copies_and_reductions_of_every_lane(policy: str, seed: int) -> None:
    """Each of 8 lanes stores 16 bytes of its own, then adds them twice."""
    target = aligned(np.full(32, 1, np.uint32))
    add = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1], [%r0], 16;"
    body = (
        words_in("7", 1)
        + f"""
      ld.param.u64 %rd0, [k_param_0]; mul.wide.u32 %rd1, %tid.x, 16; add.u64 %rd1, %rd1, %rd0;
      mad.lo.u32 %r0, %tid.x, 16, {TILE};
      setp.lt.u32 %p0, %tid.x, 8; @!%p0 bra $END;
      {BULK_STORE} [%rd1], [%r0], 16; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
      {add} {add} cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    $END:"""
    )
    run(body, target, policy=policy, seed=seed)
    assert target.tolist() == [3 * (7 + i) for i in range(32)]


def test_a_store_whose_lanes_disagree_is_a_fault() -> None:
    tensor = aligned(np.zeros((4, 8), np.uint32))
    store = f"{TMA}.2d.{TO_GLOBAL} [%rd0, {{0, %r0}}], [{TILE}];"
    with pytest.raises(Fault, match="several"):
        run(f"mov.b64 %rd0, k_param_0; mov.u32 %r0, %laneid; {store}", tensor_map(tensor, (4, 8)), memory=[tensor])


@pytest.mark.parametrize("policy", ["early", "late"])
def test_a_store_to_memory_that_is_not_there_is_a_fault_where_it_was_started(policy: str) -> None:
    tensor = aligned(np.zeros((4, 8), np.uint32))
    body = "mov.b64 %rd0, k_param_0;" + words_in("0", 1) + f"\n.loc 1 90 1\n{tma_store(0)}\n.loc 1 91 1\n"
    with pytest.raises(Fault) as caught:
        run(f"{body} cp.async.bulk.wait_group 0;", tensor_map(tensor, (4, 8)), policy=policy)
    assert caught.value.kind == "out of bounds"
    assert caught.value.at is not None and caught.value.at.source == Source("kernel.py", 90)


# ------------------------------------------------------------------------------------------------ groups
class Groups(Observer):
    """For each wait_group: which groups it covered, and how many effects each group of the warp had left."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self.waits: list[tuple[bool, list[int], list[int]]] = []
        self.blocked_for: list[int] = []

    def committed(self, warp: Any, at: Any, group: Any) -> None:
        assert group.number == len(self.all)
        self.all.append(group)

    def joined(self, warp: Any, at: Any, groups: Any, read: bool) -> None:
        left = [sum(len(operation.effects) for operation in group.operations) for group in self.all]
        self.waits.append((read, [group.number for group in groups], left))

    def blocked(self, warp: Any, at: Any) -> None:
        assert isinstance(warp.waiting, BulkWait)
        self.blocked_for.append(len(warp.waiting.groups))


group_programs = st.lists(
    st.tuples(st.just("group"), st.integers(0, 2)) | st.tuples(st.sampled_from(["wait", "read"]), st.integers(0, 2)),
    min_size=3,
    max_size=12,
)


@example([("group", 1), ("read", 0), ("read", 0), ("wait", 0)], ("early", 0))
@example([("group", 1), ("read", 0), ("read", 0), ("wait", 0)], ("late", 0))
@given(group_programs, st.sampled_from(RUNS))
@settings(max_examples=80)
def test_a_wait_covers_all_groups_but_the_youngest(ops: list[tuple[str, int]], how: tuple[str, int]) -> None:
    """Whatever the schedule: the covered groups have been read or are complete, and each is told once for each kind."""
    body = words_in("0", 1) + "ld.param.u64 %rd1, [k_param_0];"
    committed = 0
    expected: list[tuple[bool, list[int]]] = []
    told: dict[bool, int] = {True: 0, False: 0}
    for kind, n in ops:
        if kind == "group":
            body += f"{BULK_STORE} [%rd1+{16 * n}], [{TILE + 16 * n}], 16;" * n + "cp.async.bulk.commit_group;"
            committed += 1
        else:
            reading = kind == "read"
            body += f"cp.async.bulk.wait_group{'.read' * reading} {n};"
            end = max(told[False], committed - n)
            start = max(told[True], told[False]) if reading else told[False]
            expected.append((reading, list(range(start, end))))
            told[reading] = max(told[reading], end)
    watcher = Groups()
    run(
        one(body, "ALL").replace("bar.sync 0;", ""),
        aligned(np.zeros(64, np.uint32)),
        policy=how[0],
        seed=how[1],
        observers=[watcher],
    )
    assert [(read, groups) for read, groups, _ in watcher.waits] == expected
    for read, groups, left in watcher.waits:
        for number in range(max(groups, default=-1) + 1):
            operations = len(watcher.all[number].operations)
            assert left[number] <= (operations if read else 0)


def three_stores(wait: str) -> tuple[Groups, Machine]:
    watcher, out = Groups(), aligned(np.zeros(64, np.uint32))
    body = words_in("0", 1) + "ld.param.u64 %rd1, [k_param_0];"
    for i in range(3):
        body += one(f"{BULK_STORE} [%rd1+{16 * i}], [{TILE}], 16; cp.async.bulk.commit_group;", f"S{i}")
    return watcher, run(body + wait, out, policy="late", observers=[watcher])


@pytest.mark.parametrize(
    ("wait", "left"), [("wait_group 1", [0, 0, 1]), ("wait_group.read 1", [1, 1, 2]), ("wait_group 3", [2, 2, 2])]
)
def test_late_operations_take_steps_only_when_a_warp_waits(wait: str, left: list[int]) -> None:
    """Of the two steps of each store, the one that reads and the one that writes; they take turns."""
    watcher, _ = three_stores(f"cp.async.bulk.{wait};")
    assert watcher.waits == [("read" in wait, list(range(3 - int(wait[-1]))), left)]
    assert bool(watcher.blocked_for) == (wait != "wait_group 3")


def test_a_store_that_was_read_need_not_have_been_written() -> None:
    """The kernel looks at global memory behind its wait: only without `.read` is the new value there."""
    for wait, early, late in (("wait_group 0", 7, 7), ("wait_group.read 0", 7, 1)):
        for policy, value in (("early", early), ("late", late)):
            target, out = aligned(np.full(32, 1, np.uint32)), aligned(np.zeros(32, np.uint32))
            body = words_in("7", 1) + "ld.param.u64 %rd1, [k_param_0]; ld.param.u64 %rd2, [k_param_1];"
            body += (
                one(f"{BULK_STORE} [%rd1], [{TILE}], 16; cp.async.bulk.commit_group;", "S") + f"cp.async.bulk.{wait};"
            )
            run(body + "ld.global.b32 %r0, [%rd1]; st.global.b32 [%rd2], %r0;", target, out, policy=policy)
            assert (out[0], target[0]) == (value, 7), (wait, policy)


def test_a_cta_is_finished_only_when_its_stores_are() -> None:
    class Ends(Observer):
        def __init__(self) -> None:
            self.log: list[str] = []

        def executed(self, operation: Any) -> None:
            self.log.append(operation.kind)

        def exited(self, warp: Any) -> None:
            self.log.append("exited")

        def finished(self, cta: Any) -> None:
            self.log.append("finished")

    orders = {}
    for policy in ("early", "late"):
        ends, target = Ends(), aligned(np.zeros(32, np.uint32))
        store = one(f"{BULK_STORE} [%rd1], [{TILE}], 16; cp.async.bulk.commit_group;", "S")
        run(words_in("7", 1) + "ld.param.u64 %rd1, [k_param_0];" + store, target, policy=policy, observers=[ends])
        orders[policy] = ends.log
        assert target[0] == 7
    assert orders == {"early": ["bulk.store", "exited", "finished"], "late": ["exited", "bulk.store", "finished"]}


@pytest.mark.parametrize(
    "statement",
    [
        f"{TMA}.3d.{TO_SHARED.replace('tile', 'im2col')} [{TILE}], [%rd0, {{0, 0, 0}}], [{SHARED}], {{%h0}}",
        f"{TMA}.2d.{TO_SHARED} [{TILE}], [%rd0], [{SHARED}]", "cp.async.bulk.prefetch.L2.global [%rd0], 128",
        "cp.async.ca.shared.global [%r0], [%rd0], 16", "cp.async.bulk.wait_group %r0", "cp.async.wait_all",
        "mbarrier.test_wait.parity.shared.b64 %p0, [%r0], 0", "mbarrier.arrive.noComplete.shared.b64 %rd0, [%r0], 1",
        "mbarrier.arrive.release.cluster.shared::cluster.b64 %rd0, [%r0], 16",
        "mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 %p0, [%r0], 0",
        "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32 [%r0], [%r1], 16, [%r2]",
        "st.async.shared::cluster.b32 [%r0], %r1, [%r2]", "red.async.shared::cluster.add.u32 [%r0], %r1, [%r2]",
    ],
)  # fmt: skip
def test_what_is_not_modelled_is_refused(statement: str) -> None:
    with pytest.raises(Unsupported, match=r"PTX line \d+"):
        Code(assemble(f"{statement};")).check()
