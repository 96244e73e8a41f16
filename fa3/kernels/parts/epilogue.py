"""From the accumulator of O to global memory, two ways with one interface.

`Staged` goes through shared memory and TMA: wide writes, the copy engine clips the last rows and columns, and the
warpgroup goes on as soon as its rows lie in shared memory. `Direct` is for tiles that leave no shared memory for O: the
quad exchanges registers so that every thread holds 16 contiguous bytes, and stores those itself.
Neither touches Q, K or V, so the next tile's loads run underneath.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warp

from fa3.config.types import ROWS_OF_WARPGROUP
from fa3.pipeline.barriers import WarpgroupBarrier

from .gemm import convert_16
from .lanes import ROW_STEP, ROWS_OF_THREAD, place_in_quad, row_of_thread, thread_of_warpgroup
from .tiles import Tile
from .tma import TmaOperand, partition


@dataclass(frozen=True)
class Staged:
    """O in 16 bits to this warpgroup's part of `sO` (64, head_dim_v, warpgroup) by stmatrix, then one TMA store."""

    target: TmaOperand
    sO: cute.Tensor
    pv: cute.TiledMma
    warpgroup: Int32
    barrier: WarpgroupBarrier

    @cute.jit
    def store(self, acc_O: cute.Tensor, tile: Tile, row_block: Int32):
        """`row_block`: index of these 64 rows among all rows of the sequence, in steps of 64."""
        rO = cute.make_rmem_tensor_like(acc_O, self.sO.element_type)
        convert_16(acc_O, rO)
        thread = thread_of_warpgroup()
        issuer = thread < 32
        if issuer:
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # the previous tile has left shared memory
        self.barrier.join()
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.sO.element_type)
        to_smem = cute.make_tiled_copy_C(atom, self.pv).get_slice(thread)
        cute.copy(to_smem, to_smem.retile(rO), to_smem.partition_D(self.sO[None, None, self.warpgroup]))
        cute.arch.fence_proxy("async.shared", space="cta")
        self.barrier.join()
        if issuer:
            shape = (ROWS_OF_WARPGROUP, cute.size(self.sO, mode=[1]))
            boxes = cute.local_tile(self.target.coordinates[None, None, tile.head, tile.batch], shape, (None, 0))
            source, boxes = partition(self.target, self.sO, boxes)
            cute.copy(self.target.atom, source[None, self.warpgroup], boxes[None, row_block])
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def drain(self):
        """Before the CTA ends: shared memory must outlive the last store that reads it."""
        if thread_of_warpgroup() < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)


@dataclass(frozen=True)
class NoStore:
    """The identity twin of `Staged`: of a result that nobody wants."""

    def store(self, acc_O: None, tile: Tile, row_block: Int32):
        pass

    def drain(self):
        pass


@dataclass(frozen=True)
class Direct:
    """O in 16 bits straight from registers to `mO` (sequence, dim, head, batch), 16 bytes per thread and store."""

    mO: cute.Tensor

    @cute.jit
    def store(self, acc_O: cute.Tensor, tile: Tile, row_block: Int32):
        rO = cute.make_rmem_tensor_like(acc_O, self.mO.element_type)
        convert_16(acc_O, rO)
        words = cute.recast_tensor(cute.make_tensor(rO.iterator, cute.make_layout(cute.size(rO))), Int32)
        quad = place_in_quad()
        row = row_block * ROWS_OF_WARPGROUP + row_of_thread()
        gO = self.mO[None, None, tile.head, tile.batch]
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Int32, num_bits_per_copy=128)
        chunk = cute.make_rmem_tensor((4,), Int32)
        columns_left = self.mO.shape[1] - 8 * quad
        # words: (row, 8-column group), one word for each; four groups at a time are one 4 x 4 exchange in the quad
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            start = gO.iterator + cute.crd2idx((row + ROW_STEP * r, 8 * quad), gO.layout)
            inside = row + ROW_STEP * r < self.mO.shape[0]
            for group in cutlass.range_constexpr(0, cute.size(words) // 2, 4):
                for i in cutlass.range_constexpr(4):
                    chunk[i] = words[2 * (group + i) + r]
                transpose_in_quad(chunk, quad)
                if inside and 8 * group < columns_left:
                    address = cute.recast_ptr((start + 8 * group).align(16), dtype=Int32)
                    cute.copy(atom, chunk, cute.make_tensor(address, cute.make_layout(4)))

    def drain(self):
        """Nothing is in flight that anyone must wait for."""


@cute.jit
def transpose_in_quad(chunk: cute.Tensor, quad: Int32):
    """Transposes the 4 x 4 matrix whose column q is thread q's `chunk`: thread q ends up with row q.

    Two butterfly steps. In each, a thread keeps the words whose index agrees with its own place in that bit and
    exchanges the others with its partner: four shuffles and twelve selects for four words.
    """
    for bit in cutlass.range_constexpr(2):
        step = 1 << bit
        upper = (quad & step) != 0
        for low in cutlass.range_constexpr(4):
            if cutlass.const_expr(low & step == 0):
                high = low | step
                first, second = chunk[low], chunk[high]
                sent = first if upper else second
                received = cute.arch.shuffle_sync_bfly(sent, offset=step)
                chunk[low] = received if upper else first
                chunk[high] = second if upper else received


@cute.jit
def store_lse(mLSE: cute.Tensor, lse: cute.Tensor, tile: Tile, row_block: Int32):
    """LSE (batch, head, sequence), float32: the first thread of each quad stores its two rows."""
    row = row_block * ROWS_OF_WARPGROUP + row_of_thread()
    gLSE = mLSE[tile.batch, tile.head, None]
    if place_in_quad() == 0:
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            if row + ROW_STEP * r < mLSE.shape[2]:
                gLSE[row + ROW_STEP * r] = lse[r]
