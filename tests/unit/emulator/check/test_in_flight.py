"""Registers that a WGMMA under way owns; groups that are never closed or waited for."""

from __future__ import annotations

import pytest

from .kernels import WARP_AND_LANE, changed, check

ACCUMULATORS = "{%r40, %r41, %r42, %r43}"
A_OPERAND = "{%r50, %r51, %r52, %r53}"
MMA = f"""wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {ACCUMULATORS}, {A_OPERAND}, %rd1, %p1, 1, 1, 0;"""
WAIT = "  wgmma.wait_group.sync.aligned 0;\n"
COMMIT = "  wgmma.commit_group.sync.aligned;\n"
FENCE = "  wgmma.fence.sync.aligned;\n"
USE = "  add.f32 %r60, %r40, %r40;\n"
REFILL = "  mov.b32 %r50, 1;\n"

GEMM = f"""{WARP_AND_LANE}
  shl.b32 %r5, %r1, 2;
  add.u32 %r5, %r5, %r4;
  mov.b32 %r6, 0;
  st.shared.b32 [%r5], %r6;
  fence.proxy.async.shared::cta;
  bar.sync 0;
  shr.u32 %r7, %r4, 4;
  or.b32 %r7, %r7, 0x80000;
  mov.b32 %r8, 8;
  mov.b64 %rd1, {{%r7, %r8}};
  mov.b32 %r40, 0;
  mov.b32 %r41, 0;
  mov.b32 %r42, 0;
  mov.b32 %r43, 0;
  mov.b32 %r50, 0;
  mov.b32 %r51, 0;
  mov.b32 %r52, 0;
  mov.b32 %r53, 0;
  setp.eq.u32 %p1, %r4, %r4;
{FENCE}  {MMA}
{COMMIT}{WAIT}{USE}{REFILL}"""
"""D += A B for one warpgroup: A in registers, B (8 x 16, without a swizzle) in shared memory."""


def found(body: str) -> set[str]:
    return check(body, threads=128).kinds


def test_right_gemm() -> None:
    report = check(GEMM, threads=128)
    assert not report, str(report)


def test_accumulator_read_before_the_wait() -> None:
    report = check(changed(GEMM, f"{WAIT}{USE}", f"{USE}{WAIT}"), threads=128, policies=["early"])
    (finding,) = report
    assert finding.kind == "accumulator in flight" and "%r40" in finding.happened
    assert finding.at.ptx.startswith("add.f32") and finding.other and finding.other.ptx.startswith("wgmma.mma")


def test_accumulator_written_before_the_wait() -> None:
    body = changed(GEMM, WAIT, f"  mov.b32 %r43, 1;\n{WAIT}")
    (finding,) = check(body, threads=128, policies=["late"])
    assert finding.kind == "accumulator in flight" and "writes %r43" in finding.happened


def test_operand_written_before_the_wait() -> None:
    assert found(changed(GEMM, f"{WAIT}{USE}{REFILL}", f"{REFILL}{WAIT}{USE}")) == {"A registers in flight"}


def test_wait_for_an_older_group() -> None:
    """One group may still run."""
    assert found(changed(GEMM, WAIT, WAIT.replace("0;", "1;"))) >= {"accumulator in flight", "wgmma never waited for"}


def test_commit_missing() -> None:
    assert found(changed(GEMM, COMMIT)) >= {"accumulator in flight", "wgmma never committed"}


def test_wait_missing() -> None:
    quiet = changed(changed(changed(GEMM, USE), REFILL), WAIT)
    assert found(quiet) == {"wgmma never waited for"}


def test_two_of_one_shape_in_a_row() -> None:
    assert not found(changed(GEMM, MMA, f"{MMA}\n  {MMA}"))


