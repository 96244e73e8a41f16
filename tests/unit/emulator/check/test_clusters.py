"""Rings between the CTAs of a cluster: right kernels, and what is found in their wrong twins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fa3.emulator.check import Report

from ..assembler import aligned
from .kernels import EMPTY_WAIT, FULL_WAIT, JOIN, READ, WARP_AND_LANE, changed, check, wait

ALL_POLICIES = ("early", "late", "random", "starve:0-0", "starve:1-1")

PAIR = """
  mov.u32 %r30, %cluster_ctarank;
  xor.b32 %r31, %r30, 1;
  mapa.shared::cluster.u32 %r32, %r4, %r31;
"""
"""%r30 rank, %r31 the rank of the other CTA, %r32 its shared memory."""
START = "  fence.mbarrier_init.release.cluster;\n  barrier.cluster.arrive.relaxed;\n  barrier.cluster.wait;\n"
INITIALISE = f"""
  setp.ne.u32 %p1, %r1, 0;
  @%p1 bra INITIALISED;
  mbarrier.init.shared.b64 [%r4], 1;
  mbarrier.init.shared.b64 [%r4+8], 1;
INITIALISED:
{START}"""
END = "  barrier.cluster.arrive;\n  barrier.cluster.wait;\n"
FILL = "st.shared.b32 [%r22], %r12;"
FENCE = "fence.proxy.async.shared::cta;"
SEND = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r32+256], [%r4+128], 128, [%r32];"
ANNOUNCE = "mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r4], 128;"
RELEASE = "mbarrier.arrive.shared::cluster.b64 _, [%r32+8];"
AGAIN = """
  xor.b32 %r10, %r10, 1;
  add.u32 %r12, %r12, 1;
  setp.lt.u32 %p4, %r12, 4;
"""


def ring(produce: str, announce: str = ANNOUNCE, read: str = READ.replace("128", "256")) -> str:
    """Warp 0 of each CTA sends 128 bytes four times into one stage of the other CTA, whose warp 1 reads them."""
    return f"""{WARP_AND_LANE}{PAIR}{INITIALISE}
  mov.b32 %r10, 0;
  mov.b32 %r12, 0;
  setp.ne.u32 %p2, %r3, 0;
  setp.ne.u32 %p3, %r2, 0;
  shl.b32 %r20, %r3, 2;
  add.u32 %r21, %r20, %r4;
  add.u32 %r22, %r21, 128;
  add.u32 %r23, %r20, %r32;
  @%p3 bra CONSUME;
PRODUCE:
  xor.b32 %r11, %r10, 1;
{EMPTY_WAIT}
  {produce}
SENT:
{AGAIN}
  @%p4 bra PRODUCE;
  bra END;
CONSUME:
  @%p2 bra ANNOUNCED;
  {announce}
ANNOUNCED:
{FULL_WAIT}
  {read}
  {JOIN}
  @%p2 bra RELEASED;
  {RELEASE}
RELEASED:
{AGAIN}
  @%p4 bra CONSUME;
