"""Where is element (i, j)? Layouts of shared memory and registers, as integers that can be tested and drawn.

Start with `algebra` (what a layout is), then `swizzle` and `smem` (tiles in shared memory, and the plan that sums their
bytes), `fragments` (who holds which element of a WGMMA operand), `fp8_operand` and `kmajor_fp8` (what 8 bits ask for).
The modules whose names end in `_dsl` are the twins used inside kernels; they import the DSL and are not imported here.
`draw` makes pictures and wants matplotlib.
"""

from fa3.layouts.algebra import (
    Layout,
    blocked_product,
    coalesce,
    complement,
    composition,
    concatenate,
    crd2idx,
    equivalent,
    idx2crd,
    logical_divide,
    logical_product,
    ordered_layout,
    right_inverse,
    tile_to_shape,
    tiled_divide,
    zipped_divide,
)
from fa3.layouts.fp8_operand import column_of_slot, permute_rows, slot_columns, slot_of_column
from fa3.layouts.fragments import a_operand_8, a_operand_16, accumulator, column_of, columns_of, owner, row_of, rows_of
from fa3.layouts.int_tuple import IntTuple, LayoutError
from fa3.layouts.kmajor_fp8 import Transpose, k_major_v, row_major_v
from fa3.layouts.smem import (
    SHARED_MEMORY_PER_CTA,
    Buffer,
    SharedLayout,
    SharedMemoryError,
    SharedMemoryPlan,
    bank_conflicts,
    k_major,
    mn_major,
    shared_k,
    shared_o,
    shared_q,
    shared_v,
)
from fa3.layouts.swizzle import ComposedLayout, Swizzle

__all__ = [
    "SHARED_MEMORY_PER_CTA",
    "Buffer",
    "ComposedLayout",
    "IntTuple",
    "Layout",
    "LayoutError",
    "SharedLayout",
    "SharedMemoryError",
    "SharedMemoryPlan",
    "Swizzle",
    "Transpose",
    "a_operand_8",
    "a_operand_16",
    "accumulator",
    "bank_conflicts",
    "blocked_product",
    "coalesce",
    "column_of",
    "column_of_slot",
    "columns_of",
    "complement",
    "composition",
    "concatenate",
    "crd2idx",
    "equivalent",
    "idx2crd",
    "k_major",
    "k_major_v",
    "logical_divide",
    "logical_product",
    "mn_major",
    "ordered_layout",
    "owner",
    "permute_rows",
    "right_inverse",
    "row_major_v",
    "row_of",
    "rows_of",
    "shared_k",
    "shared_o",
    "shared_q",
    "shared_v",
    "slot_columns",
    "slot_of_column",
    "tile_to_shape",
    "tiled_divide",
    "zipped_divide",
]
