"""Is a GEMM in flight here? A dataflow over the control flow of the SASS.

Hopper's matrix instructions are asynchronous. `HGMMA` issues one; the one marked `gsb0` closes a group; and
`WARPGROUP.DEPBAR.LE gsb0, n` waits until at most n groups are outstanding. So a place in the program is described by

    (groups that were closed and not waited for, whether a group is open)

and since two paths may meet in different states, by the set of all states that some path can bring there. The sets are
finite, because counts above the largest n of any wait behave alike. An instruction runs under a GEMM if in *every*
state of its set something is outstanding: then it does so whatever path was taken. (The GEMM may have finished early
by then; SASS shows what the schedule allows, not what the clock does.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fa3.sass.flow import Graph
from fa3.sass.listing import Instruction, Listing, mma_of, wait_of


@dataclass(frozen=True)
class State:
    """Outstanding work of one warpgroup: closed groups that no wait has covered, and a group still being issued."""

    groups: int = 0
    open: bool = False

    @property
    def busy(self) -> int:
        return self.groups + self.open


@dataclass(frozen=True)
class Issue:
    """A matrix instruction; `commits` closes the group that it belongs to."""

    commits: bool

    def __call__(self, state: State, cap: int) -> State:
        return State(min(state.groups + 1, cap)) if self.commits else State(state.groups, True)


@dataclass(frozen=True)
class Wait:
    """Waits until at most `most` closed groups are outstanding."""

    most: int

    def __call__(self, state: State, cap: int) -> State:
        return State(min(state.groups, self.most), state.open)


@dataclass(frozen=True)
class Effect:
    """What an instruction does to the state; a predicated one may also do nothing."""

    action: Issue | Wait
    certain: bool = True

    def __call__(self, states: frozenset[State], cap: int) -> frozenset[State]:
        after = frozenset(self.action(state, cap) for state in states)
        return after if self.certain else after | states


def effect_of(instruction: Instruction) -> Effect | None:
    certain = not instruction.predicate
    if mma := mma_of(instruction):
        return Effect(Issue(mma.commits), certain)
    if (most := wait_of(instruction)) is not None:
        return Effect(Wait(most), certain)
    return None


def states_before(graph: Graph, effects: Sequence[Effect | None]) -> list[frozenset[State]]:
    """For each instruction every state in which some path reaches it; empty where none does."""
    cap = 1 + max((effect.action.most for effect in effects if effect and isinstance(effect.action, Wait)), default=0)
    entering: dict[int, frozenset[State]] = {0: frozenset({State()})} if graph.blocks else {}
    pending = list(entering)
    while pending:
        index = pending.pop()
        states = entering[index]
        for position in graph.blocks[index]:
            if effect := effects[position]:
                states = effect(states, cap)
        for successor in graph.blocks[index].successors:
            known = entering.get(successor, frozenset())
            if not states <= known:
                entering[successor] = known | states
                pending.append(successor)
    return _spread(graph, effects, entering, cap)


def _spread(
    graph: Graph, effects: Sequence[Effect | None], entering: dict[int, frozenset[State]], cap: int
) -> list[frozenset[State]]:
    """From the states at the top of each block to those before each of its instructions."""
    before: list[frozenset[State]] = []
    for index, block in enumerate(graph.blocks):
        states = entering.get(index, frozenset())
        for position in block:
            before.append(states)
            if effect := effects[position]:
                states = effect(states, cap)
    return before


def gemms_in_flight(listing: Listing) -> list[int]:
    """For each instruction how many groups are outstanding on every path to it, an open one included.

    Exact for 0; larger counts stop at one more than the largest number that any wait leaves outstanding, and the open
    group. Instructions that no path reaches get 0.
    """
    effects = [effect_of(instruction) for instruction in listing.instructions]
    before = states_before(listing.graph, effects)
    return [min((state.busy for state in states), default=0) for states in before]
