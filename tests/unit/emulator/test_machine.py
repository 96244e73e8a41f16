"""Whole launches: CTAs, parameters, guards, observers, and codes that share blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fa3.emulator import machine
from fa3.emulator.blocks import Code
from fa3.emulator.faults import Fault, Unsupported
from fa3.emulator.machine import Machine
from fa3.emulator.observe import Observer
from fa3.sass.listing import Source

from .assembler import LANES, SHARED, aligned, assemble, launch_of, pointer, run, store

POLICIES = ["early", "late", "random", "starve:0-0"]


# ------------------------------------------------------------------------------------------------ grids
class Live(Observer):
    """How many CTAs have begun and not finished, at most; who finished."""

    def __init__(self) -> None:
        self.live: set[int] = set()
        self.most = 0
        self.done: list[int] = []

    def stepping(self, warp: Any, step: Any, mask: Any) -> None:
        self.live.add(warp.cta.number)
        self.most = max(self.most, len(self.live))

    def finished(self, cta: Any) -> None:
        self.live.discard(cta.number)
        self.done.append(cta.number)


GLOBAL_INDEX = """
  mov.u32 %r0, %ctaid.z; mad.lo.u32 %r0, %r0, %nctaid.y, %ctaid.y; mad.lo.u32 %r0, %r0, %nctaid.x, %ctaid.x;
  mad.lo.u32 %r1, %r0, %ntid.x, %tid.x;"""


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("resident", [1, 2, 5, 100])
def test_a_grid_larger_than_what_is_resident(policy: str, resident: int) -> None:
    watcher, out = Live(), np.zeros(24 * 64, np.uint32)
    body = (
        GLOBAL_INDEX
        + pointer(0, "%rd0", 4, "%r1")
        + "bar.sync 0; mad.lo.u32 %r2, %r0, 1000, %tid.x; st.global.b32 [%rd0], %r2;"
    )
    done = run(body, out, grid=(2, 3, 4), threads=64, resident=resident, policy=policy, seed=3, observers=[watcher])
    assert out.tolist() == [1000 * cta + thread for cta in range(24) for thread in range(64)]
    assert watcher.most <= resident and sorted(watcher.done) == list(range(24))
    assert policy != "early" or watcher.most == min(resident, 24)
    assert [cta.block for cta in done.ctas] == [(i % 2, i // 2 % 3, i // 6) for i in range(24)]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_cta_has_its_own_shared_memory_and_barriers(policy: str) -> None:
    out = np.zeros(6 * 32, np.uint32)
    body = (
        GLOBAL_INDEX
        + pointer(0, "%rd0", 4, "%r1")
        + f"""
      setp.ne.u32 %p0, %tid.x, 0; @%p0 bra $INIT; mbarrier.init.shared.b64 [{SHARED}], 32; st.shared.b32 [2048], %r0;
    $INIT: bar.sync 0; mbarrier.arrive.shared.b64 _, [{SHARED}];
    $WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [{SHARED}], 0; @!%p1 bra $WAIT;
      ld.shared.b32 %r2, [2048]; st.global.b32 [%rd0], %r2;"""
    )
    done = run(body, out, grid=(6, 1, 1), policy=policy, seed=1)
    assert out.tolist() == [cta for cta in range(6) for _ in range(32)]
    assert {cta.mbarriers[SHARED].phases for cta in done.ctas} == {1}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_ctas_share_tiles_through_an_atomic_counter(policy: str, seed: int) -> None:
    """Each CTA draws tickets until there are none left; every ticket is drawn once."""
    counter, owner = aligned(np.zeros(1, np.uint32)), aligned(np.full(40, 99, np.uint32))
    body = """
      ld.param.u64 %rd0, [k_param_0]; ld.param.u64 %rd1, [k_param_1]; mov.u32 %r5, %ctaid.x;
    $LOOP:
      elect.sync _|%p0, -1; @!%p0 bra $DRAWN; atom.global.add.u32 %r0, [%rd0], 1;
    $DRAWN:
      shfl.sync.idx.b32 %r0, %r0, 0, 31, -1; setp.ge.u32 %p1, %r0, 40; @%p1 bra $END;
      mul.wide.u32 %rd2, %r0, 4; add.u64 %rd2, %rd2, %rd1; @!%p0 bra $NEXT;
      ld.global.b32 %r3, [%rd2]; sub.u32 %r3, %r3, 99; add.u32 %r3, %r3, %r5; st.global.b32 [%rd2], %r3;
    $NEXT: bra.uni $LOOP;
    $END:"""
    run(body, counter, owner, grid=(5, 1, 1), resident=3, policy=policy, seed=seed)
    assert counter[0] == 40 + 5 and (owner < 5).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_warp_that_spins_on_memory_lets_others_run(policy: str) -> None:
    """CTA 0 waits for a flag in global memory that CTA 1 sets, which waits for one that its other warp sets in shared
    memory."""
    flag, out = aligned(np.zeros(1, np.uint32)), np.zeros(128, np.uint32)
    body = (
        GLOBAL_INDEX
        + pointer(1, "%rd1", 4, "%r1")
        + """
      ld.param.u64 %rd0, [k_param_0]; setp.eq.u32 %p0, %r0, 1; st.shared.b32 [2048], 0; bar.sync 0; @%p0 bra $SETS;
    $SPIN: ld.relaxed.gpu.global.b32 %r2, [%rd0]; setp.eq.u32 %p1, %r2, 0; @%p1 bra $SPIN; bra $END;
    $SETS: setp.ge.u32 %p0, %tid.x, 32; @%p0 bra $OTHER;
    $INNER: ld.volatile.shared.b32 %r2, [2048]; setp.eq.u32 %p1, %r2, 0; @%p1 bra $INNER;
      st.global.b32 [%rd0], 7; bra $END;
    $OTHER: st.shared.b32 [2048], 5; mov.u32 %r2, 3;
    $END: st.global.b32 [%rd1], %r2;"""
    )
    run(body, flag, out, grid=(2, 1, 1), threads=64, policy=policy)
    assert out.tolist() == [7] * 64 + [5] * 32 + [3] * 32


# ------------------------------------------------------------------------------------------------ parameters
def test_parameters_by_value() -> None:
    """Sub-words are extended by their type; a vector or an offset reads a part of a struct."""
    struct = bytes(range(1, 25))
    body = """
      ld.param.u8 %r0, [k_param_0]; ld.param.s8 %r1, [k_param_0];
      ld.param.u16 %h1, [k_param_1]; ld.param.s16 %r3, [k_param_1];
      ld.param.b32 %r4, [k_param_2]; ld.param.f32 %r5, [k_param_3]; ld.param.b64 %rd6, [k_param_4];
      ld.param.b32 %r7, [k_param_5+4]; ld.param.v2.b8 {%h8, %h9}, [k_param_5+2];
      ld.param.v2.b32 {%r10, %r11}, [k_param_5+8]; ld.param.b16 %h12, [k_param_5+22]; ld.param.s32 %rd13, [k_param_2];
      cvt.u32.u16 %r2, %h1; cvt.u32.u16 %r8, %h8; cvt.u32.u16 %r9, %h9; cvt.u32.u16 %r12, %h12;
      mov.b64 {%r6, %r16}, %rd6; mov.b64 {%r13, %r14}, %rd13;
      mov.b64 %rd0, k_param_5; cvta.param.u64 %rd1, %rd0; ld.global.b32 %r15, [%rd1+12];
      ld.param.u64 %rd2, [k_param_6];"""
    values: list[Any] = [
        np.uint8(0x90),
        np.uint16(0x9001),
        np.uint32(0x80000002),
        np.float32(1.5),
        np.uint64(1 << 33 | 5),
        struct,
    ]
    out = np.zeros(17, np.uint32)
    run(body + "".join(f"st.global.b32 [%rd2+{4 * i}], %r{i};" for i in range(17)), *values, out)
    expected = [
        0x90, 0xFFFFFF90, 0x9001, 0xFFFF9001, 0x80000002, 0x3FC00000, 5, 0x08070605, 3, 4, 0x0C0B0A09, 0x100F0E0D,
        0x1817, 0x80000002, 0xFFFFFFFF, 0x100F0E0D, 2,
    ]  # fmt: skip
    assert [hex(x) for x in out.tolist()] == [hex(x) for x in expected]


def test_a_parameter_may_not_be_written() -> None:
    with pytest.raises(Fault, match="read only"):
        run("mov.b64 %rd0, k_param_0; st.global.b32 [%rd0], 1;", b"\0" * 64)


@pytest.mark.parametrize(
    "statement",
    ["ld.param.b32 %r0, [k_param_0+2]", "ld.param.v2.b32 {%r0, %r1}, [k_param_0]", "ld.param.b32 %r0, [k_param_9]"],
)
def test_a_load_outside_of_its_parameter_is_refused(statement: str) -> None:
    with pytest.raises(Unsupported, match=r"PTX line \d+"):
        Code(assemble(f"{statement};", [np.uint32(1)])).check()


# ------------------------------------------------------------------------------------------------ refusals, guards
def test_an_unknown_instruction_is_named_with_both_lines() -> None:
    body = "\n.loc 1 12 1\nsetp.lt.u32 %p0, %tid.x, 32; @%p0 bra $END;\n.loc 1 13 4\nvabsdiff.u32 %r0, %r1, %r2;\n$END:"
    program = assemble(body)
    line = next(statement.line for statement in program.statements if statement.name == "vabsdiff")
    with pytest.raises(Unsupported, match=rf"`vabsdiff.u32 %r0, %r1, %r2`, PTX line {line}, kernel.py:13"):
        Code(program).check()
    launch: Any = launch_of(program)
    machine.run(program, launch)  # nobody comes there
    program = assemble(body.replace("@%p0", "@!%p0"))
    with pytest.raises(Unsupported) as caught:
        machine.run(program, launch)
    assert caught.value.at is not None and caught.value.at.source == Source("kernel.py", 13)
    assert caught.value.warp is not None


@pytest.mark.parametrize("policy", POLICIES)
def test_an_endless_kernel_is_stopped(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MAX_STATEMENTS", 30_000)
    with pytest.raises(Fault, match="30000 instructions") as caught:
        run("\n.loc 1 5 1\n$LOOP: add.u32 %r0, %r0, 1; bra $LOOP;", threads=64, policy=policy)
    assert caught.value.kind == "endless"
    assert caught.value.at is not None and caught.value.at.source == Source("kernel.py", 5)


def test_statements_are_counted() -> None:
    """A branch counts; a loop counts each time; a statement that was taken out does not."""
    program = assemble(
        "mov.u32 %r0, 0;\n$L: add.u32 %r0, %r0, 1; setp.lt.u32 %p0, %r0, 5; @%p0 bra $L; bar.sync 0;", threads=64
    )
    launch: Any = launch_of(program)
    done = machine.run(program, launch)
    assert done.executed == 2 * (1 + 5 * 3 + 1 + 1)
    assert [warp.executed for warp in done.ctas[0].warps] == [18, 18]
    assert machine.run(program.without(4), launch).executed == 2 * 17


# ------------------------------------------------------------------------------------------------ observers
class Everything(Observer):
    """All events as tuples."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []

    def note(self, event: str, warp: Any = None, *details: Any) -> None:
        self.log.append((event, *(() if warp is None else (warp.cta.number, warp.index)), *details))

    def started(self, machine: Any) -> None:
        self.note("started", None, len(machine.ctas))

    def stepping(self, warp: Any, step: Any, mask: Any) -> None:
        self.note("step", warp, step.kind, step.first, len(step.statements), None if mask is None else int(mask.sum()))

    def shared(self, warp: Any, at: Any, addresses: Any, nbytes: int, write: bool) -> None:
        self.note("shared", warp, at.name, len(addresses), nbytes, write)

    def memory(self, warp: Any, at: Any, addresses: Any, nbytes: int, write: bool) -> None:
        self.note("memory", warp, at.name, len(addresses), nbytes, write)

    def fenced(self, warp: Any, at: Any) -> None:
        self.note("fenced", warp, at.opcode)

    def issued(self, warp: Any, operation: Any) -> None:
        self.note("issued", warp, operation.kind, operation.nbytes)

    def executed(self, operation: Any) -> None:
        self.note("executed", operation.warp, operation.kind, operation.done)

    def committed(self, warp: Any, at: Any, group: Any) -> None:
        self.note("committed", warp, group.kind, group.number, len(group.operations))

    def joined(self, warp: Any, at: Any, groups: Any, read: bool) -> None:
        self.note("joined", warp, [group.number for group in groups], read)

    def initialised(self, warp: Any, at: Any, barrier: Any) -> None:
        self.note("initialised", warp, barrier.address, barrier.count)

    def arrived(self, warp: Any, at: Any, barrier: Any, count: int, expected: int) -> None:
        self.note("arrived", warp, count, expected, barrier.pending, barrier.tx)

    def transferred(self, operation: Any, barrier: Any, nbytes: int) -> None:
        self.note("transferred", operation.warp, nbytes, barrier.tx)

    def completed(self, barrier: Any) -> None:
        self.note("completed", None, barrier.cta.number, barrier.phases, barrier.pending)

    def passed(self, warp: Any, at: Any, barrier: Any, parity: int) -> None:
        self.note("passed", warp, parity, barrier.phases)

    def entered(self, warp: Any, at: Any, barrier: Any, threads: int, sync: bool) -> None:
        self.note("entered", warp, barrier.number, threads, sync, barrier.arrived)

    def left(self, warp: Any, at: Any, barrier: Any) -> None:
        self.note("left", warp, barrier.number, barrier.generation)

    def blocked(self, warp: Any, at: Any) -> None:
        self.note("blocked", warp, at.name, type(warp.waiting).__name__)

    def exited(self, warp: Any) -> None:
        self.note("exited", warp, warp.exited)

    def finished(self, cta: Any) -> None:
        self.note("finished", None, cta.number)

    def ended(self, machine: Any) -> None:
        self.note("ended", None, machine.executed > 0)


