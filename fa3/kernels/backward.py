"""Algorithm 3 of FlashAttention-3: the backward pass, warp-specialised.

One CTA of `1 + tile_n / 64` warpgroups owns `tile_n` keys of one head of K and V, and walks over the query blocks that
see them, for each query head of the group. Every math warpgroup owns 64 keys: its rows of S^T, dP^T, dK and dV.

Roles and edges (ring: who fills it -> who reads it, stages)::

    load       1 warp, TMA                             k, v   load -> math0..     1     the CTA's keys and values
    math0      64 keys: S^T, dP^T, dV, dK; part of dQ  q      load -> math0..     2     tile_m queries and their LSE
    math1      the next 64 keys, ...                   do     load -> math0..     2     tile_m rows of dO and of D
    dq_writer  1 warp, adds dQ to global memory        dq     math_i -> dq_writer 1 each  fp32 dQ of one step

dS is exchanged between the math warpgroups themselves, through shared memory and a named barrier: dQ needs all keys.

Timeline of a math warpgroup; two of them interleave::

    tensor cores   S^T | dP^T         | dV          | dQ      | dK       | S^T | dP^T ...
    the rest             P = exp(S-L)   dS = P(dP-D)  dS to smem  dQ to smem

The algorithm (arXiv 2407.08608, Algorithm 3), in the order of this file:

    load       K_j, V_j; then for each query block i: Q_i with LSE_i, dO_i with D_i, as stages fall free
    math       dK = dV = 0; for each i: S^T = K_j Q_i^T; dP^T = V_j dO_i^T; P = exp(S - LSE); dS = P * (dP - D);
               dV += P^T dO_i; dS to shared memory; dQ_i = dS K_j, for the dQ writer; dK += dS^T Q_i
    dq_writer  for each i: dQ += dQ_i in fp32 global memory, so that no math warpgroup waits for global memory
    epilogue   dK, dV through shared memory, where K and V were, and TMA

S and dP are computed transposed, so that P^T and dS^T come out as the A operands of the GEMMs of dV and dK, in
registers. `backward_prepare` has written LSE and D before, and cleared dQ, unless the row has the first CTA store its
part (`parts/turnstile.py`); `backward_finish` scales and converts it.
The three are chained by programmatic dependent launch: each may start before the one before it has ended, and whoever
needs its results waits for them (`griddepcontrol_wait`).

A key may want only some of dQ, dK and dV. What serves the others alone is then not there: kernels, roles, edges,
buffers, and GEMMs, whose twins commit empty groups, so that the main loop waits for the same numbers of groups. For dV
alone V and D are still loaded, unused.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator

from fa3.config.backward import BackwardConfig, BackwardKey, Wanted
from fa3.config.backward_budget import backward_registers, backward_topology, check_backward, exchanges
from fa3.config.types import ROWS_OF_WARPGROUP as ROWS
from fa3.layouts.fragments_dsl import as_a_operand_16, rows_and_columns
from fa3.pipeline.barriers import BarrierNames, CommonBarrier, WarpgroupBarrier, meet_cluster
from fa3.pipeline.call_site import call_site
from fa3.pipeline.cursor import Cursor, Lockstep
from fa3.pipeline.ring import Ring, init_barriers, make_rings
from fa3.pipeline.topology import Topology

from .forward import COL_MAJOR, DTYPES, ROW_MAJOR, SMEM_ALIGNMENT
from .parts.bulk import load_row
from .parts.dq import DQGemm, NoDQ, NoDQGemm, StagedDQ, dq_mma
from .parts.epilogue import NoStore, Staged
from .parts.gemm import convert_16, start_gemm, start_nothing, wait_gemms
from .parts.key_mask import KEY_MASKS
from .parts.key_tiles import FirstKeysFirst, KeysFirst, KeyTile, LastKeysFirst
from .parts.lanes import ROWS_OF_THREAD, place_in_quad, thread_of_warpgroup
from .parts.tiles import TileSpace
from .parts.tma import TmaOperand, load_operand, partition, sequence_major, store_operand_if_wanted
from .parts.turnstile import AnyOrder, FirstComes, InOrder

# --------------------------------------------------------------------------------------- shared memory, edges, barriers


@dataclass(frozen=True)
class Plan:
    """What a key implies before anything runs: MMAs, shared-memory layouts, edges and named barriers."""

    config: BackwardConfig
    dtype: Any
    st: cute.TiledMma
    """S^T = K Q^T and dP^T = V dO^T: 64 keys by tile_m queries."""
    dv: cute.TiledMma
    dk: cute.TiledMma
    dq: cute.TiledMma
    lK: cute.ComposedLayout
    lKt: cute.ComposedLayout
    lV: cute.ComposedLayout
    lQ: cute.ComposedLayout
    lQt: cute.ComposedLayout
    ldO: cute.ComposedLayout
    ldOt: cute.ComposedLayout
    ldS: cute.ComposedLayout
    topology: Topology
    barriers: BarrierNames
    wanted: Wanted

    @classmethod
    def of(cls, key: BackwardKey) -> "Plan":
        c, dtype = key.config, DTYPES[key.dtype]
        groups = c.math_warpgroups
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        registers = warpgroup.OperandSource.RMEM

        def mma(b, columns, *source):
            return hopper.make_trivial_tiled_mma(dtype, dtype, k_major, b, Float32, (1, 1, 1), (ROWS, columns), *source)

        def row_major(rows, columns, stages):
            """(row, column, stage), columns contiguous."""
            return hopper.make_smem_layout_b(ROW_MAJOR, (ROWS, rows, columns), dtype, stages)

        def transposed(rows, columns, stages):
            """(column, row, stage) of the same bytes."""
            return hopper.make_smem_layout_b(COL_MAJOR, (ROWS, columns, rows), dtype, stages)

        return cls(
            config=c,
            dtype=dtype,
            st=mma(k_major, c.tile_m),
            dv=mma(mn_major, c.head_dim_v, registers),
            dk=mma(mn_major, c.head_dim, registers),
            dq=dq_mma(c, dtype),
            lK=row_major(ROWS, c.head_dim, groups),
            lKt=transposed(ROWS, c.head_dim, groups),
            lV=row_major(ROWS, c.head_dim_v, groups),
            lQ=row_major(c.tile_m, c.head_dim, c.stages_q),
            lQt=transposed(c.tile_m, c.head_dim, c.stages_q),
            ldO=row_major(c.tile_m, c.head_dim_v, c.stages_do),
            ldOt=transposed(c.tile_m, c.head_dim_v, c.stages_do),
            ldS=row_major(c.tile_m, ROWS, groups * c.stages_ds),
            topology=backward_topology(c, key.wanted),
            barriers=BarrierNames((("ds", 1), ("rows", groups))),
            wanted=key.wanted,
        )

    def storage(self) -> Any:
        """The CTA's shared memory. `fa3.config.backward_budget` sums the same fields without the DSL."""
        c, dtype = self.config, self.dtype

        def buffer(layout):
            return cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout)], SMEM_ALIGNMENT]

        def rows(stages):
            return cute.struct.Align[cute.struct.MemRange[Float32, c.tile_m * stages], 128]

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, self.topology.barriers]
            lse: rows(c.stages_q)
            delta: rows(c.stages_do)
            k: buffer(self.lK)
            v: buffer(self.lV)
            q: buffer(self.lQ)
            do: buffer(self.ldO)
            ds: buffer_if("q" in self.wanted, dtype, self.ldS)
            dq: cute.struct.Align[cute.struct.MemRange[Float32, dq_staging(c, self.wanted)], SMEM_ALIGNMENT]

        return Storage

    def views(self, storage) -> dict[str, cute.Tensor]:
        """The buffers as tensors: tiles (row, column, stage); with " t" the same bytes as (column, row, stage)."""
        c = self.config

        return {
            "k": tiles(storage.k, self.lK),
            "k t": tiles(storage.k, self.lKt),
            "v": tiles(storage.v, self.lV),
            "q": tiles(storage.q, self.lQ),
            "q t": tiles(storage.q, self.lQt),
            "q rows": storage.lse.get_tensor(cute.make_layout((c.tile_m, c.stages_q))),
            "do": tiles(storage.do, self.ldO),
            "do t": tiles(storage.do, self.ldOt),
            "do rows": storage.delta.get_tensor(cute.make_layout((c.tile_m, c.stages_do))),
            **self._dq_views(storage),
        }

    def _dq_views(self, storage) -> dict[str, cute.Tensor]:
        """What only dQ needs."""
        if "q" not in self.wanted:
            return {}
        c = self.config
        dq = storage.dq.get_tensor(cute.make_layout((c.dq_piece, c.stages_dq, c.dq_parts)))
        return {"ds": tiles(storage.ds, self.ldS), "dq": dq}


