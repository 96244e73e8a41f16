"""Tiles between global and shared memory by the copy engine (TMA)."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync


class TmaOperand(NamedTuple):
    """A global tensor as the copy engine sees it: the descriptor, and the tensor of coordinates that addresses it."""

    atom: cute.CopyAtom
    coordinates: cute.Tensor


def load_operand(tensor: cute.Tensor, smem_layout: cute.ComposedLayout, tile: tuple[int, int]) -> TmaOperand:
    """Host side: `tensor` (rows, columns, head, batch) loaded in boxes of `tile`. Outside the tensor a box is zero."""
    return TmaOperand(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, smem_layout, tile))


def store_operand(tensor: cute.Tensor, smem_layout: cute.ComposedLayout, tile: tuple[int, int]) -> TmaOperand:
    """Host side: as `load_operand`, for stores. What lies outside the tensor is not written."""
    return TmaOperand(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, smem_layout, tile))


def store_operand_if_wanted(
    tensor: cute.Tensor | None, smem_layout: cute.ComposedLayout, tile: tuple[int, int]
) -> TmaOperand | None:
    """As `store_operand`, of a (batch, sequence, head, dim) result; None of one that is not computed."""
    return None if tensor is None else store_operand(sequence_major(tensor), smem_layout, tile)


def sequence_major(tensor: cute.Tensor) -> cute.Tensor:
    """(batch, sequence, head, dim) -> (sequence, dim, head, batch): rows and columns of a tile first."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 3, 2, 0]))


def dim_major(tensor: cute.Tensor) -> cute.Tensor:
    """(batch, sequence, head, dim) -> (dim, sequence, head, batch): V as the second GEMM's B operand, V^T."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[3, 1, 2, 0]))


def partition(operand: TmaOperand, smem: cute.Tensor, boxes: cute.Tensor) -> tuple[Any, Any]:
    """Pairs shared memory (rows, columns, stage) with boxes of coordinates (rows, columns, index).

    Returns the two as the copy takes them: `smem[None, stage]` and `boxes[None, index]`.
    """
    alone = cute.make_layout(1)
    return cpasync.tma_partition(operand.atom, 0, alone, cute.group_modes(smem, 0, 2), cute.group_modes(boxes, 0, 2))
