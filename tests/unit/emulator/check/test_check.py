"""`check`: schedules, restored outputs, compared results, references."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fa3.emulator.check import Checks, Names, check, checkers
from fa3.emulator.check.runs import Results

from ..assembler import assemble, launch_of
from .kernels import WARP_AND_LANE, changed

COPY = f"""{WARP_AND_LANE}
  ld.param.u64 %rd1, [k_param_0];
  shl.b32 %r5, %r1, 2;
  cvt.u64.u32 %rd2, %r5;
  add.s64 %rd1, %rd1, %rd2;
  add.u32 %r5, %r5, %r4;
  cvt.rn.f32.u32 %r6, %r1;
  st.shared.b32 [%r5], %r6;
  bar.sync 0;
  ld.shared.b32 %r7, [%r5];
  st.global.b32 [%rd1], %r7;
"""
RIGHT = torch.arange(64, dtype=torch.float32)


def launch(body: str, tensor: torch.Tensor) -> tuple[Any, Any]:
    program = assemble(body, [tensor.numpy()], threads=64)
    asked: Any = launch_of(program, [tensor.numpy()])
    asked.allocations[0].name, asked.tensors = "o", {"o": tensor}
    return program, asked


def reference(results: Results) -> Iterator[str]:
    if not torch.equal(results["o"], RIGHT):
        yield "o is wrong."


def test_right_kernel() -> None:
    o = torch.zeros(64)
    report = check(*launch(COPY, o), Names("k"), seeds=range(2), reference=reference)
    assert not report and report.runs == 4 and report.kernel == "k"
    assert torch.equal(o, RIGHT)


def test_outputs_start_as_nan_in_every_run() -> None:
    """A kernel that adds to its output would otherwise see the results of the run before."""
    seen: list[torch.Tensor] = []
    body = changed(COPY, "st.global.b32 [%rd1], %r7;", "ld.global.b32 %r8, [%rd1];\n  st.global.b32 [%rd1], %r8;")
    check(*launch(body, torch.zeros(64)), reference=lambda results: seen.append(results["o"].clone()) or ())
    assert len(seen) == 3 and all(tensor.isnan().all() for tensor in seen)


def test_other_tensors_start_as_they_were() -> None:
    """What is added to must not start as NaN, and not as the run before left it."""
    seen: list[torch.Tensor] = []
    program, asked = launch(
        changed(COPY, "st.global.b32 [%rd1], %r7;", "red.global.add.f32 [%rd1], %r7;"), torch.ones(64)
    )
    asked.allocations[0].name, asked.tensors = "sum", {"sum": asked.tensors["o"]}
    check(program, asked, reference=lambda results: seen.append(results["sum"].clone()) or ())
    assert len(seen) == 3 and all(torch.equal(tensor, RIGHT + 1) for tensor in seen)


def test_wrong_result() -> None:
    body = changed(COPY, "cvt.rn.f32.u32 %r6, %r1;", "cvt.rn.f32.u32 %r6, %r2;")
    (finding,) = check(*launch(body, torch.zeros(64)), reference=reference)
    assert finding.kind == "wrong result" and finding.happened == "o is wrong." and finding.count == 3


def test_results_that_depend_on_the_schedule() -> None:
    """Each warp reads what the other wrote, or what it has not yet written."""
    body = changed(
        changed(COPY, "  bar.sync 0;\n"),
        "ld.shared.b32 %r7, [%r5];",
        "xor.b32 %r5, %r5, 128;\n  ld.shared.b32 %r7, [%r5];",
    )
    report = check(*launch(body, torch.zeros(64)), policies=("late", "random"), seeds=range(6))
    assert {"different results", "read before it arrived"} <= report.kinds, str(report)
    assert len({name for finding in report for name in finding.schedules}) > 1


def test_fault_is_a_finding() -> None:
    body = changed(COPY, "st.global.b32 [%rd1], %r7;", "st.global.b32 [%rd1+4096], %r7;")
    assert "out of bounds" in check(*launch(body, torch.zeros(64))).kinds


def test_unknown_policy() -> None:
    with pytest.raises(ValueError, match="policy"):
        check(*launch(COPY, torch.zeros(64)), policies=("slow",))


def test_checkers_of_a_run_of_ones_own() -> None:
    from fa3.emulator import machine

    (one,) = checkers()
    assert isinstance(one, Checks)
    machine.run(*launch(changed(COPY, "  bar.sync 0;\n"), torch.zeros(64)), observers=[one])
    assert one.findings == []
