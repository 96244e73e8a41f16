"""Plays a machine in time: every actor goes on as soon as it can, and each step takes as long as the caller says."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from .machine import Actor, Machine, State
from .steps import Step

Duration = Callable[[Actor, Step], float]


@dataclass(frozen=True)
class Moment:
    """A step: it ran from `begin` to `time` and left `state` behind."""

    begin: float
    time: float
    actor: Actor
    step: Step
    state: State


@dataclass(frozen=True)
class Timeline:
    """All steps in the order in which they took effect."""

    machine: Machine
    moments: tuple[Moment, ...]

    @property
    def end(self) -> float:
        return max((moment.time for moment in self.moments), default=0.0)

    def states(self) -> list[tuple[float, State]]:
        """The first state at time 0, and the state after every step."""
        return [(0.0, self.machine.start()), *((moment.time, moment.state) for moment in self.moments)]


def play(machine: Machine, duration: Duration) -> Timeline:
    """Raises `Deadlock` when nobody can go on, and `Fault` when a step breaks a rule."""
    state, time, moments = machine.start(), 0.0, []
    busy: list[tuple[float, int, float, Actor]] = []
    order = {actor: i for i, actor in enumerate(machine.programs)}
    while not machine.finished(state):
        working = {actor for *_, actor in busy}
        if not busy:
            machine.runnable(state)
        for actor in machine.programs:
            step = machine.following(state, actor)
            if step is not None and actor not in working and step.ready(state.things, actor):
                heapq.heappush(busy, (time + duration(actor, step), order[actor], time, actor))
        time, _, begin, actor = heapq.heappop(busy)
        step = machine.following(state, actor)
        assert step is not None
        if step.ready(state.things, actor):
            state = machine.step(state, actor)
            moments.append(Moment(begin, time, actor, step, state))
    return Timeline(machine, tuple(moments))
