"""The forward's protocol, from the kernel's own text: who waits for what, and what each wait, GEMM and release means.

`Load.run`, `Math.run` and both main loops run here as plain Python on plain integers (`protocol.text`); stand-ins note
what they ask for (`protocol.record`). Each role's record must keep the rules (`protocol.rules`), and all of them
together, as programs of the model machine (`protocol.machine`), must come to an end in whatever order the warps run.
Rings that are right by themselves can still deadlock beside another, if two roles walk them in different orders.
"""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa3.pipeline.model import Deadlock, Fault, explore

from .protocol.machine import machine_of
from .protocol.mistakes import MISTAKES
from .protocol.record import Case, Cta, TileCase
from .protocol.rules import BrokenRule, check
from .protocol.text import KernelText

ALGORITHMS = ("plain", "overlap")
LOOPS = pytest.mark.parametrize("algorithm", ALGORITHMS)


def tile(*own, clear=()):
    return TileCase(own, clear)


TILES = {
    "one": (tile(3, 3),),
    "causal": (tile(1, 3), tile(0, 0), tile(2, 4)),
    "shrinking": (tile(3, 1), tile(0, 2)),
    "many or no masks": (tile(4, 4, clear=(1, 0)), tile(3, 3, clear=(3, 3))),
    "three warpgroups": (tile(0, 1, 2), tile(2, 3, 3), tile(2, 1, 0)),
}
"""Blocks that each warpgroup sees, tile by tile. Under a causal mask, later rows see no fewer keys; the last rows of a
sequence may see fewer, or none."""
CASES = [Case(algorithm, TILES[name], stages) for algorithm, name, stages in product(ALGORITHMS, TILES, (1, 2, 3))]
CASES += [
    Case(algorithm, (tile(3, 3, clear=(clear, clear)), tile(1, 1, clear=(1, 1)), tile(2, 0)), cuts_one_block=True)
    for algorithm, clear in product(ALGORITHMS, (2, 3))
]
CASES += [Case(algorithm, (tile(3, 2), tile(0, 2)), turns="free") for algorithm in ALGORITHMS]

SMALL = [
    Case(algorithm, tiles, stages=1)
    for tiles in ((tile(2, 2),), (tile(1, 2),), (tile(3, 3),), (tile(0, 1), tile(0, 1)), (tile(0, 1, 2),))
    for algorithm in ALGORITHMS
]
"""Few enough states for every interleaving, with the fewest stages, which couple the roles most."""


@pytest.fixture(name="text", scope="module")
def _text():
    return KernelText.of()


# ---------------------------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.algorithm}-{case.tiles[0].own}-{case.stages}")
def test_every_role_keeps_the_rules(text, case):
    check(Cta.of(text, case))


@st.composite
def cases(draw):
    groups = draw(st.integers(2, 3))
    tiles = []
    for _ in range(draw(st.integers(1, 4))):
        own = draw(st.tuples(*[st.integers(0, 4)] * groups))
        tiles.append(TileCase(own, tuple(draw(st.integers(0, blocks)) for blocks in own)))
    turns = draw(st.sampled_from(["pingpong", "pingpong", "free"]))
    return Case(draw(st.sampled_from(ALGORITHMS)), tuple(tiles), draw(st.integers(1, 3)), turns)


@given(case=cases())
def test_every_role_keeps_the_rules_on_any_tiles(text, case):
    check(Cta.of(text, case))


# -------------------------------------------------------------------------------------------------------- interleavings


@LOOPS
@pytest.mark.parametrize("own", [(2, 2), (1, 2), (0, 1), (0, 2), (2, 1), (2, 0), (1, 0)], ids=str)
@pytest.mark.parametrize("stages", (1, 2))
def test_every_interleaving_of_a_tile(text, algorithm, stages, own):
    case = Case(algorithm, (TileCase(own),), stages)
    assert explore(machine_of(Cta.of(text, case), whole_warpgroups=True)) > 100


