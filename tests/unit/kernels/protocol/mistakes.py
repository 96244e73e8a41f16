"""Mistakes of an edit to the forward, each planted into a copy of its text, with the words that tell it.

`rules` are words of the broken rule. `machine` are words of the fault or deadlock on the model machine, where one is
looked for; some mistakes (a load order, K held over a turn) break no rule of one role and show only there.
"""

from __future__ import annotations

from dataclasses import dataclass

from .text import Edit


@dataclass(frozen=True)
class Mistake:
    edit: Edit
    rules: str = ""
    machine: str = ""


def overlap(old: str, new: str, rules: str = "", machine: str = "") -> Mistake:
    return Mistake(Edit("forward_overlap", old, new), rules, machine)


def forward(old: str, new: str, rules: str = "", machine: str = "") -> Mistake:
    return Mistake(Edit("forward", old, new), rules, machine)


TURN = "\nself.turns.wait()"

OVERLAP = {
    "no wait for k in the prologue": overlap(
        'self.rings["k"].wait(k)\nself.gemms',
        "self.gemms",
        "start_scores reads k.*wait is missing",
        "reads item",
    ),
    "no wait for k in the loop": overlap(
        'self.rings["k"].wait(k)' + TURN, "self.turns.wait()", "start_scores reads k.*wait is missing", "reads item"
    ),
    "no wait for v in the loop": overlap(
        'self.rings["v"].wait(v)\nself.gemms.start_output(v)\nself.turns.give()',
        "self.gemms.start_output(v)\nself.turns.give()",
        "start_output reads v.*wait is missing",
        "reads item",
    ),
    "no wait for v in the drain": overlap(
        'self.rings["v"].wait(v)\nself.gemms.start_output(v)\nwait_gemms(0)',
        "self.gemms.start_output(v)\nwait_gemms(0)",
        "start_output reads v.*wait is missing",
        "reads item",
    ),
    "no wait for q": overlap('self.rings["q"].wait(q)', "pass", "start_scores reads q.*wait is missing", "reads item"),
    "k stands still after the prologue": overlap(
        "k = k.advance()\nself.mask", "self.mask", "waits for k.*has not advanced", "reads item 0, expected 1"
    ),
    "v stands still after the drain": overlap(
        "return k, v.advance()", "return k, v", "waits for v.*has not advanced", "reads item 0, expected 1"
    ),
    "v stands still in the masked loop": overlap(
        "first_row, blocks - 2 - j)\nself._softmax_under_output(v)\nk, v = k.advance(), v.advance()",
        "first_row, blocks - 2 - j)\nself._softmax_under_output(v)\nk = k.advance()",
        "waits for v.*has not advanced",
    ),
    "k stands still in the clear loop": overlap(
        "self._start_both_wait_for_scores(q, k, v)\nself._softmax_under_output(v)\nk, v = k.advance(), v.advance()",
        "self._start_both_wait_for_scores(q, k, v)\nself._softmax_under_output(v)\nv = v.advance()",
        "waits for k.*has not advanced",
        "reads item 1, expected 2",
    ),
    "no give": overlap(
        "self.turns.give()", "pass", r"turns.give\(\) is missing", "waits at turn.*128 of 256 threads have come"
    ),
    "no turn": overlap(
        "self.turns.wait()", "pass", r"turns.wait\(\) is missing", "comes a second time before the barrier has opened"
    ),
    "scores before the turn": overlap(
        "self.turns.wait()\nself.gemms.start_scores(q, k)",
        "self.gemms.start_scores(q, k)\nself.turns.wait()",
        "start_scores of block .* outside a turn",
    ),
    "turns counted as in the plain loop": overlap(
        "blocks_without_turn: int = 1",
        "blocks_without_turn: int = 0",
        "takes 2 turns; the tile has 1",
        "waits at turn",
    ),
    "no rescale in the loop": overlap(
        'self.softmax.rescale(self.gemms.acc_O)\nself.rings["v"].wait(v)\nself.gemms.start_output(v)\nself.turns',
        'self.rings["v"].wait(v)\nself.gemms.start_output(v)\nself.turns',
        "O that has not been rescaled",
    ),
    "no rescale in the drain": overlap(
        "# drain\nself.softmax.rescale(self.gemms.acc_O)", "# drain", "O that has not been rescaled"
    ),
    "rescale under the GEMM that adds to O": overlap(
        'self.softmax.rescale(self.gemms.acc_O)\nself.rings["v"].wait(v)\nself.gemms.start_output(v)\nself.turns',
        'self.rings["v"].wait(v)\nself.gemms.start_output(v)\nself.softmax.rescale(self.gemms.acc_O)\nself.turns',
        "rescale while P V of block . may still be added to O",
    ),
    "rescale after the next softmax": overlap(
        "self.softmax.step(self.gemms.acc_S)\nwait_gemms(0)",
        "self.softmax.step(self.gemms.acc_S)\nself.softmax.rescale(self.gemms.acc_O)\nwait_gemms(0)",
        "rescale while P V of block",
    ),
    "k released before its GEMM is done": overlap(
        'wait_gemms(1)\nself.rings["k"].release(k)',
        'self.rings["k"].release(k)\nwait_gemms(1)',
        "releases k.*while S = Q K.* may still read it",
        "overwrites item . with .; unread by math",
    ),
    "k released before its GEMM is done in the prologue": overlap(
        'wait_gemms(0)\nself.rings["k"].release(k)',
        'self.rings["k"].release(k)\nwait_gemms(0)',
        "releases k.*while S = Q K.* may still read it",
    ),
    "v released before its GEMM is done": overlap(
        'wait_gemms(0)\nself.rings["v"].release(v)\nself.gemms.take_p()',
        'self.rings["v"].release(v)\nwait_gemms(0)\nself.gemms.take_p()',
        "releases v.*while O .* may still read it",
        "overwrites item . with .; unread by math",
    ),
    "waits for too few GEMMs": overlap(
        "wait_gemms(1)", "wait_gemms(2)", "releases k.*while S = Q K.* may still read it"
    ),
    "no wait for the last GEMM": overlap(
        'wait_gemms(0)\nself.rings["v"].release(v)\nreturn',
        'self.rings["v"].release(v)\nreturn',
        "releases v.*while O .* may still read it",
    ),
    "k not released": overlap(
        'wait_gemms(1)\nself.rings["k"].release(k)',
        "wait_gemms(1)",
        "waits for k.*release is missing",
        "waits for k.empty",
    ),
    "k not released in the prologue": overlap(
        'wait_gemms(0)\nself.rings["k"].release(k)',
        "wait_gemms(0)",
        "waits for k.*release is missing",
        "waits for k.empty",
    ),
    "v not released": overlap(
        'wait_gemms(0)\nself.rings["v"].release(v)\nself.gemms.take_p()',
        "wait_gemms(0)\nself.gemms.take_p()",
        "waits for v.*release is missing",
        "waits for v.empty",
    ),
    "q not released": overlap('self.rings["q"].release(q)', "pass", "has not released q", "waits for q.empty"),
    "q released at once": overlap(
        'self.rings["q"].wait(q)',
        'self.rings["q"].wait(q)\nself.rings["q"].release(q)',
        "start_scores reads q.*has been released",
    ),
    "no take_p": overlap(
        'self.rings["v"].release(v)\nself.gemms.take_p()',
        'self.rings["v"].release(v)',
        "overwrites P of block ., not taken by take_p",
    ),
    "take_p under the GEMM that reads P": overlap(
        'wait_gemms(0)\nself.rings["v"].release(v)\nself.gemms.take_p()',
        'self.gemms.take_p()\nwait_gemms(0)\nself.rings["v"].release(v)',
        "take_p overwrites P of block .* while its GEMM may still read it",
    ),
    "no softmax in the prologue": overlap(
        "self.softmax.step(self.gemms.acc_S)\nself.gemms.take_p()\n# main",
        "self.gemms.take_p()\n# main",
        "take_p before softmax.step",
    ),
    "softmax before the scores are there": overlap(
        'wait_gemms(1)\nself.rings["k"].release(k)',
        'self.softmax.step(self.gemms.acc_S)\nwait_gemms(1)\nself.rings["k"].release(k)',
        "softmax of block .* while its GEMM may be running",
    ),
    "no mask in the prologue": overlap(
        "self.mask.hide(self.gemms.acc_S, hidden, first_row, blocks - 1)",
        "pass",
        "softmax of block .* without its mask",
    ),
    "the mask of the block before": overlap(
        "first_row, blocks - 2 - j)", "first_row, blocks - 1 - j)", "masks block . as if it were ."
    ),
    "one block too many when all are clear": overlap(
        "clear = cutlass.min(self.mask.clear_blocks(first_row), blocks - 1)",
        "clear = self.mask.clear_blocks(first_row)",
        "start_scores once more than the 3 blocks",
    ),
    "one clear block too many": overlap(
        "clear = cutlass.min(self.mask.clear_blocks(first_row), blocks - 1)",
        "clear = cutlass.min(self.mask.clear_blocks(first_row) + 1, blocks - 1)",
        "softmax of block .* without its mask",
    ),
    "one block too few": overlap("clear = blocks - 1", "clear = blocks - 2", "adds . blocks' P V to O"),
}

