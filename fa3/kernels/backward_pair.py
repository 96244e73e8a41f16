"""The backward for head dim 256 in pairs of CTAs, which compute dQ together.

A CTA adds its part of dQ to global memory in every step, 64 KB for 64 queries at head dim 256, and the adders of the L2
cache take about 15 bytes per cycle and SM, so that adding lasts longer than the five GEMMs. Here the two CTAs of a
cluster own neighbouring key blocks and walk over the same query blocks. Each sends its dS to the other, so that it can
sum half of the dimensions of dQ over the keys of both: half as much to add (unmerged change #2889 of flash-attention
reports 471 -> 530 TFLOP/s for it).

Everything else is as in `backward_wide.py`; there are two more edges::

    k_peer   load -> math0..                        1 stage    half of the columns of the other's keys, once
    ds_peer  math0 -> math0.. of the other CTA      1 stage    dS of one step

Steps of a query block::

    tensor cores   S | dP      |                      | dQ, own keys | dV | dK | dQ, other keys |
    the rest           P = ..    dS = .., both to smem  dS to the other CTA                      dQ out
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa3.config.types import ROWS_OF_WARPGROUP as ROWS
from fa3.pipeline.barriers import meet_cluster
from fa3.pipeline.call_site import call_site
from fa3.pipeline.cursor import Cursor
from fa3.pipeline.ring import PeerRing

from .backward import Operands, Walk
from .backward_wide import Math, ThroughShared, WidePlan, consume_through_shared, turnstile_of_warpgroups
from .parts.dq import DirectDQ, dq_shape
from .parts.gemm import start_gemm, wait_gemms
from .parts.lanes import thread_of_warpgroup


@dataclass(frozen=True)
class PairMath(Math):
    """One math warpgroup of a pair."""

    @cute.jit
    def _gradients(self, q: Cursor, do: Cursor, exchange: Cursor, m_block: Int32, head: Int32, is_last):
        """dS = P * (dP - D); both to shared memory, and dS to the other CTA; dV += P^T dO; dQ = dS K; dK += dS^T Q."""
        self.scores.take_p()
        wait_gemms(0)
        self.scores.score_gradients(do)
        self.scores.take_ds()
        self.dq.ring.acquire(exchange)  # the other CTA has the dS of the last step
        self.everyone.join()  # all GEMMs that read the P and dS of the last step are done
        self.scores.share()
        self.everyone.join()
        self.dq.send(exchange)
        self.dq.start()
        self.dv.start(do)
        self.dk.start(q)
        self.dq.ring.wait(exchange)
        self.dq.start_peer()
        wait_gemms(2)
        self.rings["do"].release(do)
        wait_gemms(1)
        self.rings["q"].release(q)
        wait_gemms(0)
        self.dq.ring.release(exchange)
        self.start.next(q, is_last)
        self.dq.put(m_block, head)
        wait_gemms(0)
        return exchange.advance()


@dataclass(frozen=True)
class PairQueryGradient:
    """The warpgroup's 64 dimensions of dQ^T of one query block, summed over the keys of both CTAs."""

    plan: WidePlan
    ring: PeerRing
    sdS: cute.Pointer
    sdS_peer: cute.Pointer
    a: cute.Tensor
    b: cute.Tensor
    a_peer: cute.Tensor
    b_peer: cute.Tensor
    acc: cute.Tensor
    way: DirectDQ
    batch: Int32
    warpgroup: Int32
    rank: Int32
    """Of the CTA in its pair."""

    @classmethod
    def of(cls, plan: WidePlan, ring: PeerRing, shared: dict[str, cute.Tensor], way: DirectDQ, batch, group):
        c, thread = plan.config, plan.dq.get_slice(0)
        rank = cute.arch.block_idx_in_cluster()

        def a(name, slab):
            keys = cute.local_tile(shared[f"{name} t"][None, None, 0], (ROWS, c.tile_n), (slab, 0))
            return plan.dq.make_fragment_A(thread.partition_A(keys))

        def b(name):
            return plan.dq.make_fragment_B(thread.partition_B(shared[f"{name} t"][None, None, 0]))

        return cls(
            plan,
            ring,
            shared["ds"].iterator,
            shared["ds_peer"].iterator,
            a("k", rank * c.math_warpgroups + group),
            b("ds"),
            a("k_peer", group),
            b("ds_peer"),
            cute.make_rmem_tensor(plan.dq.partition_shape_C(dq_shape(c)), Float32),
            way,
            batch,
            group,
            rank,
        )

    def cursor(self) -> Cursor:
        return self.ring.cursor()

    @cute.jit
    def send(self, exchange: Cursor):
        """dS of this CTA to the other."""
        if self.warpgroup == 0:
            if thread_of_warpgroup() < 32:
                self.ring.send(exchange, self.sdS, self.sdS_peer)

    @call_site
    def start(self):
        """dQ^T = K^T dS^T over this CTA's keys, not waited for."""
        start_gemm(self.plan.dq, self.acc, self.a, self.b, False)

    @call_site
    def start_peer(self):
        """dQ^T += K^T dS^T over the other's keys, not waited for."""
        start_gemm(self.plan.dq, self.acc, self.a_peer, self.b_peer, True)

    def put(self, m_block: Int32, head: Int32):
        part = self.rank * self.plan.config.math_warpgroups + self.warpgroup
        self.way.put_slice(self.acc, self.way.cursor(), part, 0, m_block, head, self.batch)


class InPairs(ThroughShared):
    """The design of this file, for `fa3.kernels.backward.Backward`. Without dQ there is nothing to exchange."""

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
        if cutlass.const_expr("q" not in plan.wanted):
            ThroughShared.consume(plan, operands, rings, shared, mask, walk, scales, own, ordered)
        else:
            tile = walk.tile
            pairs, pair = mask.of_pairs(), tile.n_block // 2
            turnstile = turnstile_of_warpgroups(plan, operands, pairs, pair, tile.batch, own, ordered)
            way = DirectDQ(operands.mdQ, turnstile, 1)
            dq = PairQueryGradient.of(plan, rings["ds_peer"], shared, way, tile.batch, own)
            rings["k_peer"].wait(rings["k_peer"].cursor())
            consume_through_shared(PairMath, dq, plan, operands, rings, shared, mask, walk, scales, own)
            meet_cluster()  # the other CTA may still tell this one that it has read its last dS
