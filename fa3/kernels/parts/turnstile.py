"""Who may add to dQ: anybody at any time, or the key blocks in a fixed order, so that every run gives the same bits.

A counter in global memory for each query block, head and batch says how many CTAs have added to it. A CTA waits until
that is its rank among the key blocks that the query block sees (`rank` of `parts/key_mask.py`), adds, waits until its
sums are there, and counts. Ranks follow the order in which CTAs start: whoever is waited for is running or done.
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from fa3.pipeline.barriers import WarpgroupBarrier
from fa3.pipeline.call_site import call_site

from .asm import int32_of
from .lanes import thread_of_warpgroup


@dataclass(frozen=True)
class NoTurnstile:
    """The identity twin: sums in whatever order they come."""

    def wait(self, m_block: Int32, head: Int32):
        pass

    def give(self, m_block: Int32, head: Int32):
        pass


@dataclass(frozen=True)
class WriterTurnstile:
    """For a warp that adds by bulk operations of its elected lane."""

    counters: cute.Tensor
    """(m_block, head), int32."""
    mask: Any
    n_block: Int32

    @call_site
    @cute.jit
    def wait(self, m_block: Int32, head: Int32):
        with cute.arch.elect_one():
            wait_for_count(_place(self.counters, m_block, head), self.mask.rank(self.n_block, m_block))
        cute.arch.sync_warp()

    @call_site
    @cute.jit
    def give(self, m_block: Int32, head: Int32):
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0)  # complete, not only read
            cute.arch.fence_proxy("async")
            count_one(_place(self.counters, m_block, head))


@dataclass(frozen=True)
class WarpgroupTurnstile:
    """For `warpgroups` warpgroups that add from registers, each to places of its own."""

    counters: cute.Tensor
    mask: Any
    n_block: Int32
    warpgroups: int
    alone: WarpgroupBarrier

    @call_site
    @cute.jit
    def wait(self, m_block: Int32, head: Int32):
        if thread_of_warpgroup() == 0:
            rank = self.mask.rank(self.n_block, m_block)
            wait_for_count(_place(self.counters, m_block, head), rank * self.warpgroups)
        self.alone.join()

    @call_site
    @cute.jit
    def give(self, m_block: Int32, head: Int32):
        cute.arch.fence_acq_rel_gpu()
        self.alone.join()
        if thread_of_warpgroup() == 0:
            count_one(_place(self.counters, m_block, head))


def _place(counters: cute.Tensor, m_block: Int32, head: Int32) -> cute.Pointer:
    return counters.iterator + cute.crd2idx((m_block, head), counters.layout)


@cute.jit
def wait_for_count(counter: cute.Pointer, wanted: Int32):
    """Returns when the counter is at least `wanted`; what was written before it was counted can be read then."""
    seen = load_acquire(counter)
    while seen < wanted:
        seen = load_acquire(counter)


@dsl_user_op
def load_acquire(counter, *, loc=None, ip=None):
    operands = [counter.toint().ir_value(loc=loc, ip=ip)]
    return int32_of("ld.acquire.gpu.global.b32 $0, [$1];", "=r,l,~{memory}", operands, True, loc, ip)


@dsl_user_op
def count_one(counter, *, loc=None, ip=None):
    """Adds 1; whoever sees it sees what this thread, and those it has met, wrote before."""
    operands = [counter.toint().ir_value(loc=loc, ip=ip), Int32(1).ir_value(loc=loc, ip=ip)]
    llvm.inline_asm(
        None,
        operands,
        "red.release.gpu.global.add.u32 [$0], $1;",
        "l,r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
