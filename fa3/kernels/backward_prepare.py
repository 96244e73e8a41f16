"""Before the backward: what a query row contributes that does not depend on a key, and a cleared dQ.

For each row: D = rowsum(dO * O) - dLSE, and LSE in base 2. With dLSE, the gradient of LSE, dS = P * (dP - D) is right
for both outputs: dLSE/dS = P. A row that sees no key has LSE = -inf; here it becomes +inf, so that its P is 0, and its
D is 0. The same holds for the rows past Sq that fill the last query block.

One CTA takes the `tile_m` rows of a query block. A row is read by as many neighbouring lanes as it has 16-byte pieces,
rounded up to a power of two, so that a warp reads whole lines.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa3.config.backward import BackwardKey

from .parts.blocks import BlockSpace
from .parts.pieces import PIECE, load_piece
from .parts.tma import sequence_major

THREADS = 256
LOG2_E = math.log2(math.e)


class BackwardPrepare:
    """Compiles one key. Called with o, do (batch, row, head, dim_v), lse and, if the key has it, dlse (batch, head,
    row), and what it writes: lse_log2, delta (batch, head, rows padded to tile_m), dq_accum (batch, head, m_block,
    slice, element), float32, and turns (batch, head, m_block) int32; the last two are None if dQ is not wanted."""

    def __init__(self, key: BackwardKey):
        self.key = key
        self.smem_bytes = 0
        pieces = key.config.head_dim_v // PIECE
        self.lanes = 1 << (pieces - 1).bit_length()
        self.rows = THREADS // self.lanes

    @cute.jit
    def __call__(
        self,
        o: cute.Tensor,
        do: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor,
        lse_log2: cute.Tensor,
        delta: cute.Tensor,
        dq_accum: cute.Tensor | None,
        turns: cute.Tensor | None,
        stream,
    ):
        batch, heads, rows = lse_log2.shape
        blocks = BlockSpace.over(rows // self.key.config.tile_m, heads, batch)
        self.kernel(sequence_major(o), sequence_major(do), lse, dlse, lse_log2, delta, dq_accum, turns, blocks).launch(
            grid=[blocks.count, 1, 1], block=[THREADS, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mO: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mdLSE: cute.Tensor,
        mLSE_log2: cute.Tensor,
        mD: cute.Tensor,
        mdQ: cute.Tensor | None,
        turns: cute.Tensor | None,
        blocks: BlockSpace,
    ):
        cute.arch.griddepcontrol_launch_dependents()  # the backward may set up; it waits for this grid's end
        number, _, _ = cute.arch.block_idx()
        m_block, head, batch = blocks.block(blocks.count - 1 - number)  # the backward starts with what came last
        thread, _, _ = cute.arch.thread_idx()
        tile_m = self.key.config.tile_m
        gO, gdO = mO[None, None, head, batch], mdO[None, None, head, batch]
        for i in cutlass.range_constexpr(tile_m // self.rows):
            row = m_block * tile_m + i * self.rows + thread // self.lanes
            mine = tuple(rows[batch, head, None] for rows in (mLSE, mdLSE, mLSE_log2, mD))
            self._row(gO, gdO, *mine, row, thread % self.lanes)
        if cutlass.const_expr("q" in self.key.wanted):
            if thread == 0:
                turns[batch, head, m_block] = Int32(0)
            if self._is_to_be_cleared(mLSE[batch, head, None], m_block):
                self._clear(mdQ[batch, head, m_block, None, None], thread)

    @cute.jit
    def _row(self, gO, gdO, gLSE, gdLSE, gLSE_log2, gD, row: Int32, lane: Int32):
        """The two numbers of one row, from its `lanes` lanes."""
        product = Float32(0.0)
        if row < gO.shape[0] and lane * PIECE < gO.shape[1]:
            o, do = load_piece(gO, row, lane * PIECE), load_piece(gdO, row, lane * PIECE)
            for e in cutlass.range_constexpr(PIECE):
                product = product + o[e].to(Float32) * do[e].to(Float32)
        for bit in cutlass.range_constexpr(self.lanes.bit_length() - 1):
            product = product + cute.arch.shuffle_sync_bfly(product, offset=1 << bit)
        if lane == 0:
            lse, delta = Float32(math.inf), Float32(0.0)
            if row < gO.shape[0]:
                natural = gLSE[row]
                if natural > -math.inf:
                    lse = natural * LOG2_E
                    delta = product
                    if cutlass.const_expr(self.key.dlse):
                        delta = product - gdLSE[row]
            gLSE_log2[row] = lse
            gD[row] = delta

    @cute.jit
    def _is_to_be_cleared(self, gLSE: cute.Tensor, m_block: Int32):
        """Where the first part of a sum is stored, only a block that no key block sees: its last row, which sees the
        most keys, has LSE = -inf. (So has a row with scores of -inf alone, for which clearing does no harm.)"""
        clear = True
        if cutlass.const_expr(self.key.config.dq_start == "stored"):
            last = cutlass.min((m_block + 1) * self.key.config.tile_m, gLSE.shape[0]) - 1
            clear = gLSE[last] == -math.inf
        return clear

    @cute.jit
    def _clear(self, block: cute.Tensor, thread: Int32):
        """dQ of the query block = 0, 16 bytes at a time."""
        zeros = cute.make_rmem_tensor((4,), Float32)
        zeros.fill(0.0)
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=128)
        count = self.key.config.dq_slice * self.key.config.dq_slices
        for i in cutlass.range_constexpr(cute.ceil_div(count, 4 * THREADS)):
            at = 4 * (i * THREADS + thread)
            if at < count:
                target = cute.make_tensor((block.iterator + at).align(16), cute.make_layout(4))
                cute.copy(atom, zeros, target)
