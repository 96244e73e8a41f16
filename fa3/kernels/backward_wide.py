"""The backward for wide heads: dK and dV are shared out by dimensions, P and dS go through shared memory.

At head dims of 192 and more, dK and dV of 64 keys are more registers than a warpgroup has. Here the accumulators are
those of dK^T and dV^T, and a warpgroup owns some of their dimensions, in slabs of 64, for all keys of the CTA (or all
dimensions for some of the keys, where the slabs do not come out even). Roles, edges, producer and dQ writer are those
of `backward.py`; this file replaces the math warpgroups' part.

    S = Q K^T    64 queries by the warpgroup's keys       A Q, B K           P -> shared memory, transposed
    dP = dO V^T  the same                                 A dO, B V          dS -> shared memory, transposed
    dV^T += dO^T P, dK^T += Q^T dS                        A dO, Q; B P, dS
    dQ^T = K^T dS^T                                       A K, B dS          once or twice 64 dimensions

Steps of a query block::

    tensor cores   S | dP      |                            | dV | dQ | dK
    the rest           P = ..    dS = .., both to smem  meet           dQ out

The warpgroups meet twice in a step: before P and dS are overwritten, and when they are complete. Where a warpgroup has
two slabs of dQ, the order is dQ, dV, dK, dQ: the first slab leaves while dV and dK run.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warp

from fa3.config.backward import BackwardConfig, BackwardKey, Wanted
from fa3.config.backward_budget import backward_topology, exchanges
from fa3.config.types import ROWS_OF_WARPGROUP as ROWS
from fa3.layouts.fragments_dsl import rows_and_columns
from fa3.pipeline.barriers import BarrierNames, CommonBarrier, WarpgroupBarrier
from fa3.pipeline.call_site import call_site
from fa3.pipeline.cursor import Cursor
from fa3.pipeline.ring import Ring
from fa3.pipeline.topology import Topology

from .backward import Operands, Walk, buffer_if, dq_staging, multiply, tiles
from .forward import COL_MAJOR, DTYPES, ROW_MAJOR, SMEM_ALIGNMENT
from .parts.dq import DirectDQ, StagedDQ, dq_shape
from .parts.gemm import convert_16, start_gemm, start_nothing, wait_gemms
from .parts.lanes import ROW_STEP, ROWS_OF_THREAD, row_of_thread, thread_of_warpgroup
from .parts.tma import TmaOperand, partition
from .parts.turnstile import NoTurnstile, WarpgroupTurnstile

# --------------------------------------------------------------------------------------- shared memory, edges, barriers


@dataclass(frozen=True)
class Share:
    """A warpgroup's part of dK^T or dV^T: `slabs` of 64 dimensions by `keys`."""

    slabs: int
    keys: int
    by_keys: bool

    @classmethod
    def of(cls, dim: int, config: BackwardConfig) -> "Share":
        slabs, groups = dim // ROWS, config.math_warpgroups
        if slabs % groups:
            return cls(slabs, config.tile_n // groups, True)
        return cls(slabs // groups, config.tile_n, False)


@dataclass(frozen=True)
class WidePlan:
    """What a key implies before anything runs, as `fa3.kernels.backward.Plan`."""

    config: BackwardConfig
    dtype: Any
    s: cute.TiledMma
    """S = Q K^T and dP = dO V^T: 64 queries by the warpgroup's keys."""
    dv: cute.TiledMma
    dk: cute.TiledMma
    dq: cute.TiledMma
    dv_share: Share
    dk_share: Share
    lK: cute.ComposedLayout
    lKt: cute.ComposedLayout
    lV: cute.ComposedLayout
    lVt: cute.ComposedLayout
    lQ: cute.ComposedLayout
    lQt: cute.ComposedLayout
    ldO: cute.ComposedLayout
    ldOt: cute.ComposedLayout
    lP: cute.ComposedLayout
    """P and dS, (key, query)."""
    lPt: cute.ComposedLayout
    lK_peer: cute.ComposedLayout
    """Of the keys of the other CTA of a pair, the columns that this one computes dQ of."""
    lKt_peer: cute.ComposedLayout
    topology: Topology
    barriers: BarrierNames
    wanted: Wanted

    @classmethod
    def of(cls, key: BackwardKey) -> "WidePlan":
        c, dtype = key.config, DTYPES[key.dtype]
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        dv, dk = Share.of(c.head_dim_v, c), Share.of(c.head_dim, c)

        def mma(a, b, columns):
            return hopper.make_trivial_tiled_mma(dtype, dtype, a, b, Float32, (1, 1, 1), (ROWS, columns))

        def both(rows, columns, stages):
            """(row, column, stage) with columns contiguous, and (column, row, stage) of the same bytes."""
            straight = hopper.make_smem_layout_b(ROW_MAJOR, (ROWS, rows, columns), dtype, stages)
            return straight, hopper.make_smem_layout_b(COL_MAJOR, (ROWS, columns, rows), dtype, stages)

        layouts = (
            *both(c.tile_n, c.head_dim, 1),
            *both(c.tile_n, c.head_dim_v, 1),
            *both(c.tile_m, c.head_dim, c.stages_q),
            *both(c.tile_m, c.head_dim_v, c.stages_do),
            *both(c.tile_n, c.tile_m, 1),
            *both(c.tile_n, c.dims_of_dq, 1),
        )
        return cls(
            c,
            dtype,
            mma(k_major, k_major, c.tile_n // c.math_warpgroups),
            mma(mn_major, k_major, dv.keys),
            mma(mn_major, k_major, dk.keys),
            _dq_mma(c, dtype),
            dv,
            dk,
            *layouts,
            topology=backward_topology(c, key.wanted),
            barriers=BarrierNames((("ds", 1), ("rows", c.math_warpgroups))),
            wanted=key.wanted,
        )

    @property
    def pairs(self) -> bool:
        return exchanges(self.config, self.wanted)

    @property
    def needs_p(self) -> bool:
        return "v" in self.wanted

    @property
    def needs_ds(self) -> bool:
        return self.wanted != "v"

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
            p: buffer_if(self.needs_p, dtype, self.lP)
            ds: buffer_if(self.needs_ds, dtype, self.lP)
            k_peer: buffer_if(self.pairs, dtype, self.lK_peer)
            ds_peer: buffer_if(self.pairs, dtype, self.lP)
            dq: cute.struct.Align[cute.struct.MemRange[Float32, dq_staging(c, self.wanted)], SMEM_ALIGNMENT]

        return Storage

    def views(self, storage) -> dict[str, cute.Tensor]:
        """The buffers as tensors: tiles (row, column, stage); with " t" the same bytes as (column, row, stage)."""
        c = self.config
        some = {}
        if dq_staging(c, self.wanted):
            some["dq"] = storage.dq.get_tensor(cute.make_layout((c.dq_piece, c.stages_dq, c.dq_parts)))
        if self.pairs:
            some |= {"k_peer": tiles(storage.k_peer, self.lK_peer), "k_peer t": tiles(storage.k_peer, self.lKt_peer)}
            some |= {"ds_peer": tiles(storage.ds_peer, self.lP), "ds_peer t": tiles(storage.ds_peer, self.lPt)}
        if self.needs_p:
            some |= {"p": tiles(storage.p, self.lP), "p t": tiles(storage.p, self.lPt)}
        if self.needs_ds:
            some |= {"ds": tiles(storage.ds, self.lP), "ds t": tiles(storage.ds, self.lPt)}
        return {
            **some,
            "k": tiles(storage.k, self.lK),
            "k t": tiles(storage.k, self.lKt),
            "v": tiles(storage.v, self.lV),
            "v t": tiles(storage.v, self.lVt),
            "q": tiles(storage.q, self.lQ),
            "q t": tiles(storage.q, self.lQt),
            "q rows": storage.lse.get_tensor(cute.make_layout((c.tile_m, c.stages_q))),
            "do": tiles(storage.do, self.ldO),
            "do t": tiles(storage.do, self.ldOt),
            "do rows": storage.delta.get_tensor(cute.make_layout((c.tile_m, c.stages_do))),
        }


def _dq_mma(config: BackwardConfig, dtype: Any) -> cute.TiledMma:
    """dQ^T = K^T dS^T, with dS as it lies here: contiguous along the queries."""
    mn_major = OperandMajorMode.MN
    return hopper.make_trivial_tiled_mma(dtype, dtype, mn_major, mn_major, Float32, (1, 1, 1), (ROWS, config.tile_m))


# ------------------------------------------------------------------------------------------------- the math warpgroups


@dataclass(frozen=True)
class Math:
    """One math warpgroup: its keys of S and dP, its dimensions of dK, dV and dQ."""

    plan: WidePlan
    rings: dict[str, Ring]
    scores: "Scores"
    dv: "KeyGradient | NoKeyGradient"
    dk: "KeyGradient | NoKeyGradient"
    dq: "QueryGradient | NoQueryGradient"
    start: "ScoresInTime | ScoresAhead"
    everyone: CommonBarrier
    mask: Any
    walk: Walk
    scale_log2: Float32
    warpgroup: Int32

    @cute.jit
    def run(self):
        walk, c = self.walk, self.plan.config
        self.dv.clear()
        self.dk.clear()
        first_key = walk.tile.n_block * c.tile_n + self.warpgroup * (c.tile_n // c.math_warpgroups)
        cut = self.mask.cut_blocks(walk.tile.n_block, walk.first)
        q, do, out = self.rings["q"].cursor(), self.rings["do"].cursor(), self.dq.cursor()
        if cutlass.const_expr(c.dq_store == "direct"):
            cute.arch.griddepcontrol_wait()  # dQ is cleared by backward_prepare
        self.rings["k"].wait(self.rings["k"].cursor())
        self.start.first(q)
        self.rings["v"].wait(self.rings["v"].cursor())
        left = walk.heads * walk.blocks
        for h in cutlass.range(walk.heads, unroll=1):
            head = walk.first_head + h
            # first the blocks that the mask cuts, then those whose queries all see all keys
            for i in cutlass.range(cut, unroll=1):
                self._probabilities(q, do)
                self.mask.hide_columns(self.scores.acc_S, first_key, walk.first + i)
                left = left - 1
                out = self._gradients(q, do, out, walk.first + i, head, left == 0)
                q, do = q.advance(), do.advance()
            for i in cutlass.range(walk.blocks - cut, unroll=1):
                self._probabilities(q, do)
                left = left - 1
                out = self._gradients(q, do, out, walk.first + cut + i, head, left == 0)
                q, do = q.advance(), do.advance()

    @cute.jit
    def _probabilities(self, q: Cursor, do: Cursor):
        """S = Q K^T and P = exp(S - LSE), while dP = dO V^T is on its way."""
        self.start.this(q)
        self.rings["do"].wait(do)
        self.scores.start_dp(do)
        wait_gemms(1)
        self.scores.probabilities(q, self.scale_log2)

    @cute.jit
    def _gradients(self, q: Cursor, do: Cursor, out: Cursor, m_block: Int32, head: Int32, is_last):
        """dS = P * (dP - D); both to shared memory; dV += P^T dO; dQ = dS K; dK += dS^T Q."""
        self.scores.take_p()
        wait_gemms(0)
        self.scores.score_gradients(do)
        self.scores.take_ds()
        self.everyone.join()  # all GEMMs that read the P and dS of the last step are done
        self.scores.share()
        self.everyone.join()
        if cutlass.const_expr(self.dq.slabs > 1):
            out = self._dq_first(q, do, out, m_block, head, is_last)
        else:
            out = self._dv_first(q, do, out, m_block, head, is_last)
        return out

    @cute.jit
    def _dq_first(self, q: Cursor, do: Cursor, out: Cursor, m_block: Int32, head: Int32, is_last):
        """For two slabs of dQ: the first one leaves while the other GEMMs run."""
        self.dq.start(0)
        self.dv.start(do)
        self.dk.start(q)
        wait_gemms(2)
        out = self.dq.put(0, out, m_block, head)
        wait_gemms(1)
        self.rings["do"].release(do)
        self.dq.start(1)
        wait_gemms(1)
        self.rings["q"].release(q)
        wait_gemms(0)
        self.start.next(q, is_last)
        out = self.dq.put(1, out, m_block, head)
        wait_gemms(0)
        return out

    @cute.jit
    def _dv_first(self, q: Cursor, do: Cursor, out: Cursor, m_block: Int32, head: Int32, is_last):
        """For one slab: dO is free early, which has a single stage at head dim 192 (dQ first: a quarter slower)."""
        self.dv.start(do)
        self.dq.start(0)
        wait_gemms(1)
        self.rings["do"].release(do)
        self.dk.start(q)
        wait_gemms(1)
        out = self.dq.put(0, out, m_block, head)
        self.start.next(q, is_last)
        wait_gemms(1)
        self.rings["q"].release(q)
        wait_gemms(0)
        return out


@dataclass(frozen=True)
class ScoresInTime:
    """S of a query block is started when its step begins."""

    ring: Ring
    scores: "Scores"

    def first(self, q: Cursor):
        pass

    def this(self, q: Cursor):
        self.ring.wait(q)
        self.scores.start_scores(q)

    def next(self, q: Cursor, is_last):
        start_nothing()


@dataclass(frozen=True)
class ScoresAhead:
    """S of a query block is started in the step before, so that the tensor cores have work while dQ leaves.

    After the last block it is computed once more, for nothing: a branch around a GEMM serialises all of them (C7514).
    """

    ring: Ring
    scores: "Scores"

    def first(self, q: Cursor):
        self.ring.wait(q)
        self.scores.start_scores(q)
        wait_gemms(0)

    def this(self, q: Cursor):
        start_nothing()

    def next(self, q: Cursor, is_last):
        following = q.advance_unless(is_last)
        self.ring.wait(following)
        self.scores.start_scores(following)


@dataclass(frozen=True)
class Scores:
    """S and dP of 64 queries and the warpgroup's keys; P and dS on their way to shared memory."""

    plan: WidePlan
    sLSE: cute.Tensor
    tSrQ: cute.Tensor
    tSrK: cute.Tensor
    acc_S: cute.Tensor
    dp: "ScoreGradients | NoScoreGradients"
    p: "Weights | NoWeights"
    ds: "Weights | NoWeights"

    @classmethod
    def of(cls, plan: WidePlan, shared: dict[str, cute.Tensor], group: Int32) -> "Scores":
        c = plan.config
        keys = c.tile_n // c.math_warpgroups
        thread = plan.s.get_slice(0)

        def own_keys(name, columns):
            return cute.local_tile(shared[name][None, None, 0], (keys, columns), (group, 0))

        def b(name, columns):
            return plan.s.make_fragment_B(thread.partition_B(own_keys(name, columns)))

        def queries_by_own_keys(name):
            return cute.local_tile(shared[name][None, None, 0], (c.tile_m, keys), (0, group))

        def weights(acc, name):
            rounded = cute.make_rmem_tensor_like(acc, plan.dtype)
            return Weights(plan.s, acc, rounded, queries_by_own_keys(name))

        shape = plan.s.partition_shape_C((ROWS, keys))
        acc_S = cute.make_rmem_tensor(shape, Float32)
        dp, p, ds = NoScoreGradients(), NoWeights(), NoWeights()
        if plan.needs_p:
            p = weights(acc_S, "p t")
        if plan.needs_ds:
            a = plan.s.make_fragment_A(thread.partition_A(shared["do"]))
            acc_dP = cute.make_rmem_tensor(shape, Float32)
            dp = ScoreGradients(plan.s, shared["do rows"], a, b("v", c.head_dim_v), acc_dP)
            ds = weights(acc_dP, "ds t")
        tSrQ = plan.s.make_fragment_A(thread.partition_A(shared["q"]))
        return cls(plan, shared["q rows"], tSrQ, b("k", c.head_dim), acc_S, dp, p, ds)

    @call_site
    def start_scores(self, q: Cursor):
        """S = Q K^T, not waited for."""
        start_gemm(self.plan.s, self.acc_S, self.tSrQ[None, None, None, q.stage], self.tSrK, False)

    @call_site
    def start_dp(self, do: Cursor):
        """dP = dO V^T, not waited for."""
        self.dp.start(do)

    @cute.jit
    def probabilities(self, q: Cursor, scale_log2: Float32):
        """P = 2^(scale_log2 * S - LSE), in place."""
        scores = rows_and_columns(self.acc_S)
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            lse = self.sLSE[row_of_thread() + ROW_STEP * r, q.stage]
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                scores[r, c] = cute.math.exp2(scores[r, c] * scale_log2 - lse, fastmath=True)

    def score_gradients(self, do: Cursor):
        """dS = P * (dP - D), in the place of dP."""
        self.dp.finish(self.acc_S, do)

    def take_p(self):
        self.p.take()

    def take_ds(self):
        self.ds.take()

    def share(self):
        """P and dS to shared memory, transposed on the way, for all warpgroups."""
        self.p.share()
        self.ds.share()
        cute.arch.fence_proxy("async.shared", space="cta")


@dataclass(frozen=True)
class ScoreGradients:
    """dP and dS of 64 queries and the warpgroup's keys."""

    mma: cute.TiledMma
    sD: cute.Tensor
    tdPrdO: cute.Tensor
    tdPrV: cute.Tensor
    acc: cute.Tensor

    @call_site
    def start(self, do: Cursor):
        """dP = dO V^T, not waited for."""
        start_gemm(self.mma, self.acc, self.tdPrdO[None, None, None, do.stage], self.tdPrV, False)

    @cute.jit
    def finish(self, acc_P: cute.Tensor, do: Cursor):
        """dS = P * (dP - D), in the place of dP."""
        p, dp = rows_and_columns(acc_P), rows_and_columns(self.acc)
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            delta = self.sD[row_of_thread() + ROW_STEP * r, do.stage]
            for c in cutlass.range_constexpr(cute.size(p, mode=[1])):
                dp[r, c] = p[r, c] * (dp[r, c] - delta)


@dataclass(frozen=True)
class NoScoreGradients:
    """The twin of `ScoreGradients` where neither dQ nor dK is wanted."""

    @call_site
    def start(self, do: Cursor):
        start_nothing()

    def finish(self, acc_P: cute.Tensor, do: Cursor):
        pass


@dataclass(frozen=True)
class Weights:
    """P or dS on the way to shared memory."""

    mma: cute.TiledMma
    acc: cute.Tensor
    rounded: cute.Tensor
    target: cute.Tensor
    """(query, the warpgroup's keys)."""

    def take(self):
        convert_16(self.acc, self.rounded)

    def share(self):
        store_transposed(self.mma, self.rounded, self.target)


@dataclass(frozen=True)
class NoWeights:
    """The identity twin of `Weights`: no GEMM reads them."""

    def take(self):
        pass

    def share(self):
        pass


def store_transposed(mma: cute.TiledMma, source: cute.Tensor, target: cute.Tensor):
    """16-bit accumulator registers to shared memory (row, column) that is contiguous along the rows."""
    matrices = 4 if cute.size(target, mode=[1]) % 16 == 0 else 2
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, matrices), source.element_type)
    to_smem = cute.make_tiled_copy_C(atom, mma).get_slice(thread_of_warpgroup())
    cute.copy(to_smem, to_smem.retile(source), to_smem.partition_D(target))


@dataclass(frozen=True)
class KeyGradient:
    """The warpgroup's part of dK^T or dV^T: one accumulator for each slab of 64 dimensions."""

    mma: cute.TiledMma
    share: Share
    a: tuple[cute.Tensor, ...]
    """Of each slab: (V, M, K, stage) of Q^T or dO^T."""
    b: cute.Tensor
    """(V, N, K) of dS or P."""
    acc: tuple[cute.Tensor, ...]
    warpgroup: Int32

    @classmethod
    def of(cls, mma: cute.TiledMma, share: Share, rows_t: cute.Tensor, weights: cute.Tensor, group: Int32):
        """`rows_t` (dim, query, stage); `weights` (key, query)."""
        thread = mma.get_slice(0)
        first = 0 if share.by_keys else group * share.slabs
        tile_m = cute.size(weights, mode=[1])
        slabs = [cute.local_tile(rows_t, (ROWS, tile_m), (first + i, 0, None)) for i in range(share.slabs)]
        own = cute.local_tile(weights, (share.keys, tile_m), (group if share.by_keys else 0, 0))
        shape = mma.partition_shape_C((ROWS, share.keys))
        return cls(
            mma,
            share,
            tuple(mma.make_fragment_A(thread.partition_A(slab)) for slab in slabs),
            mma.make_fragment_B(thread.partition_B(own)),
            tuple(cute.make_rmem_tensor(shape, Float32) for _ in slabs),
            group,
        )

    def clear(self):
        for acc in self.acc:
            acc.fill(0.0)

    @call_site
    def start(self, rows: Cursor):
        """dV^T += dO^T P or dK^T += Q^T dS, not waited for: one group."""
        start_gemms(self.mma, self.acc, [a[None, None, None, rows.stage] for a in self.a], self.b)

    def store(self, target_t: cute.Tensor, dtype: Any):
        """To shared memory (dim, key), in 16 bits."""
        first = 0 if self.share.by_keys else self.warpgroup * self.share.slabs
        column = self.warpgroup if self.share.by_keys else 0
        for i, acc in enumerate(self.acc):
            rounded = cute.make_rmem_tensor_like(acc, dtype)
            convert_16(acc, rounded)
            part = cute.local_tile(target_t, (ROWS, self.share.keys), (first + i, column))
            store_transposed(self.mma, rounded, part)


@dataclass(frozen=True)
class NoKeyGradient:
    """The twin of `KeyGradient` for one that is not wanted."""

    acc: tuple[()] = ()

    def clear(self):
        pass

    @call_site
    def start(self, rows: Cursor):
        start_nothing()


@call_site
@cute.jit
def start_gemms(mma: cute.TiledMma, accs: cutlass.Constexpr, operands: cutlass.Constexpr, b: cute.Tensor):
    """acc_i += a_i b for several accumulators, as one committed group."""
    cute.nvgpu.warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, True)
    for acc, a in zip(accs, operands, strict=True):
        for k in cutlass.range_constexpr(cute.size(b, mode=[2])):
            cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
    cute.nvgpu.warpgroup.commit_group()


@dataclass(frozen=True)
class QueryGradient:
    """The warpgroup's part of dQ^T of one query block, 64 dimensions at a time."""

    plan: WidePlan
    a: tuple[cute.Tensor, ...]
    b: cute.Tensor
    acc: cute.Tensor
    way: StagedDQ | DirectDQ
    batch: Int32
    warpgroup: Int32

    @classmethod
    def of(cls, plan: WidePlan, shared: dict[str, cute.Tensor], way, batch: Int32, group: Int32) -> "QueryGradient":
        c = plan.config
        slabs, thread = c.dq_slices // c.math_warpgroups, plan.dq.get_slice(0)
        keys = shared["k t"][None, None, 0]
        parts = [cute.local_tile(keys, (ROWS, c.tile_n), (group * slabs + i, 0)) for i in range(slabs)]
        return cls(
            plan,
            tuple(plan.dq.make_fragment_A(thread.partition_A(part)) for part in parts),
            plan.dq.make_fragment_B(thread.partition_B(shared["ds t"][None, None, 0])),
            cute.make_rmem_tensor(plan.dq.partition_shape_C(dq_shape(c)), Float32),
            way,
            batch,
            group,
        )

    @property
    def slabs(self) -> int:
        return len(self.a)

    def cursor(self) -> Cursor:
        return self.way.cursor()

    @call_site
    def start(self, slab: int):
        """dQ^T = K^T dS^T of one slab, not waited for."""
        start_gemm(self.plan.dq, self.acc, self.a[slab], self.b, False)

    def put(self, slab: int, out: Cursor, m_block: Int32, head: Int32):
        """Returns the cursor of the next."""
        return self.way.put_slice(self.acc, out, self.warpgroup, slab, m_block, head, self.batch)


@dataclass(frozen=True)
class NoQueryGradient:
    """The twin of `QueryGradient` where dQ is not wanted."""

    slabs: int = 1

    def cursor(self) -> Cursor:
        return Cursor(Int32(0), Int32(0), 1)

    @call_site
    def start(self, slab: int):
        start_nothing()

    def put(self, slab: int, out: Cursor, m_block: Int32, head: Int32):
        return out


class ThroughShared:
    """The design of this file, for `fa3.kernels.backward.Backward`."""

    @staticmethod
    def plan(key: BackwardKey) -> WidePlan:
        return WidePlan.of(key)

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
        """What a math warpgroup does."""
        dq = NoQueryGradient()
        if cutlass.const_expr("q" in plan.wanted):
            way = _way_of_dq(plan, operands, rings, shared, mask, walk, own, ordered)
            dq = QueryGradient.of(plan, shared, way, walk.tile.batch, own)
        consume_through_shared(Math, dq, plan, operands, rings, shared, mask, walk, scales, own)


def _way_of_dq(
    plan: WidePlan, operands: Operands, rings, shared, mask, walk: Walk, own: Int32, ordered: bool
) -> StagedDQ | DirectDQ:
    c = plan.config
    if c.dq_store == "staged":
        return StagedDQ.of(c, rings["dq"], shared["dq"], own)
    turnstile = turnstile_of_warpgroups(plan, operands, mask, walk.tile.n_block, walk.tile.batch, own, ordered)
    return DirectDQ(operands.mdQ, turnstile, c.dq_slices // c.math_warpgroups)


def turnstile_of_warpgroups(
    plan: WidePlan, operands: Operands, mask, n_block: Int32, batch: Int32, own: Int32, ordered: bool
) -> NoTurnstile | WarpgroupTurnstile:
    """`n_block` counts key blocks, or pairs of them, as `mask` does."""
    if not ordered:
        return NoTurnstile()
    alone = WarpgroupBarrier(plan.barriers.first("rows"), own)
    together = plan.config.math_warpgroups * plan.config.cluster
    return WarpgroupTurnstile(operands.turns[None, None, batch], mask, n_block, together, alone)


@cute.jit
def consume_through_shared(
    math: cutlass.Constexpr,
    dq,
    plan: cutlass.Constexpr,
    operands: Operands,
    rings,
    shared,
    mask,
    walk: Walk,
    scales,
    own: Int32,
):
    """The main loop of `math`, then dK and dV to where K and V were, and out."""
    scale_log2, scale = scales
    everyone = CommonBarrier(plan.barriers.first("ds"), plan.config.math_warpgroups)
    scores = Scores.of(plan, shared, own)
    dv, dk = NoKeyGradient(), NoKeyGradient()
    if cutlass.const_expr("v" in plan.wanted):
        dv = KeyGradient.of(plan.dv, plan.dv_share, shared["do t"], shared["p"][None, None, 0], own)
    if cutlass.const_expr("k" in plan.wanted):
        dk = KeyGradient.of(plan.dk, plan.dk_share, shared["q t"], shared["ds"][None, None, 0], own)
    start = (ScoresAhead if plan.config.scores_ahead else ScoresInTime)(rings["q"], scores)
    math(plan, rings, scores, dv, dk, dq, start, everyone, mask, walk, scale_log2, own).run()
    for acc in dk.acc:
        multiply(acc, scale)
    results = [
        (gradient, getattr(operands, f"d{name}"), name)
        for gradient, name in ((dv, "v"), (dk, "k"))
        if name in plan.wanted
    ]
    everyone.join()  # nobody reads K or V any more
    for gradient, _, name in results:
        gradient.store(shared[f"{name} t"][None, None, 0], plan.dtype)
    cute.arch.fence_proxy("async.shared", space="cta")
    everyone.join()
    if own == 0:
        if thread_of_warpgroup() < 32:
            for _, target, name in results:
                _store_tile(target, shared[name], walk)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)


def _store_tile(target: TmaOperand, source: cute.Tensor, walk: Walk):
    """The CTA's keys of dK or dV. What lies past Sk is not written."""
    tile, shape = walk.tile, (cute.size(source, mode=[0]), cute.size(source, mode=[1]))
    boxes = cute.local_tile(target.coordinates[None, None, tile.head, tile.batch], shape, (None, 0))
    smem, boxes = partition(target, source, boxes)
    cute.copy(target.atom, smem[None, 0], boxes[None, tile.n_block])
