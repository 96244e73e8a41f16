"""Actors (warps, copy engines) that take the steps of their programs in any order.

The programs have no branches, so what a state means depends on nothing but how far each actor is and what the shared
things are. That makes states comparable, and `explore` can visit all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .steps import Step
from .things import Fault, Thing

Actor = str


class Deadlock(Fault):
    """Nobody can take a step, and somebody has not finished. The message says who waits for whom."""


@dataclass(frozen=True)
class State:
    """How many steps each actor has taken, and the things as they are now."""

    taken: Mapping[Actor, int]
    things: Mapping[str, Thing]

    def key(self) -> tuple[object, ...]:
        """Equal for equal states."""
        return (*self.taken.values(), *self.things.values())


@dataclass(frozen=True)
class Machine:
    """Programs and the things they share, in their first state."""

    programs: Mapping[Actor, Sequence[Step]]
    things: Mapping[str, Thing]

    def start(self) -> State:
        return State(dict.fromkeys(self.programs, 0), dict(self.things))

    def following(self, state: State, actor: Actor) -> Step | None:
        """The actor's next step; None if it has finished."""
        program, taken = self.programs[actor], state.taken[actor]
        return program[taken] if taken < len(program) else None

    def finished(self, state: State) -> bool:
        return all(self.following(state, actor) is None for actor in self.programs)

    def runnable(self, state: State) -> list[Actor]:
        """Who can take a step. Raises `Deadlock` if nobody can and somebody should."""
        waiting = [(actor, step) for actor in self.programs if (step := self.following(state, actor)) is not None]
        able = [actor for actor, step in waiting if step.ready(state.things, actor)]
        if waiting and not able:
            raise Deadlock("nobody can go on\n" + self.report(state))
        return able

    def step(self, state: State, actor: Actor) -> State:
        """The state after `actor`'s next step, which must be ready. Raises `Fault` if the step breaks a rule."""
        step = self.following(state, actor)
        if step is None or not step.ready(state.things, actor):
            raise ValueError(f"{actor} cannot take a step")
        try:
            changes = step.apply(state.things, actor)
        except Fault as fault:
            raise Fault(f"{fault}   (step {state.taken[actor]} of {actor}: {step})") from None
        return State({**state.taken, actor: state.taken[actor] + 1}, {**state.things, **changes})

    def report(self, state: State) -> str:
        """A line for each actor that has not finished: what it waits for, and who could still bring it."""
        waiting = [(actor, step) for actor in self.programs if (step := self.following(state, actor)) is not None]
        return "\n".join(f"  {actor:<10} {self._reason(state, actor, step)}" for actor, step in waiting)

    def _reason(self, state: State, actor: Actor, step: Step) -> str:
        if step.ready(state.things, actor):
            return f"can go on: {step}"
        barrier, why = step.awaits(), step.why(state.things)
        if barrier is None:
            return why
        came = getattr(state.things[barrier], "arrived", ())
        names = [entry if isinstance(entry, str) else entry[0] for entry in came]
        here = f" ({', '.join(names)})" if names else ""
        return f"{why}{here}; to come: {', '.join(self._helpers(state, barrier, actor)) or 'nobody'}"

    def _helpers(self, state: State, barrier: str, waiting: Actor) -> list[Actor]:
        """Other actors with a step ahead of them that may open the barrier."""
        return [
            actor
            for actor, program in self.programs.items()
            if actor != waiting and any(step.completes() == barrier for step in program[state.taken[actor] :])
        ]


def explore(machine: Machine, limit: int = 500_000) -> int:
    """Tries every interleaving; returns the number of different states.

    Raises `Fault` or `Deadlock` for the first that goes wrong, with the steps that led there, and ValueError if there
    are more than `limit` states.
    """
    start = machine.start()
    came: dict[tuple[object, ...], tuple[State, Actor] | None] = {start.key(): None}
    todo = [start]
    while todo:
        state = todo.pop()
        try:
            for actor in machine.runnable(state):
                reached = machine.step(state, actor)
                if reached.key() not in came:
                    came[reached.key()] = (state, actor)
                    todo.append(reached)
        except Fault as fault:
            trace = "\n".join(f"  {line}" for line in _trace(machine, came, state))
            raise type(fault)(f"{fault}\nafter\n{trace}") from None
        if len(came) > limit:
            raise ValueError(f"more than {limit} states; make the programs smaller")
    return len(came)


def _trace(
    machine: Machine, came: Mapping[tuple[object, ...], tuple[State, Actor] | None], state: State
) -> Iterator[str]:
    """The steps that led from the start to `state`."""
    lines = []
    origin = came[state.key()]
    while origin is not None:
        state, actor = origin
        lines.append(f"{actor}: {machine.following(state, actor)}")
        origin = came[state.key()]
    return reversed(lines)
