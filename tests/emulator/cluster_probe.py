"""A kernel in pairs of CTAs, each of which sends a number from every thread to the other."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects.nvvm import MemScopeKind
from cutlass.memory import SmemAllocator

THREADS = 128
STEP = 1000


@cute.kernel
def kernel(y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    pair, _, _ = cute.arch.cluster_idx()
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    peer = rank ^ 1
    smem = SmemAllocator()
    full, read = smem.allocate_array(cutlass.Int64, 1), smem.allocate_array(cutlass.Int64, 1)
    inbox = smem.allocate_tensor(Int32, cute.make_layout(THREADS), 128)
    if thread == 0:
        cute.arch.mbarrier_init(full, 1)
        cute.arch.mbarrier_init(read, THREADS)
    cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()
    if thread == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(full, 4 * THREADS)
    cute.arch.store_async_dsmem(inbox.iterator + thread, STEP * (2 * pair + rank) + thread, full, peer)
    cute.arch.mbarrier_wait(full, 0)
    y[block * THREADS + thread] = inbox[thread]
    cute.arch.mbarrier_arrive(read, peer, scope=MemScopeKind.CLUSTER)
    cute.arch.mbarrier_wait(read, 0)


@cute.jit
def host(y: cute.Tensor, stream):
    blocks = cute.size(y) // THREADS
    kernel(y).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], cluster=[2, 1, 1], min_blocks_per_mp=1, stream=stream)
