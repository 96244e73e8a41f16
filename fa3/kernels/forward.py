"""Algorithm 1 of FlashAttention-3: the forward pass, warp-specialised.

One persistent CTA of `1 + tile_m / 64` warpgroups. Every math warpgroup owns 64 query rows for itself.

Roles and edges (ring: who fills it -> who reads it, stages)::

    load    1 warp, TMA and the tile schedule       tile   load -> math0..  2          number of the next tile
    math0   64 rows: S = Q K^T, softmax, O += P V   q      load -> math_i   1 for each the 64 rows of warpgroup i
    math1   the next 64 rows, ...                   k, v   load -> math0..  `stages`   tile_n keys, tile_n values

Timeline of a CTA (ping-pong: the S GEMM of one warpgroup lies under the softmax of the other)::

    load    Q0 K Q1 K V K V ... V                 | next tile's Q, K, V, as stages fall free
    math0   | S   | softmax | PV    S | softmax | PV ...       | O, LSE |
    math1         | S   | softmax | PV    S | softmax ...          | O, LSE |

The algorithm (arXiv 2407.08608, Algorithm 1), in the order of this file:

    load      give registers back; for each tile: load Q_i, then K_j, V_j as stage after stage is free
    math      take registers; O = 0, l = 0, m = -inf; wait for Q_i
    main loop for j: wait K_j; S = Q_i K_j^T; release K_j; m, P, l; O = diag(e^(m_old - m)) O; wait V_j;
              O += P V_j; release V_j
    epilogue  O = diag(1/l) O, L = m + log l; write both

Key blocks are walked from the last to the first: only the last ones can need a mask. `forward_overlap.py` replaces the
main loop (`PlainLoop`) by Algorithm 2's and shares the rest.

Before you edit: rebind a cursor in its loop's own text, or it freezes (docs/dsl_rules.md). The order of the loads in
`Load.run` and of K, turn and V in `Math.pass_over` keeps the CTA free of deadlock. Afterwards, without a GPU:
`python -m fa3.sass forward --diff HEAD`, and `pytest tests/unit/kernels`, which runs this text against a model.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator

from fa3.config.budget import TILE_SLOTS, check_forward, forward_registers, forward_topology
from fa3.config.types import ROWS_OF_WARPGROUP as ROWS
from fa3.config.types import ForwardConfig, KernelKey
from fa3.layouts.fragments_dsl import as_a_operand_16
from fa3.pipeline.barriers import BarrierNames, WarpgroupBarrier, make_turns
from fa3.pipeline.call_site import call_site
from fa3.pipeline.cursor import Cursor
from fa3.pipeline.ring import Ring, init_barriers, make_rings
from fa3.pipeline.topology import Topology

from .parts.epilogue import Direct, Staged, store_lse
from .parts.gemm import convert_16, start_gemm, wait_gemms
from .parts.mask import MASKS
from .parts.softmax import Extremum, OnlineSoftmax
from .parts.strategies import Epilogue, MainLoop, Mask, Order, Turns
from .parts.tiles import LongestFirst, RowsFirst, Tile, TileCounter, TileSpace
from .parts.tma import TmaOperand, dim_major, load_operand, partition, sequence_major, store_operand

ROW_MAJOR, COL_MAJOR = cutlass.tensor_utils.LayoutEnum.ROW_MAJOR, cutlass.tensor_utils.LayoutEnum.COL_MAJOR
DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}
SMEM_ALIGNMENT = 1024
"""The 128-byte swizzle repeats after 8 rows, and its pattern counts from an address that is a multiple of this."""


# --------------------------------------------------------------------------------------- shared memory, edges, barriers


@dataclass(frozen=True)
class Plan:
    """What a key implies before anything runs: MMAs, shared-memory layouts, edges and named barriers."""

    config: ForwardConfig
    dtype: Any
    qk: cute.TiledMma
    pv: cute.TiledMma
    lQ: cute.ComposedLayout
    lK: cute.ComposedLayout
    lV: cute.ComposedLayout
    lO: cute.ComposedLayout
    topology: Topology
    barriers: BarrierNames

    @classmethod
    def of(cls, key: KernelKey) -> "Plan":
        c, dtype = key.config, DTYPES[key.dtype]
        groups = c.math_warpgroups
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        registers = warpgroup.OperandSource.RMEM
        return cls(
            config=c,
            dtype=dtype,
            qk=hopper.make_trivial_tiled_mma(dtype, dtype, k_major, k_major, Float32, (1, 1, 1), (ROWS, c.tile_n)),
            pv=hopper.make_trivial_tiled_mma(
                dtype, dtype, k_major, mn_major, Float32, (1, 1, 1), (ROWS, c.head_dim_v), registers
            ),
            lQ=hopper.make_smem_layout_a(ROW_MAJOR, (ROWS, c.tile_n, c.head_dim), dtype, groups),
            lK=hopper.make_smem_layout_b(ROW_MAJOR, (ROWS, c.tile_n, c.head_dim), dtype, c.stages),
            lV=hopper.make_smem_layout_b(COL_MAJOR, (ROWS, c.head_dim_v, c.tile_n), dtype, c.stages),
            lO=hopper.make_smem_layout_epi(dtype, ROW_MAJOR, (ROWS, c.head_dim_v), groups),
            topology=forward_topology(c),
            barriers=BarrierNames((("turn", groups), ("rows", groups))),
        )

    def storage(self) -> Any:
        """The CTA's shared memory. `fa3.config.budget` sums the same fields without the DSL; a test compares them."""
        dtype, staged = self.dtype, self.config.store == "staged"

        def buffer(layout, present=True):
            return cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout) if present else 0], SMEM_ALIGNMENT]

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, self.topology.barriers]
            tiles: cute.struct.MemRange[Int32, TILE_SLOTS]
            q: buffer(self.lQ)
            k: buffer(self.lK)
            v: buffer(self.lV)
            o: buffer(self.lO, staged)

        return Storage


