"""PTX instructions that the DSL has no function for."""

from cutlass import Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T


def int32_of(text: str, constraints: str, operands: list, effects: bool, loc, ip) -> Int32:
    """One PTX instruction with a 32-bit result (`$0`). `effects`: it touches memory, and must stay where it is."""
    return Int32(
        llvm.inline_asm(
            T.i32(),
            operands,
            text,
            constraints,
            has_side_effects=effects,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )
