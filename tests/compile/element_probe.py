"""One thread block that loads values, applies something to them, and stores what it gives."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

THREADS = 128


def exp2_and_forget(x, count):
    cute.math.exp2(x[0], fastmath=True)
    return x[0]


def volatile_exp2_and_forget(x, count):
    cute.arch.exp2(x[0])
    return x[0]


def fast_exp2(x, count):
    return cute.math.exp2(x[0], fastmath=True)


def careful_exp2(x, count):
    return cute.math.exp2(x[0])


def fast_maximum(x, count):
    return cute.arch.fmax(x[0], x[1])


def slow_maximum(x, count):
    return cutlass.max(x[0], x[1])


def branches_in_a_plain_function(x, count):
    return x[0] if count > 3 else x[1]


@cute.jit
def branches_in_a_traced_function(x, count):
    return x[0] if count > 3 else x[1]


@cute.jit
def returns_early(x, count):
    if count > 3:
        return x[0]
    return x[1]


@cute.jit
def breaks_out(x, count):
    total = x[0]
    for i in cutlass.range(count):
        if i > 3:
            break
        total += x[1]
    return total


@cute.jit
def changes_a_type(x, count):
    total = 0
    for _ in cutlass.range(count):
        total = x[0]
    return total


@cute.jit
def takes_too_much_shared_memory(x, count):
    tile = SmemAllocator().allocate_tensor(Float32, cute.make_layout(100_000), 128)  # 400 000 bytes; an SM has 232 448
    tile[count] = x[0]
    return tile[count + 1]


@cute.kernel
def kernel(y: cute.Tensor, count: Int32, apply: cutlass.Constexpr, width: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    x = cute.make_rmem_tensor((width,), Float32)
    for i in cutlass.range_constexpr(width):
        x[i] = y[thread + THREADS * i]
    y[thread] = apply(x, count)


@cute.jit
def host(y: cute.Tensor, count: Int32, apply: cutlass.Constexpr, width: cutlass.Constexpr, stream):
    kernel(y, count, apply, width).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.kernel
def register_kernel(y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < 4:
        cute.arch.setmaxregister_decrease(40)
        y[thread] = Float32(1.0)
    else:
        cute.arch.setmaxregister_increase(232)
        y[thread] = Float32(2.0)


@cute.jit
def register_host(y: cute.Tensor, min_blocks: cutlass.Constexpr, stream):
    register_kernel(y).launch(grid=[1, 1, 1], block=[384, 1, 1], min_blocks_per_mp=min_blocks, stream=stream)