class Operands(NamedTuple):
    """The global tensors: Q, K, V (as V^T) and O through TMA; O, for `direct` stores, and LSE as plain tensors."""

    q: TmaOperand
    k: TmaOperand
    v: TmaOperand
    o: TmaOperand
    mO: cute.Tensor
    mLSE: cute.Tensor


# ------------------------------------------------------------------------------------------------- roles, in data order


@dataclass(frozen=True)
class Load:
    """The producer warp: draws tiles, and keeps the rings of Q, K and V full."""

    plan: Plan
    operands: Operands
    rings: dict[str, Ring]
    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    sTile: cute.Tensor
    order: Order
    counter: TileCounter
    mask: Mask

    @cute.jit
    def run(self):
        groups = self.plan.config.math_warpgroups
        q, k, v, out = (self.rings[name].cursor() for name in ("q", "k", "v", "tile"))
        number, _, _ = cute.arch.block_idx()
        while number < self.order.space.count:
            tile = self.order.tile(number)
            first_row = tile.m_block * self.plan.config.tile_m
            blocks = self.mask.blocks(first_row, self.plan.config.tile_m)
            if blocks > 0:
                queries, keys, values = self._sources(tile)
                q = self._load("q", queries, q, tile.m_block * groups)
                k = self._load("k", keys, k, blocks - 1)
                for i in cutlass.range_constexpr(1, groups):
                    q = self._load("q", queries, q, tile.m_block * groups + i)
                for j in cutlass.range(blocks - 1, unroll=1):  # K one block ahead of V: Algorithm 2 reads it so
                    k = self._load("k", keys, k, blocks - 2 - j)
                    v = self._load("v", values, v, blocks - 1 - j)
                v = self._load("v", values, v, 0)
            number = self.counter.draw()
            out = self._publish(out, number)

    def _sources(self, tile: Tile):
        """Pairs (shared, global) of Q, K and V^T for this tile's head, ready to be indexed by stage and block."""
        c, ops = self.plan.config, self.operands
        gQ = cute.local_tile(ops.q.coordinates[None, None, tile.head, tile.batch], (ROWS, c.head_dim), (None, 0))
        gK = cute.local_tile(ops.k.coordinates[None, None, tile.head_kv, tile.batch], (c.tile_n, c.head_dim), (None, 0))
        gV = cute.local_tile(
            ops.v.coordinates[None, None, tile.head_kv, tile.batch], (c.head_dim_v, c.tile_n), (0, None)
        )
        return partition(ops.q, self.sQ, gQ), partition(ops.k, self.sK, gK), partition(ops.v, self.sV, gV)

    @cute.jit
    def _load(self, name: cutlass.Constexpr, source, cursor: Cursor, block: Int32):
        """Fills one stage with a block, and returns the cursor of the next."""
        smem, boxes = source
        ring, operand = self.rings[name], getattr(self.operands, name)
        ring.acquire(cursor)
        cute.copy(operand.atom, boxes[None, block], smem[None, cursor.stage], tma_bar_ptr=ring.barrier(cursor))
        return cursor.advance()

    @cute.jit
    def _publish(self, cursor: Cursor, number: Int32):
        ring = self.rings["tile"]
        ring.acquire(cursor)
        with cute.arch.elect_one():
            self.sTile[cursor.stage] = number
        ring.commit(cursor)  # elects the same lane, so that its arrival releases its own store
        return cursor.advance()


