"""setmaxnreg: values, whole warpgroups, and the pool of the CTA."""

from __future__ import annotations

import pytest

from fa3.emulator.check import Names

from .kernels import WARP_AND_LANE, changed, check

DEC, INC = "setmaxnreg.dec.sync.aligned.u32 24;", "setmaxnreg.inc.sync.aligned.u32 240;"
ROLES = f"""{WARP_AND_LANE}
  setp.gt.u32 %p1, %r2, 3;
  @%p1 bra MATH;
  {DEC}
  bra END;
MATH:
  {INC}
END:
"""
"""Three warpgroups: 24 + 240 + 240 registers of 504 (3 x 168)."""


class Roles(Names):
    def role(self, warp: int) -> str:
        return "load" if warp < 4 else f"math{warp // 4 - 1}"

    @property
    def registers(self) -> dict[str, int] | None:
        return {"load": 24, "math0": 240, "math1": 240}


def findings(body: str, names: Names | None = None) -> list[str]:
    report = check(body, threads=384, names=names, policies=["early"])
    assert report.kinds <= {"register budget"}, str(report)
    return [finding.happened for finding in report]


def test_right_budget() -> None:
    assert not findings(ROLES)
    assert not findings(ROLES, Roles("k"))


def test_nothing_is_asked_for() -> None:
    assert not findings(WARP_AND_LANE)
    assert len(findings(WARP_AND_LANE, Roles("k"))) >= 1


@pytest.mark.parametrize("count", [20, 25, 264])
def test_values_that_the_hardware_refuses(count: int) -> None:
    assert any("multiples of 8" in text for text in findings(changed(ROLES, INC, INC.replace("240", str(count)))))


def test_more_than_the_cta_has() -> None:
    texts = findings(changed(ROLES, INC, INC.replace("240", "248")))
    assert any("66560" in text and "64512" in text for text in texts), texts


def test_taken_but_not_given() -> None:
    """Without the dec the load warpgroup keeps its 168."""
    texts = findings(changed(ROLES, DEC))
    assert any("128 x 168 + 128 x 240 + 128 x 240" in text for text in texts), texts


def test_given_but_not_taken() -> None:
    assert not findings(changed(ROLES, INC))
    assert any("executes no setmaxnreg" in text for text in findings(changed(ROLES, INC), Roles("k")))


def test_by_one_warp_of_a_warpgroup() -> None:
    alone = changed(ROLES, f"  {DEC}", f"  setp.ne.u32 %p2, %r2, 0;\n  @%p2 bra END;\n  {DEC}")
    assert any("do not all execute" in text for text in findings(alone))


def test_taken_though_fewer_than_at_the_start() -> None:
    assert any("from 168 to 160" in text for text in findings(changed(ROLES, INC, INC.replace("240", "160"))))