@pytest.mark.parametrize("case", SMALL[4:], ids=lambda case: f"{case.algorithm}-{case.tiles[0].own}")
def test_every_interleaving_of_laps_tiles_and_three_warpgroups(text, case):
    assert explore(machine_of(Cta.of(text, case), whole_warpgroups=True)) > 100


@settings(max_examples=60)
@given(case=cases(), data=st.data())
def test_many_tiles_in_any_order(text, case, data):
    """Every warp by itself, with the arrive counts of the kernel's topology."""
    machine = machine_of(Cta.of(text, case))
    dice, state = data.draw(st.randoms(use_true_random=False)), machine.start()
    while able := machine.runnable(state):
        state = machine.step(state, dice.choice(able))
    assert machine.finished(state)


@LOOPS
def test_turns_of_one_loop_do_not_fit_the_other(text, algorithm):
    """A warpgroup that passes over a whole tile must take as many turns as its neighbours' main loop does: one for each
    block in Algorithm 1, one fewer in Algorithm 2. The rule of one under the loop of the other hangs."""
    tiles = (tile(0, 1), tile(0, 1))
    others = {"plain": 1, "overlap": 0}[algorithm]
    cta = Cta.of(text, Case(algorithm, tiles, blocks_without_turn=others))
    with pytest.raises(Deadlock, match="waits at turn"):
        explore(machine_of(cta, whole_warpgroups=True))
    with pytest.raises(BrokenRule, match="turns; the tile has"):
        check(cta)


# ------------------------------------------------------------------------------------------------------------- mistakes

NAMED = [pytest.param(group, name, id=f"{group}-{name}") for group, found in MISTAKES.items() for name in found]


def concerned(cases, group):
    """The cases that run the text in which the mistake is planted."""
    return [case for case in cases if group not in ALGORITHMS or case.algorithm == group]


@pytest.mark.parametrize(("group", "name"), [p for p in NAMED if MISTAKES[p.values[0]][p.values[1]].rules])
def test_a_mistake_breaks_a_rule(group, name):
    mistake = MISTAKES[group][name]
    text = KernelText.of(mistake.edit)
    with pytest.raises(AssertionError, match=mistake.rules):
        for case in concerned(CASES, group):
            check(Cta.of(text, case))


@pytest.mark.parametrize(("group", "name"), [p for p in NAMED if MISTAKES[p.values[0]][p.values[1]].machine])
def test_a_mistake_stops_the_machine(group, name):
    mistake = MISTAKES[group][name]
    text = KernelText.of(mistake.edit)
    with pytest.raises(Fault, match=mistake.machine):
        for case in concerned(SMALL, group):
            explore(machine_of(Cta.of(text, case), whole_warpgroups=True))


def test_k_held_over_the_turn_breaks_no_rule_of_one_role():
    """With one stage, warpgroups earlier in the circle may be waiting for the next K, which waits for this stage: only
    the machine can tell."""
    text = KernelText.of(MISTAKES["math"]["k held over the turn"].edit)
    check(Cta.of(text, Case("overlap", (tile(0, 1, 2),), stages=1)))


def test_a_broken_rule_shows_the_lines_that_led_to_it():
    text = KernelText.of(MISTAKES["overlap"]["no wait for k in the loop"].edit)
    with pytest.raises(BrokenRule) as broken:
        check(Cta.of(text, Case("overlap", TILES["one"], stages=1)))
    told, *lines = str(broken.value).splitlines()
    assert told == (
        'math0, tile 0: start_scores reads k[0] phase 1, which is not held: rings["k"].wait is missing before it'
    )
    assert "self.turns.wait()" in lines[-2] and "forward_overlap.py:" in lines[-2]
    assert lines[-1].strip().startswith("->") and lines[-1].endswith("self.gemms.start_scores(q, k)")


def test_an_edit_must_find_its_line_once():
    mistake = MISTAKES["overlap"]["no give"].edit
    with pytest.raises(AssertionError, match="holds this 0 times"):
        mistake.apply("self.turns.take()")
    with pytest.raises(AssertionError, match="holds this 2 times"):
        mistake.apply(f"{mistake.old}\n{mistake.old}")
