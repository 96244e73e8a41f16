"""All rings and the turnstile of a forward together: who is where when, whatever the interleaving.

A ring that is right by itself can still deadlock beside another, if two roles walk them in different orders. So this
tells the forward's story, block by block, in the model's words: the order in which `load` fills Q, K, V and the tile
numbers, and in which the math warpgroups wait, take turns and release. A math warpgroup is one actor here.

It is a story, not the kernel: an order that changes there is changed here by hand.
"""

from dataclasses import dataclass, field
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa3.pipeline import Cursor, Edge, Topology
from fa3.pipeline.model import Deadlock, Machine, ModelRing, ModelTurns, NamedBarrier, TensorCores, explore
from fa3.pipeline.model.steps import Enter, Leave, Program
from fa3.pipeline.model.turns import CORES, turn
from tests.unit.pipeline.rings import cast


@dataclass
class Walk:
    """One role's way through one ring: its cursor, and the number of the next item."""

    ring: ModelRing
    program: Program
    who: str
    cursor: Cursor = field(init=False)
    item: int = 0

    def __post_init__(self):
        self.cursor = Cursor.start(self.ring.plan.edge.stages)

    def next(self):
        self.cursor, self.item = self.cursor.advance(), self.item + 1

    def load(self):
        self.program += self.ring.acquire(self.cursor) + self.ring.fill(self.cursor, self.item)
        if self.ring.plan.edge.bytes == 0:
            self.program += self.ring.commit(self.cursor)
        self.next()

    def wait(self):
        self.program += self.ring.wait(self.cursor)

    def release(self, read=True):
        look = self.ring.read(self.cursor, self.item) if read else self.ring.pass_over(self.cursor)
        self.program += look + self.ring.release(self.cursor)
        self.next()


@dataclass(frozen=True)
class Tile:
    """`blocks` key blocks are loaded; math warpgroup i looks at the last `own[i]` of them, and passes over the rest."""

    own: tuple[int, ...]

    @property
    def blocks(self):
        return max(self.own)


class Load:
    def __init__(self, rings):
        self.program = []
        self.q, self.k, self.v, self.tile = (Walk(rings[name], self.program, "load") for name in "q k v tile".split())

    def run(self, tiles):
        for tile in tiles:
            if tile.blocks > 0:
                self.q.load()
                self.k.load()
                for _ in tile.own[1:]:
                    self.q.load()
                for _ in range(tile.blocks - 1):
                    self.k.load()
                    self.v.load()
                self.v.load()
            self.tile.load()
        return self.program


class Math:
    """A math warpgroup with Algorithm 1's main loop. `turn_rule(j, own)`: is block j passed over with a turn?"""

    def __init__(self, rings, group, groups, turn_rule=None):
        self.group, self.program = group, []
        self.turns = ModelTurns(group, groups)
        self.q, self.k, self.v, self.tile = (
            Walk(rings[name], self.program, f"math{group}") for name in "q k v tile".split()
        )
        for _ in range(group):
            self.q.next()
        self.turn_rule = turn_rule or self.usual_turns

    @staticmethod
    def usual_turns(j, own):
        return True

    def run(self, tiles):
        self.program += self.turns.open()
        for tile in tiles:
            if tile.blocks > 0:
                self.pass_over(tile.blocks - tile.own[self.group], tile.own[self.group])
                self.q.wait()
                if tile.own[self.group] > 0:
                    self.main_loop(tile.own[self.group])
                self.q.release(read=tile.own[self.group] > 0)
                for _ in tile.own[1:]:
                    self.q.next()
            self.tile.wait()
            self.tile.release()
        return self.program

    def pass_over(self, blocks, own):
        for j in range(blocks):
            self.k.wait()
            self.k.release(read=False)
            if self.turn_rule(j, own):
                self.take_turn()
            self.v.wait()
            self.v.release(read=False)

    def take_turn(self, wait_inside=None):
        self.program += [*self.turns.wait(), Enter(cores=CORES)]
        if wait_inside is not None:
            wait_inside.wait()
        self.program += [Leave(cores=CORES), *self.turns.give()]

    def main_loop(self, blocks):
        for _ in range(blocks):
            self.k.wait()
            self.take_turn()
            self.k.release()
            self.v.wait()
            self.v.release()


