"""One warpgroup that multiplies two tiles in shared memory, and does something with the result or beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.memory import SmemAllocator

DTYPE = cutlass.BFloat16
M, N, K = 64, 128, 64
ROW_MAJOR = cutlass.tensor_utils.LayoutEnum.ROW_MAJOR
VALUES = 64


@dataclass(frozen=True)
class Work:
    """What a probe's loop may use: two accumulators, operands, and values that no GEMM touches."""

    mma: Any
    acc: Any
    other: Any
    a: Any
    b: Any
    values: Any

    def start(self, acc: Any) -> None:
        """acc += a b, not waited for."""
        warpgroup.fence()
        atom = cute.make_mma_atom(self.mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        for k in range(K // 16):
            cute.gemm(atom, acc, self.a[None, None, k, 0], self.b[None, None, k, 0], acc)
        warpgroup.commit_group()

    def softmax(self) -> Any:
        """Replaces the values by exponentials of their distance to the largest one, which it returns."""
        largest = self.values[0]
        for i in range(1, VALUES):
            largest = cute.arch.fmax(largest, self.values[i])
        for i in range(VALUES):
            self.values[i] = cute.math.exp2(self.values[i] - largest, fastmath=True)
        return largest

    def scale(self, factor: Any) -> None:
        for i in range(cute.size(self.acc)):
            self.acc[i] = self.acc[i] * factor


def waits(work: Work) -> None:
    work.start(work.acc)
    warpgroup.wait_group(0)


def touches_an_accumulator_in_flight(work: Work) -> None:
    work.start(work.acc)
    for i in range(cute.size(work.acc)):
        work.acc[i] = work.acc[i] * 0.5
    work.start(work.other)
    warpgroup.wait_group(0)


def softmax_under_a_gemm(work: Work) -> None:
    """As in the forward: a maximum and exponentials of other values, then the accumulator is scaled."""
    work.start(work.acc)
    largest = work.softmax()
    warpgroup.wait_group(0)
    work.scale(largest)


def softmax_before_a_fence(work: Work) -> None:
    work.start(work.acc)
    largest = work.softmax()
    cute.arch.fence_acq_rel_cta()
    warpgroup.wait_group(0)
    work.scale(largest)


def multiplies_with_a_shared_atom(work: Work) -> None:
    """`tiled_mma.set` in a helper: the value that it stores belongs to the loop that calls it."""
    warpgroup.fence()
    for k in range(K // 16):
        cute.gemm(work.mma, work.acc, work.a[None, None, k, 0], work.b[None, None, k, 0], work.acc)
        work.mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
    warpgroup.wait_group(0)


@cute.kernel
def kernel(
    y: cute.Tensor,
    mma: cute.TiledMma,
    layout_a: cute.ComposedLayout,
    layout_b: cute.ComposedLayout,
    count: Int32,
    step: cutlass.Constexpr,
    uniform: cutlass.Constexpr,
    twice: cutlass.Constexpr,
):
    thread, _, _ = cute.arch.thread_idx()
    smem = SmemAllocator()
    sA = smem.allocate_tensor(DTYPE, layout_a.outer, 1024, layout_a.inner)
    sB = smem.allocate_tensor(DTYPE, layout_b.outer, 1024, layout_b.inner)
    index = cute.arch.make_warp_uniform(thread // 128) * 128 if cutlass.const_expr(uniform) else thread
    part = mma.get_slice(index)
    a, b = mma.make_fragment_A(part.partition_A(sA)), mma.make_fragment_B(part.partition_B(sB))
    acc = cute.make_rmem_tensor(mma.partition_shape_C((2 * M, N)), Float32)
    other = cute.make_rmem_tensor(mma.partition_shape_C((2 * M, N)), Float32)
    values = cute.make_rmem_tensor((VALUES,), Float32)
    acc.fill(0.0)
    other.fill(0.0)
    for i in cutlass.range_constexpr(VALUES):
        values[i] = y[thread + 256 * i]
    work = Work(mma, acc, other, a, b, values)
    for _ in cutlass.range(count, unroll=1):
        step(work)
    if cutlass.const_expr(twice):
        step(work)
    for i in cutlass.range_constexpr(cute.size(acc)):
        y[thread + 256 * i] = acc[i] + other[i] + values[i % VALUES]


@cute.jit
def host(
    y: cute.Tensor, count: Int32, step: cutlass.Constexpr, uniform: cutlass.Constexpr, twice: cutlass.Constexpr, stream
):
    major = OperandMajorMode.K
    mma = hopper.make_trivial_tiled_mma(DTYPE, DTYPE, major, major, Float32, (2, 1, 1), (M, N))
    layout_a = hopper.make_smem_layout_a(ROW_MAJOR, (2 * M, N, K), DTYPE, 1)
    layout_b = hopper.make_smem_layout_b(ROW_MAJOR, (2 * M, N, K), DTYPE, 1)
    kernel(y, mma, layout_a, layout_b, count, step, uniform, twice).launch(
        grid=[1, 1, 1], block=[256, 1, 1], min_blocks_per_mp=1, stream=stream
    )
