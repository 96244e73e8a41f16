"""mbarriers, named barriers, deadlocks: against a model of their counters, and in kernels of several warps."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa3.emulator.faults import Fault
from fa3.emulator.machine import Deadlock
from fa3.emulator.observe import Observer
from fa3.emulator.sync import MBarrierWait, NamedBarrierWait
from fa3.sass.listing import Source

from .assembler import LANES, SHARED, aligned, run, store

POLICIES = ["early", "late", "random", "starve:0-0", "starve:1-2"]
BARRIER = SHARED
"""Shared address of the first mbarrier."""


LABELS = itertools.count()


def wait(address: int | str, parity: int | str, name: str) -> str:
    """A loop of try_wait, as compilers write it. Uses %p14."""
    return f"\n$W{name}: mbarrier.try_wait.parity.shared.b64 %p14, [{address}], {parity}, 10000; @!%p14 bra $W{name};\n"


def by_thread(thread: int, body: str) -> str:
    """A body for one thread of the CTA. Uses %p13."""
    label = f"$T{next(LABELS)}"
    return f"setp.ne.u32 %p13, %tid.x, {thread}; @%p13 bra {label};\n{body}\n{label}:\n"


def initialised(*counts: int) -> str:
    """mbarriers for these arrivals at BARRIER, BARRIER + 8, ..., for the whole CTA."""
    inits = "".join(f"mbarrier.init.shared.b64 [{BARRIER + 8 * i}], {count};" for i, count in enumerate(counts))
    return by_thread(0, inits + "fence.mbarrier_init.release.cluster;") + "bar.sync 0;\n"


def located(fault: Fault) -> int | None:
    return fault.at.source.line if fault.at and fault.at.source else None


# ------------------------------------------------------------------------------------------------ mbarriers
class Counters:
    """An mbarrier by its description in the PTX ISA."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.tx = self.phases = 0

    def settle(self) -> None:
        if self.pending == 0 and self.tx == 0:
            self.pending, self.phases = self.count, self.phases + 1

    def arrive(self, count: int, expected: int) -> bool:
        """False if that is too many."""
        if count > self.pending:
            return False
        self.pending, self.tx = self.pending - count, self.tx + expected
        self.settle()
        return True

    def bring(self, nbytes: int) -> None:
        self.tx -= nbytes
        self.settle()


operations = st.one_of(
    st.tuples(st.just("arrive"), st.integers(1, 3)),
    st.tuples(st.just("expect"), st.sampled_from([0, 16, 32])),
    st.tuples(st.just("copy"), st.sampled_from([16, 32])),
    st.tuples(st.just("wait"), st.integers(0, 1)),
)


class Phases(Observer):
    def __init__(self) -> None:
        self.completed_phases: list[int] = []

    def completed(self, barrier: Any) -> None:
        self.completed_phases.append(barrier.phases)


@given(st.integers(1, 4), st.lists(operations, max_size=14))
@settings(max_examples=120)
def test_an_mbarrier_counts_arrivals_and_bytes(count: int, ops: list[tuple[str, int]]) -> None:
    """One thread arrives, announces bytes, copies some (at once, under the policy "early") and waits for a parity."""
    model, body, ends = Counters(count), "", ""
    for i, (kind, n) in enumerate(ops):
        body += f"\n.loc 1 {i + 1} 1\n"
        if kind == "wait":
            body += wait(BARRIER, n, str(i))
            if model.phases & 1 == n:
                ends = "deadlock"
        elif kind == "copy":
            body += f"cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [2048], [%rd0], {n}, [{BARRIER}];\n"
            model.bring(n)
        elif kind == "expect":
            body += f"mbarrier.arrive.expect_tx.shared.b64 _, [{BARRIER}], {n};\n"
            ends = "" if model.arrive(1, n) else "fault"
        else:
            body += f"mbarrier.arrive.shared.b64 _, [{BARRIER}]{f', {n}' if n > 1 else ''};\n"
            ends = "" if model.arrive(n, 0) else "fault"
        if ends:
            break
    data, watcher = aligned(np.zeros(64, np.uint8)), Phases()
    body = f"mbarrier.init.shared.b64 [{BARRIER}], {count}; ld.param.u64 %rd0, [k_param_0]; {body}"
    machine: Any = None
    try:
        machine = run(by_thread(0, body), data, observers=[watcher])
    except Deadlock as deadlock:
        assert ends == "deadlock" and deadlock.warps[0].at.source == Source("kernel.py", i + 1)
    except Fault as fault:
        assert ends == "fault" and fault.kind == "mbarrier arrivals" and located(fault) == i + 1
    else:
        assert not ends
        barrier = machine.ctas[0].mbarriers[BARRIER]
        assert (barrier.phases, barrier.pending, barrier.tx) == (model.phases, model.pending, model.tx)
    assert watcher.completed_phases == list(range(1, model.phases + 1))


