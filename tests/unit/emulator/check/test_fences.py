"""A missing wgmma.fence is found in the text, on every path."""

from __future__ import annotations

from typing import Any

from fa3.emulator.check import Names, check
from fa3.emulator.check.fences import find_unfenced
from fa3.emulator.check.report import Finding

from ..assembler import assemble, launch_of
from .kernels import changed
from .test_in_flight import FENCE, GEMM, MMA, REFILL, USE

SECOND = f"""{FENCE}  {MMA}
  wgmma.commit_group.sync.aligned;
  wgmma.wait_group.sync.aligned 0;
"""


def unfenced(body: str) -> list[Finding]:
    return find_unfenced(assemble(body, threads=128), Names("k"))


def test_right_gemms() -> None:
    assert not unfenced(GEMM)
    assert not unfenced(GEMM + SECOND)


def test_first_fence_missing() -> None:
    (finding,) = unfenced(changed(GEMM, FENCE))
    assert finding.kind == "no wgmma.fence" and finding.other and finding.other.ptx.startswith("mov.b32")


def test_first_fence_missing_though_no_register_was_touched() -> None:
    untouched = "\n".join(line for line in GEMM.splitlines() if "mov.b32 %r4" not in line and "mov.b32 %r5" not in line)
    (finding,) = unfenced(changed(untouched, FENCE.strip()))
    assert "from the start of the kernel" in finding.happened and finding.other is None


def test_second_fence_missing() -> None:
    (finding,) = unfenced(GEMM + changed(SECOND, FENCE))
    assert "%r50" in finding.happened


def test_no_fence_needed_behind_a_gemm_of_the_same_registers() -> None:
    quiet = changed(changed(GEMM, USE), REFILL)
    assert not unfenced(quiet + changed(SECOND, FENCE))


def test_touched_on_one_path_only() -> None:
    """A branch around the use does not help."""
    branch = f"  @%p1 bra AROUND;\n{USE}AROUND:\n"
    body = changed(changed(GEMM, USE), REFILL)
    (finding,) = unfenced(body + branch + changed(SECOND, FENCE))
    assert finding.other and finding.other.ptx.startswith("add.f32")


def test_touched_in_the_lap_before() -> None:
    body = changed(changed(GEMM, USE), REFILL)
    loop = f"LOOP:\n{changed(SECOND, FENCE)}{USE}  @%p1 bra LOOP;\n"
    assert len(unfenced(body + loop)) == 1
    assert not unfenced(body + loop.replace("LOOP:\n", f"LOOP:\n{FENCE}"))


def test_found_once_for_all_runs() -> None:
    program = assemble(changed(GEMM, FENCE), threads=128)
    launch: Any = launch_of(program)
    (finding,) = check(program, launch, policies=("early", "late"))
    assert finding.kind == "no wgmma.fence" and finding.count == 1