END:
{END}"""


COPIES = ring(f"{FILL}\n  {FENCE}\n  {JOIN}\n  @%p2 bra SENT;\n  {SEND}")
"""Through a buffer of its own, by a copy in the async proxy."""
STORES = ring("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r23+256], %r12, [%r32];")
"""By asynchronous stores."""
ARRIVE = "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r32];"
STORE = "st.shared::cluster.b32 [%r23+256], %r12;"
THREADS = ring(f"{STORE}\n  {JOIN}\n  @%p2 bra SENT;\n  {ARRIVE}", announce="")
"""By stores of threads, and an arrival behind them."""
RINGS = {"copies": COPIES, "stores": STORES, "threads": THREADS}


def check_pair(body: str, *arguments: Any, **options: Any) -> Report:
    return check(body, *arguments, grid=(4, 1, 1), cluster=(2, 1, 1), **options)


@pytest.mark.parametrize("name", RINGS)
def test_right_rings(name: str) -> None:
    report = check_pair(RINGS[name], policies=ALL_POLICIES, seeds=range(4))
    assert not report, str(report)


# ------------------------------------------------------------------------------------------------ starts and ends
@pytest.mark.parametrize("policy", ALL_POLICIES)
@pytest.mark.parametrize("name", RINGS)
def test_ring_without_a_barrier_at_the_end(name: str, policy: str) -> None:
    """The last releases meet a CTA that may be gone, under every schedule."""
    report = check_pair(changed(RINGS[name], END), policies=[policy])
    assert report.kinds == {"exited CTA"}, str(report)
    release = next(finding for finding in report if finding.at.ptx == RELEASE.strip(";"))
    assert release.at.rank is not None and f"(warp 1) of CTA rank {release.at.rank} at" in str(release)
    assert f"CTA rank {1 - release.at.rank} " in release.happened


def test_a_relaxed_barrier_at_the_end_hands_nothing_over() -> None:
    assert check_pair(changed(COPIES, END, END.replace("arrive", "arrive.relaxed"))).kinds == {"exited CTA"}


def test_who_waits_for_the_last_release_needs_no_barrier_at_the_end() -> None:
    """Each producer waits once more for the stage to be free."""
    drained = changed(COPIES, "  @%p4 bra PRODUCE;\n", f"  @%p4 bra PRODUCE;\n{wait('DRAIN', '%r4+8', '1')}")
    report = check_pair(changed(drained, END), seeds=range(4))
    assert not report, str(report)


@pytest.mark.parametrize("policy", ALL_POLICIES)
@pytest.mark.parametrize("name", RINGS)
def test_ring_without_a_barrier_at_the_start(name: str, policy: str) -> None:
    """Either the barrier does not exist yet, or nothing says so."""
    kinds = check_pair(changed(RINGS[name], START, "bar.sync 0;"), policies=[policy]).kinds
    assert kinds & {"barrier not visible", "CTA not started", "mbarrier"}, kinds


def test_store_into_a_cta_that_may_not_have_started() -> None:
    body = f"{WARP_AND_LANE}{PAIR}\n  st.shared::cluster.b32 [%r32+128], %r30;\n{END}"
    report = check_pair(body, threads=32, policies=["early", "random"])
    assert report.kinds == {"CTA not started"}, str(report)
    right = changed(body, "  st.shared::cluster", f"{END}  st.shared::cluster")
    assert not check_pair(right, threads=32)


def test_start_without_the_fence_of_the_initialisation() -> None:
    assert "barrier not visible" in check_pair(changed(COPIES, "  fence.mbarrier_init.release.cluster;\n")).kinds


# ------------------------------------------------------------------------------------------------ arrivals
@pytest.mark.parametrize("name", RINGS)
def test_ring_without_a_release(name: str) -> None:
    """The deadlock names both CTAs."""
    report = check_pair(changed(RINGS[name], RELEASE))
    assert "deadlock" in report.kinds
    texts = [finding.happened for finding in report.of("deadlock")]
    assert any("of CTA rank 0 waits for phase" in text or "of CTA rank 1 waits for phase" in text for text in texts)


def test_deadlock_names_who_should_come_from_the_other_cta() -> None:
    """Rank 1 stops releasing after three times."""
    stop = "setp.eq.u32 %p5, %r30, 1;\n  setp.gt.and.u32 %p5, %r12, 1, %p5;\n  @%p5 bra RELEASED;\n  " + RELEASE
    (finding, *_) = check_pair(changed(COPIES, RELEASE, stop), policies=["random"]).of("deadlock")
    assert "warpgroup 0 (warp 0) of CTA rank 0 waits for phase 2 of the mbarrier" in finding.happened
    assert "of CTA rank 0 (parity 0): it lacks 1 of 1 arrival" in finding.happened
    assert "warpgroup 0 (warp 1) of CTA rank 1 should come, but waits for" in finding.happened


def test_a_warp_that_misses_the_clusters_barrier() -> None:
    body = f"""{WARP_AND_LANE}{PAIR}
  setp.eq.u32 %p1, %r30, 0;
  setp.eq.and.u32 %p1, %r2, 1, %p1;
  @!%p1 bra MEET;
  bar.sync 1, 64;