PLAIN = {
    "no wait for k": forward(
        'self.rings["k"].wait(k)' + TURN, "self.turns.wait()", "start_scores reads k.*wait is missing", "reads item"
    ),
    "no wait for v": forward(
        'self.rings["v"].wait(v)\nself.gemms',
        "self.gemms",
        "start_output reads v.*wait is missing",
        "reads item",
    ),
    "no wait for q": forward(
        'self.rings["q"].wait(q)\n# first', "# first", "start_scores reads q.*wait is missing", "reads item"
    ),
    "no give": forward(
        'self.turns.give()\nself.rings["k"].release(k)',
        'self.rings["k"].release(k)',
        r"turns.give\(\) is missing",
        "waits at turn.*128 of 256 threads have come",
    ),
    "no turn": forward(
        "self.turns.wait()\nself.gemms",
        "self.gemms",
        r"turns.wait\(\) is missing",
        "comes a second time before the barrier has opened",
    ),
    "v stands still in the clear loop": forward(
        "for _ in cutlass.range(clear, unroll=1):\n"
        "self._scores(q, k)\n"
        "self._softmax_and_output(v)\n"
        "k, v = k.advance(), v.advance()",
        "for _ in cutlass.range(clear, unroll=1):\n"
        "    self._scores(q, k)\n"
        "    self._softmax_and_output(v)\n"
        "    k = k.advance()",
        "waits for v.*has not advanced",
        "reads item ., expected .",
    ),
    "k released before its GEMM is done": forward(
        'wait_gemms(0)\nself.turns.give()\nself.rings["k"].release(k)',
        'self.rings["k"].release(k)\nwait_gemms(0)\nself.turns.give()',
        "releases k.*while S = Q K.* may still read it",
        "overwrites item . with .; unread by math",
    ),
    "v released before its GEMM is done": forward(
        'wait_gemms(0)\nself.rings["v"].release(v)',
        'self.rings["v"].release(v)\nwait_gemms(0)',
        "releases v.*while O .* may still read it",
        "overwrites item . with .; unread by math",
    ),
    "k not released": forward(
        'self.turns.give()\nself.rings["k"].release(k)',
        "self.turns.give()",
        "waits for k.*release is missing",
        "waits for k.empty",
    ),
    "v not released": forward(
        'wait_gemms(0)\nself.rings["v"].release(v)',
        "wait_gemms(0)",
        "waits for v.*release is missing",
        "waits for v.empty",
    ),
    "q not released": forward('self.rings["q"].release(q)', "pass", "has not released q", "waits for q.empty"),
    "no rescale": forward(
        "self.softmax.rescale(self.gemms.acc_O)\nself.rings",
        "self.rings",
        "O that has not been rescaled",
    ),
    "rescale before the softmax": forward(
        "self.softmax.step(self.gemms.acc_S)\nself.gemms.take_p()\nself.softmax.rescale(self.gemms.acc_O)",
        "self.softmax.rescale(self.gemms.acc_O)\nself.softmax.step(self.gemms.acc_S)\nself.gemms.take_p()",
        "rescales O a second time for one softmax.step",
    ),
    "no take_p": forward("self.gemms.take_p()\nself.softmax", "self.softmax", "without P"),
    "no mask": forward(
        "self.mask.hide(self.gemms.acc_S, self.softmax.extremum.hidden, first_row, blocks - 1 - j)",
        "pass",
        "softmax of block .* without its mask",
    ),
    "blocks without the mask first": forward(
        "first_row, blocks - 1 - j)", "first_row, j)", "masks block . as if it were ."
    ),
    "S added to the last": forward(
        "self.acc_S, a, b, False)", "self.acc_S, a, b, True)", r"the GEMM \(mma, acc, a, b, accumulate\) is"
    ),
    "O not added to": forward(
        "as_a_operand_16(self.rP), b, True)",
        "as_a_operand_16(self.rP), b, False)",
        r"the GEMM \(mma, acc, a, b, accumulate\) is",
    ),
    "v in the stage of another": forward(
        "self.tOrV[None, None, None, v.stage]",
        "self.tOrV[None, None, None, 1]",
        r"the GEMM \(mma, acc, a, b, accumulate\) is",
    ),
}

