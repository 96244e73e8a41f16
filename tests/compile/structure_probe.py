"""One GEMM, D = A B^T with a ring between a load warp and two math warpgroups, written twice.

`Structured` has roles as dataclasses, edges that a topology plans, rings and cursors, as the kernels do. `Inlined` is
the same program in one function, with barriers, stages and phases as plain numbers.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from fa3.pipeline.cursor import Cursor
from fa3.pipeline.ring import Ring, init_barriers, make_rings
from fa3.pipeline.schedule import load_and_math
from fa3.pipeline.topology import Edge, Topology

DTYPE = cutlass.BFloat16
M, N, K, STAGES = 128, 128, 64, 3
GROUPS = M // 64
TILE_BYTES = (M + N) * K * DTYPE.width // 8
ROW_MAJOR = cutlass.tensor_utils.LayoutEnum.ROW_MAJOR

SCHEDULE = load_and_math(GROUPS)
TOPOLOGY = Topology.of(SCHEDULE, Edge("ab", "load", ("math0", "math1"), stages=STAGES, bytes=TILE_BYTES))


class Operand(NamedTuple):
    """A matrix as the copy engine sees it."""

    atom: cute.CopyAtom
    coordinates: cute.Tensor


class Shared(NamedTuple):
    """The kernel's shared memory."""

    barriers: Any
    sA: cute.Tensor
    sB: cute.Tensor


def allocate(layout_a: cute.ComposedLayout, layout_b: cute.ComposedLayout) -> Shared:
    @cute.struct
    class Storage:
        barriers: cute.struct.MemRange[cutlass.Int64, 2 * STAGES]
        a: cute.struct.Align[cute.struct.MemRange[DTYPE, cute.cosize(layout_a)], 1024]
        b: cute.struct.Align[cute.struct.MemRange[DTYPE, cute.cosize(layout_b)], 1024]

    storage = SmemAllocator().allocate(Storage)
    return Shared(
        storage.barriers.data_ptr(),
        storage.a.get_tensor(layout_a.outer, swizzle=layout_a.inner),
        storage.b.get_tensor(layout_b.outer, swizzle=layout_b.inner),
    )


def partition(operand: Operand, smem: cute.Tensor, tile: tuple[int, int], block: Int32):
    boxes = cute.local_tile(operand.coordinates, tile, (block, None))
    alone = cute.make_layout(1)
    grouped = cute.group_modes(smem, 0, 2), cute.group_modes(boxes, 0, 2)
    return cpasync.tma_partition(operand.atom, 0, alone, *grouped)


# --- with structure --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """The producer warp."""

    ring: Ring
    a: Operand
    b: Operand
    shared: Shared

    @cute.jit
    def run(self, blocks: Int32):
        m_block, n_block, _ = cute.arch.block_idx()
        tAsA, tAgA = partition(self.a, self.shared.sA, (M, K), m_block)
        tBsB, tBgB = partition(self.b, self.shared.sB, (N, K), n_block)
        cursor = self.ring.cursor()
        for k in cutlass.range(blocks, unroll=1):
            self.ring.acquire(cursor)
            barrier = self.ring.barrier(cursor)
            cute.copy(self.a.atom, tAgA[None, k], tAsA[None, cursor.stage], tma_bar_ptr=barrier)
            cute.copy(self.b.atom, tBgB[None, k], tBsB[None, cursor.stage], tma_bar_ptr=barrier)
            cursor = cursor.advance()


