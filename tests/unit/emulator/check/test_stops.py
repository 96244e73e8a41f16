"""Deadlocks and faults of the machine as findings."""

from __future__ import annotations

from .kernels import ANNOUNCE, EMPTY_WAIT, RELEASE, RING, WARP_AND_LANE, changed, check, check_ring
from .test_phases import NAMES, Planned


class Meeting(Planned):
    def meeting(self, number: int) -> frozenset[int] | None:
        return frozenset((1, 2)) if number == 3 else None


def test_deadlock_says_who_should_come() -> None:
    """The consumer never frees the stage."""
    report = check_ring(changed(RING, RELEASE), names=NAMES, policies=["late"])
    load, math = sorted(report.of("deadlock"), key=lambda finding: finding.at.warp)
    assert report.kinds == {"deadlock"} and load.subject == math.subject == "k"
    assert "phase 0 of k.empty[0] (parity 0): it lacks 1 of 1 arrival" in load.happened
    assert "Ever arrived there: nobody" in load.happened and "waits for k.full[0]" in load.happened
    assert "phase 1 of k.full[0] (parity 1)" in math.happened and "waits for k.empty[0]" in math.happened


def test_root_of_a_deadlock_comes_first() -> None:
    """The producer ends early; the consumer waits for it, and a third warp for the consumer."""
    early = changed(
        RING, "setp.lt.u32 %p4, %r12, 4;\n  @%p4 bra PRODUCE;", "setp.lt.u32 %p4, %r12, 3;\n  @%p4 bra PRODUCE;"
    )
    early = changed(
        early,
        "  setp.ne.u32 %p3, %r2, 0;\n",
        "  setp.eq.u32 %p6, %r2, 2;\n  @%p6 bra MEET;\n  setp.ne.u32 %p3, %r2, 0;\n",
    )
    early = changed(early, "CONSUME:\n", "  bra LOOP;\nMEET:\n  bar.sync 3, 64;\n  bra OUT;\nLOOP:\nCONSUME:\n")
    early = changed(early, "END:", "  setp.eq.u32 %p6, %r2, 0;\n  @%p6 bra END;\n  bar.sync 3, 64;\nEND:\nOUT:")
    first, second = check_ring(early, threads=96, names=Meeting("k"), policies=["late"]).of("deadlock")
    assert first.at.warp == 1 and "has ended" in first.happened
    assert second.at.warp == 2 and "1 warp." in second.happened
    assert f"This follows from the wait at PTX line {first.at.ptx_line}." in second.happened
    assert "This follows" not in first.happened


def test_missing_bytes_are_named() -> None:
    (finding,) = [
        found
        for found in check_ring(changed(RING, ANNOUNCE, ANNOUNCE.replace("128", "144")), names=NAMES).of("deadlock")
        if found.at.warp == 1
    ]
    assert "16 bytes that were announced" in finding.happened
    assert finding.other and finding.other.role == "warpgroup 0"


def test_deadlock_without_names() -> None:
    report = check_ring(changed(RING, RELEASE))
    assert report.kinds == {"deadlock"}
    assert any("the mbarrier at shared address 1032" in finding.happened for finding in report)


def test_named_barrier() -> None:
    body = f"{WARP_AND_LANE}\n  setp.eq.u32 %p1, %r2, 1;\n  @%p1 bra END;\n  bar.sync 2, 64;\nEND:\n"
    (finding,) = check(body)
    assert finding.kind == "deadlock" and "32 of 64 threads have arrived, which leaves 1 warp" in finding.happened


def test_fault_keeps_its_kind_and_place() -> None:
    (finding,) = check(f"{WARP_AND_LANE}\n  st.shared.b32 [%r4+4096], %r1;", threads=32, policies=["early"])
    assert finding.kind == "out of bounds" and finding.at.ptx.startswith("st.shared") and finding.advice


def test_fault_names_the_barrier() -> None:
    report = check_ring(changed(RING, EMPTY_WAIT), names=NAMES, policies=["late"])
    assert "k.full[0]" in report.of("mbarrier arrivals")[0].happened
