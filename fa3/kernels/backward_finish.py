"""After the backward: dQ = scale * the fp32 sum, in 16 bits.

One CTA takes a query block. Its warpgroups read the slices of dQ as the accumulators that they were (`parts/dq.py`),
scale and convert them, and bring them through shared memory into rows for TMA, which drops the rows past Sq.
"""

from typing import Any

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.memory import SmemAllocator

from fa3.config.backward import BackwardKey
from fa3.config.types import ROWS_OF_WARPGROUP as ROWS

from .forward import DTYPES, ROW_MAJOR, SMEM_ALIGNMENT
from .parts.dq import dq_mma, dq_shape, vectors, vectors_of_thread
from .parts.gemm import convert_16
from .parts.lanes import THREADS, thread_of_warpgroup
from .parts.tma import TmaOperand, partition, sequence_major, store_operand


class BackwardFinish:
    """Compiles one key. Called with dq_accum (batch, head, m_block, slice, element) float32, and dq (batch, row, head,
    dim), which it writes."""

    def __init__(self, key: BackwardKey):
        self.key = key
        self.dtype = DTYPES[key.dtype]
        self.smem_bytes = 0

    def _layout(self) -> cute.ComposedLayout:
        c = self.key.config
        return hopper.make_smem_layout_b(ROW_MAJOR, (ROWS, c.tile_m, c.head_dim), self.dtype, 1)

    @cute.jit
    def __call__(self, dq_accum: cute.Tensor, dq: cute.Tensor, scale: Float32, stream):
        c = self.key.config
        operand = store_operand(sequence_major(dq), self._layout(), (c.tile_m, c.head_dim))
        self.kernel(operand, dq_accum, scale).launch(
            grid=[dq_accum.shape[2], dq_accum.shape[1], dq_accum.shape[0]],
            block=[c.dq_slices * THREADS, 1, 1],
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, target: TmaOperand, mdQ: cute.Tensor, scale: Float32):
        c, layout = self.key.config, self._layout()
        m_block, head, batch = cute.arch.block_idx()
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
        rdQ = self._read(mdQ[batch, head, m_block, own, None].iterator, scale)
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
        """This thread's part of a slice, scaled, in 16 bits."""
        acc_dQ = cute.make_rmem_tensor(self._mma().partition_shape_C(dq_shape(self.key.config)), Float32)
        target = vectors(acc_dQ)
        source = vectors_of_thread(dq_slice, cute.size(target, mode=[1]))
        cute.copy(cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=128), source, target)
        for i in range(cute.size(acc_dQ)):
            acc_dQ[i] = acc_dQ[i] * scale
        rdQ = cute.make_rmem_tensor_like(acc_dQ, self.dtype)
        convert_16(acc_dQ, rdQ)
        return rdQ

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