MATH = {
    "passes without a wait": forward(
        "ring.wait(cursor)\nring.release(cursor)",
        "ring.release(cursor)",
        "before it has arrived: no wait",
        "reads item",
    ),
    "passes without a release": forward(
        "ring.wait(cursor)\nring.release(cursor)",
        "ring.wait(cursor)",
        "waits for k.*release is missing",
        "waits for k.empty",
    ),
    "passes over k and stands still": forward(
        'k = let_pass(self.rings["k"], k)', 'let_pass(self.rings["k"], k)', "waits for k.*has not advanced"
    ),
    "passes over k alone": forward(
        'v = let_pass(self.rings["v"], v)', "pass", "start_output reads v of block 2; due is block 0"
    ),
    "passes over q without a release": forward(
        'let_pass(self.rings["q"], q)', "pass", "has not released q", "waits for q.empty"
    ),
    "passes without turns": forward(
        "self.main_loop.turns.wait()\nself.main_loop.turns.give()",
        "pass",
        "takes . turns; the tile has",
        "waits at turn",
    ),
    "k held over the turn": forward(
        'k = let_pass(self.rings["k"], k)\n'
        "if own + j >= self.main_loop.blocks_without_turn:\n"
        "self.main_loop.turns.wait()\n"
        "self.main_loop.turns.give()",
        "if own + j >= self.main_loop.blocks_without_turn:\n"
        "    self.main_loop.turns.wait()\n"
        "    self.main_loop.turns.give()\n"
        'k = let_pass(self.rings["k"], k)',
        machine="waits at turn",
    ),
    "passes over own blocks": forward(
        "self.pass_over(k, v, blocks - own, own)", "self.pass_over(k, v, blocks, own)", "unread"
    ),
    "the tile's blocks for the warpgroup's": forward(
        "self.main_loop.run(q, k, v, own_row, own)",
        "self.main_loop.run(q, k, v, own_row, blocks)",
        "masks block . as if it were .",
    ),
    "the tile's rows for the warpgroup's": forward(
        "self.main_loop.run(q, k, v, own_row, own)",
        "self.main_loop.run(q, k, v, first_row, own)",
        "rows were another warpgroup's",
    ),
    "q stays in its lap": forward("q = q.next_lap()", "pass", "waits for q.*rows of this tile lie in", "reads item"),
    "q of the first warpgroup": forward(
        "Cursor(self.warpgroup, Int32(0), groups)", "Cursor(Int32(0), Int32(0), groups)", "rows of this tile lie in"
    ),
    "the next number stands still": forward("tiles = tiles.advance()", "pass", "waits for tile.*has not advanced"),
    "numbers released unread": forward(
        "number = self.sTile[cursor.stage]\ncute.arch.sync_warp()\nring.release(cursor)",
        "ring.release(cursor)\nnumber = self.sTile[cursor.stage]\ncute.arch.sync_warp()",
        "releases the tile's number before it is read",
    ),
    "numbers released by the first lane": forward("cute.arch.sync_warp()", "pass", "one lane releases"),
    "the next tile after the stores": forward(
        "number = self._next_tile(tiles)\n"
        "tiles = tiles.advance()\n"
        "lse = softmax.finish(acc_O)\n"
        "row_block = tile.m_block * groups + self.warpgroup\n"
        "store_lse(self.mLSE, lse, tile, row_block)\n"
        "self.epilogue.store(acc_O, tile, row_block)",
        "lse = softmax.finish(acc_O)\n"
        "row_block = tile.m_block * groups + self.warpgroup\n"
        "store_lse(self.mLSE, lse, tile, row_block)\n"
        "self.epilogue.store(acc_O, tile, row_block)\n"
        "number = self._next_tile(tiles)\n"
        "tiles = tiles.advance()",
        "stores O before the next tile's number is fetched",
    ),
    "nobody opens the turns": forward("self.main_loop.turns.open()", "pass", r"before turns.open\(\)", "waits at turn"),
    "the softmax of the tile before": forward("softmax.reset()", "pass", "softmax has not been reset"),
    "the O of the tile before": forward("acc_O.fill(0.0)", "pass", "O has not been set to 0"),
    "the rows of another warpgroup": forward(
        "row_block = tile.m_block * groups + self.warpgroup",
        "row_block = tile.m_block * groups",
        "stores to another tile's rows",
    ),
    "ends too early": forward("self.epilogue.drain()", "pass", "before its stores have left shared memory"),
    "waits for its stores at the start": forward(
        "self.main_loop.turns.open()",
        "self.main_loop.turns.open()\nself.epilogue.drain()\nself.epilogue.drain = lambda: None",
        "before its stores have left shared memory",
    ),
}

