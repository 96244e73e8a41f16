"""mbarriers: initialisation, counts, bytes, phases, and what is left of them."""

from __future__ import annotations

from typing import ClassVar

import pytest

from fa3.emulator.check import Names
from fa3.emulator.check.names import BarrierPlan

from .kernels import ANNOUNCE, BARRIER, LOAD, RELEASE, RING, changed, check_ring, wait

CTA_BARRIER = "  bar.sync 0;\n"
INIT_FENCE = "  fence.mbarrier_init.release.cluster;\n"


class Planned(Names):
    """The ring of `kernels`: warp 0 fills a stage of 128 bytes, warp 1 frees it."""

    plans: ClassVar = {
        BARRIER: BarrierPlan("k.full[0]", "k", 1, frozenset((0,)), ("load",), 128),
        BARRIER + 8: BarrierPlan("k.empty[0]", "k", 1, frozenset((1,)), ("math0",), 0),
    }

    def plan(self, address: int) -> BarrierPlan | None:
        return self.plans.get(address)


NAMES = Planned("k")


def test_right_ring_and_its_plan() -> None:
    assert not check_ring(names=NAMES, seeds=range(3))


# ------------------------------------------------------------------------------------------------ initialisation
def test_cta_barrier_missing() -> None:
    report = check_ring(changed(RING, CTA_BARRIER), policies=["late", "early"])
    assert "barrier not visible" in report.kinds, str(report)


def test_init_fence_missing() -> None:
    """The copy engine may not see the initialisation; for the threads the CTA's barrier is enough."""
    (finding,) = check_ring(changed(RING, INIT_FENCE), policies=["late"])
    assert finding.kind == "barrier not visible" and finding.at.ptx.startswith("cp.async.bulk")


def test_proxy_fence_for_init_fence() -> None:
    assert not check_ring(changed(RING, INIT_FENCE, "  fence.proxy.async.shared::cta;\n"))


def test_initialised_twice() -> None:
    init = "  mbarrier.init.shared.b64 [%r4+8], 1;\n"
    report = check_ring(changed(RING, init, init * 2))
    assert report.kinds == {"barrier initialised twice"}, str(report)


def test_never_initialised() -> None:
    report = check_ring(changed(RING, "  mbarrier.init.shared.b64 [%r4+8], 1;\n"), names=NAMES)
    (finding,) = report
    assert finding.kind == "mbarrier" and "k.empty[0]" in finding.happened


@pytest.mark.parametrize("count", [2, 3])
def test_wrong_count(count: int) -> None:
    wrong = changed(RING, "mbarrier.init.shared.b64 [%r4+8], 1;", f"mbarrier.init.shared.b64 [%r4+8], {count};")
    report = check_ring(wrong, names=NAMES)
    assert {"arrival count", "deadlock"} <= report.kinds
    assert check_ring(wrong).kinds == {"deadlock"}  # without a plan nobody knows the right count


# ------------------------------------------------------------------------------------------------ arrivals and bytes
@pytest.mark.parametrize("policy", ["early", "late", "random"])
def test_more_warps_than_the_barrier_counts(policy: str) -> None:
    """Two warps free a stage, and the barrier counts one of them: the other's arrival is for the next phase, or not."""
    report = check_ring(threads=96, policies=[policy])
    assert report.kinds & {"barrier phase", "mbarrier arrivals"}, str(report)


def test_phase_complete_without_one_of_its_warps() -> None:
    """Two warps free a stage whose barrier counts one arrival."""
    plans = {**Planned.plans, BARRIER + 8: BarrierPlan("k.empty[0]", "k", 2, frozenset((1, 2)), ("math0",), 0)}
    names = type("Two", (Planned,), {"plans": plans})("k")
    report = check_ring(names=names, threads=96)
    assert {"arrival count", "early phase"} <= report.kinds, str(report)
    assert {finding.subject for finding in report.of("early phase")} == {"k"}


@pytest.mark.parametrize("nbytes", [112, 144, 256])
def test_wrong_bytes(nbytes: int) -> None:
    wrong = changed(RING, ANNOUNCE, ANNOUNCE.replace("128", str(nbytes)))
    report = check_ring(wrong, names=NAMES)
    assert {"transaction bytes", "deadlock"} <= report.kinds, str(report)
    (finding,) = [found for found in check_ring(wrong).of("deadlock") if "[%r4]" in found.at.ptx]
    assert "bytes" in finding.happened


def test_bytes_of_one_load_for_two() -> None:
    """The phase is complete when the first one has come."""
    two = changed(RING, LOAD, f"{LOAD}\n  {LOAD.replace('+128]', '+256]')}")
    assert "transaction bytes" in check_ring(two, policies=["late"]).kinds
    both = changed(two, ANNOUNCE, ANNOUNCE.replace("128", "256"))
    assert not check_ring(both)


def test_more_bytes_than_a_barrier_counts() -> None:
    report = check_ring(changed(RING, ANNOUNCE, ANNOUNCE.replace("128", str(1 << 20))))
    assert "transaction bytes" in report.kinds


# ------------------------------------------------------------------------------------------------ phases
def test_wait_for_one_of_several_phases() -> None:
    """A third warp waits once, for parity 1: for phase 1, or 3, or the one before all."""
    watch = "  setp.eq.u32 %p6, %r2, 2;\n  mov.b32 %r10, 1;\n  @%p6 bra WATCH;\n  mov.b32 %r10, 0;\n"
    body = changed(RING, "  setp.ne.u32 %p3, %r2, 0;\n", f"{watch}  setp.ne.u32 %p3, %r2, 0;\n")
    spin = "  add.u32 %r12, %r12, 1;\n  setp.lt.u32 %p4, %r12, 300;\n  @%p4 bra WATCH;\n"
    body = changed(body, "END:", f"  bra END;\nWATCH:\n{spin}{wait('WATCHED', '%r4', '%r10')}\nEND:")
    (finding,) = check_ring(body, threads=96, policies=["starve:2-2"], seeds=range(10))
    assert finding.kind == "barrier phase" and finding.at.warp == 2


def test_left_mid_phase() -> None:
    """An arrival after the last lap, for a phase that nobody completes."""
    body = changed(RING, "END:", "END:\n  setp.ne.u32 %p7, %r1, 32;\n  @%p7 bra OUT;\n  " + RELEASE + "\nOUT:")
    body = changed(body, "mbarrier.init.shared.b64 [%r4+8], 1;", "mbarrier.init.shared.b64 [%r4+8], 2;")
    body = changed(body, f"  {RELEASE}\nRELEASED", f"  {RELEASE.replace(', 1;', ', 2;')}\nRELEASED")
    report = check_ring(body)
    (finding,) = report.of("barrier left mid-phase")
    assert "1 of 2 arrivals" in finding.happened


def test_bytes_left() -> None:
    """Bytes are announced at the end that nobody brings; or brought that nobody announced."""
    missing, more = (
        changed(RING, "  bra END;\n", f"  @%p2 bra END;\n  {what}\n  bra END;\n") for what in (ANNOUNCE, LOAD)
    )
    (finding,) = check_ring(missing).of("barrier left mid-phase")
    assert "128 bytes missing" in finding.happened
    (finding,) = check_ring(more, policies=["early"]).of("barrier left mid-phase")
    assert "0 of 1 arrivals and 128 bytes too many" in finding.happened
