"""A circular buffer between roles, guarded by mbarriers.

Every stage has two barriers. `full` completes when the stage's data has arrived, `empty` when every reader is done
with it. A producer *acquires* a stage (waits until it is empty) and *commits* it; a consumer *waits* for it and
*releases* it. In lap L of the ring, `full` completes its phase L and `empty` its phase L; an `mbarrier` wait with
parity p passes once the phase of that parity is complete, and a fresh barrier passes parity 1. So a consumer waits
with its cursor's phase and a producer with the opposite one, which lets the first lap through without waiting.

Source: PTX ISA, `mbarrier`; FlashAttention-3 (arXiv 2407.08608), Algorithm 1, "ring".
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects import llvm
from cutlass._mlir.dialects.nvvm import MemScopeKind
from cutlass.cutlass_dsl import dsl_user_op

from .call_site import call_site
from .cursor import Cursor
from .topology import EdgePlan, Topology


@dataclass(frozen=True)
class Ring:
    """The run-time side of an edge: pointers to its `full` and `empty` barriers, one of each per stage."""

    plan: EdgePlan
    full: cute.Pointer
    empty: cute.Pointer

    def cursor(self) -> Cursor:
        """The first stage of the first lap, as run-time integers."""
        return Cursor(Int32(0), Int32(0), self.plan.edge.stages)

    def of_producer(self, index: Int32) -> "Ring":
        """The stages of one of several producers, as a ring of its own."""
        edge = self.plan.edge
        part = replace(edge, producer=edge.producers[0], stages=edge.stages_of_producer)
        first = index * part.stages
        return Ring(replace(self.plan, edge=part), self.full + first, self.empty + first)

    @call_site
    @cute.jit
    def acquire(self, cursor: Cursor):
        """Producer warp: wait until the stage is empty. If the copy engine fills it, announce the bytes to come."""
        cute.arch.mbarrier_wait(self.empty + cursor.stage, cursor.phase ^ 1)
        if cutlass.const_expr(self.plan.edge.bytes > 0):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(self.full + cursor.stage, self.plan.edge.bytes)

    def barrier(self, cursor: Cursor):
        """The barrier that a TMA load of this stage reports its bytes to; with it a load needs no commit."""
        return self.full + cursor.stage

    @call_site
    @cute.jit
    def commit(self, cursor: Cursor):
        """Producer warp: what its elected lane wrote into the stage is there to be read."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.full + cursor.stage)

    @call_site
    @cute.jit
    def wait(self, cursor: Cursor):
        """Consumer: wait until the stage has arrived."""
        cute.arch.mbarrier_wait(self.full + cursor.stage, cursor.phase)

    @call_site
    @cute.jit
    def release(self, cursor: Cursor):
        """Consumer warp: done reading the stage; one lane arrives for the warp."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + cursor.stage)


@dataclass(frozen=True)
class PeerRing(Ring):
    """An edge between the two CTAs of a cluster: each fills the stages of the other.

    In `full` arrives what the peer sends, `empty` tells when the peer has read what it was sent. Between the last
    release and the end of a CTA there must be a barrier of the cluster: a CTA that has ended cannot be told anything.
    """

    peer: Int32

    @call_site
    @cute.jit
    def acquire(self, cursor: Cursor):
        """Before something is sent, or what was sent is overwritten: waits until the peer has read the stage."""
        cute.arch.mbarrier_wait(self.empty + cursor.stage, cursor.phase ^ 1)

    @call_site
    @cute.jit
    def send(self, cursor: Cursor, source: cute.Pointer, target: cute.Pointer):
        """One warp: sends a stage's bytes from here to the `target` of the peer, and expects as many from there."""
        with cute.arch.elect_one():
            full = self.full + cursor.stage
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.plan.edge.bytes)
            copy_to_peer(target, source, self.plan.edge.bytes, full, self.peer)

    @call_site
    @cute.jit
    def release(self, cursor: Cursor):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + cursor.stage, self.peer, scope=MemScopeKind.CLUSTER)


@dsl_user_op
def copy_to_peer(target, source, nbytes: int, barrier, peer, *, loc=None, ip=None):
    """Copies shared memory to the same CTA-relative address `target` of a peer, and reports to the peer's `barrier`."""
    operands = [pointer.toint().ir_value(loc=loc, ip=ip) for pointer in (target, source, barrier)]
    operands += [Int32(value).ir_value(loc=loc, ip=ip) for value in (nbytes, peer)]
    text = """{
        .reg .b32 far, bar;
        mapa.shared::cluster.u32 far, $0, $4;
        mapa.shared::cluster.u32 bar, $2, $4;
        cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [far], [$1], $3, [bar];
    }"""
    llvm.inline_asm(
        None,
        operands,
        text,
        "r,r,r,r,r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def make_rings(topology: Topology, barriers: cute.Pointer) -> dict[str, Ring]:
    """Binds every edge to its barriers in shared memory (`topology.barriers` 64-bit words from `barriers`)."""
    rings: dict[str, Ring] = {}
    for plan in topology.plans:
        full = barriers + plan.first_barrier
        empty = full + plan.edge.stages
        if plan.edge.across:
            rings[plan.edge.name] = PeerRing(plan, full, empty, cute.arch.block_idx_in_cluster() ^ 1)
        else:
            rings[plan.edge.name] = Ring(plan, full, empty)
    return rings


@call_site
@cute.jit
def init_barriers(topology: cutlass.Constexpr, barriers: cute.Pointer):
    """One warp of the CTA: sets the arrive counts. Every thread must pass a CTA barrier before it uses a ring."""
    with cute.arch.elect_one():
        for plan in topology.plans:
            for stage in range(plan.edge.stages):
                full = barriers + plan.first_barrier + stage
                cute.arch.mbarrier_init(full, plan.full_arrivals)
                cute.arch.mbarrier_init(full + plan.edge.stages, plan.empty_arrivals)
    cute.arch.mbarrier_init_fence()
