"""Who may add to dQ, and when.

A counter in global memory for each query block, head and batch says how many CTAs have put their part of dQ there. The
CTA of the first keys stores its part, so that nothing has to be cleared; all others add theirs to it (`FirstStores`).
To have the same bits in every run they do so one after the other, in the order of the keys (`InOrder`). CTAs start in
that order, too: whoever is waited for is running or done.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from fa3.pipeline.barriers import WarpgroupBarrier
from fa3.pipeline.call_site import call_site

from .asm import int32_of
from .bulk import add_to_global, store_to_global
from .lanes import thread_of_warpgroup


@dataclass(frozen=True)
class FirstStores:
    """For a warp that writes by bulk operations of its elected lane: the first key block stores, the others add."""

    counters: cute.Tensor
    """(m_block, head), int32."""
    n_block: Int32

    @call_site
    @cute.jit
    def wait(self, m_block: Int32, head: Int32):
        """Until this CTA may put its part there."""
        if self.n_block > 0:
            self._wait_for(Int32(1), m_block, head)

    @cute.jit
    def put(self, target: cute.Pointer, source: cute.Pointer, count: cutlass.Constexpr):
        """One thread: `count` fp32 numbers of shared memory."""
        if self.n_block == 0:
            store_to_global(target, source, count)
        else:
            add_to_global(target, source, count)

    @call_site
    @cute.jit
    def give(self, m_block: Int32, head: Int32):
        """This CTA has put its part there."""
        if self.n_block == 0:
            self._count(m_block, head)

    @cute.jit
    def _wait_for(self, count: Int32, m_block: Int32, head: Int32):
        with cute.arch.elect_one():
            wait_for_count(_place(self.counters, m_block, head), count)
            cute.arch.fence_proxy("async")
        cute.arch.sync_warp()

    @cute.jit
    def _count(self, m_block: Int32, head: Int32):
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0)  # complete, not only read
            cute.arch.fence_proxy("async")
            count_one(_place(self.counters, m_block, head))


@dataclass(frozen=True)
class InOrder(FirstStores):
    """Key block after key block."""

    @call_site
    @cute.jit
    def wait(self, m_block: Int32, head: Int32):
        self._wait_for(self.n_block, m_block, head)

    @call_site
    @cute.jit
    def give(self, m_block: Int32, head: Int32):
        self._count(m_block, head)


@dataclass(frozen=True)
class NoTurnstile:
    """For warpgroups that add from registers to what has been cleared, in whatever order they come."""

    def wait(self, m_block: Int32, head: Int32):
        pass

    def give(self, m_block: Int32, head: Int32):
        pass


@dataclass(frozen=True)
class WarpgroupTurnstile:
    """As `NoTurnstile`, one CTA after the other; each of its `warpgroups` has places of its own."""

    counters: cute.Tensor
    n_block: Int32
    warpgroups: int
    alone: WarpgroupBarrier

    @call_site
    @cute.jit
    def wait(self, m_block: Int32, head: Int32):
        if thread_of_warpgroup() == 0:
            wait_for_count(_place(self.counters, m_block, head), self.n_block * self.warpgroups)
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
