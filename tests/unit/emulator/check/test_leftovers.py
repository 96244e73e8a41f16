"""Copies that are under way when a warp or the CTA ends."""

from __future__ import annotations

from .kernels import FULL_WAIT, RING, SOURCE, changed, check, check_ring
from .test_shared_memory import READING, STAGED

COMMIT = "  cp.async.bulk.commit_group;\n"


def test_store_is_not_waited_for() -> None:
    (finding,) = check(changed(STAGED, READING), SOURCE)
    assert finding.kind == "copy never waited for" and finding.at.ptx.startswith("cp.async.bulk.global")


def test_store_is_not_committed() -> None:
    (finding,) = check(changed(STAGED, COMMIT), SOURCE)
    assert finding.kind == "copy never committed"


def test_complete_wait_is_as_good() -> None:
    assert not check(changed(STAGED, "wait_group.read", "wait_group"), SOURCE)


def test_wait_for_all_but_one() -> None:
    assert check(changed(STAGED, "wait_group.read 0", "wait_group.read 1"), SOURCE).kinds == {"copy never waited for"}


def test_load_is_not_waited_for() -> None:
    """The producer fills the stage once more at the end."""
    body = changed(
        RING, "setp.lt.u32 %p4, %r12, 4;\n  @%p4 bra PRODUCE;", "setp.lt.u32 %p4, %r12, 5;\n  @%p4 bra PRODUCE;"
    )
    (finding,) = check_ring(body)
    assert finding.kind == "load never waited for"
    assert FULL_WAIT in body
