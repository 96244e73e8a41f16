"""The records of all roles as programs of the model machine (`fa3.pipeline.model`), to be run in any order.

A record is followed to the letter: the programs wait, arrive and copy where the kernel did, right or wrong. Added is
what the hardware does not say aloud: which item a role means to read, and from when to when its GEMMs read it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fa3.config.budget import forward_schedule, forward_topology
from fa3.pipeline import Cursor, Topology
from fa3.pipeline.model import Machine, ModelRing, ModelTurns, NamedBarrier, TensorCores
from fa3.pipeline.model.ring import warps as warps_of
from fa3.pipeline.model.steps import Bring, Done, Enter, Leave, Program, Read
from fa3.pipeline.model.turns import CORES, turn
from fa3.pipeline.registers import THREADS_PER_WARPGROUP
from tests.unit.pipeline.rings import cast

from .record import Cta, Event, Spot


def machine_of(cta: Cta, whole_warpgroups: bool = False) -> Machine:
    """All roles of the CTA, with the barriers of `forward_topology`. Every warp is an actor; or, with fewer
    interleavings, every math warpgroup is one and arrives once where its four warps would arrive four times."""
    groups, topology, schedule = cta.case.groups, forward_topology(cta.case.config), forward_schedule(cta.case.config)
    if whole_warpgroups:
        schedule = cast(groups, warps=1)
        topology = Topology.of(schedule, *(plan.edge for plan in topology.plans))
    rings = {plan.edge.name: ModelRing.of(schedule, plan) for plan in topology.plans}
    programs = {"load": LoadProgram(rings).of(cta.load), **engines(rings, cta.load)}
    cast_of = [warps_of(schedule[f"math{group}"]) for group in range(groups)]
    for group, events in enumerate(cta.math):
        turns = ModelTurns(group, groups, THREADS_PER_WARPGROUP // len(cast_of[group]))
        program = MathProgram(rings, turns).of(events)
        programs |= dict.fromkeys(cast_of[group], program)
    things = {turn(i): NamedBarrier() for i in range(groups)}
    things[CORES] = TensorCores(tuple(cast_of))
    for ring in rings.values():
        things |= ring.things()
    return Machine(programs, things)


def cursor(spot: Spot) -> Cursor:
    return Cursor(spot.stage, spot.phase, 0)  # the model's operations ask for stage and phase alone


@dataclass
class LoadProgram:
    """The n-th filling of a ring is its item n."""

    rings: dict[str, ModelRing]
    fills: Counter[str] = field(default_factory=Counter)

    def of(self, events: Sequence[Event]) -> Program:
        return [step for event in events for step in self._steps(event)]

    def _steps(self, event: Event) -> Program:
        if event.what in ("acquire", "commit"):
            return getattr(self.rings[event.spot.ring], event.what)(cursor(event.spot))
        if event.what in ("copy", "write number"):
            ring = event.facts.get("smem", "tile")
            item, self.fills[ring] = self.fills[ring], self.fills[ring] + 1
            return self.rings[ring].fill(cursor(Spot(ring, event.facts["stage"], 0)), item)
        return []


def engines(rings: dict[str, ModelRing], events: Sequence[Event]) -> dict[str, Program]:
    """The copy engine, as one actor for each stage: copies into different stages may overtake one another."""
    programs: dict[str, Program] = {}
    fills: Counter[str] = Counter()
    for event in events:
        if event.what == "copy":
            name, stage = event.facts["smem"], event.facts["stage"]
            ring, (reported, at) = rings[name], event.facts["barrier"]
            programs.setdefault(f"tma {ring.buffer(stage)}", []).append(
                Bring(
                    buffer=ring.buffer(stage),
                    item=fills[name],
                    size=ring.plan.edge.bytes,
                    barrier=rings[reported].full(at),
                )
            )
            fills[name] += 1
    return programs


Item = tuple[str, int, int]
"""Ring, number of the item, stage in which a role reads it."""


@dataclass
class MathProgram:
    """The n-th item of K, V or the tile's number that a warpgroup reads, or releases unread, is the ring's item n. Its
    rows of Q are those of the tile with keys that it is at."""

    rings: dict[str, ModelRing]
    turns: ModelTurns

    def of(self, events: Sequence[Event]) -> Program:
        reads = list(self._reads(events))
        last = {item: index for index, items in enumerate(reads) for item in items}
        begun: set[Item] = set()
        running: list[int] = []
        program: Program = []
        for index, event in enumerate(events):
            fresh = [item for item in reads[index] if item not in begun]
            begun.update(fresh)
            program += [Read(buffer=self._buffer(item), item=item[1]) for item in fresh]
            if event.what in ("start_scores", "start_output"):
                running.append(index)
            elif event.what == "wait_gemms":
                over = running[: max(len(running) - event.facts["in_flight"], 0)]
                running = running[len(over) :]
                program += self._done(over, reads, last)
            elif event.what == "read number":
                program += self._done([index], reads, last)
            elif event.what in ("wait", "release"):
                ring = self.rings[event.spot.ring]
                unread = event.what == "release" and reads[index] == []
                program += ring.pass_over(cursor(event.spot)) if unread and self._passed[index] else []
                program += getattr(ring, event.what)(cursor(event.spot))
            elif event.what == "open turn":
                program += self.turns.open()
            elif event.what == "wait turn":
                program += [*self.turns.wait(), Enter(cores=CORES)]
            elif event.what == "give turn":
                program += [Leave(cores=CORES), *self.turns.give()]
        return program

    def _buffer(self, item: Item) -> str:
        ring, _, stage = item
        return self.rings[ring].buffer(stage)

    def _done(self, over: Sequence[int], reads: Sequence[list[Item]], last: dict[Item, int]) -> Program:
        """These reading events are over: the items that nobody of this role reads later are no longer needed."""
        return [Done(buffer=self._buffer(item)) for index in over for item in reads[index] if last[item] == index]

    def _reads(self, events: Sequence[Event]) -> Iterator[list[Item]]:
        """For each event the items that it reads. Notes, on the way, which releases let an item pass unread."""
        read: Counter[str] = Counter()
        released: Counter[str] = Counter()
        passed: Counter[str] = Counter()
        q_read = False
        self._passed: dict[int, bool] = {}
        for index, event in enumerate(events):
            items = []
            if event.what in ("start_scores", "start_output", "read number"):
                spots = event.spots or (Spot("tile", event.facts["stage"], 0),)
                for spot in spots:
                    if spot.ring == "q":
                        number = released["q"] * self.turns.warpgroups + self.turns.warpgroup
                        q_read = True
                    else:
                        number = read[spot.ring] + passed[spot.ring]
                        read[spot.ring] += 1
                    items.append((spot.ring, number, spot.stage))
            elif event.what == "release":
                ring = event.spot.ring
                unread = not q_read if ring == "q" else released[ring] == read[ring] + passed[ring]
                self._passed[index] = unread
                passed[ring] += unread
                released[ring] += 1
                if ring == "q":
                    q_read = False
            yield items
