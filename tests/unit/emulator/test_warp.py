"""Divergence and reconvergence: random programs with branches against an interpreter that goes lane by lane."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa3.emulator.faults import Fault
from fa3.emulator.observe import Observer
from fa3.sass.listing import Source

from .assembler import LANES, load, on_lanes, run, store

LANE = np.arange(LANES, dtype=np.uint32)
WORD = (1 << 32) - 1


# ------------------------------------------------------------------------------------------------ random programs
class Node(NamedTuple):
    """A statement: x = 3 x + n; something under a condition on a bit of x; a loop of 0 to 3 rounds, as two bits say."""

    kind: Literal["step", "if", "loop", "return", "leave"]
    n: int
    body: tuple[Any, ...] = ()
    other: tuple[Any, ...] = ()


steps = st.integers(0, 99).map(lambda n: Node("step", n))
exits = st.tuples(st.sampled_from(("return", "leave")), st.integers(0, 8)).map(lambda leaf: Node(*leaf))


def programs(leaves: st.SearchStrategy[Node]) -> st.SearchStrategy[tuple[Node, ...]]:
    bit = st.integers(0, 8)
    nested = st.recursive(
        leaves,
        lambda inner: (
            st.tuples(st.just("if"), bit, blocks(inner), blocks(inner))
            | st.tuples(st.just("loop"), bit, blocks(inner), st.just(()))
        ).map(lambda parts: Node(*parts)),
        max_leaves=12,
    )
    return st.lists(nested, min_size=1, max_size=4).map(tuple)


def blocks(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[tuple[Node, ...]]:
    return st.lists(inner, max_size=3).map(tuple)


def emitted(nodes: tuple[Node, ...], names: Iterator[int], depth: int = 0, loop: str = "") -> str:
    """PTX: x is %r0, the counter of a loop of depth d is %r<10 + d>."""
    text = ""
    for node in nodes:
        label, counter = f"$L{next(names)}", f"%r{10 + depth}"
        test = f"shr.u32 %r1, %r0, {node.n}; and.b32 %r1, %r1, 1; setp.ne.u32 %p0, %r1, 0;\n"
        if node.kind == "step":
            text += f"mad.lo.u32 %r0, %r0, 3, {node.n};\n"
        elif node.kind == "return":
            text += f"{test} @%p0 ret;\n"
        elif node.kind == "leave":
            text += f"{test} @%p0 bra {loop};\n" if loop else ""
        elif node.kind == "if":
            text += f"{test} @!%p0 bra {label}E;\n{emitted(node.body, names, depth, loop)} bra.uni {label}D;\n"
            text += f"{label}E:\n{emitted(node.other, names, depth, loop)}{label}D:\n"
        else:
            text += f"shr.u32 {counter}, %r0, {node.n}; and.b32 {counter}, {counter}, 3;\n{label}:\n"
            text += f"setp.eq.u32 %p1, {counter}, 0; @%p1 bra {label}D; sub.u32 {counter}, {counter}, 1;\n"
            text += f"{emitted(node.body, names, depth + 1, f'{label}D')} bra {label};\n{label}D:\n"
    return text


class Returned(Exception):
    pass


class Left(Exception):
    pass


def interpreted(nodes: tuple[Node, ...], x: int, inside: bool = False) -> int:
    """What one lane makes of x."""
    for node in nodes:
        condition = x >> node.n & 1
        if node.kind == "step":
            x = (3 * x + node.n) & WORD
        elif node.kind == "if":
            x = interpreted(node.body if condition else node.other, x, inside)
        elif node.kind == "loop":
            try:
                for _ in range(x >> node.n & 3):
                    x = interpreted(node.body, x, True)
            except Left as left:
                x = left.args[0]
        elif condition and node.kind == "return":
            raise Returned
        elif condition and node.kind == "leave" and inside:
            raise Left(x)
    return x


@given(programs(steps | exits), st.integers(0, 1 << 20), st.sampled_from(["early", "random"]))
@settings(max_examples=120)
def test_every_lane_goes_its_own_way(nodes: tuple[Node, ...], seed: int, policy: str) -> None:
    start = np.random.default_rng(seed).integers(0, 1 << 32, LANES, np.uint32)
    out = np.full(LANES, 7, np.uint32)
    expected = []
    for lane in range(LANES):
        try:
            expected.append(interpreted(nodes, int(start[lane])))
        except Returned:
            expected.append(7)
    body = load(0, "%r0", 4) + emitted(nodes, itertools.count()) + store(1, "%r0", 4)
    run(body, start, out, policy=policy, seed=seed)
    assert out.tolist() == expected


@given(programs(steps), st.integers(0, 1 << 20))
@settings(max_examples=60)
def test_lanes_meet_again(nodes: tuple[Node, ...], seed: int) -> None:
    """Behind every outer statement, and with nobody having run ahead: `vote.sync` is a fault in a part of a warp."""
    start = np.random.default_rng(seed).integers(0, 1 << 32, LANES, np.uint32)
    names = itertools.count()
    body = "".join(emitted((node,), names) + "vote.sync.ballot.b32 %r50, %p0, -1;" for node in nodes)
    watcher = Masks()
    got = on_lanes(body, {"%r0": start}, {"%r0": np.uint32}, observers=[watcher])
    assert got["%r0"].tolist() == [interpreted(nodes, int(x)) for x in start]
    assert watcher.masks["vote"] == [(1 << LANES) - 1] * len(nodes)


class Masks(Observer):
    """The lanes of every step, by the name of its first statement."""

    def __init__(self) -> None:
        self.masks: dict[str, list[int]] = {}
        self.order: list[str] = []

    def stepping(self, warp: Any, step: Any, mask: Any) -> None:
        lanes = (1 << LANES) - 1 if mask is None else sum(1 << int(i) for i in np.flatnonzero(mask))
        self.masks.setdefault(step.statements[0].name, []).append(lanes)
        self.order.append(step.statements[0].name)


# ------------------------------------------------------------------------------------------------ single cases
def test_both_sides_of_a_branch_run_once_with_their_lanes() -> None:
    watcher = Masks()
    body = """
      setp.lt.u32 %p0, %laneid, 5; @%p0 bra $THEN;
      fence.proxy.async; bra.uni $END;
    $THEN: membar.cta;
    $END: bar.sync 0;"""
    done = run(body, observers=[watcher])
    assert watcher.masks["fence"] == [WORD ^ 31] and watcher.masks["membar"] == [31]
    assert watcher.masks["bar"] == [WORD]
    assert done.executed == done.ctas[0].warps[0].executed == 2 + 2 + 1 + 1 + 1


def test_a_uniform_branch_takes_one_side() -> None:
    watcher = Masks()
    run("setp.lt.u32 %p0, %laneid, 32; @%p0 bra $END; fence.proxy.async;\n$END: bar.sync 0;", observers=[watcher])
    assert "fence" not in watcher.masks and watcher.masks["bar"] == [WORD]


def test_an_elected_lane_does_something_alone() -> None:
    body = """
      mov.u32 %r0, 0; elect.sync _|%p0, -1; @!%p0 bra $END;
      atom.global.add.u32 %r0, [%rd0], 1; add.u32 %r0, %r0, 100;
    $END: bar.sync 0;"""
    counter, out = np.zeros(1, np.uint32), np.zeros(LANES, np.uint32)
    run("ld.param.u64 %rd0, [k_param_0];" + body + store(1, "%r0", 4), counter, out)
    assert counter[0] == 1 and out.tolist() == [100] + [0] * 31


def test_nobody_overtakes_a_lane_that_waits() -> None:
    """Lane 0 of warp 0 waits for warp 1, in a branch; the others wait for it where the branches meet."""
    body = """
      setp.ne.u32 %p0, %tid.x, 0; @%p0 bra $READY;
      mbarrier.init.shared.b64 [1024], 1;
    $READY: bar.sync 0;
      setp.ge.u32 %p0, %tid.x, 32; @%p0 bra $ARRIVE;
      setp.ne.u32 %p0, %tid.x, 0; @%p0 bra $MEET;
    $WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [1024], 0; @!%p1 bra $WAIT;
    $MEET: vote.sync.all.pred %p2, %p1, -1; bra.uni $END;
    $ARRIVE: setp.ne.u32 %p0, %tid.x, 32; @%p0 bra $END; mbarrier.arrive.shared.b64 _, [1024];
    $END:"""
    watcher = Masks()
    run(body, threads=64, observers=[watcher])
    assert watcher.masks["mbarrier"] == [1, 1, 1]  # init, the wait (told once though it waits), the arrival
    assert watcher.masks["vote"] == [WORD]
    assert watcher.order.index("vote") > len(watcher.order) - 1 - watcher.order[::-1].index("mbarrier")


@pytest.mark.parametrize("ending", ["@%p0 ret;", "@%p0 exit;", "@!%p0 bra $ON; ret;\n$ON:"])
def test_lanes_that_return_early(ending: str) -> None:
    out = np.zeros(LANES, np.uint32)
    done = run(f"setp.lt.u32 %p0, %laneid, 9; mov.u32 %r0, 1; {ending}" + store(0, "%r0", 4), out)
    assert out.tolist() == [0] * 9 + [1] * 23
    assert done.ctas[0].warps[0].exited


def test_a_warp_that_returns_whole_leaves_the_others() -> None:
    out = np.zeros(96, np.uint32)
    run("setp.eq.u32 %p0, %warpid, 1; mov.u32 %r0, 1; @%p0 ret;" + store(0, "%r0", 4), out, threads=96)
    assert out.tolist() == [1] * 32 + [0] * 32 + [1] * 32


@pytest.mark.parametrize("barrier", ["bar.sync 0", "bar.arrive 1, 64", "barrier.sync 3, 32", "barrier.arrive 3, 64"])
@pytest.mark.parametrize("how", ["@%p0 bra $END;", "@!%p0 bra $ON; ret;\n$ON:"])
def test_a_barrier_in_a_part_of_a_warp_is_a_fault(barrier: str, how: str) -> None:
    with pytest.raises(Fault, match="executed by 20 of the warp's 32 lanes") as caught:
        run(f"setp.lt.u32 %p0, %laneid, 12; {how}\n.loc 1 8 1\n{barrier};\n$END:")
    assert caught.value.kind == "divergence"
    assert caught.value.at is not None and caught.value.at.source == Source("kernel.py", 8)


def test_a_branch_in_the_middle_of_inline_assembly() -> None:
    """Two blocks with the same names of labels and predicates."""
    loop = """
      { .reg .pred P1; .reg .u32 left; mov.u32 left, %laneid;
      AGAIN: setp.eq.u32 P1, left, 0; @P1 bra DONE; add.u32 %r0, %r0, %r1; sub.u32 left, left, 1; bra.uni AGAIN;
      DONE: }"""
    got = on_lanes(f"mov.u32 %r0, 0; mov.u32 %r1, 2; {loop} {loop}", {}, {"%r0": np.uint32})
    assert got["%r0"].tolist() == [4 * lane for lane in range(LANES)]