@pytest.mark.parametrize("parity", [0, 1])
def test_a_fresh_mbarrier_has_passed_the_odd_phase(parity: int) -> None:
    body = initialised(1) + wait(BARRIER, parity, "A")
    if parity:
        run(body)
    else:
        with pytest.raises(Deadlock):
            run(body)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_lane_of_a_warp_arrives(policy: str) -> None:
    out = np.zeros(64, np.uint32)
    body = (
        initialised(32)
        + f"""
      setp.ge.u32 %p0, %tid.x, 32; @%p0 bra $WAIT;
      mbarrier.arrive.shared.b64 _, [{BARRIER}];
    $WAIT: {wait(BARRIER, 0, "A")} mov.u32 %r0, 1; {store(0, "%r0", 4)}"""
    )
    done = run(body, out, threads=64, policy=policy, seed=1)
    assert done.ctas[0].mbarriers[BARRIER].phases == 1 and out.all()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_all_who_wait_go_on(policy: str, seed: int) -> None:
    """Three warps wait for two phases that warp 0 completes; the second only once they have all seen the first."""
    out = np.zeros((2, 128), np.uint32)
    body = (
        initialised(1, 3)
        + f"""
      setp.ge.u32 %p0, %tid.x, 32; @%p0 bra $CONSUMER;
      st.shared.b32 [2048], 11; {by_thread(0, f"mbarrier.arrive.shared.b64 _, [{BARRIER}];")}
      {wait(BARRIER + 8, 0, "P")} st.shared.b32 [2048], 22;
      {by_thread(0, f"mbarrier.arrive.shared::cta.b64 _, [{BARRIER}];")}
      bra $END;
    $CONSUMER:
      {wait(BARRIER, 0, "A")} ld.shared.b32 %r0, [2048];
      elect.sync _|%p1, -1; @!%p1 bra $SEEN; mbarrier.arrive.shared.b64 _, [{BARRIER + 8}];
    $SEEN: {wait(BARRIER, 1, "B")} ld.shared.b32 %r1, [2048];
      {store(0, "%r0", 4)} {store(1, "%r1", 4)}
    $END:"""
    )
    run(body, out[0], out[1], threads=128, policy=policy, seed=seed)
    assert (out[0, 32:] == 11).all() and (out[1, 32:] == 22).all()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_a_ring_of_two_stages(policy: str, seed: int) -> None:
    """A producer and a consumer warp hand ten numbers over by full and empty mbarriers; parities alternate."""
    body = (
        initialised(1, 1, 1, 1)
        + f"""
      mov.u32 %r0, 0; mov.u32 %r9, 0; shr.u32 %r20, %tid.x, 5; setp.ne.u32 %p0, %r20, 0;
    $LOOP:
      and.b32 %r1, %r0, 1; shr.u32 %r2, %r0, 1; and.b32 %r2, %r2, 1; shl.b32 %r3, %r1, 3;
      add.u32 %r4, %r3, {BARRIER}; add.u32 %r5, %r3, {BARRIER + 16}; shl.b32 %r6, %r1, 4; add.u32 %r6, %r6, 2048;
      xor.b32 %r10, %r2, 1;
      @%p0 bra $CONSUME;
      {wait("%r5", "%r10", "E")} mad.lo.u32 %r7, %r0, %r0, 5; st.shared.b32 [%r6], %r7;
      elect.sync _|%p1, -1; @!%p1 bra $NEXT; mbarrier.arrive.shared.b64 _, [%r4]; bra $NEXT;
    $CONSUME:
      {wait("%r4", "%r2", "F")} ld.shared.b32 %r8, [%r6]; mad.lo.u32 %r9, %r9, 7, %r8; st.shared.b32 [%r6], 0;
      elect.sync _|%p1, -1; @!%p1 bra $NEXT; mbarrier.arrive.shared.b64 _, [%r5];
    $NEXT:
      add.u32 %r0, %r0, 1; setp.lt.u32 %p2, %r0, 10; @%p2 bra $LOOP;
      {store(0, "%r9", 4)}"""
    )
    out = np.zeros(64, np.uint32)
    done = run(body, out, threads=64, policy=policy, seed=seed)
    total = 0
    for i in range(10):
        total = total * 7 + i * i + 5
    assert set(out[32:].tolist()) == {total & 0xFFFFFFFF}
    assert [done.ctas[0].mbarriers[BARRIER + 8 * i].phases for i in range(4)] == [5] * 4