def test_two_shapes_with_common_accumulators() -> None:
    other = MMA.replace("n8k16", "n16k16").replace(ACCUMULATORS, "{%r40, %r41, %r42, %r43, %r44, %r45, %r46, %r47}")
    more = "".join(f"  mov.b32 %r{i}, 0;\n" for i in range(44, 48))
    body = changed(
        changed(GEMM, MMA, f"{MMA}\n  {other}"), "  mov.b32 %r50, 0;\n  mov", f"{more}  mov.b32 %r50, 0;\n  mov"
    )
    assert found(body) == {"accumulator in flight"}


def test_accumulators_as_operand_of_the_next() -> None:
    """P of the second GEMM would be the running S of the first."""
    other = MMA.replace(A_OPERAND, ACCUMULATORS).replace("{%r40", "{%r70", 1)
    other = other.replace("%r41, %r42, %r43}, {", "%r71, %r72, %r73}, {", 1)
    body = changed(GEMM, MMA, f"{MMA}\n  {other}")
    body = changed(body, "  mov.b32 %r40, 0;\n", "".join(f"  mov.b32 %r{i}, 0;\n" for i in (40, 70, 71, 72, 73)))
    assert found(body) == {"accumulator in flight"}


def test_operand_overwritten_by_the_next() -> None:
    other = MMA.replace(f"{ACCUMULATORS}, {A_OPERAND}", f"{A_OPERAND}, {ACCUMULATORS.replace('%r4', '%r7')}")
    body = changed(GEMM, MMA, f"{MMA}\n  {other}")
    body = changed(body, "  mov.b32 %r40, 0;\n", "".join(f"  mov.b32 %r{i}, 0;\n" for i in (40, 70, 71, 72, 73)))
    assert found(body) == {"A registers in flight"}


def test_only_the_first_touch_is_reported() -> None:
    """Also when others follow in steps of their own."""
    more = f"{USE}  bar.warp.sync -1;\n  add.f32 %r61, %r41, %r42;\n  bar.warp.sync -1;\n  add.f32 %r61, %r40, %r42;\n"
    (finding,) = check(changed(GEMM, f"{WAIT}{USE}", f"{more}{WAIT}"), threads=128, policies=["late"])
    assert finding.count == 4 and finding.at.ptx.startswith("add.f32 %r60")  # once for each warp


BEHIND = "  bar.sync 0;\n  st.shared.b32 [%r5], %r6;\n"


def test_operand_in_shared_memory_is_overwritten_behind_the_wait() -> None:
    assert not found(GEMM + BEHIND)


def test_operand_in_shared_memory_is_overwritten_before_the_wait() -> None:
    early = changed(GEMM, WAIT, f"{BEHIND}{WAIT}")
    (finding,) = check(early, threads=128, policies=["early"])
    assert finding.kind == "overwritten while read" and "by WGMMA" in finding.happened


@pytest.mark.parametrize("register", ["%r40", "%r52"])
def test_register_never_written(register: str) -> None:
    body = changed(GEMM, f"  mov.b32 {register}, 0;\n")
    (finding,) = check(body, threads=128, policies=["early"])
    assert finding.kind == "uninitialised register" and register in finding.happened


def test_register_never_written_is_reported_once() -> None:
    body = f"{WARP_AND_LANE}\n  add.u32 %r6, %r5, %r5;\n  bar.warp.sync -1;\n  add.u32 %r7, %r5, %r5;\n"
    (finding,) = check(body, threads=32, policies=["early"])
    assert finding.count == 1 and finding.at.ptx.startswith("add.u32 %r6")


def test_accumulators_that_are_only_written() -> None:
    """With scale-d false a WGMMA does not read them."""
    body = changed(changed(GEMM, "  mov.b32 %r40, 0;\n"), "setp.eq.u32 %p1", "setp.ne.u32 %p1")
    assert not found(body)


def test_register_written_on_one_path() -> None:
    body = f"""{WARP_AND_LANE}
  setp.ne.u32 %p1, %r2, 0;
  @%p1 bra READ;
  mov.b32 %r5, 1;
READ:
  add.u32 %r6, %r5, %r5;
"""
    (finding,) = check(body, policies=["early"])
    assert finding.kind == "uninitialised register" and finding.at.warp == 1