def dq_staging(config: BackwardConfig, wanted: Wanted) -> int:
    """fp32 numbers of the buffer in which dQ waits for the dQ writer."""
    staged = config.dq_store == "staged" and "q" in wanted
    return config.dq_piece * config.stages_dq * config.dq_parts if staged else 0


def buffer_if(needed: bool, dtype: Any, layout: cute.ComposedLayout) -> Any:
    """Room for tiles, or for nothing."""
    size = cute.cosize(layout) if needed else 0
    return cute.struct.Align[cute.struct.MemRange[dtype, size], SMEM_ALIGNMENT]


def tiles(buffer, layout: cute.ComposedLayout) -> cute.Tensor:
    return buffer.get_tensor(layout.outer, swizzle=layout.inner)


class Operands(NamedTuple):
    """The global tensors: through TMA, or as plain tensors.

    mLSE, mD (row, head, batch) float32 with rows padded to tile_m; mdQ (element, slice, m_block, head, batch) float32;
    turns (m_block, head, batch) int32, how many have added to a block of dQ. What serves a gradient that is not wanted
    is None.
    """

    q: TmaOperand
    k: TmaOperand
    v: TmaOperand
    do: TmaOperand
    dk: TmaOperand | None
    dv: TmaOperand | None
    mLSE: cute.Tensor
    mD: cute.Tensor
    mdQ: cute.Tensor | None
    turns: cute.Tensor | None
    k_peer: TmaOperand | None = None
    """K again, in tiles of the columns that a CTA of a pair needs of the other's keys."""


