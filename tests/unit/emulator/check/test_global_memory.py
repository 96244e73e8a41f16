"""Order in global memory: sums of several CTAs, counters between them, and what an earlier kernel has written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fa3.emulator import machine
from fa3.emulator.check import Names, Report
from fa3.emulator.check.composite import Checks
from fa3.emulator.cuda_abi import PROGRAMMATIC
from fa3.emulator.faults import Fault
from fa3.emulator.program import Program

from ..assembler import aligned, assemble, launch_of
from .kernels import changed

CTAS, WORDS = 3, 32
ARGUMENTS = [aligned(np.zeros(WORDS, np.float32)), aligned(np.zeros(4, np.uint32))]
SCHEDULES = (("early", 0), ("late", 0), *(("random", seed) for seed in range(8)))
"""A look at a counter that comes late enough sees what it need not: only some schedules show that nobody waits."""


class SumNames(Names):
    earlier = frozenset(("sums", "counter"))
    sums = frozenset(("sums",))
    counters = frozenset(("counter",))
    written_once = frozenset()

    def __init__(self, ordered: bool = True) -> None:
        super().__init__("k")
        self.ordered = ordered


ADDRESSES = """
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, %ctaid.x;
  ld.param.u64 %rd1, [k_param_0];
  ld.param.u64 %rd2, [k_param_1];
  mov.u32 %r9, __dynamic_shmem__0;
  griddepcontrol.wait;
  setp.ne.u32 %p1, %r1, 0;
"""
TURN = """
  @%p1 bra MET;
AGAIN:
  ld.acquire.gpu.global.b32 %r3, [%rd2];
  setp.lt.u32 %p2, %r3, %r2;
  @%p2 bra AGAIN;
MET:
  bar.sync 0;
"""
COUNT = """
  @%p1 bra END;
  red.release.gpu.global.add.u32 [%rd2], 1;
END:
"""
BY_THREADS = (
    ADDRESSES
    + TURN
    + """
  mul.wide.u32 %rd3, %r1, 4;
  add.s64 %rd3, %rd1, %rd3;
  mov.b32 %r4, 0;
  red.relaxed.gpu.global.add.f32 [%rd3], %r4;
  bar.sync 1, 32;
"""
    + COUNT
)
"""CTA after CTA, every thread adds to a word; one thread counts for all."""

IN_BULK = (
    ADDRESSES
    + """
  shl.b32 %r5, %r1, 2;
  add.s32 %r5, %r9, %r5;
  mov.b32 %r4, 0;
  st.shared.b32 [%r5], %r4;
  fence.proxy.async.shared::cta;
"""
    + TURN
    + """
  @%p1 bra END;
  cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r9], 128;
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group 0;
  red.release.gpu.global.add.u32 [%rd2], 1;
END:
"""
)
"""Likewise, by one bulk reduction of the thread that counts."""
BOTH = pytest.mark.parametrize("body", [BY_THREADS, IN_BULK], ids=["threads", "bulk"])


def check(body: str, ordered: bool = True, attributes: Any = None, names: Names | None = None) -> Report:
    return check_program(lambda: assemble(body, ARGUMENTS), ordered, attributes, names)


def check_program(
    make: Callable[[], Program], ordered: bool = True, attributes: Any = None, names: Names | None = None
) -> Report:
    """What the checkers find in a program with two arguments, the sums and the counter, under several schedules."""
    program, report = make(), Report()
    for policy, seed in SCHEDULES:
        sums, counter = aligned(np.zeros(WORDS, np.float32)), aligned(np.zeros(4, np.uint32))
        launch: Any = launch_of(program, [sums, counter], (CTAS, 1, 1), 1024)
        launch.allocations[0].name, launch.allocations[1].name = "sums", "counter"
        launch.attributes = {PROGRAMMATIC: (1,)} if attributes is None else attributes
        checks = Checks(names or SumNames(ordered))
        try:
            machine.run(program, launch, policy=policy, seed=seed, observers=[checks], resident=CTAS)
        except Fault as fault:
            checks.stopped(fault)
        for finding in checks.findings:
            report.add(finding)
    return report


@BOTH
def test_in_turn(body: str) -> None:
    assert not check(body)


@BOTH
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("@%p2 bra AGAIN;", ""),  # nobody waits
        ("setp.lt.u32 %p2, %r3, %r2;", "add.s32 %r6, %r3, 1;\n  setp.lt.u32 %p2, %r6, %r2;"),  # for one too few
        ("red.release.gpu", "red.relaxed.gpu"),
        ("red.release.gpu", "red.release.cta"),
        ("ld.acquire.gpu", "ld.relaxed.gpu"),
    ],
)
def test_out_of_turn(body: str, old: str, new: str) -> None:
    report = check(changed(body, old, new))
    assert report.kinds == {"sums in no fixed order"}
    assert all(finding.subject == "sums" and finding.other for finding in report)
    assert not check(changed(body, old, new), ordered=False), "whoever does not mind their order may do so"


def test_counted_before_the_sum_is_complete() -> None:
    """A wait for the reads is no wait for the sums."""
    for old, new in (("wait_group 0", "wait_group.read 0"), ("  cp.async.bulk.wait_group 0;\n", "")):
        assert "sums in no fixed order" in check(changed(IN_BULK, old, new)).kinds


def test_counted_before_the_other_lanes_have_added() -> None:
    assert check(changed(BY_THREADS, "  bar.sync 1, 32;\n", "")).kinds == {"sums in no fixed order"}


def test_a_fence_hands_over_as_well() -> None:
    fenced = changed(BY_THREADS, "red.release.gpu", "fence.acq_rel.gpu;\n  red.relaxed.gpu")
    assert not check(fenced)


@BOTH
def test_a_store_among_sums(body: str) -> None:
    """The second CTA stores, in its turn or not."""
    reduction = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"
    adds, stores = ("red.relaxed.gpu.global.add.f32", "st.global.f32")
    if body is IN_BULK:
        adds, stores = reduction, "cp.async.bulk.global.shared::cta.bulk_group"
    stored = changed(body, adds, stores)
    assert not check(stored) and not check(stored, ordered=False)
    assert "race in global memory" in check(changed(stored, "@%p2 bra AGAIN;", ""), ordered=False).kinds


# ------------------------------------------------------------------------------------------------ dependent launches
@BOTH
def test_a_kernel_that_overtakes_the_one_before(body: str) -> None:
    report = check(changed(body, "  griddepcontrol.wait;\n", ""))
    assert report.kinds == {"grid dependency"} and {f.subject for f in report} == {"sums", "counter"}


def test_the_wait_of_one_thread_serves_whom_it_meets() -> None:
    late = changed(IN_BULK, "  griddepcontrol.wait;\n", "").replace("AGAIN:", "  griddepcontrol.wait;\nAGAIN:")
    assert not check(late)
    alone = changed(late, "  @%p1 bra END;\n  cp", "  setp.ne.u32 %p1, %r1, 1;\n  @%p1 bra END;\n  cp")
    assert not check(alone), "the barrier tells the other thread"
    assert check(changed(alone, "  bar.sync 0;\n", "")).kinds >= {"grid dependency"}


def test_without_the_attribute_nothing_overtakes() -> None:
    assert not check(changed(IN_BULK, "  griddepcontrol.wait;\n", ""), attributes={})


def test_nothing_is_said_about_what_nobody_knows() -> None:
    assert not check(changed(BY_THREADS, "@%p2 bra AGAIN;", ""), names=Names("k"))
