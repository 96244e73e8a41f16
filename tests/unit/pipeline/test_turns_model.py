"""The turnstile as a model: strict alternation with any number of warpgroups, and what breaks it."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa3.pipeline.model import Deadlock, Fault, Machine, ModelTurns, explore, turns_machine
from fa3.pipeline.model.steps import Come, Enter
from fa3.pipeline.model.turns import turn


@pytest.mark.parametrize("warpgroups", (2, 3, 4))
@pytest.mark.parametrize("turns", (0, 1, 2, 5))
def test_every_interleaving_alternates(warpgroups, turns):
    """`TensorCores` raises on the first turn out of order, and `explore` on the first deadlock."""
    assert explore(turns_machine([turns] * warpgroups)) > 1


def finish(machine, choose):
    """The final state, and who entered the tensor cores in which order."""
    state, entered = machine.start(), []
    while able := machine.runnable(state):
        actor = able[choose(len(able))]
        if isinstance(machine.following(state, actor), Enter):
            entered.append(actor)
        state = machine.step(state, actor)
    return state, entered


@given(st.sampled_from((2, 3)), st.integers(1, 6), st.data())
def test_warps_in_any_order_alternate_by_warpgroup(warpgroups, turns, data):
    """Four actors for each warpgroup: its warps come and go one by one, and still the warpgroups alternate."""
    machine = turns_machine([turns] * warpgroups, warps=4)
    state, entered = finish(machine, lambda n: data.draw(st.integers(0, n - 1)))
    groups = [actor.split(".")[0] for actor in entered]
    assert groups == [f"math{i}" for _ in range(turns) for i in range(warpgroups) for _ in range(4)]
    left = {i: sum(size for _, size in state.things[turn(i)].arrived) for i in range(warpgroups)}
    assert left == {i: 128 if i == 0 else 0 for i in left}, "the last one gave a turn that nobody takes"


def fits(turns):
    """Turn k of warpgroup i comes after turn k of those before it in the circle, and turn k - 1 of those behind."""
    return all(other >= own - (j > i) for i, own in enumerate(turns) for j, other in enumerate(turns) if own and i != j)


@pytest.mark.parametrize("turns", [*product(range(4), repeat=2), *product(range(3), repeat=3)], ids=str)
def test_unequal_numbers_of_turns_deadlock(turns):
    """A warpgroup that skips a turn leaves the next one waiting. Only the very last turns may be missing."""
    machine = turns_machine(turns)
    if fits(turns):
        assert explore(machine) >= 1
    else:
        with pytest.raises(Deadlock, match="waits at turn"):
            explore(machine)


def test_the_report_names_the_turn():
    with pytest.raises(Deadlock) as raised:
        explore(turns_machine((1, 2)))
    assert "math1      waits at turn[1]: 128 of 256 threads have come (math1); to come: nobody" in str(raised.value)


# ------------------------------------------------------------------------------------------------------- planted faults


class NobodyOpens(ModelTurns):
    def open(self):
        return []


class EverybodyOpens(ModelTurns):
    def open(self):
        return self.give()


class GivesBackwards(ModelTurns):
    def give(self):
        return [Come(barrier=turn((self.warpgroup - 1) % self.warpgroups), size=self.threads, threads=256)]


class CountsItselfOnly(ModelTurns):
    def wait(self):
        come, stay = super().wait()
        return [Come(barrier=come.barrier, size=self.threads, threads=128, wait=True), stay]


class GivesBeforeItsGemms(ModelTurns):
    def wait(self):
        return super().wait() + super().give()

    def give(self):
        return []

    def open(self):
        return super().give() if self.warpgroup == self.warpgroups - 1 else []


class DoesNotWait(ModelTurns):
    def wait(self):
        return []


@pytest.mark.parametrize(
    ("broken", "warpgroups"),
    [
        *product((NobodyOpens, EverybodyOpens, CountsItselfOnly, GivesBeforeItsGemms, DoesNotWait), (2, 3)),
        (GivesBackwards, 3),  # with two, backwards is forwards
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_some_interleaving_shows_a_planted_fault(broken, warpgroups):
    right = turns_machine([3] * warpgroups)
    programs = {f"math{i}": broken(i, warpgroups).program(3) for i in range(warpgroups)}
    with pytest.raises(Fault):
        explore(Machine(programs, right.things))


def test_a_warpgroup_is_one_actor_or_four():
    with pytest.raises(ValueError, match="1 or 4 actors, not 2"):
        turns_machine((1, 1), warps=2)
