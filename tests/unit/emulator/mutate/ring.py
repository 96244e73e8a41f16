"""A small kernel with all that the operators look for: a ring of two stages, filled by warp 0 and read by warp 1.

Argument 0 has a block of 32 floats for each lap, argument 1 gets what warp 1 read, argument 2 is the number of blocks.
"""

from __future__ import annotations

import numpy as np

from fa3.emulator.check.names import BarrierPlan, Names
from fa3.emulator.program import Program

from ..assembler import SHARED, aligned, assemble

BLOCKS = 5

BODY = """
  .loc 1 1 1
  mov.u32 %r1, %tid.x;
  shr.u32 %r2, %r1, 5;
  mov.u32 %r3, %laneid;
  mov.b32 %r4, __dynamic_shmem__0;
  ld.param.b32 %r5, [k_param_2];
  setp.ne.u32 %p1, %r1, 0;
  @%p1 bra INITIALISED;
  .loc 1 2 1
  mov.b32 %r6, 1;
  mbarrier.init.shared.b64 [%r4], %r6;
  mbarrier.init.shared.b64 [%r4+8], 1;
  mbarrier.init.shared.b64 [%r4+16], 1;
  mbarrier.init.shared.b64 [%r4+24], 1;
INITIALISED:
  .loc 1 3 1
  fence.mbarrier_init.release.cluster;
  .loc 1 4 1
  bar.sync 0;
  mov.b32 %r10, 0;
  mov.b32 %r11, %r10;
  mov.b32 %r12, 0;
  setp.ge.s32 %p2, %r12, %r5;
  @%p2 bra DONE;
  setp.ne.u32 %p3, %r2, 0;
  @%p3 bra READ;
FILL:
  .loc 1 10 1
  shl.b32 %r13, %r10, 3;
  add.s32 %r14, %r4, %r13;
  add.s32 %r15, %r14, 16;
  xor.b32 %r16, %r11, 1;
EMPTY:
  mbarrier.try_wait.parity.shared.b64 %p4, [%r15], %r16, 1000;
  @%p4 bra FREE;
  bra EMPTY;
FREE:
  .loc 1 11 1
  shl.b32 %r17, %r12, 7;
  shl.b32 %r18, %r3, 2;
  add.s32 %r19, %r17, %r18;
  cvt.u64.u32 %rd1, %r19;
  ld.param.b64 %rd2, [k_param_0];
  add.s64 %rd3, %rd2, %rd1;
  ld.global.b32 %r20, [%rd3];
  shl.b32 %r21, %r10, 7;
  add.s32 %r22, %r21, %r18;
  add.s32 %r23, %r4, %r22;
  st.shared.b32 [%r23+128], %r20;
  .loc 1 12 1
  bar.warp.sync -1;
  setp.ne.u32 %p10, %r3, 0;
  @%p10 bra FILLED;
  mov.b32 %r24, 1;
  mbarrier.arrive.shared.b64 %rd4, [%r14], %r24;
FILLED:
  .loc 1 13 1
  add.s32 %r25, %r10, 1;
  setp.eq.b32 %p5, %r25, 2;
  selp.b32 %r26, 1, 0, %p5;
  selp.b32 %r27, -2, 0, %p5;
  add.s32 %r10, %r27, %r25;
  xor.b32 %r11, %r11, %r26;
  .loc 1 14 1
  add.s32 %r12, %r12, 1;
  setp.lt.s32 %p6, %r12, %r5;
  @%p6 bra FILL;
  bra DONE;
READ:
  .loc 1 20 1
  shl.b32 %r30, %r10, 3;
  add.s32 %r31, %r4, %r30;
FULL:
  mbarrier.try_wait.parity.shared.b64 %p7, [%r31], %r11, 1000;
  @%p7 bra CAME;
  bra FULL;
CAME:
  .loc 1 21 1
  shl.b32 %r33, %r10, 7;
  shl.b32 %r34, %r3, 2;
  add.s32 %r35, %r33, %r34;
  add.s32 %r36, %r4, %r35;
  ld.shared.b32 %r37, [%r36+128];
  shl.b32 %r38, %r12, 7;
  add.s32 %r39, %r38, %r34;
  cvt.u64.u32 %rd5, %r39;
  ld.param.b64 %rd6, [k_param_1];
  add.s64 %rd7, %rd6, %rd5;
  st.global.b32 [%rd7], %r37;
  .loc 1 22 1
  bar.warp.sync -1;
  setp.ne.u32 %p11, %r3, 0;
  @%p11 bra RELEASED;
  mbarrier.arrive.shared.b64 %rd8, [%r31+16], 1;
RELEASED:
  .loc 1 23 1
  add.s32 %r40, %r10, 1;
  setp.eq.b32 %p8, %r40, 2;
  selp.b32 %r41, 1, 0, %p8;
  selp.b32 %r42, -2, 0, %p8;
  add.s32 %r10, %r42, %r40;
  xor.b32 %r11, %r11, %r41;
  .loc 1 24 1
  add.s32 %r12, %r12, 1;
  setp.lt.s32 %p9, %r12, %r5;
  @%p9 bra READ;
DONE:
"""


class RingNames(Names):
    """The ring's name is "data"."""

    def plan(self, address: int) -> BarrierPlan | None:
        number, rest = divmod(address - SHARED, 8)
        if rest or not 0 <= number < 4:
            return None
        side, stage = ("full", "empty")[number // 2], number % 2
        warp = number // 2
        return BarrierPlan(f"data.{side}[{stage}]", "data", 1, frozenset((warp,)), (self.role(warp),), 0)

    def role(self, warp: int) -> str:
        return ("fill", "read")[warp]

    def buffer(self, first: int) -> str:
        return "data" if first >= SHARED + 128 else ""


def program() -> Program:
    return assemble(BODY, arguments(), threads=64)


def arguments() -> list[object]:
    source = aligned(np.arange(32 * BLOCKS, dtype=np.float32))
    return [source, aligned(np.zeros_like(source)), np.int32(BLOCKS)]
