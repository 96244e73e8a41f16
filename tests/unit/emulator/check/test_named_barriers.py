"""Named barriers: counts, groups that share one, generations that are not ordered, arrivals that are left."""

from __future__ import annotations

import pytest

from fa3.emulator.check import Names

from .kernels import WARP_AND_LANE, changed, check

TURNS = f"""{WARP_AND_LANE}
  mov.b32 %r10, 0;
  add.u32 %r11, %r2, 1;
  xor.b32 %r12, %r2, 1;
  add.u32 %r12, %r12, 1;
  setp.ne.u32 %p1, %r2, 1;
  @%p1 bra TURN;
  bar.arrive 1, 64;
TURN:
  bar.sync %r11, 64;
  bar.arrive %r12, 64;
  add.u32 %r10, %r10, 1;
  setp.lt.u32 %p2, %r10, 3;
  @%p2 bra TURN;
"""
"""Two warps take turns; barrier 1 and 2 stand for "it is warp 0's turn" and "it is warp 1's". One arrival is left."""
WAIT, GIVE = "  bar.sync %r11, 64;\n", "  bar.arrive %r12, 64;\n"


class Turns(Names):
    most_left = 1

    def event(self, number: int) -> str:
        return {1: "turn of math0", 2: "turn of math1"}.get(number, "")

    def meeting(self, number: int) -> frozenset[int]:
        return frozenset((0, 1)) if number in (1, 2) else frozenset()

    def may_be_left(self, number: int, warps: int) -> bool:
        return self.event(number) != "" and warps == 1


def test_turns() -> None:
    assert not check(TURNS, seeds=range(5))
    assert not check(TURNS, names=Turns("k"), seeds=range(5))


def test_turn_taken_without_a_wait() -> None:
    """Each gives turns that the other never took, so that a generation has two arrivals of one warp."""
    report = check(changed(TURNS, WAIT), names=Turns("k"), policies=["early"])
    assert report.kinds == {"named barrier"}, str(report)


def test_turn_taken_without_a_wait_by_one() -> None:
    """Warp 0 gives turn after turn; warp 1 waits for its own."""
    alone = changed(TURNS, WAIT, f"  setp.eq.u32 %p3, %r2, 0;\n  @%p3 bra GIVE;\n{WAIT}GIVE:\n")
    assert check(alone).kinds & {"named barrier", "deadlock"}


@pytest.mark.parametrize("names", [None, Turns("k")])
def test_turn_given_twice(names: Names | None) -> None:
    assert "named barrier" in check(changed(TURNS, GIVE, GIVE * 2), names=names).kinds


def test_warp_that_gives_itself_the_first_turn() -> None:
    """It arrives and then waits in one generation, which is legal; only the plan of fa3's own turns forbids it."""
    own = changed(
        changed(TURNS, "setp.ne.u32 %p1, %r2, 1;", "setp.ne.u32 %p1, %r2, 0;"), "bar.arrive 1, 64;", "bar.arrive 1, 64;"
    )
    assert not check(own, seeds=range(3))
    assert "named barrier" in check(own, names=Turns("k")).kinds


def test_turn_not_given() -> None:
    assert "deadlock" in check(changed(TURNS, GIVE)).kinds


@pytest.mark.parametrize("threads", [32, 96, 128])
def test_other_thread_counts(threads: int) -> None:
    report = check(changed(TURNS, WAIT, WAIT.replace("64", str(threads))))
    assert report.kinds & {"named barrier", "deadlock"}, str(report)


def test_no_multiple_of_32() -> None:
    report = check(f"{WARP_AND_LANE}\n  bar.sync 1, 40;")
    assert report.kinds == {"named barrier"}


def test_more_threads_than_the_cta_has() -> None:
    assert "named barrier" in check(f"{WARP_AND_LANE}\n  bar.sync 1, 128;").kinds


PAIRS = f"""{WARP_AND_LANE}
  shr.u32 %r5, %r2, 1;
  add.u32 %r5, %r5, 1;
  bar.sync %r5, 64;
  bar.sync %r5, 64;
"""
"""Warps 0 and 1 meet at barrier 1, warps 2 and 3 at barrier 2."""


def test_pairs() -> None:
    assert not check(PAIRS, threads=128, seeds=range(3))


@pytest.mark.parametrize("policy", ["early", "late", "random"])
def test_two_groups_at_one_barrier(policy: str) -> None:
    """Also in an order in which each of them happened to meet its own."""
    shared = changed(PAIRS, "bar.sync %r5, 64;", "bar.sync 1, 64;")
    assert "named barrier" in check(shared, threads=128, policies=[policy]).kinds


def test_barrier_of_somebody_else() -> None:
    """Known from the plan alone: all warps meet at a barrier that stands for a turn."""
    body = f"{WARP_AND_LANE}\n  bar.sync 3;"
    assert not check(body)
    (finding,) = check(body, names=Turns("k"))
    assert finding.kind == "named barrier" and "not used" in finding.happened


def test_left_arrivals() -> None:
    """Of a turn one may be left, of others none."""
    left = f"{WARP_AND_LANE}\n  setp.ne.u32 %p1, %r2, 0;\n  @%p1 bra END;\n  bar.arrive 1, 64;\nEND:\n"
    assert not check(left, names=Turns("k"))
    elsewhere = Turns("k")
    elsewhere.may_be_left = lambda number, warps: False  # type: ignore[method-assign]
    assert check(left, names=elsewhere).kinds == {"named barrier left mid-phase"}
    two = changed(left, "bar.arrive 1, 64;", "bar.arrive 1, 64;\n  bar.arrive 2, 64;")
    assert check(two, names=Turns("k")).kinds == {"named barrier left mid-phase"}
