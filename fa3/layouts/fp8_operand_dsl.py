"""Register views that turn an fp32 accumulator into an 8-bit A operand: the DSL twins of `fa3.layouts.fp8_operand`.

The environment variable CUTE_DSL_ARCH must say sm_90a before this module is imported (`fa3.compile` does that).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from fa3.layouts.fp8_operand import accumulator_words_view
from fa3.layouts.fragments import a_operand_8_view
from fa3.layouts.smem_dsl import dsl_layout

__all__ = ["accumulator_words", "operand_words"]


def accumulator_words(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator with coordinate (byte (2, 2), row, half, k-block): the four values that share an operand word.

    `acc` holds N fp32 columns, N a multiple of 32. Convert `view[None, r, h, b]` to 8 bits, byte 0 lowest, and store it
    as word (r, h, b) of `operand_words`.
    """
    return cute.make_tensor(acc.iterator, dsl_layout(accumulator_words_view(2 * cute.size(acc))))


def operand_words(p8: cute.Tensor) -> cute.Tensor:
    """An 8-bit A operand fragment ((4, 2, 2), 1, N/32) as its 32-bit words, coordinate (row, half, k-block)."""
    n = 2 * cute.size(p8)
    if p8.element_type.width != 8 or p8.shape != a_operand_8_view(n).shape:
        raise ValueError(f"expected an 8-bit A operand ((4, 2, 2), 1, N/32), got {p8.element_type} {p8.shape}")
    words = cute.recast_tensor(cute.make_tensor(p8.iterator, cute.make_layout(cute.size(p8))), cutlass.Int32)
    return cute.make_tensor(words.iterator, cute.make_layout((2, 2, n // 32), stride=(1, 2, 4)))
