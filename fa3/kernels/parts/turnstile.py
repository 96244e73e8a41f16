"""Who may add to dQ, and when.

There is a counter in global memory for each query block, head and batch, 0 at first. With it the key blocks that the
query block sees agree on who is first (`FirstComes`), or on an order (`InOrder`), if they have to (`AnyOrder`).
"""

from dataclasses import dataclass
from typing import Any

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
class AnyOrder:
    """For a warp that writes by bulk operations of its elected lane: all add their parts to zeros, in any order."""

    counters: cute.Tensor
    """(m_block, head), int32; nobody counts."""

    def wait(self, m_block: Int32, head: Int32) -> bool:
        """Until this CTA may put its part there. Returns whether it is the first, which stores its part."""
        return False

    def put(self, target: cute.Pointer, source: cute.Pointer, count: int, is_first: bool):
        """One thread: `count` fp32 numbers of shared memory."""
        add_to_global(target, source, count)

    def give(self, m_block: Int32, head: Int32, is_first: bool):
        """All of this CTA's part is on its way."""

    def close(self, m_block: Int32, head: Int32):
        """After the last query block of a head."""


@dataclass(frozen=True)
class FirstComes:
    """As `AnyOrder`, but the CTA that comes first stores its part, so that nothing has to be cleared before; the others
    wait until it has.

    A counter is 0 until someone has come, then 1, and 2 when the first part is there.
    """

    counters: cute.Tensor
    """(m_block, head), int32."""

    @call_site
    @cute.jit
    def wait(self, m_block: Int32, head: Int32):
        before = Int32(0)
        if cute.arch.lane_idx() == 0:
            place = _place(self.counters, m_block, head)
            before = compare_and_swap(place, 0, 1)
            if before == 1:
                wait_for_count(place, Int32(2))
        before = cute.arch.shuffle_sync(before, 0)
        return before == 0

    @cute.jit
    def put(self, target: cute.Pointer, source: cute.Pointer, count: cutlass.Constexpr, is_first):
        put_bulk(target, source, count, is_first)

    @call_site
    @cute.jit
    def give(self, m_block: Int32, head: Int32, is_first):
        if is_first:
            with cute.arch.elect_one():
                count_when_complete(_place(self.counters, m_block, head), 0)

    def close(self, m_block: Int32, head: Int32):
        pass


@dataclass(frozen=True)
class InOrder:
    """As `FirstComes`, but all in a fixed order, so that every run gives the same bits.

    A counter says how many key blocks have put their part there. A CTA waits until that is its rank among those that
    the query block sees. Ranks follow the order in which CTAs start: whoever is waited for is running or done.

    A part is counted when the next one is on its way, too, so that the writer need not stand until its end. That did
    not pay (H200, head dim 128, causal, 8k, of the speed without an order: 0.75 to 0.78; earlier, counted at once, 0.81
    and 0.86, with other changes between).
    """

    counters: cute.Tensor
    mask: Any
    n_block: Int32
    first_block: Int32
    groups: int
    """Bulk groups of one query block."""

    @call_site
    @cute.jit
    def wait(self, m_block: Int32, head: Int32):
        rank = self.mask.rank(self.n_block, m_block)
        if cute.arch.lane_idx() == 0:
            wait_for_count(_place(self.counters, m_block, head), rank)
        cute.arch.sync_warp()
        return rank == 0

    @cute.jit
    def put(self, target: cute.Pointer, source: cute.Pointer, count: cutlass.Constexpr, is_first):
        put_bulk(target, source, count, is_first)

    @call_site
    @cute.jit
    def give(self, m_block: Int32, head: Int32, is_first):
        if m_block > self.first_block:
            with cute.arch.elect_one():
                count_when_complete(_place(self.counters, m_block - 1, head), self.groups)

    @call_site
    @cute.jit
    def close(self, m_block: Int32, head: Int32):
        with cute.arch.elect_one():
            count_when_complete(_place(self.counters, m_block, head), 0)


@cute.jit
def put_bulk(target: cute.Pointer, source: cute.Pointer, count: cutlass.Constexpr, is_first):
    if is_first:
        store_to_global(target, source, count)
    else:
        add_to_global(target, source, count)


@cute.jit
def count_when_complete(counter: cute.Pointer, younger: cutlass.Constexpr):
    """One thread: counts when all its bulk groups but the `younger` last are complete, not only read."""
    cute.arch.cp_async_bulk_wait_group(younger)
    cute.arch.fence_proxy("async")
    count_one(counter)


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
    """Returns when the counter is at least `wanted`; what was written before it was counted can be read then, by the
    copy engine, too."""
    seen = load_acquire(counter)
    while seen < wanted:
        seen = load_acquire(counter)
    cute.arch.fence_proxy("async")


@dsl_user_op
def load_acquire(counter, *, loc=None, ip=None):
    operands = [counter.toint().ir_value(loc=loc, ip=ip)]
    return int32_of("ld.acquire.gpu.global.b32 $0, [$1];", "=r,l,~{memory}", operands, True, loc, ip)


@dsl_user_op
def compare_and_swap(counter, expected: int, new: int, *, loc=None, ip=None):
    """Sets a counter that is `expected` to `new`, and returns what it was."""
    values = [Int32(value).ir_value(loc=loc, ip=ip) for value in (expected, new)]
    operands = [counter.toint().ir_value(loc=loc, ip=ip), *values]
    return int32_of("atom.acquire.gpu.global.cas.b32 $0, [$1], $2, $3;", "=r,l,r,r,~{memory}", operands, True, loc, ip)


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