COPY = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.global.shared::cta.bulk_group"
PIPELINE = f"""
  ld.param.u64 %rd0, [k_param_0]; setp.ge.u32 %p0, %tid.x, 32; @%p0 bra $READY;
  elect.sync _|%p1, -1; @!%p1 bra $READY; mbarrier.init.shared.b64 [{SHARED}], 1; fence.mbarrier_init.release.cluster;
$READY:
  bar.sync 0; @%p0 bra $CONSUMER;
  elect.sync _|%p1, -1; @!%p1 bra $END; mbarrier.arrive.expect_tx.shared.b64 _, [{SHARED}], 32;
  {COPY} [2048], [%rd0], 32, [{SHARED}]; bra $END;
$CONSUMER:
  mbarrier.try_wait.parity.shared.b64 %p2, [{SHARED}], 0; @!%p2 bra $CONSUMER;
  elect.sync _|%p1, -1; @!%p1 bra $END; ld.shared.b32 %r0, [2048]; add.u32 %r0, %r0, 1; st.shared.b32 [2048], %r0;
  fence.proxy.async.shared::cta; {STORE} [%rd0], [2048], 16; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
$END:"""


def pipeline(
    policy: str, seed: int = 0, grid: int = 1, watched: bool = True
) -> tuple[list[tuple[Any, ...]], Any, Machine]:
    watcher, data = Everything(), aligned(np.arange(8, dtype=np.uint32) + 41)
    observers = [watcher] if watched else []
    done = run(PIPELINE, data, threads=64, grid=(grid, 1, 1), policy=policy, seed=seed, observers=observers)
    return watcher.log, data, done