@pytest.mark.parametrize(
    ("statement", "kind", "words"),
    [
        ("mbarrier.arrive.shared.b64 _, [1040]", "mbarrier", "no initialised mbarrier at shared address 1040"),
        ("mbarrier.arrive.expect_tx.shared.b64 _, [1040], 16", "mbarrier", "1040"),
        ("mbarrier.try_wait.parity.shared.b64 %p0, [1040], 0", "mbarrier", "1040"),
        ("mbarrier.init.shared.b64 [1028], 1", "mbarrier", "8-byte aligned"),
        ("mbarrier.init.shared.b64 [1032], 0", "mbarrier", "0 arrivals"),
        (
            "mbarrier.arrive.shared.b64 _, [1024], 3",
            "mbarrier arrivals",
            "3 arrival.s. where the phase waits for 2 of 2",
        ),
        ("mbarrier.init.shared.b64 [8192], 1", "out of bounds", "8192"),
    ],
)
def test_misuse_of_an_mbarrier_is_a_fault(statement: str, kind: str, words: str) -> None:
    with pytest.raises(Fault, match=words) as caught:
        run(initialised(2) + by_thread(0, f".loc 1 77 1\n{statement};"))
    assert (caught.value.kind, located(caught.value)) == (kind, 77)


def test_lanes_that_wait_for_different_phases_are_a_fault() -> None:
    with pytest.raises(Fault, match="several"):
        run(initialised(1) + "and.b32 %r0, %tid.x, 1; mbarrier.try_wait.parity.shared.b64 %p0, [1024], %r0;")


