"""16-byte pieces of rows, for kernels that read them with plain loads."""

import cutlass.cute as cute
from cutlass import Int32

PIECE = 8
"""16-bit elements in 16 bytes."""


@cute.jit
def load_piece(tensor: cute.Tensor, row: Int32, column: Int32):
    """Eight neighbours of a row, in registers. `column` is a multiple of 8, rows are 16-byte aligned."""
    piece = cute.make_rmem_tensor((PIECE,), tensor.element_type)
    place = tensor.iterator + cute.crd2idx((row, column), tensor.layout)
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), tensor.element_type, num_bits_per_copy=128)
    cute.copy(atom, cute.make_tensor(place.align(16), cute.make_layout(PIECE)), piece)
    return piece