def test_observers_are_told_what_happens_in_order() -> None:
    log, data, _ = pipeline("late")
    assert data.tolist() == [42, 42, 43, 44, 45, 46, 47, 48]
    events = [event for event in log if event[0] != "step"]
    zero, one = (0, 0), (0, 1)
    assert events == [
        ("started", 0),
        ("initialised", *zero, SHARED, 1),
        ("fenced", *zero, "fence.mbarrier_init.release.cluster"),
        ("entered", *zero, 0, 64, True, 0),
        ("blocked", *zero, "bar", "NamedBarrierWait"),
        ("entered", *one, 0, 64, True, 32),
        ("left", *one, 0, 1),
        ("blocked", *one, "mbarrier", "MBarrierWait"),
        ("left", *zero, 0, 1),
        ("arrived", *zero, 1, 32, 1, 0),
        ("issued", *zero, "bulk.load", 32),
        ("exited", *zero, True),
        ("transferred", *zero, 32, 32),
        ("completed", 0, 1, 1),
        ("executed", *zero, "bulk.load", True),
        ("passed", *one, 0, 1),
        ("shared", *one, "ld", 1, 4, False),
        ("shared", *one, "st", 1, 4, True),
        ("fenced", *one, "fence.proxy.async.shared::cta"),
        ("issued", *one, "bulk.store", 16),
        ("committed", *one, "bulk", 0, 1),
        ("blocked", *one, "cp", "BulkWait"),
        ("blocked", *one, "cp", "BulkWait"),
        ("executed", *one, "bulk.store", True),
        ("joined", *one, [0], False),
        ("exited", *one, True),
        ("finished", 0),
        ("ended", True),
    ]


