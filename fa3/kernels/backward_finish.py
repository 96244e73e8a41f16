"""After the backward: dQ = scale * the fp32 sum, in 16 bits.

A query that sees one key only has a gradient of exactly 0, whatever that key is: its P is 1. Its dP and D are the same
sum in two orders, so that the kernels find a dS of rounding errors; here such queries get their 0.

One CTA takes a query block. Its warpgroups read the slices of dQ as the accumulators that they were (`parts/dq.py`),
scale and convert them, and bring them through shared memory into rows for TMA, which drops the rows past Sq.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.memory import SmemAllocator

from fa3.config.backward import BackwardKey
from fa3.config.types import ROWS_OF_WARPGROUP as ROWS
from fa3.layouts.fragments_dsl import rows_and_columns

from .forward import DTYPES, ROW_MAJOR, SMEM_ALIGNMENT
from .parts.blocks import BlockSpace
from .parts.dq import dq_mma, dq_shape, vectors, vectors_of_thread
from .parts.gemm import convert_16
from .parts.lanes import ROW_STEP, ROWS_OF_THREAD, THREADS, place_in_quad, row_of_thread, thread_of_warpgroup
from .parts.tma import TmaOperand, partition, sequence_major, store_operand


class BackwardFinish:
    """Compiles one key. Called with dq_accum (batch, head, m_block, slice, element) float32, dq (batch, row, head,
    dim), which it writes, and the queries that see one key only: from `lone` to before `lone_end`."""

    def __init__(self, key: BackwardKey):
        self.key = key
        self.dtype = DTYPES[key.dtype]
        self.smem_bytes = 0

    def _layout(self) -> cute.ComposedLayout:
        c = self.key.config
        return hopper.make_smem_layout_b(ROW_MAJOR, (ROWS, c.tile_m, c.head_dim), self.dtype, 1)

    @cute.jit
    def __call__(self, dq_accum: cute.Tensor, dq: cute.Tensor, scale: Float32, lone: Int32, lone_end: Int32, stream):
        c = self.key.config
        operand = store_operand(sequence_major(dq), self._layout(), (c.tile_m, c.head_dim))
        blocks = BlockSpace.over(dq_accum.shape[2], dq_accum.shape[1], dq_accum.shape[0])
        self.kernel(operand, dq_accum, scale, lone, lone_end, blocks).launch(
            grid=[blocks.count, 1, 1],
            block=[c.dq_slices * THREADS, 1, 1],
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, target: TmaOperand, mdQ: cute.Tensor, scale: Float32, lone: Int32, lone_end: Int32, blocks: BlockSpace
    ):
        c, layout = self.key.config, self._layout()
        number, _, _ = cute.arch.block_idx()
        m_block, head, batch = blocks.block(blocks.count - 1 - number)  # what came last is still in the L2 cache
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            cpasync.prefetch_descriptor(target.atom)

        @cute.struct
        class Storage:
            dq: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout)], SMEM_ALIGNMENT]

        self.smem_bytes = Storage.__sizeof__()
        storage = SmemAllocator().allocate(Storage)
        sdQ = storage.dq.get_tensor(layout.outer, swizzle=layout.inner)
        own = cute.arch.make_warp_uniform(warp_index // 4)
        cute.arch.griddepcontrol_wait()  # for the sums of the backward
        acc_dQ = self._read(mdQ[batch, head, m_block, own, None].iterator, scale)
        first = m_block * c.tile_m
        if lone < first + c.tile_m and first < lone_end:
            self._clear(acc_dQ, lone - first, lone_end - first, own)
        rdQ = cute.make_rmem_tensor_like(acc_dQ, self.dtype)
        convert_16(acc_dQ, rdQ)
        self._to_rows(rdQ, sdQ, own)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        if warp_index == 0:
            boxes = cute.local_tile(target.coordinates[None, None, head, batch], (c.tile_m, c.head_dim), (None, 0))
            source, boxes = partition(target, sdQ, boxes)
            cute.copy(target.atom, source[None, 0], boxes[None, m_block])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def _read(self, dq_slice: cute.Pointer, scale: Float32) -> cute.Tensor:
        """This thread's part of a slice, scaled."""
        acc_dQ = cute.make_rmem_tensor(self._mma().partition_shape_C(dq_shape(self.key.config)), Float32)
        target = vectors(acc_dQ)
        source = vectors_of_thread(dq_slice, cute.size(target, mode=[1]))
        cute.copy(cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=128), source, target)
        for i in range(cute.size(acc_dQ)):
            acc_dQ[i] = acc_dQ[i] * scale
        return acc_dQ

    @cute.jit
    def _clear(self, acc_dQ: cute.Tensor, lone: Int32, lone_end: Int32, own: Int32):
        """0 for the queries of the block from `lone` to before `lone_end`."""
        values = rows_and_columns(acc_dQ)
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            for c in cutlass.range_constexpr(cute.size(values, mode=[1])):
                query = own * ROWS + row_of_thread() + ROW_STEP * r
                if cutlass.const_expr(self.key.config.dq_gemm == "transposed"):
                    query = 8 * (c // 2) + c % 2 + 2 * place_in_quad()
                if lone <= query and query < lone_end:
                    values[r, c] = Float32(0.0)

    def _to_rows(self, rdQ: cute.Tensor, sdQ: cute.Tensor, own) -> None:
        """Into (query, dimension): each warpgroup its 64 queries, or, transposed, its 64 dimensions."""
        rows = sdQ[None, None, 0]
        transposed = self.key.config.dq_gemm == "transposed"
        if transposed:
            rows = cute.make_tensor(rows.iterator, cute.select(rows.layout, mode=[1, 0]))
        part = cute.local_tile(rows, dq_shape(self.key.config), (own, 0))
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transposed, 4), self.dtype)
        to_smem = cute.make_tiled_copy_C(atom, self._mma()).get_slice(thread_of_warpgroup())
        cute.copy(to_smem, to_smem.retile(rdQ), to_smem.partition_D(part))

    def _mma(self) -> Any:
        return dq_mma(self.key.config, self.dtype)