class Walk(NamedTuple):
    """A CTA's way: the query heads of its group, and for each the query blocks from `first` on."""

    tile: KeyTile
    first_head: Int32
    heads: Int32
    first: Int32
    blocks: Int32


# ------------------------------------------------------------------------------------------------- roles, in data order


@dataclass(frozen=True)
class Load:
    """The producer warp: K and V once, then keeps the rings of Q and dO full."""

    plan: Plan
    operands: Operands
    rings: dict[str, Ring]
    shared: dict[str, cute.Tensor]
    walk: Walk

    @cute.jit
    def run(self):
        walk = self.walk
        q, do = self.rings["q"].cursor(), self.rings["do"].cursor()
        # what the first GEMMs want, in their order; of all loads only LSE and D wait for backward_prepare
        queries, gradients = self._sources(walk.first_head)
        self._load_keys("k", self.plan.config.head_dim)
        self._load_tile("q", queries, q, walk.first)
        self._load_keys("v", self.plan.config.head_dim_v)
        self._load_tile("do", gradients, do, walk.first)
        if cutlass.const_expr("k_peer" in self.rings):
            self._load_keys_of_peer()
        cute.arch.griddepcontrol_wait()
        q = self._load_rows("q", queries, q, walk.first)
        do = self._load_rows("do", gradients, do, walk.first)
        for h in cutlass.range(walk.heads, unroll=1):
            queries, gradients = self._sources(walk.first_head + h)
            loaded = Int32(h == 0)
            for i in cutlass.range(walk.blocks - loaded, unroll=1):
                block = walk.first + loaded + i
                self._load_tile("q", queries, q, block)
                q = self._load_rows("q", queries, q, block)
                self._load_tile("do", gradients, do, block)
                do = self._load_rows("do", gradients, do, block)
        cute.arch.griddepcontrol_launch_dependents()

    @call_site
    @cute.jit
    def _load_keys(self, name: cutlass.Constexpr, columns: cutlass.Constexpr):
        """The CTA's rows of K or V, slab by slab."""
        c = self.plan.config
        operand, tile, ring = getattr(self.operands, name), self.walk.tile, self.rings[name]
        shape = (c.key_rows, columns)
        boxes = cute.local_tile(operand.coordinates[None, None, tile.head, tile.batch], shape, (None, 0))
        smem, boxes = partition(operand, self.shared[name], boxes)
        cursor = ring.cursor()
        ring.acquire(cursor)
        for i in cutlass.range_constexpr(c.key_slabs):
            box = boxes[None, tile.n_block * c.key_slabs + i]
            cute.copy(operand.atom, box, smem[None, i], tma_bar_ptr=ring.barrier(cursor))

    @call_site
    @cute.jit
    def _load_keys_of_peer(self):
        """Of the keys of the other CTA of a pair the columns that this one computes dQ of."""
        c, tile, ring, operand = self.plan.config, self.walk.tile, self.rings["k_peer"], self.operands.k_peer
        rank = cute.arch.block_idx_in_cluster()
        keys = operand.coordinates[None, None, tile.head, tile.batch]
        boxes = cute.local_tile(keys, (c.tile_n, c.dims_of_dq), (None, rank))
        smem, boxes = partition(operand, self.shared["k_peer"], boxes)
        cursor = ring.cursor()
        ring.acquire(cursor)
        cute.copy(operand.atom, boxes[None, tile.n_block ^ 1], smem[None, 0], tma_bar_ptr=ring.barrier(cursor))

    def _sources(self, head: Int32):
        """Of Q with LSE, and of dO with D."""
        c, operands = self.plan.config, self.operands
        return self._source("q", operands.mLSE, head, c.head_dim), self._source("do", operands.mD, head, c.head_dim_v)

    def _source(self, name: str, mRows: cute.Tensor, head: Int32, columns: int):
        """(shared tiles, global boxes, global rows) of one query head, ready to be indexed by stage and block."""
        operand, batch, tile_m = getattr(self.operands, name), self.walk.tile.batch, self.plan.config.tile_m
        boxes = cute.local_tile(operand.coordinates[None, None, head, batch], (tile_m, columns), (None, 0))
        rows = cute.local_tile(mRows[None, head, batch], (tile_m,), (None,))
        return *partition(operand, self.shared[name], boxes), rows

    @call_site
    @cute.jit
    def _load_tile(self, name: cutlass.Constexpr, source, cursor: Cursor, block: Int32):
        """Begins to fill a stage: a block of Q or dO. The stage is full when `_load_rows` has done the rest."""
        smem, boxes, _ = source
        ring, operand = self.rings[name], getattr(self.operands, name)
        ring.acquire(cursor)
        cute.copy(operand.atom, boxes[None, block], smem[None, cursor.stage], tma_bar_ptr=ring.barrier(cursor))

    @cute.jit
    def _load_rows(self, name: cutlass.Constexpr, source, cursor: Cursor, block: Int32):
        """The numbers of the block's rows. Returns the cursor of the next stage."""
        _, _, rows = source
        load_row(rows[None, block], self.shared[f"{name} rows"][None, cursor.stage], self.rings[name].barrier(cursor))
        return cursor.advance()