def test_every_step_is_told_once_before_it_is_done() -> None:
    """Steps of one warp are in the order of the program, and a wait is one step however often it is tried."""
    log, _, done = pipeline("late")
    steps = [(event[2], event[3], event[4], event[5]) for event in log if event[0] == "step"]
    first_warp = [kind for warp, kind, _, _ in steps if warp == 0]
    assert first_warp == [
        "math",
        "elect.sync",
        "mbarrier.init",
        "fence",
        "bar.sync",
        "elect.sync",
        "mbarrier.arrive",
        "cp.async.bulk",
    ]
    assert [kind for warp, kind, _, _ in steps if warp == 1].count("mbarrier.try_wait") == 1
    for _, kind, first, count in steps:
        names = [statement.name for statement in done.program.statements[first : first + count]]
        assert count >= 1 if kind == "math" else (count == 1 and kind.startswith(names[0]))
    assert log[0][0] == "started" and log[-1][0] == "ended"
    assert log.index(("step", 0, 0, "bar.sync", *log_step(log, "bar.sync"))) < log.index(
        ("entered", 0, 0, 0, 64, True, 0)
    )


def log_step(log: list[tuple[Any, ...]], kind: str) -> tuple[Any, ...]:
    return next(event[4:] for event in log if event[0] == "step" and event[3] == kind)


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_seeds_give_equal_runs(policy: str) -> None:
    first, again, other = (pipeline(policy, seed, grid=5)[0] for seed in (7, 7, 8))
    assert first == again
    assert (first != other) == (policy not in ("early", "late"))


