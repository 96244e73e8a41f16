"""Algorithm 2 of FlashAttention-3: the main loop that overlaps the GEMMs and the softmax of one warpgroup.

Roles, edges, shared memory and epilogue are those of `forward.py`; this file replaces its `PlainLoop`.

Timeline of a warpgroup; while the softmax of block j runs, P V of block j - 1 is on the tensor cores::

    tensor cores   S_0 |         | S_1  P_0 V_0 | S_2  P_1 V_1 | ...            | P_n V_n
    softmax             | soft 0 |      | soft 1      | soft 2 ...  | soft n |

Steps, as in the paper (arXiv 2407.08608, Algorithm 2), with blocks counted from the last key block:

    prologue   S_0 = Q K_0^T; softmax; P_cur
    for j      start S_next = Q K_j^T; rescale O; start O += P_cur V_(j-1); wait for S_next; release K_j; softmax;
               wait for O; release V_(j-1); P_cur = P_next
    drain      rescale O; O += P_cur V_last

(The paper rescales O after the wait. Here it happens one lap later, under the next S GEMM.)

It costs registers: S of one block (4 bytes a score) and P of the one before (2 bytes) are alive together. The compiler
may reorder; `python -m fa3.sass forward` counts the exponentials that are issued while a GEMM is in flight.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa3.pipeline.cursor import Cursor
from fa3.pipeline.ring import Ring

from .forward import Gemms
from .parts.gemm import wait_gemms
from .parts.softmax import OnlineSoftmax
from .parts.strategies import Mask, Turns


@dataclass(frozen=True)
class OverlapLoop:
    """Algorithm 2: P V of one block is under way while the scores of the next are exponentiated.

    A turn covers issuing S_next and P V. The prologue's S and the drain's P V go without one.
    """

    gemms: Gemms
    rings: dict[str, Ring]
    turns: Turns
    softmax: OnlineSoftmax
    mask: Mask
    blocks_without_turn: int = 1

    @cute.jit
    def run(self, q: Cursor, k: Cursor, v: Cursor, first_row: Int32, blocks: Int32):
        """The `blocks` key blocks that these rows see, from the last; `first_row`: the warpgroup's first query row."""
        hidden = self.softmax.extremum.hidden
        # prologue
        self.rings["q"].wait(q)
        self.rings["k"].wait(k)
        self.gemms.start_scores(q, k)
        wait_gemms(0)
        self.rings["k"].release(k)
        k = k.advance()
        self.mask.hide(self.gemms.acc_S, hidden, first_row, blocks - 1)
        self.softmax.step(self.gemms.acc_S)
        self.gemms.take_p()
        # main loop: first the other blocks that the mask cuts, then those that every row sees whole
        clear = blocks - 1
        if cutlass.const_expr(not self.mask.cuts_one_block):
            clear = cutlass.min(self.mask.clear_blocks(first_row), blocks - 1)
            for j in cutlass.range(blocks - 1 - clear, unroll=1):
                self._start_both_wait_for_scores(q, k, v)
                self.mask.hide(self.gemms.acc_S, hidden, first_row, blocks - 2 - j)
                self._softmax_under_output(v)
                k, v = k.advance(), v.advance()
        for _ in cutlass.range(clear, unroll=1):
            self._start_both_wait_for_scores(q, k, v)
            self._softmax_under_output(v)
            k, v = k.advance(), v.advance()
        self.rings["q"].release(q)
        # drain
        self.softmax.rescale(self.gemms.acc_O)
        self.rings["v"].wait(v)
        self.gemms.start_output(v)
        wait_gemms(0)
        self.rings["v"].release(v)
        return k, v.advance()

    @cute.jit
    def _start_both_wait_for_scores(self, q: Cursor, k: Cursor, v: Cursor):
        """Both GEMMs on their way; returns when S_next is there and O += P_cur V still runs.

        O is scaled for P_cur between the two, under the GEMM of S_next: up to 4 % faster than after the softmax (H200).
        """
        self.rings["k"].wait(k)
        self.turns.wait()
        self.gemms.start_scores(q, k)
        self.softmax.rescale(self.gemms.acc_O)
        self.rings["v"].wait(v)
        self.gemms.start_output(v)
        self.turns.give()
        wait_gemms(1)
        self.rings["k"].release(k)

    @cute.jit
    def _softmax_under_output(self, v: Cursor):
        """Softmax of S_next under the running P V; then P_next takes P_cur's place.

        ptxas moves the wait up between the exponentials, so that a third to a half of them run under P V of this
        warpgroup and the rest under the GEMMs of the others. Holding it back until all were issued was 2-4 % slower
        (H200).
        """
        self.softmax.step(self.gemms.acc_S)
        wait_gemms(0)
        self.rings["v"].release(v)
        self.gemms.take_p()
