"""dQ: who computes which part of it, and how it leaves the CTA.

The sum of dQ over the key blocks lives in fp32 in global memory, in an order of its own: each warpgroup's part of a
query block is one contiguous slice, in the order in which the accumulator's registers are stored, 16 bytes of every
thread next to each other. So the way there needs no exchange between threads, meets no bank twice, and one bulk
operation adds a whole slice. `backward_finish` reads the slices with the same map.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode

from fa3.config.backward import BackwardConfig
from fa3.config.types import ROWS_OF_WARPGROUP as ROWS
from fa3.pipeline.call_site import call_site
from fa3.pipeline.cursor import Cursor
from fa3.pipeline.ring import Ring

from .bulk import add_vector
from .gemm import start_gemm_sum
from .lanes import THREADS, thread_of_warpgroup

VECTOR = 4
"""fp32 numbers in 16 bytes."""


# ------------------------------------------------------------------------------------------------ the GEMM
def dq_mma(config: BackwardConfig, dtype: Any) -> cute.TiledMma:
    """64 rows of dQ^T, or of dQ."""
    k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
    if config.dq_gemm == "transposed":
        a, b, columns = mn_major, k_major, config.tile_m
    else:
        a, b, columns = k_major, mn_major, config.head_dim
    return hopper.make_trivial_tiled_mma(dtype, dtype, a, b, Float32, (1, 1, 1), (ROWS, columns))


def dq_shape(config: BackwardConfig) -> tuple[int, int]:
    """Rows and columns of a warpgroup's part."""
    return (ROWS, config.tile_m) if config.dq_gemm == "transposed" else (ROWS, config.head_dim)


@dataclass(frozen=True)
class DQGemm:
    """A warpgroup's part of dQ for one query block, summed over the CTA's keys, which lie in slabs of 64.

    `a`, `b`: (V, M or N, K, slab) descriptors; of the operand that is dS the slabs of all stages follow each other.
    """

    mma: cute.TiledMma
    a: cute.Tensor
    b: cute.Tensor
    acc: cute.Tensor
    slabs: int
    transposed: bool
    groups: int = 1
    """GEMMs that `start` puts under way."""

    @classmethod
    def of(cls, config: BackwardConfig, mma: cute.TiledMma, sKt: cute.Tensor, sdS: cute.Tensor, warpgroup: Int32):
        """`sKt` (dim, key, slab), `sdS` (query, key, slab); `warpgroup` chooses 64 dimensions, or 64 queries."""
        cut, thread = (ROWS, ROWS), mma.get_slice(0)
        transposed = config.dq_gemm == "transposed"
        first, second = (sKt, sdS) if transposed else (sdS, sKt)
        a = thread.partition_A(cute.local_tile(first, cut, (warpgroup, 0, None)))
        acc = cute.make_rmem_tensor(mma.partition_shape_C(dq_shape(config)), Float32)
        b = thread.partition_B(second)
        slabs = config.math_warpgroups
        return cls(mma, mma.make_fragment_A(a), mma.make_fragment_B(b), acc, slabs, transposed)

    @call_site
    def start(self, ds: Cursor):
        """dQ_local = dS K, not waited for."""
        start_gemm_sum(self.mma, self.acc, [self._operands(ds, slab) for slab in range(self.slabs)], False)

    def _operands(self, ds: Cursor, slab: int):
        of_ds = ds.stage * self.slabs + slab
        of_a, of_b = (slab, of_ds) if self.transposed else (of_ds, slab)
        return self.a[None, None, None, of_a], self.b[None, None, None, of_b]


@dataclass(frozen=True)
class NoDQGemm:
    """The identity twin of `DQGemm`: of a warpgroup that has no part in dQ."""

    groups: int = 0
    acc: None = None

    def start(self, ds: Cursor):
        pass


# ------------------------------------------------------------------------------------------------ the way out
def vectors(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator as (4, vector): what a thread stores in 16 bytes at a time."""
    return cute.make_tensor(acc.iterator, cute.make_layout((VECTOR, cute.size(acc) // VECTOR)))


def vectors_of_thread(dq_slice: cute.Pointer, count: int) -> cute.Tensor:
    """This thread's (4, vector) of a slice in memory: vector i of all threads, then vector i + 1."""
    layout = cute.make_layout((VECTOR, count), stride=(1, VECTOR * THREADS))
    return cute.make_tensor((dq_slice + VECTOR * thread_of_warpgroup()).align(16), layout)


@dataclass(frozen=True)
class StagedDQ:
    """Piece by piece into this warpgroup's stages of shared memory, for the dQ writer."""

    ring: Ring
    """The warpgroup's part of the edge."""
    stages: cute.Tensor
    """(element of a piece, stage)."""
    pieces: int
    """Of one slice."""

    @classmethod
    def of(cls, config: BackwardConfig, ring: Ring, staging: cute.Tensor, warpgroup: Int32) -> "StagedDQ":
        """`staging` (element, stage, warpgroup)."""
        return cls(ring.of_producer(warpgroup), staging[None, None, warpgroup], config.dq_pieces)

    def cursor(self) -> Cursor:
        return self.ring.cursor()

    @cute.jit
    def put(self, acc_dQ: cute.Tensor, out: Cursor):
        """A slice of one query block. Returns the cursor of the next."""
        source = vectors(acc_dQ)
        count = cute.size(source, mode=[1]) // self.pieces
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=128)
        for i in cutlass.range_constexpr(self.pieces):
            self.ring.acquire(out)
            piece = cute.local_tile(source, (VECTOR, count), (0, i))
            cute.copy(atom, piece, vectors_of_thread(self.stages[None, out.stage].iterator, count))
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            self.ring.commit(out)
            out = out.advance()
        return out

    def put_slice(self, acc_dQ: cute.Tensor, out: Cursor, own: Int32, index: int, m_block, head, batch):
        """`put`, of a caller that knows where the slice goes. Here the writer knows it."""
        return self.put(acc_dQ, out)


@dataclass(frozen=True)
class NoDQ:
    """The identity twin of `StagedDQ`: nothing to put anywhere."""

    def cursor(self) -> Cursor:
        return Cursor(Int32(0), Int32(0), 1)

    def put(self, acc_dQ: None, out: Cursor):
        return out


@dataclass(frozen=True)
class DirectDQ:
    """Straight from registers to global memory, 16 bytes at a time: where shared memory has no room for a slice.

    The slices' own order makes the 32 lanes of a warp add 512 bytes next to each other.
    """

    mdQ: cute.Tensor
    """(element, slice, m_block, head, batch)."""
    turnstile: Any
    slices: int
    """That a warpgroup puts for one query block, one after the other."""

    def cursor(self) -> Cursor:
        return Cursor(Int32(0), Int32(0), 1)

    @cute.jit
    def put_slice(self, acc_dQ: cute.Tensor, out: Cursor, own: Int32, index: cutlass.Constexpr, m_block, head, batch):
        """Slice number `index` of those of warpgroup `own`."""
        if cutlass.const_expr(index == 0):
            self.turnstile.wait(m_block, head)
        source, part = vectors(acc_dQ), own * self.slices + index
        start = self.mdQ[None, part, m_block, head, batch].iterator + VECTOR * thread_of_warpgroup()
        for i in cutlass.range_constexpr(cute.size(source, mode=[1])):
            add_vector(start + i * (VECTOR * THREADS), [source[e, i] for e in range(VECTOR)])
        if cutlass.const_expr(index == self.slices - 1):
            self.turnstile.give(m_block, head)
        return out