@dataclass(frozen=True)
class Math:
    """One math warpgroup: 64 query rows of every tile, from scores to O and LSE."""

    plan: Plan
    rings: dict[str, Ring]
    sTile: cute.Tensor
    order: Order
    mask: Mask
    main_loop: MainLoop
    epilogue: Epilogue
    mLSE: cute.Tensor
    warpgroup: Int32

    @cute.jit
    def run(self):
        groups, tile_m = self.plan.config.math_warpgroups, self.plan.config.tile_m
        softmax, acc_O = self.main_loop.softmax, self.main_loop.gemms.acc_O
        q = Cursor(self.warpgroup, Int32(0), groups)
        k, v, tiles = (self.rings[name].cursor() for name in ("k", "v", "tile"))
        self.main_loop.turns.open()
        number, _, _ = cute.arch.block_idx()
        while number < self.order.space.count:
            tile = self.order.tile(number)
            first_row = tile.m_block * tile_m
            blocks = self.mask.blocks(first_row, tile_m)
            softmax.reset()
            acc_O.fill(0.0)
            if blocks > 0:
                own_row = first_row + ROWS * self.warpgroup
                own = self.mask.blocks(own_row, ROWS)
                k, v = self.pass_over(k, v, blocks - own, own)
                if own > 0:
                    k, v = self.main_loop.run(q, k, v, own_row, own)
                else:
                    let_pass(self.rings["q"], q)
                q = q.next_lap()
            number = self._next_tile(tiles)
            tiles = tiles.advance()
            lse = softmax.finish(acc_O)
            row_block = tile.m_block * groups + self.warpgroup
            store_lse(self.mLSE, lse, tile, row_block)
            self.epilogue.store(acc_O, tile, row_block)
        self.epilogue.drain()

    @cute.jit
    def pass_over(self, k: Cursor, v: Cursor, blocks: Int32, own: Int32):
        """Lets `blocks` key blocks go by that other warpgroups of the tile see, and this one, which sees `own`, not.

        Turns included: every warpgroup takes as many as the main loop takes for all blocks of the tile. K goes before
        the turn: with a single stage, who waits for its turn while holding K may wait for a warpgroup that waits for
        the next K.
        """
        for j in cutlass.range(blocks, unroll=1):
            k = let_pass(self.rings["k"], k)
            if own + j >= self.main_loop.blocks_without_turn:
                self.main_loop.turns.wait()
                self.main_loop.turns.give()
            v = let_pass(self.rings["v"], v)
        return k, v

    @cute.jit
    def _next_tile(self, cursor: Cursor):
        """Fetched before the epilogue, so that its latency lies under the stores."""
        ring = self.rings["tile"]
        ring.wait(cursor)
        number = self.sTile[cursor.stage]
        cute.arch.sync_warp()
        ring.release(cursor)
        return number