# ------------------------------------------------------------------------------------------------ named barriers
class Visits(Observer):
    """Who enters and leaves named barriers, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int, int]] = []

    def entered(self, warp: Any, at: Any, barrier: Any, threads: int, sync: bool) -> None:
        self.log.append(("sync" if sync else "arrive", warp.index, barrier.number))

    def left(self, warp: Any, at: Any, barrier: Any) -> None:
        self.log.append(("left", warp.index, barrier.number))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_barrier_0_joins_the_whole_cta_again_and_again(policy: str, seed: int) -> None:
    watcher = Visits()
    done = run("bar.sync 0; " * 3, threads=160, policy=policy, seed=seed, observers=[watcher])
    entered, left = dict.fromkeys(range(5), 0), dict.fromkeys(range(5), 0)
    for event, warp, number in watcher.log:
        assert number == 0
        (left if event == "left" else entered)[warp] += 1
        assert max(left.values()) <= min(entered.values())  # nobody leaves before all have entered
        assert entered[warp] - left[warp] in (0, 1)
    assert set(left.values()) == {3} and done.ctas[0].named[0].generation == 3


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_barriers_of_parts_of_a_cta(policy: str, seed: int) -> None:
    """Warps 0 and 1 meet at barrier 2, warps 2 and 3 at barrier 3, each with its number in a register, four times."""
    watcher = Visits()
    body = """
      shr.u32 %r0, %tid.x, 6; add.u32 %r0, %r0, 2; mov.u32 %r1, 64; mov.u32 %r2, 0;
    $LOOP: bar.sync %r0, %r1; add.u32 %r2, %r2, 1; setp.lt.u32 %p0, %r2, 4; @%p0 bra $LOOP;"""
    done = run(body, threads=128, policy=policy, seed=seed, observers=[watcher])
    assert [b.generation for b in done.ctas[0].named] == [0, 0, 4, 4] + [0] * 12
    for barrier, warps in ((2, (0, 1)), (3, (2, 3))):
        count = {(event, warp): 0 for event in ("sync", "left") for warp in range(4)}
        for event, warp, number in watcher.log:
            if number == barrier:
                count[event, warp] += 1
                assert all(count["left", w] <= count["sync", v] for w in warps for v in warps)
        assert [count["left", w] for w in range(4)] == [4 * (w in warps) for w in range(4)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_turns_are_handed_over_by_arrive_and_sync(policy: str, seed: int) -> None:
    """Two warps take turns, six times each: who arrives does not wait, and a barrier serves many generations."""
    body = """
      shr.u32 %r0, %tid.x, 5; xor.b32 %r1, %r0, 1; add.u32 %r2, %r0, 1; add.u32 %r3, %r1, 1; mov.u32 %r5, 0;
      setp.ne.u32 %p0, %r0, 1; @%p0 bra $LOOP; bar.arrive 1, 64;
    $LOOP:
      bar.sync %r2, 64;
      ld.shared.b32 %r6, [2048]; mad.lo.u32 %r6, %r6, 3, %r0; st.shared.b32 [2048], %r6;
      bar.arrive %r3, 64;
      add.u32 %r5, %r5, 1; setp.lt.u32 %p1, %r5, 6; @%p1 bra $LOOP;
      setp.ne.u32 %p0, %r0, 0; @%p0 bra $END; bar.sync 1, 64;
    $END:
      ld.shared.b32 %r6, [2048];""" + store(0, "%r6", 4)
    out = np.zeros(64, np.uint32)
    total = 0
    for turn in range(12):
        total = 3 * total + turn % 2
    run(by_thread(0, "st.shared.b32 [2048], 0;") + "bar.sync 0;" + body, out, threads=64, policy=policy, seed=seed)
    assert out[0] == total


def test_arriving_does_not_wait() -> None:
    done = run("bar.arrive 4, 128; bar.arrive 5, 96;", threads=64)
    assert [(b.arrived, b.expected) for b in done.ctas[0].named[4:6]] == [(64, 128), (64, 96)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("mad.lo.u32 %r0, %warpid, 32, 64; bar.arrive 1, %r0;", "to join (64|96) threads while others wait"),
        ("mad.lo.u32 %r0, %warpid, 32, 64; bar.sync 1, %r0;", "to join (64|96) threads while others wait"),
        ("bar.sync 1, 48;", "48 threads, no multiple of 32"),
        ("bar.sync 1, 0;", "0 threads"),
        ("bar.sync 16, 64;", "barriers 0 to 15"),
        ("mov.u32 %r0, %laneid; bar.sync %r0, 64;", "several"),
    ],
)
def test_misuse_of_a_named_barrier_is_a_fault(body: str, words: str, policy: str) -> None:
    with pytest.raises(Fault, match=words) as caught:
        run(f".loc 1 50 1\n{body}", threads=64, policy=policy)
    assert caught.value.kind in ("named barrier", "divergence") and located(caught.value) == 50


def test_a_barrier_serves_other_counts_in_its_next_generation() -> None:
    body = "bar.sync 1, 128; setp.ge.u32 %p0, %tid.x, 64; @%p0 bra $END; bar.sync 1, 64;\n$END:"
    assert run(body, threads=128).ctas[0].named[1].generation == 2


# ------------------------------------------------------------------------------------------------ deadlocks
@pytest.mark.parametrize("policy", POLICIES)
def test_a_deadlock_names_who_waits_for_what(policy: str) -> None:
    """Warp 0 waits for an mbarrier with bytes missing, warp 1 for a named barrier; warps 2 and 3 have exited."""
    body = (
        initialised(2)
        + f"""
      setp.ge.u32 %p0, %tid.x, 64; @%p0 bra $ARRIVES;
      setp.ge.u32 %p0, %tid.x, 32; @%p0 bra $NAMED;
      {by_thread(0, f"mbarrier.arrive.expect_tx.shared.b64 _, [{BARRIER}], 48;")}
      .loc 1 101 1
      {wait(BARRIER, 0, "A")} ret;
    $NAMED:
      .loc 1 102 1
      bar.sync 7, 64; ret;
    $ARRIVES: nanosleep.u32 5;"""
    )
    with pytest.raises(Deadlock) as caught:
        run(body, threads=128, policy=policy)
    deadlock = caught.value
    assert [warp.index for warp in deadlock.warps] == [0, 1]
    assert [warp.at.source.line for warp in deadlock.warps if warp.at.source] == [101, 102]
    first, second = (warp.waiting for warp in deadlock.warps)
    assert isinstance(first, MBarrierWait) and first.parity == 0 and first.barrier.address == BARRIER
    assert isinstance(second, NamedBarrierWait) and second.barrier.number == 7
    for words in ("warp 0 of CTA 0", "1 of 2 arrivals and 48 bytes", "warp 1 of CTA 0", "32 of 64 threads"):
        assert words in str(deadlock)
    assert "warp 2" not in str(deadlock)


def test_a_deadlock_of_one_cta_is_told_after_the_others_have_finished() -> None:
    out = np.zeros(4, np.uint32)
    body = """
      mov.u32 %r0, %ctaid.x; setp.ne.u32 %p0, %r0, 2; @%p0 bra $ON; bar.sync 1, 64;
    $ON: mov.u32 %r1, 1; mul.wide.u32 %rd0, %r0, 4; ld.param.u64 %rd1, [k_param_0]; add.u64 %rd0, %rd0, %rd1;
      st.global.b32 [%rd0], %r1;"""
    with pytest.raises(Deadlock) as caught:
        run(body, out, grid=(4, 1, 1), resident=2)
    assert [warp.cta.number for warp in caught.value.warps] == [2]
    assert out.tolist() == [1, 1, 0, 1]


# ------------------------------------------------------------------------------------------------ registers, fences
def test_the_register_budget_is_recorded() -> None:
    body = """
      setp.lt.u32 %p0, %tid.x, 64; @%p0 bra $INC; setmaxnreg.dec.sync.aligned.u32 24; ret;
    $INC: setp.lt.u32 %p0, %tid.x, 32; @%p0 bra $END; setmaxnreg.inc.sync.aligned.u32 240;
    $END:"""
    done = run(body, threads=96)
    assert [warp.setmaxnreg for warp in done.ctas[0].warps] == [None, 240, 24]


class Fences(Observer):
    def __init__(self) -> None:
        self.opcodes: list[str] = []

    def fenced(self, warp: Any, at: Any) -> None:
        self.opcodes.append(at.opcode)


def test_fences_are_told_and_hints_do_nothing() -> None:
    fences = ["fence.proxy.async.shared::cta", "fence.mbarrier_init.release.cluster", "membar.gl", "fence.acq_rel.gpu"]
    watcher = Fences()
    hints = "griddepcontrol.wait; prefetch.tensormap [%rd0]; bar.warp.sync -1; griddepcontrol.launch_dependents;"
    done = run("; ".join(fences) + f"; {hints}", observers=[watcher])
    assert watcher.opcodes == fences
    assert done.executed == len(fences) + 4 + 1
    assert len(done.ctas[0].warps) * LANES == 32