class OverlapMath(Math):
    """Algorithm 2's main loop: K one block ahead of V, and no turn for the first block, seen or passed over."""

    @staticmethod
    def usual_turns(j, own):
        return j > 0 or own > 0

    def main_loop(self, blocks):
        self.k.wait()
        self.k.release()
        for _ in range(blocks - 1):
            self.k.wait()
            self.take_turn(wait_inside=self.v)
            self.k.release()
            self.v.release()
        self.v.wait()
        self.v.release()


def machine_of(tiles, groups, stages, math=Math, turn_rule=None):
    schedule = cast(groups, warps=1)
    readers = tuple(f"math{i}" for i in range(groups))
    topology = Topology.of(
        schedule,
        Edge("tile", "load", readers, stages=2),
        Edge("q", "load", readers, stages=groups, bytes=16, private=True),
        Edge("k", "load", readers, stages=stages, bytes=16),
        Edge("v", "load", readers, stages=stages, bytes=16),
    )
    rings = {plan.edge.name: ModelRing.of(schedule, plan) for plan in topology.plans}
    load = Load(rings)
    programs = {"load": load.run(tiles)}
    for walk in (load.q, load.k, load.v):
        programs |= walk.ring.engines(walk.item)
    for group in range(groups):
        programs[f"math{group}"] = math(rings, group, groups, turn_rule).run(tiles)
    things = {turn(i): NamedBarrier() for i in range(groups)}
    things[CORES] = TensorCores(tuple((reader,) for reader in readers))
    for ring in rings.values():
        things |= ring.things()
    return Machine(programs, things)


LOOPS = pytest.mark.parametrize("math", (Math, OverlapMath), ids=("plain", "overlap"))
CAUSAL = [(2, 2), (1, 2), (0, 1), (0, 2)]
"""Blocks that each warpgroup sees. Under a causal mask, later rows see no fewer keys."""
ANY = [(2, 1), (2, 0), (1, 0)]


@LOOPS
@pytest.mark.parametrize(("stages", "own"), [*product((1, 2, 3), [*CAUSAL, *ANY])], ids=lambda value: str(value))
def test_every_interleaving_of_a_tile(math, stages, own):
    assert explore(machine_of([Tile(own)], 2, stages, math)) > 100


class HoldsK(OverlapMath):
    """A planted fault: a block is passed over with K's stage held until the turn has come."""

    def pass_over(self, blocks, own):
        for j in range(blocks):
            self.k.wait()
            if self.turn_rule(j, own):
                self.take_turn()
            self.k.release(read=False)
            self.v.wait()
            self.v.release(read=False)


@pytest.mark.parametrize("own", [(2, 1), (0, 1, 2)], ids=str)
def test_k_must_go_before_the_turn(own):
    """With one stage, warpgroups earlier in the circle may be waiting for the next K, which waits for this stage."""
    with pytest.raises(Deadlock, match="waits at turn"):
        explore(machine_of([Tile(own)], len(own), 1, HoldsK))
    explore(machine_of([Tile(own)], len(own), 1, OverlapMath))


@LOOPS
@given(st.data())
def test_many_tiles_in_any_order(math, data):
    groups, stages = data.draw(st.integers(2, 3)), data.draw(st.integers(1, 3))
    owns = st.tuples(*[st.integers(0, 4)] * groups)
    tiles = [Tile(own) for own in data.draw(st.lists(owns, min_size=1, max_size=4))]
    machine = machine_of(tiles, groups, stages, math)
    dice, state = data.draw(st.randoms(use_true_random=False)), machine.start()
    while able := machine.runnable(state):
        state = machine.step(state, dice.choice(able))
    assert machine.finished(state)


def test_turns_of_one_loop_do_not_fit_the_other():
    """A warpgroup that passes over a whole tile must take as many turns as its neighbours' main loop does: one for each
    block in Algorithm 1, one fewer in Algorithm 2. The rule of one under the loop of the other hangs."""
    tiles = [Tile((0, 1)), Tile((0, 1))]
    explore(machine_of(tiles, 2, 2, Math))
    with pytest.raises(Deadlock, match="waits at turn"):
        explore(machine_of(tiles, 2, 2, Math, turn_rule=OverlapMath.usual_turns))
    with pytest.raises(Deadlock, match="waits at turn"):
        explore(machine_of(tiles, 2, 2, OverlapMath, turn_rule=Math.usual_turns))