@dataclass(frozen=True)
class Gemms:
    """The two GEMMs of a warpgroup: operands in shared memory as descriptors, S, P and O in registers."""

    plan: Plan
    tSrQ: cute.Tensor
    tSrK: cute.Tensor
    tOrV: cute.Tensor
    acc_S: cute.Tensor
    rP: cute.Tensor
    acc_O: cute.Tensor

    @classmethod
    def of(cls, plan: Plan, sQ: cute.Tensor, sK: cute.Tensor, sV: cute.Tensor) -> "Gemms":
        c = plan.config
        qk, pv = plan.qk.get_slice(0), plan.pv.get_slice(0)
        scores = plan.qk.partition_shape_C((ROWS, c.tile_n))
        return cls(
            plan,
            plan.qk.make_fragment_A(qk.partition_A(sQ)),
            plan.qk.make_fragment_B(qk.partition_B(sK)),
            plan.pv.make_fragment_B(pv.partition_B(sV)),
            cute.make_rmem_tensor(scores, Float32),
            cute.make_rmem_tensor(scores, plan.dtype),
            cute.make_rmem_tensor(plan.pv.partition_shape_C((ROWS, c.head_dim_v)), Float32),
        )

    @call_site
    def start_scores(self, q: Cursor, k: Cursor):
        """S = Q K^T, not waited for."""
        a, b = self.tSrQ[None, None, None, q.stage], self.tSrK[None, None, None, k.stage]
        start_gemm(self.plan.qk, self.acc_S, a, b, False)

    @call_site
    def start_output(self, v: Cursor):
        """O += P V, not waited for."""
        b = self.tOrV[None, None, None, v.stage]
        start_gemm(self.plan.pv, self.acc_O, as_a_operand_16(self.rP), b, True)

    def take_p(self):
        """P in 16 bits: the accumulator's registers, in the order the second GEMM wants its A operand in."""
        convert_16(self.acc_S, self.rP)


@dataclass(frozen=True)
class PlainLoop:
    """Algorithm 1: S, softmax and P V of one block after the other. A turn covers one S GEMM, from issue to end."""

    gemms: Gemms
    rings: dict[str, Ring]
    turns: Turns
    softmax: OnlineSoftmax
    mask: Mask
    blocks_without_turn: int = 0

    @cute.jit
    def run(self, q: Cursor, k: Cursor, v: Cursor, first_row: Int32, blocks: Int32):
        """The `blocks` key blocks that these rows see, from the last; `first_row`: the warpgroup's first query row."""
        self.rings["q"].wait(q)
        # first the blocks that the mask cuts, then those that every row sees whole
        clear = self.mask.clear_blocks(first_row)
        for j in cutlass.range(blocks - clear, unroll=1):
            self._scores(q, k)
            self.mask.hide(self.gemms.acc_S, self.softmax.extremum.hidden, first_row, blocks - 1 - j)
            self._softmax_and_output(v)
            k, v = k.advance(), v.advance()
        for _ in cutlass.range(clear, unroll=1):
            self._scores(q, k)
            self._softmax_and_output(v)
            k, v = k.advance(), v.advance()
        self.rings["q"].release(q)
        return k, v

    @cute.jit
    def _scores(self, q: Cursor, k: Cursor):
        """S = Q K_j^T."""
        self.rings["k"].wait(k)
        self.turns.wait()
        self.gemms.start_scores(q, k)
        wait_gemms(0)
        self.turns.give()
        self.rings["k"].release(k)

    @cute.jit
    def _softmax_and_output(self, v: Cursor):
        """m, P, l; then O = diag(e^(m_old - m)) O + P V_j."""
        self.softmax.step(self.gemms.acc_S)
        self.gemms.take_p()
        self.softmax.rescale(self.gemms.acc_O)
        self.rings["v"].wait(v)
        self.gemms.start_output(v)
        wait_gemms(0)
        self.rings["v"].release(v)


@call_site
@cute.jit
def let_pass(ring: cutlass.Constexpr, cursor: Cursor):
    """Releases a stage unread. It must have arrived: released early it would count for the lap before."""
    ring.wait(cursor)
    ring.release(cursor)
    return cursor.advance()


# ------------------------------------------------------------------------------------------------------ kernel and host


