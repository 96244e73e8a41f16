"""Machines: what can go on, who waits for whom, all interleavings, and time."""

import pytest

from fa3.pipeline.model import Deadlock, Fault, Machine, MBarrier, explore, play, ring_machine
from fa3.pipeline.model.steps import Arrive, Bring, Done, Step, Wait
from tests.unit.pipeline.rings import FAULTS, ring


def test_only_ready_steps_can_be_taken():
    machine = Machine({"a": [Wait(barrier="x", parity=0)], "b": [Arrive(barrier="x")]}, {"x": MBarrier(1)})
    state = machine.start()
    assert machine.runnable(state) == ["b"]
    with pytest.raises(ValueError, match="a cannot take a step"):
        machine.step(state, "a")
    state = machine.step(state, "b")
    assert machine.runnable(state) == ["a"]
    state = machine.step(state, "a")
    assert machine.finished(state)
    assert machine.runnable(state) == []


def test_every_order_is_tried():
    """Two actors with n and m steps of no effect: (n + 1)(m + 1) states."""
    machine = Machine({"a": [Step()] * 3, "b": [Step()] * 4}, {})
    assert explore(machine) == 4 * 5


def test_too_many_states_are_refused():
    with pytest.raises(ValueError, match="more than 10 states"):
        explore(Machine({"a": [Step()] * 3, "b": [Step()] * 4}, {}), limit=10)


def test_a_fault_comes_with_the_step_and_the_way_to_it():
    machine = Machine({"a": [Step("think"), Arrive(barrier="x", bytes=16), Arrive(barrier="x")]}, {"x": MBarrier(1)})
    with pytest.raises(Fault) as raised:
        explore(machine)
    assert str(raised.value).splitlines() == [
        "a is arrival 2 of 1, after a   (step 2 of a: Arrive x)",
        "after",
        "  a: Step think",
        "  a: Arrive x bytes=16",
    ]


def test_a_deadlock_says_who_waits_for_whom():
    machine = FAULTS["one warp does not release"](ring(consumers=2, stages=1), 3)
    with pytest.raises(Deadlock) as raised:
        explore(machine)
    lines = str(raised.value).splitlines()
    assert lines[0] == "nobody can go on"
    assert "load" in lines[1] and "waits for k.empty[0] with parity 0: phase 0 has 1 of 2 arrivals (math0)" in lines[1]
    assert "math1" in lines[3] and "waits for k.full[0] with parity 1: phase 1 has 0 of 1 arrivals" in lines[3]
    assert lines[3].endswith("to come: load")


def test_nobody_is_named_when_nobody_can_help():
    machine = Machine({"a": [Wait(barrier="x", parity=0)]}, {"x": MBarrier(1)})
    with pytest.raises(Deadlock, match="to come: nobody"):
        machine.runnable(machine.start())


# ---------------------------------------------------------------------------------------------------------------- time


def duration(actor, step):
    return {Bring: 4.0, Done: 3.0}.get(type(step), 0.0)


@pytest.mark.parametrize(("stages", "end"), [(1, 6 * (8 + 3)), (2, 3 * 8 + 4 * 3), (3, 8 + 3 + 8 + 3 * 3)])
def test_more_stages_take_less_time(stages, end):
    """A copy takes 8, its use 3. One stage: they take turns. More: the use of one item hides in the copy of another."""
    timeline = play(ring_machine(ring(consumers=1, stages=stages, bytes=32), 6), duration)
    assert timeline.end == end
    assert timeline.machine.finished(timeline.moments[-1].state)


def test_time_goes_forward():
    timeline = play(ring_machine(ring(consumers=3, warps=2, stages=2, bytes=32), 5), duration)
    times = [moment.time for moment in timeline.moments]
    assert times == sorted(times)
    assert all(moment.begin <= moment.time for moment in timeline.moments)
    assert len(times) == sum(len(program) for program in timeline.machine.programs.values())


def test_a_deadlock_ends_the_play():
    with pytest.raises(Deadlock, match="to come: nobody"):
        play(FAULTS["consumers do not release"](ring(), 5), duration)
