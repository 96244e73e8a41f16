"""Contiguous bytes to and from global memory without a tensor map: bulk copies, and 16-byte reductions."""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import dsl_user_op

from fa3.pipeline.call_site import call_site


@call_site
@cute.jit
def load_row(source: cute.Tensor, target: cute.Tensor, barrier: cute.Pointer):
    """One lane of a warp copies fp32 numbers, a multiple of 4, and reports their bytes to a ring's `barrier`."""
    bits = cute.size(target) * Float32.width
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=bits)
    with cute.arch.elect_one():
        cute.copy(atom, source, target, mbar_ptr=barrier)


@dsl_user_op
def add_to_global(target, source, count: int, *, loc=None, ip=None):
    """Adds `count` fp32 numbers of shared memory to global memory, in one bulk operation of the thread that asks.

    It joins the thread's open bulk group: `cp_async_bulk_commit_group` and `cp_async_bulk_wait_group` follow.
    """
    _bulk("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32", target, source, count, loc, ip)


@dsl_user_op
def store_to_global(target, source, count: int, *, loc=None, ip=None):
    """As `add_to_global`, but what was there before is lost."""
    _bulk("cp.async.bulk.global.shared::cta.bulk_group", target, source, count, loc, ip)


def _bulk(instruction: str, target, source, count: int, loc, ip):
    operands = [
        target.toint().ir_value(loc=loc, ip=ip),
        source.toint().ir_value(loc=loc, ip=ip),
        Int32(Float32.width // 8 * count).ir_value(loc=loc, ip=ip),
    ]
    llvm.inline_asm(
        None,
        operands,
        f"{instruction} [$0], [$1], $2;",
        "l,r,r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def add_vector(target, values: list, *, loc=None, ip=None):
    """Adds four fp32 numbers to 16 aligned bytes of global memory. Nobody waits for it."""
    operands = [target.toint().ir_value(loc=loc, ip=ip), *(Float32(v).ir_value(loc=loc, ip=ip) for v in values)]
    llvm.inline_asm(
        None,
        operands,
        "red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};",
        "l,f,f,f,f,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
