"""Outputs are written once, all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fa3.emulator import machine
from fa3.emulator.check import Names, Report
from fa3.emulator.check.composite import Checks

from ..assembler import assemble, launch_of
from .kernels import changed

ROWS, COLUMNS = 4, 32
WRITE = """
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, %ctaid.x;
  ld.param.u64 %rd1, [k_param_0];
  mad.lo.s32 %r3, %r2, 32, %r1;
  mul.wide.u32 %rd2, %r3, 4;
  add.s64 %rd1, %rd1, %rd2;
  mov.b32 %r4, 0;
  st.global.b32 [%rd1], %r4;
"""
"""Row i of a (4, 32) tensor is written by CTA i."""


def check(body: str, tensor: torch.Tensor, grid: int = ROWS) -> Report:
    program = assemble(body, [tensor.numpy()])
    launch: Any = launch_of(program, [tensor.numpy()], grid=(grid, 1, 1))
    launch.allocations[0].name = "o"
    launch.tensors = {"o": tensor}
    checks = Checks(Names("k"))
    machine.run(program, launch, policy="random", observers=[checks])
    return Report(checks.findings)


def test_every_element_once() -> None:
    assert not check(WRITE, torch.empty(ROWS, COLUMNS))


def test_a_row_is_missing() -> None:
    (finding,) = check(WRITE, torch.empty(ROWS, COLUMNS), grid=3)
    assert finding.kind == "never written" and finding.subject == "o"
    assert "32 of 128 elements" in finding.happened and "[3, 0]" in finding.happened


def test_a_row_is_written_by_two() -> None:
    twice = changed(WRITE, "mad.lo.s32", "shr.u32 %r2, %r2, 1;\n  mad.lo.s32")
    report = check(twice, torch.empty(ROWS, COLUMNS))
    assert report.kinds == {"written twice", "never written"}
    assert "32 elements of o again, from [0, 0] on" in report.of("written twice")[0].happened or "[1, 0]" in str(report)


def test_vectors() -> None:
    """A store of 8 bytes writes two elements."""
    body = changed(WRITE, "  st.global.b32 [%rd1], %r4;\n", "  st.global.v2.b32 [%rd1], {%r4, %r4};\n")
    pairs = changed(changed(body, "%r2, 32, %r1", "%r2, 16, %r1"), "%rd2, %r3, 4", "%rd2, %r3, 8")
    half = changed(pairs, "ld.param", "setp.ge.u32 %p1, %r1, 16;\n  @%p1 bra END;\n  ld.param") + "END:\n"
    assert not check(half, torch.empty(ROWS, COLUMNS))
    assert "written twice" in check(pairs, torch.empty(ROWS, COLUMNS)[:3], grid=2).kinds


def test_sums_may_be_written_often() -> None:
    adds = changed(
        changed(WRITE, "mad.lo.s32", "shr.u32 %r2, %r2, 1;\n  mad.lo.s32"), "st.global.b32", "red.global.add.u32"
    )
    assert check(adds, torch.empty(ROWS, COLUMNS)).kinds == {"never written"}


@pytest.mark.parametrize(("opcode", "twice"), [("cp.async.bulk", True), ("cp.reduce.async.bulk", False)])
def test_bulk_copies(opcode: str, twice: bool) -> None:
    """Every CTA stores its row by a bulk copy; CTA 1 that of CTA 0."""
    form = ".global.shared::cta.bulk_group" + ("" if twice else ".add.f32")
    body = f"""
  mov.b32 %r9, __dynamic_shmem__0;
  mov.u32 %r8, %tid.x;
  shl.b32 %r8, %r8, 2;
  add.u32 %r8, %r8, %r9;
  st.shared.b32 [%r8], 0;
  fence.proxy.async.shared::cta;
  bar.warp.sync -1;
  mov.u32 %r2, %ctaid.x;
  ld.param.u64 %rd1, [k_param_0];
  mul.wide.u32 %rd2, %r2, 128;
  add.s64 %rd1, %rd1, %rd2;
  mov.u32 %r1, %tid.x;
  setp.ne.u32 %p1, %r1, 0;
  @%p1 bra END;
  {opcode}{form} [%rd1], [%r9], 128;
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group.read 0;
END:
"""
    assert not check(body, torch.empty(ROWS, COLUMNS))
    same = changed(body, "mul.wide.u32 %rd2, %r2, 128;", "shr.u32 %r2, %r2, 1;\n  mul.wide.u32 %rd2, %r2, 128;")
    assert check(same, torch.empty(ROWS, COLUMNS)).kinds == {"never written"} | ({"written twice"} if twice else set())


def test_holes_of_a_view_need_not_be_written() -> None:
    """A tensor with a stride: what lies between its rows is not part of it."""
    storage = torch.zeros(ROWS, 2 * COLUMNS)
    view = storage[:, :COLUMNS]
    program = assemble(changed(WRITE, "%r2, 32, %r1", "%r2, 64, %r1"), [storage.numpy()])
    launch: Any = launch_of(program, [storage.numpy()], grid=(ROWS, 1, 1))
    launch.allocations[0].name, launch.tensors = "o", {"o": view}
    checks = Checks(Names("k"))
    machine.run(program, launch, policy="random", observers=[checks])
    assert not checks.findings
