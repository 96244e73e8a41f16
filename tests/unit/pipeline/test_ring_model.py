"""The ring as a model: any interleaving reads every item once and in order, and no planted fault goes unseen."""

from collections import defaultdict
from itertools import product

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from fa3.pipeline.model import Buffer, Fault, MBarrier, explore, ring_machine
from fa3.pipeline.model.steps import Read
from tests.unit.pipeline.rings import FAULTS, NONE_WITH_ONE_STAGE, machines, ring


class RingInAnyOrder(RuleBasedStateMachine):
    """Producers, copy engines and consumers of one ring take steps in an order that hypothesis chooses."""

    fault = None

    @initialize(data=st.data())
    def begin(self, data):
        self.machine = data.draw(machines(self.fault))
        self.state = self.machine.start()
        self.seen = defaultdict(list)

    def go(self, actor):
        step = self.machine.following(self.state, actor)
        self.state = self.machine.step(self.state, actor)
        if isinstance(step, Read):
            self.seen[actor].append(step.item)

    @rule(choice=st.integers(0, 63))
    def one_step(self, choice):
        if able := self.machine.runnable(self.state):
            self.go(able[choice % len(able)])

    @rule(choice=st.integers(0, 63))
    def as_far_as_it_can(self, choice):
        """One actor runs ahead of all others, until it has to wait."""
        able = self.machine.runnable(self.state) or list(self.machine.programs)
        actor = able[choice % len(able)]
        while (step := self.machine.following(self.state, actor)) and step.ready(self.state.things, actor):
            self.go(actor)

    @invariant()
    def somebody_can_go_on(self):
        self.machine.runnable(self.state)  # raises Deadlock

    def teardown(self):
        if not hasattr(self, "machine"):
            return
        while able := self.machine.runnable(self.state):
            self.go(able[0])
        self.everything_was_read()

    def everything_was_read(self):
        for actor, program in self.machine.programs.items():
            assert self.seen[actor] == [step.item for step in program if isinstance(step, Read)]
            assert self.seen[actor] == sorted(set(self.seen[actor]))
        for thing in self.state.things.values():
            if isinstance(thing, Buffer):
                assert thing.owner == "free"
            if isinstance(thing, MBarrier):
                assert (thing.arrived, thing.bytes) == ((), 0), "a phase was left half complete"


TestRingInAnyOrder = RingInAnyOrder.TestCase
TestRingInAnyOrder.settings = settings(max_examples=80, stateful_step_count=60)
QUICK = settings(
    max_examples=25, stateful_step_count=60, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
"""To see that a fault shows; the shortest way to it is of no interest."""


@pytest.mark.parametrize("name", FAULTS)
def test_any_order_shows_a_planted_fault(name):
    """The test above can fail: with any of these faults it does."""
    broken = type("Broken", (RingInAnyOrder,), {"fault": staticmethod(FAULTS[name])})
    with pytest.raises(Fault):
        run_state_machine_as_test(broken, settings=QUICK)


# ----------------------------------------------------------------------------- small rings: all interleavings, not some

SMALL = [
    *({"consumers": c, "stages": s, "bytes": b} for c, s, b in product((1, 2), (1, 2, 3), (0, 32))),
    *({"consumers": c, "stages": c, "bytes": b, "private": True} for c, b in product((1, 2, 3), (0, 32))),
    {"consumers": 1, "warps": 2, "stages": 2, "bytes": 32},
    {"consumers": 2, "warps": 2, "stages": 1},
    {"consumers": 3, "stages": 2},
    {"consumers": 1, "stages": 2, "producing": 2},
]


def name_of(kind):
    return "-".join(f"{key}{value}" for key, value in kind.items())


@pytest.mark.parametrize("kind", SMALL, ids=name_of)
def test_every_interleaving_is_right(kind):
    drawn = ring(**kind)
    assert explore(ring_machine(drawn, 2 * drawn.plan.edge.stages + 1)) > 10


@pytest.mark.parametrize("kind", SMALL[:9:2] + SMALL[12:17], ids=name_of)
@pytest.mark.parametrize("name", FAULTS)
def test_some_interleaving_shows_a_planted_fault(kind, name):
    drawn = ring(**kind)
    machine_of = FAULTS[name]
    items = 3 * drawn.plan.edge.stages + 3
    if drawn.plan.edge.stages == 1 and name in NONE_WITH_ONE_STAGE:
        assert explore(machine_of(drawn, items)) > 10
        return
    with pytest.raises(Fault):
        explore(machine_of(drawn, items))


@pytest.mark.parametrize("first", ((), (0,), (0, 1), (0, 1, 2, 3, 4)))
def test_consumers_may_pass_over_what_they_wait_for(first):
    """One consumer looks only at the later items, the other at all."""
    assert explore(ring_machine(ring(stages=2, bytes=32), 5, [first, ()])) > 10


def test_an_edge_that_nobody_uses_is_finished_at_once():
    machine = ring_machine(ring(), 0)
    assert machine.finished(machine.start())
