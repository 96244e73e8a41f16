"""Races, proxy fences and unwritten words in shared memory: each right kernel, and what is found in its wrong twins."""

from __future__ import annotations

import pytest

from .kernels import (
    EMPTY_WAIT,
    FULL_WAIT,
    INITIALISE,
    JOIN,
    LOAD,
    READ,
    RELEASE,
    RING,
    SOURCE,
    WARP_AND_LANE,
    changed,
    check,
    check_ring,
)

UNORDERED = {"overwritten while read", "read before it arrived"}


# ------------------------------------------------------------------------------------------------ a ring
def test_right_ring() -> None:
    report = check_ring(seeds=range(5))
    assert not report, str(report)


@pytest.mark.parametrize("policy", ["early", "late", "random", "starve:0-0", "starve:1-1"])
@pytest.mark.parametrize("wait", [FULL_WAIT, EMPTY_WAIT])
def test_missing_wait_shows_under_every_schedule(wait: str, policy: str) -> None:
    """As a race, or, where the warps happened to be ordered otherwise, by the phases that they took for one another."""
    kinds = check_ring(changed(RING, wait), policies=[policy]).kinds
    assert kinds & (UNORDERED | {"barrier phase", "mbarrier arrivals"}), kinds


def test_stage_is_read_before_it_arrived() -> None:
    """Both sides are named."""
    (finding,) = check_ring(changed(RING, FULL_WAIT), policies=["random"]).of("read before it arrived")
    assert finding.at.ptx.startswith("ld.shared") and finding.other is not None
    assert finding.other.ptx.startswith("cp.async.bulk")
    assert "warp 1" in finding.happened and "warp 0" in finding.happened and "by TMA" in finding.happened


def test_released_before_read() -> None:
    early = changed(changed(RING, f"  {RELEASE}\n"), f"  {READ}", f"@%p2 bra KEPT;\n  {RELEASE}\nKEPT:\n  {READ}")
    assert "overwritten while read" in check_ring(early).kinds


def test_lane_that_releases_speaks_for_itself_alone() -> None:
    """Without a warp barrier the other 31 lanes may not have read yet."""
    report = check_ring(changed(RING, JOIN))
    assert report.kinds == {"overwritten while read"}, str(report)


def test_released_by_the_lane_that_read() -> None:
    """Then no warp barrier is needed."""
    alone = changed(changed(RING, JOIN), f"  {READ}").replace(RELEASE, f"{READ}\n  {RELEASE}")
    assert not check_ring(alone)


def test_load_beside_the_stage_that_is_read() -> None:
    """The consumer reads what no load has written."""
    report = check_ring(changed(RING, LOAD, LOAD.replace("+128]", "+512]")))
    assert report.kinds == {"uninitialised shared memory"}, str(report)


def test_load_over_barriers() -> None:
    report = check_ring(changed(RING, LOAD, LOAD.replace("[%r4+128]", "[%r4+0]")), policies=["late"])
    assert "barrier overwritten" in report.kinds


# ------------------------------------------------------------------------------------------------ threads only
EXCHANGE = f"""{WARP_AND_LANE}
  shl.b32 %r5, %r1, 2;
  add.u32 %r5, %r5, %r4;
  st.shared.b32 [%r5], %r1;
  bar.sync 0;
  xor.b32 %r6, %r1, 32;
  shl.b32 %r6, %r6, 2;
  add.u32 %r6, %r6, %r4;
  ld.shared.b32 %r7, [%r6];
  bar.sync 0;
  st.shared.b32 [%r6], %r7;
"""
"""Warps exchange values through shared memory."""
MEETS = "  bar.sync 0;\n"


def test_exchange() -> None:
    assert not check(EXCHANGE, seeds=range(3))


def test_exchange_without_barriers() -> None:
    assert check(changed(EXCHANGE, MEETS)).kinds >= {"read before it arrived"}


def test_two_writers_of_one_word() -> None:
    both = f"{WARP_AND_LANE}\n  st.shared.b32 [%r4], %r1;"
    assert check(both).kinds == {"written twice at once"}
    assert not check(both, threads=32)


@pytest.mark.parametrize(("apart", "kinds"), [(2, set()), (0, {"written twice at once"})])
def test_halves_of_a_word(apart: int, kinds: set[str]) -> None:
    """Two warps write 16 bits each, `apart` bytes apart."""
    body = f"""{WARP_AND_LANE}
  mul.lo.u32 %r5, %r2, {apart};
  add.u32 %r5, %r5, %r4;
  mov.b16 %h1, 7;
  setp.ne.u32 %p1, %r3, 0;
  @%p1 bra END;
  st.shared.b16 [%r5], %h1;
END:
"""
    assert check(body).kinds == kinds