LOAD = {
    "the first k stands still": forward(
        'k = self._load("k", keys, k, blocks - 1)',
        'self._load("k", keys, k, blocks - 1)',
        "acquires k.*has not advanced",
        "waits for k.empty",
    ),
    "v stands still in the loop": forward(
        'v = self._load("v", values, v, blocks - 1 - j)',
        'self._load("v", values, v, blocks - 1 - j)',
        "acquires v.*has not advanced",
    ),
    "every load stands still": forward(
        "tma_bar_ptr=ring.barrier(cursor))\nreturn cursor.advance()",
        "tma_bar_ptr=ring.barrier(cursor))\nreturn cursor",
        "acquires q.*has not advanced",
    ),
    "loads into a stage that is in use": forward(
        "ring.acquire(cursor)\ncute.copy", "cute.copy", "without having acquired", "overwrites item"
    ),
    "k of the block after": forward(
        '"k", keys, k, blocks - 2 - j)', '"k", keys, k, blocks - 1 - j)', "item . of k.*is block .; due is block"
    ),
    "v of the block after": forward(
        '"v", values, v, blocks - 1 - j)', '"v", values, v, blocks - 2 - j)', "item . of v.*is block .; due is block"
    ),
    "no last v": forward('v = self._load("v", values, v, 0)', "pass", "fills v 2 times; due are 3", "waits for v.full"),
    "k of the query's head": forward(
        "tile.head_kv, tile.batch], (c.tile_n", "tile.head, tile.batch], (c.tile_n", "of .head, batch."
    ),
    "v into the stages of k": forward(
        "partition(ops.v, self.sV, gV)",
        "partition(ops.v, self.sK, gV)",
        "without having acquired",
    ),
    "bytes reported to a barrier of another stage": forward(
        "tma_bar_ptr=ring.barrier(cursor))", "tma_bar_ptr=ring.barrier(cursor.advance()))", "reports to another stage"
    ),
    "all k before the first v": forward(
        "for j in cutlass.range(blocks - 1, unroll=1):  # K one block ahead of V: Algorithm 2 reads it so\n"
        'k = self._load("k", keys, k, blocks - 2 - j)\n'
        'v = self._load("v", values, v, blocks - 1 - j)\n'
        'v = self._load("v", values, v, 0)',
        "for j in cutlass.range(blocks - 1, unroll=1):\n"
        '    k = self._load("k", keys, k, blocks - 2 - j)\n'
        'for j in cutlass.range(blocks, unroll=1):\n    v = self._load("v", values, v, blocks - 1 - j)',
        machine="waits for v.full",
    ),
    "the number that was drawn last": forward(
        "number = self.counter.draw()\nout = self._publish(out, number)",
        "out = self._publish(out, number)\nnumber = self.counter.draw()",
        "has not just drawn",
    ),
    "nothing is drawn": forward("number = self.counter.draw()", "pass", "does a loop never end"),
    "the tile's number stands still": forward(
        "releases its own store\nreturn cursor.advance()",
        "releases its own store\nreturn cursor",
        "acquires tile.*has not advanced",
    ),
    "no commit": forward("ring.commit(cursor)  #", "#", "filled and committed", "waits for tile.full"),
}

MISTAKES = {"overlap": OVERLAP, "plain": PLAIN, "math": MATH, "load": LOAD}
