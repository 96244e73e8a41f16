"""Small kernels for the checkers: right as they stand, and wrong after one line was taken out or replaced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fa3.emulator import machine
from fa3.emulator.check import Names, Report
from fa3.emulator.check.composite import Checks
from fa3.emulator.faults import Fault

from ..assembler import SHARED, aligned, assemble, launch_of

POLICIES = ("early", "late", "random")
BARRIER = SHARED
"""Shared address of the first mbarrier of the kernels here; the others follow it."""
DATA = SHARED + 128
SOURCE = aligned(np.arange(256, dtype=np.float32))


def check(
    body: str,
    *arguments: Any,
    threads: int = 64,
    names: Names | None = None,
    policies: Sequence[str] = POLICIES,
    seeds: Sequence[int] = (0,),
    smem: int = 4096,
    grid: tuple[int, int, int] = (1, 1, 1),
    cluster: tuple[int, int, int] = (1, 1, 1),
) -> Report:
    """What the checkers find in a body under several schedules."""
    program = assemble(body, arguments, threads)
    report = Report()
    for policy in policies:
        for seed in seeds:
            checks = Checks(names or Names("k"))
            launch: Any = launch_of(program, arguments, grid, smem, cluster=cluster)
            try:
                machine.run(program, launch, policy=policy, seed=seed, observers=[checks])
            except Fault as fault:
                checks.stopped(fault)
            for finding in checks.findings:
                report.add(finding)
    return report


def changed(body: str, old: str, new: str = "") -> str:
    """The body with another line, or without it."""
    assert old in body, old
    return body.replace(old, new)


def wait(label: str, address: str, parity: str) -> str:
    """Spins until the phase of an mbarrier is complete."""
    return f"""
{label}:
  mbarrier.try_wait.parity.shared.b64 %p9, [{address}], {parity};
  @%p9 bra {label}_DONE;
  bra {label};
{label}_DONE:"""


WARP_AND_LANE = """
  mov.u32 %r1, %tid.x;
  shr.u32 %r2, %r1, 5;
  mov.u32 %r3, %laneid;
  mov.b32 %r4, __dynamic_shmem__0;
"""
"""%r1 thread, %r2 warp, %r3 lane, %r4 shared memory."""

INITIALISE = """
  setp.ne.u32 %p1, %r1, 0;
  @%p1 bra INITIALISED;
  mbarrier.init.shared.b64 [%r4], 1;
  mbarrier.init.shared.b64 [%r4+8], 1;
INITIALISED:
  fence.mbarrier_init.release.cluster;
  bar.sync 0;
"""
"""A `full` barrier at %r4 and an `empty` one at %r4 + 8."""

FULL_WAIT = wait("FULL", "%r4", "%r10")
EMPTY_WAIT = wait("EMPTY", "%r4+8", "%r11")
ANNOUNCE = "mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r4], 128;"
LOAD = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r4+128], [%rd1], 128, [%r4];"
READ = "ld.shared.b32 %r20, [%r21+128];"
JOIN = "bar.warp.sync -1;"
RELEASE = "mbarrier.arrive.shared.b64 %rd8, [%r4+8], 1;"

RING = f"""{WARP_AND_LANE}{INITIALISE}
  ld.param.u64 %rd1, [k_param_0];
  mov.b32 %r10, 0;
  mov.b32 %r12, 0;
  setp.ne.u32 %p2, %r3, 0;
  setp.ne.u32 %p3, %r2, 0;
  @%p3 bra CONSUME;
PRODUCE:
  xor.b32 %r11, %r10, 1;
{EMPTY_WAIT}
  @%p2 bra LOADED;
  {ANNOUNCE}
  {LOAD}
LOADED:
  xor.b32 %r10, %r10, 1;
  add.u32 %r12, %r12, 1;
  setp.lt.u32 %p4, %r12, 4;
  @%p4 bra PRODUCE;
  bra END;
CONSUME:
{FULL_WAIT}
  shl.b32 %r21, %r3, 2;
  add.u32 %r21, %r21, %r4;
  {READ}
  {JOIN}
  @%p2 bra RELEASED;
  {RELEASE}
RELEASED:
  xor.b32 %r10, %r10, 1;
  add.u32 %r12, %r12, 1;
  setp.lt.u32 %p4, %r12, 4;
  @%p4 bra CONSUME;
END:
"""
"""Warp 0 loads 128 bytes four times into one stage; warp 1 reads them, and one lane of it frees the stage."""


def check_ring(body: str = RING, **options: Any) -> Report:
    return check(body, SOURCE, **options)