@dataclass(frozen=True)
class DQWriter:
    """The warp that brings dQ to global memory, for each query block what the math warpgroups hand it."""

    config: BackwardConfig
    rings: tuple[Ring, ...]
    """Of each math warpgroup with a part in dQ."""
    mdQ: cute.Tensor
    """(element, slice, m_block, head, batch)."""
    staging: cute.Tensor
    """(element of a piece, stage, warpgroup)."""
    turnstile: Any
    walk: Walk

    @cute.jit
    def run(self):
        walk, rounds = self.walk, self.config.dq_rounds
        lag = min(self.config.stages_dq, 2) - 1
        out = self.rings[0].cursor()
        freed = out
        cute.arch.griddepcontrol_wait()  # backward_prepare has set the counters to 0
        for h in cutlass.range(walk.heads, unroll=1):
            for i in cutlass.range(walk.blocks, unroll=1):
                m_block, head = walk.first + i, walk.first_head + h
                is_first = self.turnstile.wait(m_block, head)  # as a rule its turn has come before the data
                for r in cutlass.range_constexpr(rounds):
                    self._put(self.mdQ[None, None, m_block, head, walk.tile.batch], r, out, is_first)
                    out = out.advance()
                    if cutlass.const_expr(r >= lag):
                        freed = self._free(freed, lag)
                if cutlass.const_expr(lag > 0):
                    freed = self._free(freed, 0)
                self.turnstile.give(m_block, head, is_first)
            if walk.blocks > 0:
                self.turnstile.close(walk.first + walk.blocks - 1, walk.first_head + h)
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def _put(self, gdQ: cute.Tensor, number: cutlass.Constexpr, cursor: Cursor, is_first):
        """Piece `number` of each warpgroup, as it comes."""
        c = self.config
        index, piece = divmod(number, c.dq_pieces)
        for p in cutlass.range_constexpr(c.dq_parts):
            self.rings[p].wait(cursor)
            target = gdQ[None, p * (c.dq_slices // c.dq_parts) + index].iterator + piece * c.dq_piece
            with cute.arch.elect_one():
                self.turnstile.put(target, self.staging[None, cursor.stage, p].iterator, c.dq_piece, is_first)
                cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def _free(self, cursor: Cursor, younger: cutlass.Constexpr):
        """Frees a piece, when all but the `younger` last have been read. Returns the cursor of the next."""
        parts = self.config.dq_parts
        for p in cutlass.range_constexpr(parts):
            with cute.arch.elect_one():
                cute.arch.cp_async_bulk_wait_group((younger + 1) * parts - 1 - p, read=True)
            self.rings[p].release(cursor)
        return cursor.advance()


@dataclass(frozen=True)
class Math:
    """One math warpgroup: dK and dV of 64 keys, and its part of every dQ."""

    plan: Plan
    rings: dict[str, Ring]
    gemms: "Gemms"
    rows: "RowStatistics | OnlyProbabilities"
    exchange: "Exchange | NoExchange"
    dq: StagedDQ | NoDQ
    mask: Any
    walk: Walk
    scale_log2: Float32
    warpgroup: Int32

    @cute.jit
    def run(self):
        walk, c = self.walk, self.plan.config
        self.gemms.clear()
        first_key = walk.tile.n_block * c.tile_n + ROWS * self.warpgroup
        cut = self.mask.cut_blocks(walk.tile.n_block, walk.first)
        steps, out = Lockstep.start(c.stages_q, c.stages_do, c.stages_ds), self.dq.cursor()
        self.rings["k"].wait(self.rings["k"].cursor())
        self.rings["v"].wait(self.rings["v"].cursor())
        for _ in cutlass.range(walk.heads, unroll=1):
            # first the blocks that the mask cuts, then those whose queries all see all keys
            for i in cutlass.range(cut, unroll=1):
                q, do, ds = steps.of(c.stages_q), steps.of(c.stages_do), steps.of(c.stages_ds)
                self._probabilities(q, do)
                self.mask.hide(self.gemms.acc_S, first_key, walk.first + i)
                out = self._gradients(q, do, ds, out)
                steps = steps.advance()
            for _ in cutlass.range(walk.blocks - cut, unroll=1):
                q, do, ds = steps.of(c.stages_q), steps.of(c.stages_do), steps.of(c.stages_ds)
                self._probabilities(q, do)
                out = self._gradients(q, do, ds, out)
                steps = steps.advance()

    @cute.jit
    def _probabilities(self, q: Cursor, do: Cursor):
        """S^T = K Q^T and P = exp(S - LSE), while dP^T = V dO^T is on its way."""
        self.rings["q"].wait(q)
        self.gemms.start_scores(q)
        self.rings["do"].wait(do)
        self.gemms.start_dp(do)
        wait_gemms(1)
        self.rows.probabilities(self.gemms.acc_S, q, self.scale_log2)

    @cute.jit
    def _gradients(self, q: Cursor, do: Cursor, ds: Cursor, out: Cursor):
        """dS = P * (dP - D); dV += P^T dO; dQ = dS K; dK += dS^T Q. Returns the cursor of the next dQ."""
        gemms = self.gemms
        gemms.take_p()
        wait_gemms(0)
        self.rows.score_gradients(gemms.acc_S, gemms.acc_dP, do)
        gemms.take_ds()
        gemms.start_dv(do)
        self.exchange.share(gemms.rdS, ds)
        if cutlass.const_expr(not self.plan.config.overlap_dq):
            wait_gemms(0)
        gemms.dq.start(ds)
        wait_gemms(gemms.dq.groups)
        self.rings["do"].release(do)
        gemms.start_dk(q)
        wait_gemms(1)
        out = self.dq.put(gemms.dq.acc, out)
        wait_gemms(0)
        self.rings["q"].release(q)
        return out


@dataclass(frozen=True)
class RowStatistics:
    """LSE (in base 2) and D of the query rows, which are the columns of S^T."""

    sLSE: cute.Tensor
    sD: cute.Tensor

    @cute.jit
    def probabilities(self, acc_S: cute.Tensor, q: Cursor, scale_log2: Float32):
        """P = 2^(scale_log2 * S - LSE), in place."""
        scores = rows_and_columns(acc_S)
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            lse = self._of_column(self.sLSE, c, q)
            for r in cutlass.range_constexpr(ROWS_OF_THREAD):
                scores[r, c] = cute.math.exp2(scores[r, c] * scale_log2 - lse, fastmath=True)

    @cute.jit
    def score_gradients(self, acc_P: cute.Tensor, acc_dP: cute.Tensor, do: Cursor):
        """dS = P * (dP - D), in the place of dP."""
        p, dp = rows_and_columns(acc_P), rows_and_columns(acc_dP)
        for c in cutlass.range_constexpr(cute.size(p, mode=[1])):
            delta = self._of_column(self.sD, c, do)
            for r in cutlass.range_constexpr(ROWS_OF_THREAD):
                dp[r, c] = p[r, c] * (dp[r, c] - delta)

    def _of_column(self, rows: cute.Tensor, c: int, cursor: Cursor):
        return rows[8 * (c // 2) + c % 2 + 2 * place_in_quad(), cursor.stage]


@dataclass(frozen=True)
class OnlyProbabilities:
    """The twin of `RowStatistics` where dS is not wanted."""

    rows: RowStatistics

    def probabilities(self, acc_S: cute.Tensor, q: Cursor, scale_log2: Float32):
        self.rows.probabilities(acc_S, q, scale_log2)

    def score_gradients(self, acc_P: cute.Tensor, acc_dP: None, do: Cursor):
        pass


@dataclass(frozen=True)
class Exchange:
    """dS from the registers of each warpgroup to shared memory, where all of them read it for dQ."""

    plan: Plan
    sdS: cute.Tensor
    everyone: CommonBarrier
    warpgroup: Int32

    @cute.jit
    def share(self, rdS: cute.Tensor, ds: Cursor):
        """Returns when the dS of all warpgroups is there.

        With two stages no one overwrites what another still reads: who writes a stage again has met everyone since,
        after their dQ of its last use.
        """
        if cutlass.const_expr(self.plan.config.stages_ds == 1):
            self.everyone.join()
        slab = self.sdS[None, None, ds.stage * self.plan.config.math_warpgroups + self.warpgroup]
        keys_by_queries = cute.make_tensor(slab.iterator, cute.select(slab.layout, mode=[1, 0]))
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), self.plan.dtype)
        to_smem = cute.make_tiled_copy_C(atom, self.plan.st).get_slice(thread_of_warpgroup())
        cute.copy(to_smem, to_smem.retile(rdS), to_smem.partition_D(keys_by_queries))
        cute.arch.fence_proxy("async.shared", space="cta")
        self.everyone.join()


@dataclass(frozen=True)
class NoExchange:
    """The twin of `Exchange` where dQ is not wanted: nobody needs the dS of others. The lanes of a warp still meet,
    since one of them soon releases, for all, the LSE and D that they have read."""

    def share(self, rdS: cute.Tensor | None, ds: Cursor):
        cute.arch.sync_warp()


@dataclass(frozen=True)
class ScoreGradients:
    """dP^T and dS^T of a warpgroup."""

    mma: cute.TiledMma
    tdPrV: cute.Tensor
    tdPrdO: cute.Tensor
    acc: cute.Tensor
    rdS: cute.Tensor

    @call_site
    def start(self, do: Cursor):
        """dP^T = V dO^T, not waited for."""
        start_gemm(self.mma, self.acc, self.tdPrV, self.tdPrdO[None, None, None, do.stage], False)

    def take(self):
        convert_16(self.acc, self.rdS)


@dataclass(frozen=True)
class NoScoreGradients:
    """The twin of `ScoreGradients` where neither dQ nor dK is wanted."""

    acc: None = None
    rdS: None = None

    @call_site
    def start(self, do: Cursor):
        start_nothing()

    def take(self):
        pass


@dataclass(frozen=True)
class KeyGradient:
    """dV or dK of a warpgroup's 64 keys."""

    mma: cute.TiledMma
    a: cute.Tensor
    """P^T or dS^T, in registers."""
    b: cute.Tensor
    """(V, N, K, stage) of dO or Q."""
    acc: cute.Tensor

    def clear(self):
        self.acc.fill(0.0)

    @call_site
    def start(self, rows: Cursor):
        """acc += a b, not waited for."""
        start_gemm(self.mma, self.acc, as_a_operand_16(self.a), self.b[None, None, None, rows.stage], True)

    def scale(self, factor: Float32):
        multiply(self.acc, factor)


@dataclass(frozen=True)
class NoKeyGradient:
    """The twin of `KeyGradient` for one that is not wanted."""

    acc: None = None

    def clear(self):
        pass

    @call_site
    def start(self, rows: Cursor):
        start_nothing()

    def scale(self, factor: Float32):
        pass


@dataclass(frozen=True)
class Gemms:
    """The five GEMMs of a warpgroup: operands in shared memory as descriptors, accumulators and P, dS in registers."""

    plan: Plan
    tSrK: cute.Tensor
    tSrQ: cute.Tensor
    acc_S: cute.Tensor
    rP: cute.Tensor
    dp: ScoreGradients | NoScoreGradients
    dv: KeyGradient | NoKeyGradient
    dk: KeyGradient | NoKeyGradient
    dq: DQGemm | NoDQGemm

    @classmethod
    def of(cls, plan: Plan, shared: dict[str, cute.Tensor], group: Int32, has_dq: bool) -> "Gemms":
        c, st = plan.config, plan.st.get_slice(0)
        shape = plan.st.partition_shape_C((ROWS, c.tile_m))
        rP = cute.make_rmem_tensor(shape, plan.dtype)
        dp, dv, dk = NoScoreGradients(), NoKeyGradient(), NoKeyGradient()
        if plan.wanted != "v":
            dp = ScoreGradients(
                plan.st,
                plan.st.make_fragment_A(st.partition_A(shared["v"]))[None, None, None, group],
                plan.st.make_fragment_B(st.partition_B(shared["do"])),
                cute.make_rmem_tensor(shape, Float32),
                cute.make_rmem_tensor(shape, plan.dtype),
            )
        if "v" in plan.wanted:
            dv = cls._key_gradient(plan.dv, rP, shared["do t"], c.head_dim_v)
        if "k" in plan.wanted:
            dk = cls._key_gradient(plan.dk, dp.rdS, shared["q t"], c.head_dim)
        return cls(
            plan,
            plan.st.make_fragment_A(st.partition_A(shared["k"]))[None, None, None, group],
            plan.st.make_fragment_B(st.partition_B(shared["q"])),
            cute.make_rmem_tensor(shape, Float32),
            rP,
            dp,
            dv,
            dk,
            DQGemm.of(c, plan.dq, shared["k t"], shared["ds"], group) if has_dq else NoDQGemm(),
        )

    @staticmethod
    def _key_gradient(mma: cute.TiledMma, weights: cute.Tensor, rows_t: cute.Tensor, columns: int) -> KeyGradient:
        b = mma.make_fragment_B(mma.get_slice(0).partition_B(rows_t))
        acc = cute.make_rmem_tensor(mma.partition_shape_C((ROWS, columns)), Float32)
        return KeyGradient(mma, weights, b, acc)

    @property
    def acc_dP(self) -> cute.Tensor | None:
        return self.dp.acc

    @property
    def rdS(self) -> cute.Tensor | None:
        return self.dp.rdS

    def clear(self):
        """dK = dV = 0."""
        self.dk.clear()
        self.dv.clear()

    @call_site
    def start_scores(self, q: Cursor):
        """S^T = K Q^T, not waited for."""
        start_gemm(self.plan.st, self.acc_S, self.tSrK, self.tSrQ[None, None, None, q.stage], False)

    @call_site
    def start_dp(self, do: Cursor):
        """dP^T = V dO^T, not waited for."""
        self.dp.start(do)

    @call_site
    def start_dv(self, do: Cursor):
        """dV += P^T dO, not waited for."""
        self.dv.start(do)

    @call_site
    def start_dk(self, q: Cursor):
        """dK += dS^T Q, not waited for."""
        self.dk.start(q)

    def take_p(self):
        """P^T in 16 bits: the accumulator's registers, in the order the GEMM of dV wants its A operand in."""
        convert_16(self.acc_S, self.rP)

    def take_ds(self):
        self.dp.take()


class InRegisters:
    """The design of this file: P and dS stay in the registers of the warpgroup that owns their keys."""

    @staticmethod
    def plan(key: BackwardKey) -> Plan:
        return Plan.of(key)

    @staticmethod
    @cute.jit
    def consume(
        plan: cutlass.Constexpr,
        operands: Operands,
        rings,
        shared,
        mask,
        walk: Walk,
        scales,
        own: Int32,
        ordered: cutlass.Constexpr,
    ):
        """What a math warpgroup does. Here the dQ writer sees to an order of dQ."""
        if cutlass.const_expr("q" not in plan.wanted):
            consume_in_registers(plan, operands, rings, shared, mask, walk, scales, own, False)
        elif cutlass.const_expr(plan.config.dq_gemm == "lone"):
            if own == 0:
                consume_in_registers(plan, operands, rings, shared, mask, walk, scales, own, True)
            else:
                consume_in_registers(plan, operands, rings, shared, mask, walk, scales, own, False)
        else:
            consume_in_registers(plan, operands, rings, shared, mask, walk, scales, own, True)


@cute.jit
def consume_in_registers(
    plan: cutlass.Constexpr,
    operands: Operands,
    rings,
    shared,
    mask,
    walk: Walk,
    scales,
    own: Int32,
    has_dq: cutlass.Constexpr,
):
    """The main loop, then the epilogue. Nobody but this warpgroup reads its V; its K is read by all for their dQ."""
    scale_log2, scale = scales
    everyone = CommonBarrier(plan.barriers.first("ds"), plan.config.math_warpgroups)
    gemms = Gemms.of(plan, shared, own, has_dq)
    rows = RowStatistics(shared["q rows"], shared["do rows"])
    if cutlass.const_expr(plan.wanted == "v"):
        rows = OnlyProbabilities(rows)
    exchange = Exchange(plan, shared["ds"], everyone, own) if "q" in plan.wanted else NoExchange()
    dq = StagedDQ.of(plan.config, rings["dq"], shared["dq"], own) if has_dq else NoDQ()
    Math(plan, rings, gemms, rows, exchange, dq, mask, walk, scale_log2, own).run()
    own = own_warpgroup()  # anew: kept through the main loop, it would be the register too many at 80 x 128
    alone = WarpgroupBarrier(plan.barriers.first("rows"), own)
    row_block = walk.tile.n_block * plan.config.math_warpgroups + own
    dv_store = Staged(operands.dv, shared["v"], plan.dv, own, alone) if "v" in plan.wanted else NoStore()
    dk_store = Staged(operands.dk, shared["k"], plan.dk, own, alone) if "k" in plan.wanted else NoStore()
    dv_store.store(gemms.dv.acc, walk.tile, row_block)
    gemms.dk.scale(scale)
    everyone.join()
    dk_store.store(gemms.dk.acc, walk.tile, row_block)
    (dk_store if "k" in plan.wanted else dv_store).drain()  # of both, where there are two


def own_warpgroup() -> Int32:
    """0 for the first math warpgroup, the same value in all lanes of a warp."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4 - 1)


def multiply(acc: cute.Tensor, factor: Float32):
    for i in range(cute.size(acc)):
        acc[i] = acc[i] * factor


# ------------------------------------------------------------------------------------------------------ kernel and host


DQ_STARTS: dict[str, Any] = {"cleared": AnyOrder, "stored": FirstComes}
ORDERS: dict[str, Any] = {"heads": KeysFirst, "sections": FirstKeysFirst}
FIXED_ORDERS: dict[bool, Any] = {False: FirstKeysFirst, True: LastKeysFirst}
"""causal -> order of the CTAs where sums have a fixed order: few key blocks of a head at a time, so that few must wait
for one another. A CTA waits only for one that starts earlier: ranks (`parts/key_mask.py`) follow the order."""


class Backward:
    """Compiles one key. Called with torch-shaped tensors: q, k, v, do, dk, dv (batch, sequence, head, dim); the row
    statistics lse_log2, delta (batch, head, rows padded to tile_m) float32; dq_accum (batch, head, m_block, slice,
    element) float32; turns (batch, head, m_block) int32 zeros. If the key does not want dK, then dk is None; likewise
    dv, and for dQ dq_accum and turns."""

    def __init__(self, key: BackwardKey, design: Any):
        """`design` is `InRegisters`, or another that has a `plan` and a `consume`."""
        self.key, self.design = key, design
        check_backward(key.config)
        self.smem_bytes = 0  # what the storage takes, known once the kernel has been traced
        self.mask = KEY_MASKS[key.config.causal]
        self.order = FIXED_ORDERS[key.config.causal] if key.deterministic else ORDERS[key.config.order]

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        do: cute.Tensor,
        lse_log2: cute.Tensor,
        delta: cute.Tensor,
        dq_accum: cute.Tensor | None,
        turns: cute.Tensor | None,
        dk: cute.Tensor | None,
        dv: cute.Tensor | None,
        scale_log2: Float32,
        scale: Float32,
        stream,
    ):
        plan, c = self.design.plan(self.key), self.key.config
        pairs = exchanges(c, self.key.wanted)
        operands = Operands(
            load_operand(sequence_major(q), plan.lQ, (c.tile_m, c.head_dim)),
            load_operand(sequence_major(k), plan.lK, (c.key_rows, c.head_dim)),
            load_operand(sequence_major(v), plan.lV, (c.key_rows, c.head_dim_v)),
            load_operand(sequence_major(do), plan.ldO, (c.tile_m, c.head_dim_v)),
            store_operand_if_wanted(dk, plan.lK, (c.key_rows, c.head_dim)),
            store_operand_if_wanted(dv, plan.lV, (c.key_rows, c.head_dim_v)),
            _reversed(lse_log2),
            _reversed(delta),
            _reversed(dq_accum) if "q" in self.key.wanted else None,
            _reversed(turns) if "q" in self.key.wanted else None,
            load_operand(sequence_major(k), plan.lK_peer, (c.tile_n, c.dims_of_dq)) if pairs else None,
        )
        group = q.shape[2] // k.shape[2]
        row_bytes = (c.head_dim + c.head_dim_v) * plan.dtype.width // 8 + (c.head_dim + 2) * Float32.width // 8
        head_bytes = cutlass.Int64(q.shape[1]) * (row_bytes * group)
        ctas = 2 if pairs else 1
        n_blocks = cute.ceil_div(k.shape[1], c.tile_n * ctas)
        space = TileSpace.over(n_blocks, k.shape[2], k.shape[2], k.shape[0], head_bytes)
        self.kernel(operands, space, group, q.shape[1], k.shape[1], scale_log2, scale).launch(
            grid=[space.count * ctas, 1, 1],
            block=[c.threads, 1, 1],
            cluster=[2, 1, 1] if pairs else None,
            min_blocks_per_mp=1,  # without it ptxas ignores setmaxnreg (C7508)
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        operands: Operands,
        space: TileSpace,
        group: Int32,
        seqlen_q: Int32,
        seqlen_k: Int32,
        scale_log2: Float32,
        scale: Float32,
    ):
        plan, c = self.design.plan(self.key), self.key.config
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            for operand in (operands.q, operands.k, operands.v, operands.do, operands.dk, operands.dv):
                if cutlass.const_expr(operand is not None):
                    cpasync.prefetch_descriptor(operand.atom)

        Storage = plan.storage()
        self.smem_bytes = Storage.__sizeof__()
        storage = SmemAllocator().allocate(Storage)
        shared = plan.views(storage)
        barriers = storage.barriers.data_ptr()
        if warp_index == 0:
            init_barriers(plan.topology, barriers)
        pairs = exchanges(c, self.key.wanted)
        if cutlass.const_expr(pairs):
            meet_cluster()
        else:
            cute.arch.sync_threads()

        rings = make_rings(plan.topology, barriers)
        mask = self.mask(seqlen_q, seqlen_k, c.tile_m, c.tile_n)
        number, _, _ = cute.arch.block_idx()
        if cutlass.const_expr(pairs):
            tile = self.order(space).tile(number // 2)
            first = mask.of_pairs().first_block(tile.n_block)  # both walk over the same query blocks
            tile = KeyTile(2 * tile.n_block + cute.arch.block_idx_in_cluster(), tile.head, tile.batch)
        else:
            tile = self.order(space).tile(number)
            first = mask.first_block(tile.n_block)
        walk = Walk(tile, tile.head * group, group, first, cute.ceil_div(seqlen_q, c.tile_m) - first)
        budget = backward_registers(c, self.key.wanted)
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(budget.load)
            if warp_index == 0:
                Load(plan, operands, rings, shared, walk).run()
            if cutlass.const_expr("dq" in rings):
                if warp_index == 1:
                    counters = operands.turns[None, None, tile.batch]
                    turnstile = DQ_STARTS[c.dq_start](counters)
                    if cutlass.const_expr(self.key.deterministic):
                        turnstile = InOrder(counters, mask, tile.n_block, first, c.dq_parts * c.dq_rounds)
                    parts = tuple(rings["dq"].of_producer(Int32(i)) for i in range(c.dq_parts))
                    DQWriter(c, parts, operands.mdQ, shared["dq"], turnstile, walk).run()
        else:
            cute.arch.setmaxregister_increase(budget.math)
            own = own_warpgroup()
            scales, ordered = (scale_log2, scale), self.key.deterministic
            self.design.consume(plan, operands, rings, shared, mask, walk, scales, own, ordered)


def _reversed(tensor: cute.Tensor) -> cute.Tensor:
    """The modes in the opposite order: the contiguous one first."""
    modes = list(range(cute.rank(tensor)))[::-1]
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))