@dataclass(frozen=True)
class Math:
    """A math warpgroup: 64 rows of D."""

    ring: Ring
    mma: cute.TiledMma
    tCrA: cute.Tensor
    tCrB: cute.Tensor
    acc: cute.Tensor

    @cute.jit
    def run(self, blocks: Int32):
        cursor = self.ring.cursor()
        self.acc.fill(0.0)
        for _ in cutlass.range(blocks, unroll=1):
            self.ring.wait(cursor)
            self._multiply(cursor)
            self.ring.release(cursor)
            cursor = cursor.advance()

    @cute.jit
    def _multiply(self, cursor: Cursor):
        warpgroup.fence()
        atom = cute.make_mma_atom(self.mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        for k in cutlass.range_constexpr(K // 16):
            a, b = self.tCrA[None, None, k, cursor.stage], self.tCrB[None, None, k, cursor.stage]
            cute.gemm(atom, self.acc, a, b, self.acc)
        warpgroup.commit_group()
        warpgroup.wait_group(0)


@cute.jit
def structured(y, a, b, mma, shared, blocks):
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        init_barriers(TOPOLOGY, shared.barriers)
    cute.arch.sync_threads()
    ring = make_rings(TOPOLOGY, shared.barriers)["ab"]
    if warp < 4:
        cute.arch.setmaxregister_decrease(40)
        if warp == 0:
            Load(ring, a, b, shared).run(blocks)
    else:
        cute.arch.setmaxregister_increase(232)
        group = cute.arch.make_warp_uniform(warp // 4 - 1)
        part = mma.get_slice(cute.make_layout(GROUPS, stride=128)(group))
        tCrA, tCrB = mma.make_fragment_A(part.partition_A(shared.sA)), mma.make_fragment_B(part.partition_B(shared.sB))
        acc = cute.make_rmem_tensor(mma.partition_shape_C((M, N)), Float32)
        Math(ring, mma, tCrA, tCrB, acc).run(blocks)
        for i in cutlass.range_constexpr(cute.size(acc)):
            y[thread + 128 * i] = acc[i]


# --- without ---------------------------------------------------------------------------------------------------------


@cute.jit
def inlined(y, a, b, mma, shared, blocks):
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    full, empty = shared.barriers, shared.barriers + STAGES
    if warp == 0:
        with cute.arch.elect_one():
            for stage in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(full + stage, 1)
                cute.arch.mbarrier_init(full + stage + STAGES, 4 * GROUPS)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if warp < 4:
        cute.arch.setmaxregister_decrease(40)
        if warp == 0:
            m_block, n_block, _ = cute.arch.block_idx()
            tAsA, tAgA = partition(a, shared.sA, (M, K), m_block)
            tBsB, tBgB = partition(b, shared.sB, (N, K), n_block)
            stage, phase = Int32(0), Int32(0)
            for k in cutlass.range(blocks, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, TILE_BYTES)
                cute.copy(a.atom, tAgA[None, k], tAsA[None, stage], tma_bar_ptr=full + stage)
                cute.copy(b.atom, tBgB[None, k], tBsB[None, stage], tma_bar_ptr=full + stage)
                wrapped = (stage + 1 == STAGES).to(Int32)
                stage, phase = stage + 1 - wrapped * STAGES, phase ^ wrapped
    else:
        cute.arch.setmaxregister_increase(232)
        group = cute.arch.make_warp_uniform(warp // 4 - 1)
        part = mma.get_slice(cute.make_layout(GROUPS, stride=128)(group))
        tCrA, tCrB = mma.make_fragment_A(part.partition_A(shared.sA)), mma.make_fragment_B(part.partition_B(shared.sB))
        acc = cute.make_rmem_tensor(mma.partition_shape_C((M, N)), Float32)
        acc.fill(0.0)
        stage, phase = Int32(0), Int32(0)
        for _ in cutlass.range(blocks, unroll=1):
            cute.arch.mbarrier_wait(full + stage, phase)
            warpgroup.fence()
            atom = cute.make_mma_atom(mma.op)
            atom.set(warpgroup.Field.ACCUMULATE, True)
            for k in cutlass.range_constexpr(K // 16):
                cute.gemm(atom, acc, tCrA[None, None, k, stage], tCrB[None, None, k, stage], acc)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(empty + stage)
            wrapped = (stage + 1 == STAGES).to(Int32)
            stage, phase = stage + 1 - wrapped * STAGES, phase ^ wrapped
        for i in cutlass.range_constexpr(cute.size(acc)):
            y[thread + 128 * i] = acc[i]


# --- kernel and host -------------------------------------------------------------------------------------------------


@cute.kernel
def kernel(
    y: cute.Tensor,
    a: Operand,
    b: Operand,
    mma: cute.TiledMma,
    layout_a: cute.ComposedLayout,
    layout_b: cute.ComposedLayout,
    blocks: Int32,
    body: cutlass.Constexpr,
):
    body(y, a, b, mma, allocate(layout_a, layout_b), blocks)


@cute.jit
def host(mA: cute.Tensor, mB: cute.Tensor, y: cute.Tensor, body: cutlass.Constexpr, stream):
    major = OperandMajorMode.K
    mma = hopper.make_trivial_tiled_mma(DTYPE, DTYPE, major, major, Float32, (GROUPS, 1, 1), (64, N))
    layout_a = hopper.make_smem_layout_a(ROW_MAJOR, (M, N, K), DTYPE, STAGES)
    layout_b = hopper.make_smem_layout_b(ROW_MAJOR, (M, N, K), DTYPE, STAGES)
    load = cpasync.CopyBulkTensorTileG2SOp()
    a = Operand(*cpasync.make_tiled_tma_atom(load, mA, layout_a, (M, K)))
    b = Operand(*cpasync.make_tiled_tma_atom(load, mB, layout_b, (N, K)))
    blocks = cute.ceil_div(mA.shape[1], K)
    kernel(y, a, b, mma, layout_a, layout_b, blocks, body).launch(
        grid=[1, 1, 1], block=[SCHEDULE.threads, 1, 1], min_blocks_per_mp=1, stream=stream
    )


def matrix(rows: Any, columns: Any) -> Any:
    """A stand-in for a row-major matrix that TMA can read."""
    return make_fake_tensor(DTYPE, (rows, columns), (cute.sym_int64(divisibility=8), 1), assumed_align=16)