class Forward:
    """Compiles one key. Called with torch-shaped tensors: q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv),
    o (B, Sq, H, Dv), lse (B, H, Sq) float32, counters (n,) int32 zeros of which `slot` is ours."""

    def __init__(self, key: KernelKey, main_loop: type[MainLoop]):
        self.key, self.main_loop = key, main_loop
        check_forward(key.config)
        self.smem_bytes = 0  # what the storage takes, known once the kernel has been traced
        self.mask = MASKS[key.config.causal]
        self.order = LongestFirst if key.config.causal else RowsFirst
        self.extremum = Extremum.of(key.negative_scale)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor,
        counters: cute.Tensor,
        slot: Int32,
        scale_log2: Float32,
        sm_count: Int32,
        stream,
    ):
        plan, c = Plan.of(self.key), self.key.config
        mO = sequence_major(o)
        operands = Operands(
            load_operand(sequence_major(q), plan.lQ, (ROWS, c.head_dim)),
            load_operand(sequence_major(k), plan.lK, (c.tile_n, c.head_dim)),
            load_operand(dim_major(v), plan.lV, (c.head_dim_v, c.tile_n)),
            store_operand(mO, plan.lO, (ROWS, c.head_dim_v)),
            mO,
            lse,
        )
        kv_bytes = cutlass.Int64(k.shape[1]) * ((c.head_dim + c.head_dim_v) * plan.dtype.width // 8)
        space = TileSpace.over(cute.ceil_div(q.shape[1], c.tile_m), q.shape[2], k.shape[2], q.shape[0], kv_bytes)
        self.kernel(operands, space, counters, slot, q.shape[1], k.shape[1], scale_log2).launch(
            grid=[cutlass.min(space.count, sm_count), 1, 1],
            block=[c.threads, 1, 1],
            min_blocks_per_mp=1,  # without it ptxas ignores setmaxnreg (C7508)
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        operands: Operands,
        space: TileSpace,
        counters: cute.Tensor,
        slot: Int32,
        seqlen_q: Int32,
        seqlen_k: Int32,
        scale_log2: Float32,
    ):
        plan, c = Plan.of(self.key), self.key.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for operand in (operands.q, operands.k, operands.v, operands.o):
                cpasync.prefetch_descriptor(operand.atom)

        Storage = plan.storage()
        self.smem_bytes = Storage.__sizeof__()
        storage = SmemAllocator().allocate(Storage)
        sQ = storage.q.get_tensor(plan.lQ.outer, swizzle=plan.lQ.inner)
        sK = storage.k.get_tensor(plan.lK.outer, swizzle=plan.lK.inner)
        sV = storage.v.get_tensor(plan.lV.outer, swizzle=plan.lV.inner)
        sTile = storage.tiles.get_tensor(cute.make_layout(TILE_SLOTS))
        barriers = storage.barriers.data_ptr()
        if warp == 0:
            init_barriers(plan.topology, barriers)
        cute.arch.sync_threads()

        rings = make_rings(plan.topology, barriers)
        mask = self.mask(seqlen_q, seqlen_k, c.tile_n)
        order = self.order(space)
        budget = forward_registers(c)
        if warp < 4:
            cute.arch.setmaxregister_decrease(budget.load)
            if warp == 0:
                counter = TileCounter(counters.iterator + slot, space.count)
                Load(plan, operands, rings, sQ, sK, sV, sTile, order, counter, mask).run()
        else:
            cute.arch.setmaxregister_increase(budget.math)
            group = cute.arch.make_warp_uniform(warp // 4 - 1)
            gemms = Gemms.of(plan, sQ, sK, sV)
            softmax = OnlineSoftmax.create(scale_log2, self.extremum, c.rescale)
            turns = make_turns(c.turns, plan.barriers.first("turn"), group, c.math_warpgroups)
            if cutlass.const_expr(c.store == "staged"):
                sO = storage.o.get_tensor(plan.lO.outer, swizzle=plan.lO.inner)
                rows = WarpgroupBarrier(plan.barriers.first("rows"), group)
                epilogue = Staged(operands.o, sO, plan.pv, group, rows)
            else:
                epilogue = Direct(operands.mO)
            main_loop = self.main_loop(gemms, rings, turns, softmax, mask)
            Math(plan, rings, sTile, order, mask, main_loop, epilogue, operands.mLSE, group).run()