def test_watching_changes_nothing() -> None:
    """A kernel with a race: its result is the schedule's, the same with observers and without."""
    body = (
        GLOBAL_INDEX
        + """
      ld.param.u64 %rd0, [k_param_0]; mov.u32 %r5, 0;
    $LOOP: ld.global.b32 %r2, [%rd0]; mad.lo.u32 %r2, %r2, 33, %r0; st.global.b32 [%rd0], %r2;
      add.u32 %r5, %r5, 1; setp.lt.u32 %p0, %r5, 9; @%p0 bra $LOOP;"""
    )
    results = {}
    for seed in range(4):
        for watched in (False, True):
            data = aligned(np.zeros(1, np.uint32))
            run(body, data, grid=(4, 1, 1), policy="random", seed=seed, observers=[Everything()] if watched else [])
            results[seed, watched] = int(data[0])
    assert all(results[seed, False] == results[seed, True] for seed in range(4))
    assert len(set(results.values())) > 1


def test_observers_of_a_run_that_fails_are_not_told_that_it_ended() -> None:
    watcher = Everything()
    with pytest.raises(Fault):
        run("bar.sync 0; st.global.b32 [%rd0], %r0;", threads=64, observers=[watcher, Observer()])
    assert "ended" not in {event[0] for event in watcher.log}
    assert watcher.log[-1][0] == "memory"  # told before it is done