MEET:
{END}"""
    findings = check_pair(body).of("deadlock")
    assert any("waits at the cluster's barrier" in finding.happened for finding in findings)
    assert any("(warp 1) of CTA rank 0 should come, but waits at named barrier 1" in f.happened for f in findings)


# ------------------------------------------------------------------------------------------------ races
UNORDERED = {"overwritten while read", "read before it arrived", "written twice at once"}


@pytest.mark.parametrize("policy", ALL_POLICIES)
@pytest.mark.parametrize("name", RINGS)
@pytest.mark.parametrize("missing", [EMPTY_WAIT, FULL_WAIT], ids=["empty", "full"])
def test_ring_without_a_wait(name: str, missing: str, policy: str) -> None:
    """As a race, or by the phases that the CTAs took for one another. (Where the producer arrives by itself and never
    waits, the consumer may miss phases.)"""
    kinds = check_pair(changed(RINGS[name], missing), policies=[policy]).kinds
    assert kinds & (UNORDERED | {"barrier phase", "mbarrier arrivals"}) or kinds == {"deadlock"}, kinds
    assert kinds != {"deadlock"} or (name, missing) == ("threads", EMPTY_WAIT)


def test_both_sides_of_a_race_are_named_with_their_ctas() -> None:
    """The stage is released before it was read."""
    read = READ.replace("128", "256")
    early = changed(changed(COPIES, f"  {RELEASE}\n"), f"  {read}", f"@%p2 bra KEPT;\n  {RELEASE}\nKEPT:\n  {read}")
    (finding,) = check_pair(early).of("overwritten while read")
    assert finding.other is not None and {finding.at.rank, finding.other.rank} == {0, 1}
    assert "of CTA rank 0" in str(finding) and "of CTA rank 1" in str(finding)


def test_release_by_a_lane_alone() -> None:
    report = check_pair(changed(STORES, JOIN))
    assert report.kinds == {"overwritten while read"}, str(report)


def test_copy_of_what_threads_wrote_without_a_proxy_fence() -> None:
    assert check_pair(changed(COPIES, FENCE)).kinds == {"no proxy fence"}


def test_buffer_filled_again_while_it_is_copied_to_the_other_cta() -> None:
    """The stage of the other CTA is free, but the sender's own buffer may still be read."""
    early = changed(COPIES, f"{EMPTY_WAIT}\n  {FILL}", f"{FILL}\n{EMPTY_WAIT}")
    report = check_pair(early)
    assert report.kinds == {"overwritten while read"}, str(report)


@pytest.mark.parametrize(
    ("arrival", "kinds"),
    [
        (ARRIVE, set()),
        (ARRIVE.replace(".release.cluster", ""), {"read before it arrived"}),
        (ARRIVE.replace(".release.cluster", ".release.cta"), {"read before it arrived"}),
        (ARRIVE.replace("release", "relaxed"), {"read before it arrived"}),
        ("fence.acq_rel.cluster;\n  " + ARRIVE.replace("release", "relaxed"), set()),
        ("fence.acq_rel.cluster;\n  " + ARRIVE.replace(".release.cluster", ""), set()),
        ("fence.acq_rel.cta;\n  " + ARRIVE.replace("release", "relaxed"), {"read before it arrived"}),
    ],
)
def test_what_an_arrival_at_another_cta_hands_over(arrival: str, kinds: set[str]) -> None:
    """Stores of threads into another CTA need release semantics of the cluster's scope."""
    found = check_pair(changed(THREADS, ARRIVE, arrival)).kinds
    assert found & UNORDERED == found - {"barrier phase"} and ("read before it arrived" in found) == bool(kinds), found


# ------------------------------------------------------------------------------------------------ proxies
STORE_OUT = """cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r4+256], 128;
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group.read 0;"""
COPY_OUT = f"""{FENCE}
  {JOIN}
  @%p2 bra OUT;
  ld.param.u64 %rd1, [k_param_0];
  {STORE_OUT}
OUT:"""
ASYNC_READER = ring(f"{STORE}\n  {JOIN}\n  @%p2 bra SENT;\n  {ARRIVE}", announce="", read=COPY_OUT)
"""As THREADS, but the stage is read by the async proxy."""


@pytest.mark.parametrize(
    ("reader", "writer", "right"),
    [
        (FENCE, "", True),
        ("", "", False),
        ("", "fence.proxy.async;", True),
        ("", "fence.proxy.async.shared::cluster;", True),
        ("", FENCE, False),
    ],
)
def test_proxy_fences_for_what_threads_of_another_cta_wrote(reader: str, writer: str, right: bool) -> None:
    """`.shared::cta` speaks of one's own shared memory only."""
    body = changed(changed(ASYNC_READER, FENCE, reader), STORE, f"{STORE}\n  {writer}")
    kinds = check_pair(body, aligned(np.zeros(64, np.uint32))).kinds
    assert kinds == (set() if right else {"no proxy fence"}), kinds
