"""The recorder on small programs in the real machine: what it notes, and that the order of the run does not matter."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import fa3
from fa3.emulator.faults import Unsupported
from fa3.emulator.timing import replay
from fa3.emulator.timing.events import Access, Arrive, Branch, Fence, Join, Math, Trace, Wait
from fa3.emulator.timing.labels import label
from fa3.emulator.timing.recorder import PREDICATED, Recorder, _bank_passes
from fa3.sass.listing import Source

from ..assembler import run

HANDSHAKE = """
  mov.u32 %r0, %tid.x;
  shr.u32 %r1, %r0, 5;
  mov.u32 %r2, __dynamic_shmem__0;
  setp.ne.s32 %p0, %r0, 0;
  @%p0 bra INITIALISED;
  mov.b32 %r3, 1;
  mbarrier.init.shared.b64 [%r2], %r3;
INITIALISED:
  bar.sync 0;
  setp.ne.s32 %p1, %r1, 0;
  @%p1 bra CONSUMER;
  ex2.approx.ftz.f32 %r4, %r4;
  ex2.approx.ftz.f32 %r5, %r5;
  elect.sync %r6|%p2, -1;
  not.pred %p3, %p2;
  @%p3 bra ARRIVED;
  st.shared.b32 [%r2+16], %r0;
  mbarrier.arrive.shared.b64 %rd0, [%r2], 1;
ARRIVED:
  ret;
CONSUMER:
WAIT:
  mbarrier.try_wait.parity.shared.b64 %p4, [%r2], 0;
  @%p4 bra DONE;
  bra WAIT;
DONE:
  fence.proxy.async.shared::cta;
  ld.shared.b32 %r7, [%r2+16];
"""
BARRIER = 1024


def record(body: str, *arguments: np.ndarray, policy: str = "early", **options: int) -> Recorder:
    recorder = Recorder()
    run(body, *arguments, policy=policy, observers=[recorder], **options)
    return recorder


def kinds(trace: Trace, warp: int) -> Counter[str]:
    return Counter(op.kind for event in trace.warps[warp] if isinstance(event, Math) for op in event.code.ops)


@pytest.fixture(scope="module")
def handshake() -> Trace:
    return record(HANDSHAKE, threads=64).traces[0]


def test_barriers_are_noted_with_phase_and_count(handshake):
    assert handshake.counts == {BARRIER: 1}
    waits = [(w, e.barrier, e.phases) for w in (0, 1) for e in handshake.warps[w] if isinstance(e, Wait)]
    arrivals = [(w, e.barrier, e.arrivals) for w in (0, 1) for e in handshake.warps[w] if isinstance(e, Arrive)]
    assert (waits, arrivals) == ([(1, BARRIER, 1)], [(0, BARRIER, 1)])
    joins = [[e for e in warp if isinstance(e, Join)] for warp in handshake.warps]
    assert [[(e.number, e.threads, e.waits) for e in warp] for warp in joins] == [[(0, 64, True)]] * 2


def test_instructions_are_noted_for_the_warp_that_executes_them(handshake):
    assert kinds(handshake, 0)["mufu"] == 2
    assert kinds(handshake, 1)["mufu"] == 0
    assert any(isinstance(event, Fence) for event in handshake.warps[1])


def test_loads_wait_and_stores_do_not(handshake):
    (store,) = [event for event in handshake.warps[0] if isinstance(event, Access)]
    (load,) = [event for event in handshake.warps[1] if isinstance(event, Access)]
    assert (store.waits, load.waits) == (False, True)
    assert store.wavefronts == load.wavefronts == 1


def test_short_branches_are_predicates_and_long_ones_are_not():
    work = "  add.u32 %r1, %r1, 1;\n"

    def branches(length: int) -> int:
        body = f"  mov.u32 %r0, %tid.x;\n setp.gt.u32 %p0, %r0, 99;\n @%p0 bra OVER;\n{length * work}OVER:\n{work}"
        return sum(isinstance(event, Branch) for event in record(body).traces[0].warps[0])

    assert branches(PREDICATED - 1) == 0
    assert branches(PREDICATED + 1) == 1


def test_a_loop_is_a_branch_each_time_around():
    body = """
  mov.b32 %r0, 0;
AGAIN:
  add.u32 %r0, %r0, 1;
  setp.lt.u32 %p0, %r0, 5;
  @%p0 bra AGAIN;
  add.u32 %r1, %r0, %r0;
"""
    trace = record(body).traces[0]
    assert sum(isinstance(event, Branch) for event in trace.warps[0]) == 5
    assert kinds(trace, 0)["alu"] == 2 * 5 + 1


@pytest.mark.parametrize("policy", ["late", "random", "starve:0-0", "starve:1-1"])
def test_the_timeline_does_not_depend_on_the_order_of_the_run(handshake, policy):
    other = record(HANDSHAKE, threads=64, policy=policy).traces[0]
    assert replay(other) == replay(handshake)


def test_every_cta_has_a_trace_and_only_the_wanted_ones_are_kept():
    body = "  mov.u32 %r0, %ctaid.x;\n  add.u32 %r1, %r0, 1;\n"
    assert set(record(body, grid=(3, 1, 1)).traces) == {0, 1, 2}
    some = Recorder(only=[1])
    run(body, grid=(3, 1, 1), observers=[some])
    assert set(some.traces) == {1}
    assert some.traces[1].number == 1


def test_atomics_are_noted_once():
    counter = np.zeros(1, np.uint32)
    body = "  ld.param.u64 %rd0, [k_param_0];\n  atom.relaxed.gpu.global.inc.u32 %r0, [%rd0], 1000;\n"
    trace = record(body, counter).traces[0]
    (access,) = [event for event in trace.warps[0] if isinstance(event, Access)]
    assert (access.space, access.waits) == ("atomic", True)


@pytest.mark.parametrize(
    ("addresses", "nbytes", "passes"),
    [
        (4 * np.arange(32), 4, 1),
        (np.zeros(32), 4, 1),  # one word for all
        (128 * np.arange(32), 4, 32),  # one bank for all
        (8 * np.arange(32), 4, 2),
        (16 * np.arange(32), 16, 4),
        (np.zeros(0), 4, 0),
    ],
)
def test_passes_through_the_banks(addresses, nbytes, passes):
    assert _bank_passes(1024 + np.asarray(addresses, np.int64), nbytes) == passes


def test_labels_come_from_file_and_function():
    softmax = Path(fa3.__file__).parent / "kernels/parts/softmax.py"
    lines = softmax.read_text().splitlines()

    def inside(function: str) -> Source:
        return Source(str(softmax), 3 + next(i for i, line in enumerate(lines) if f"def {function}(" in line))

    assert label(inside("finish")) == "epilogue"
    assert label(inside("scale_row")) == "rescale"
    assert label(inside("step")) == "softmax"
    assert label(Source("/not/there/softmax.py", 3)) == "softmax"
    assert label(Source("/not/there/cursor.py", 3)) == label(None) == "control"


def test_clusters_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"no timeline of clusters; this launch has clusters of \(2, 1, 1\)"):
        run("barrier.cluster.arrive; barrier.cluster.wait;", grid=(2, 1, 1), cluster=(2, 1, 1), observers=[Recorder()])
