"""WGMMA batches, and the conversion of an accumulator to the 16-bit operand of the next one."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import dsl_user_op

from fa3.pipeline.call_site import call_site

from .asm import int32_of


@call_site
@cute.jit
def start_gemm(mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: cutlass.Constexpr):
    """Issues acc (+)= a b as one committed group and returns while it runs; `wait_gemms` waits.

    `a`: (V, M, K) descriptors or registers; `b`: (V, N, K) descriptors. The atom is made afresh here because setting
    ACCUMULATE mutates the Python object, and a mutation inside a run-time loop would leak a value of that loop.
    """
    start_gemm_sum(mma, acc, [(a, b)], accumulate)


@call_site
@cute.jit
def start_gemm_sum(mma: cute.TiledMma, acc: cute.Tensor, terms: cutlass.Constexpr, accumulate: cutlass.Constexpr):
    """As `start_gemm`, for a sum over operands in several places: acc (+)= a_0 b_0 + a_1 b_1 + ..."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for a, b in terms:
        for k in cutlass.range_constexpr(cute.size(b, mode=[2])):
            cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@call_site
def start_nothing():
    """An empty group, in the place of a GEMM whose result nobody wants: everybody counts groups as with it."""
    warpgroup.commit_group()


@call_site
def wait_gemms(in_flight: int):
    """Waits until at most the `in_flight` youngest groups are still running."""
    warpgroup.wait_group(in_flight)


@dsl_user_op
def _pack_pair(high, low, dtype, *, loc=None, ip=None):
    """Two fp32 values, rounded to nearest and packed into 32 bits; `low` in the low half."""
    kind = {cutlass.Float16: "f16x2", cutlass.BFloat16: "bf16x2"}[dtype]
    operands = [Float32(value).ir_value(loc=loc, ip=ip) for value in (high, low)]
    return int32_of(f"cvt.rn.{kind}.f32 $0, $1, $2;", "=r,f,f", operands, False, loc, ip)


def convert_16(source: cute.Tensor, target: cute.Tensor):
    """fp32 fragment -> 16-bit fragment in the same order, two values per instruction.

    `TensorSSA.to` packs only power-of-two element counts: for the 88 values of a 64 x 176 tile it emits one conversion
    each and spills 580 bytes (DSL 4.8.1).
    """
    values = cute.make_tensor(source.iterator, cute.make_layout(cute.size(source)))
    pairs = cute.recast_tensor(cute.make_tensor(target.iterator, cute.make_layout(cute.size(target))), Int32)
    for i in range(cute.size(pairs)):
        pairs[i] = _pack_pair(values[2 * i + 1], values[2 * i], target.element_type)