def test_arrival_without_a_wait_does_not_order() -> None:
    """bar.arrive hands over; it does not wait."""
    body = f"""{WARP_AND_LANE}
  setp.ne.u32 %p1, %r2, 0;
  @%p1 bra SECOND;
  st.shared.b32 [%r4], %r1;
  bar.arrive 1, 64;
  bra END;
SECOND:
  bar.sync 1, 64;
  st.shared.b32 [%r4], %r1;
END:
"""
    assert not check(body)
    swapped = changed(changed(body, "bar.arrive", "bar.swapped"), "bar.sync", "bar.arrive").replace(
        "bar.swapped", "bar.sync"
    )
    assert "written twice at once" in check(swapped).kinds


# ------------------------------------------------------------------------------------------------ proxies
FENCE = "fence.proxy.async.shared::cta;"
STORE = "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r4], 256;"
STAGED = f"""{WARP_AND_LANE}
  ld.param.u64 %rd1, [k_param_0];
  shl.b32 %r5, %r1, 2;
  add.u32 %r5, %r5, %r4;
  st.shared.b32 [%r5], %r1;
  {FENCE}
  bar.sync 0;
  setp.ne.u32 %p1, %r1, 0;
  @%p1 bra END;
  {STORE}
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group.read 0;
END:
"""
"""All threads write shared memory, thread 0 stores it to global memory."""


def test_staged_store() -> None:
    assert not check(STAGED, SOURCE)


def test_fence_behind_the_barrier_counts() -> None:
    """It lies on the path from the write to the copy."""
    assert not check(changed(changed(STAGED, FENCE), f"  {STORE}", f"  {FENCE}\n  {STORE}"), SOURCE)


def test_no_proxy_fence() -> None:
    report = check(changed(STAGED, FENCE), SOURCE)
    assert report.kinds == {"no proxy fence"}, str(report)


def test_fence_of_another_space() -> None:
    assert check(changed(STAGED, FENCE, "fence.proxy.async.global;"), SOURCE).kinds == {"no proxy fence"}


def test_fence_before_the_write() -> None:
    early = changed(changed(STAGED, f"  {FENCE}\n"), "  st.shared", f"  {FENCE}\n  st.shared")
    assert check(early, SOURCE).kinds == {"no proxy fence"}


def test_store_before_the_barrier() -> None:
    early = changed(STAGED, "bar.sync 0;").replace("END:", "END:\n  bar.sync 0;")
    kinds = check(early, SOURCE).kinds
    assert kinds and kinds <= UNORDERED


REUSED = changed(STAGED, "END:", "END:\n  bar.sync 0;\n  st.shared.b32 [%r5], %r3;")
"""The buffer is written again, once the copy has read it."""
READING = "  cp.async.bulk.wait_group.read 0;\n"


def test_reuse_after_the_copy() -> None:
    assert not check(REUSED, SOURCE)


def test_reuse_before_the_copy_has_read() -> None:
    late = changed(changed(REUSED, READING), "st.shared.b32 [%r5], %r3;", f"st.shared.b32 [%r5], %r3;\n{READING}")
    assert check(late, SOURCE).kinds == {"overwritten while read"}


def test_load_needs_no_fence_for_threads() -> None:
    """What TMA wrote, threads may read after the wait, and write over without a fence."""
    body = changed(RING, READ, f"{READ}\n  st.shared.b32 [%r21+128], %r3;\n")
    report = check_ring(body)
    assert report.kinds == {"no proxy fence"}, str(report)  # but the next load comes after a write by threads
    fenced = changed(body, JOIN, f"{FENCE}\n  {JOIN}")
    assert not check_ring(fenced)


# ------------------------------------------------------------------------------------------------ before any write
def test_read_of_nothing() -> None:
    report = check(f"{WARP_AND_LANE}{INITIALISE}\n  ld.shared.b32 %r7, [%r4+256];")
    assert report.kinds == {"uninitialised shared memory"}
    assert "1 of 1 words" in report.findings[0].happened


def test_read_of_something_written_in_part() -> None:
    body = f"{WARP_AND_LANE}\n  st.shared.b32 [%r4], %r1;\n  ld.shared.v2.b32 {{%r6, %r7}}, [%r4];"
    assert check(body, threads=32).kinds == {"uninitialised shared memory"}
    assert not check(changed(body, "ld.shared.v2.b32 {%r6, %r7}", "ld.shared.b32 %r6"), threads=32)