def test_what_a_step_reads_and_writes() -> None:
    """Of a run of math, reads are what is not written before; registers are bits, in the order of declaration."""
    registers = "{%r1, %r2, %r3, %r4}, {%r5, %r6, %r7, %r8}"
    mma = f"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {registers}, %rd1, %p1, 1, 1, 0;"
    program = assemble(
        f"""
      add.u32 %r1, %r2, %r3; add.u32 %r4, %r1, %tid.x; setp.lt.and.u32 %p1, %r5, %r4, !%p2;
      ld.shared.v2.b32 {{%r1, %r2}}, [%r3+8]; st.global.b32 [%rd1], %r4; shfl.sync.bfly.b32 %r1|%p1, %r2, %r3, 31, -1;
      atom.global.add.u32 %r1, [%rd1], %r2; mbarrier.try_wait.parity.shared.b64 %p1, [%r1], %r2; {mma}
      {{ .reg .pred P1; elect.sync _|P1, -1; }} wgmma.wait_group.sync.aligned 0;"""
    )
    code = Code(program)
    names = list(program.registers)
    steps = [step for first in code.starts for step in code.block(first).steps]

    def named(bits: int) -> set[str]:
        return {name for i, name in enumerate(names) if bits >> i & 1}

    assert [(step.kind, named(step.reads), named(step.writes)) for step in steps] == [
        ("math", {"%r2", "%r3", "%r5", "%p2"}, {"%r1", "%r4", "%p1"}),
        ("ld", {"%r3"}, {"%r1", "%r2"}),
        ("st", {"%rd1", "%r4"}, set()),
        ("shfl.sync", {"%r2", "%r3"}, {"%r1", "%p1"}),
        ("atom", {"%rd1", "%r2"}, {"%r1"}),
        ("mbarrier.try_wait", {"%r1", "%r2"}, {"%p1"}),
        ("wgmma.mma_async", {*(f"%r{i}" for i in range(1, 9)), "%rd1", "%p1"}, {f"%r{i}" for i in range(1, 5)}),
        ("elect.sync", set(), {names[-1]}),
        ("wgmma.wait_group", set(), set()),
    ]
    assert [step.first for step in steps] == [0, *range(3, 11)]


# ------------------------------------------------------------------------------------------------ codes
def outcome(code: Any, data: Any) -> tuple[Any, ...]:
    """Events, result and fault of a run."""
    data = aligned(data)
    watcher = Everything()
    launch: Any = launch_of(code.program, [data], block=(64, 1, 1))
    try:
        machine.run(code, launch, policy="random", seed=2, observers=[watcher])
    except Fault as fault:
        return watcher.log, data.tolist(), fault.kind, str(fault.at), fault.warp and fault.warp.index
    return watcher.log, data.tolist(), None


def ends(code: Code) -> dict[int, int]:
    """First statement of each block -> the one behind its last."""
    return dict(zip(code.starts, [*code.starts[1:], len(code.program.statements)], strict=True))


def test_a_code_for_a_changed_program_shares_the_other_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every statement taken out in turn: the blocks without it are the same objects, and the run is that of a fresh
    code."""
    monkeypatch.setattr(machine, "MAX_STATEMENTS", 5_000)  # without its try_wait, a loop around one has no end
    data = np.arange(8, dtype=np.uint32) + 41
    program = assemble(PIPELINE, [data], threads=64)
    code = Code(program)
    code.check()
    outcomes = set()
    for index in range(len(program.statements) - 1):
        changed = program.without(index)
        shared, fresh = code.with_program(changed), Code(changed)
        assert shared.program is changed and code.program is program
        for first, end in ends(fresh).items():
            alike = ends(code).get(first) == end and not first <= index < end
            assert (shared.block(first) is code._blocks.get(first)) == alike
        got = outcome(shared, data)
        expected = outcome(fresh, data)
        assert [str(x) for x in got[1:]] == [str(x) for x in expected[1:]] and got[0] == expected[0]
        outcomes.add(str(got[1:]))
    assert len(outcomes) > 5


def test_a_code_serves_many_runs() -> None:
    data = aligned(np.arange(8, dtype=np.uint32) + 41)
    code = Code(assemble(PIPELINE, [data], threads=64))
    launch: Any = launch_of(code.program, [data], block=(64, 1, 1))
    for i in range(3):
        machine.run(code, launch, policy="random", seed=i)
        assert data[0] == 42 + i


def test_a_replaced_statement_is_executed() -> None:
    program = assemble("mov.u32 %r0, 5; add.u32 %r0, %r0, 1;" + store(0, "%r0", 4), [np.zeros(LANES, np.uint32)])
    out = np.zeros(LANES, np.uint32)
    launch: Any = launch_of(program, [out])
    code = Code(program)
    machine.run(code, launch)
    assert set(out.tolist()) == {6}
    changed = program.replaced(1, replace(program.statements[1], operands=("%r0", "%r0", "10")))
    machine.run(code.with_program(changed), launch)
    assert set(out.tolist()) == {15}
    machine.run(code, launch)
    assert set(out.tolist()) == {6}
