"""The model's rings and turns do what the kernels' do: the same barriers, counts, parities, in the same order.

The kernels' methods run here as plain Python on plain integers, with the barrier instructions replaced by a log.
"""

import sys
from contextlib import nullcontext
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import product

import cutlass.cute as cute
import pytest

from fa3.pipeline import Cursor, Edge, Topology, load_and_math
from fa3.pipeline.model import MBarrier, ModelRing, ModelTurns
from fa3.pipeline.model.steps import Arrive, Come, Stay, Wait
from fa3.pipeline.model.turns import turn


def fresh(name):
    """A copy of a module of fa3.pipeline. The DSL rewrites a function when it first traces it; it never saw this."""
    spec = spec_from_file_location(f"fa3.pipeline.untraced_{name}", find_spec(f"fa3.pipeline.{name}").origin)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


RING, BARRIERS = fresh("ring"), fresh("barriers")
Ring, PingPong, WarpgroupBarrier = RING.Ring, BARRIERS.PingPong, BARRIERS.WarpgroupBarrier

BOTH = ("math0", "math1")
SCHEDULE = load_and_math(2)
TOPOLOGY = Topology.of(
    SCHEDULE,
    Edge("tile", "load", BOTH, stages=3),
    Edge("q", "load", BOTH, stages=2, bytes=64, private=True),
    Edge("k", "load", BOTH, stages=2, bytes=96),
)
BASE = 100
"""Where the barriers begin in memory, in barriers."""


def plain(value):
    """A Python integer from one of the DSL's."""
    return int(getattr(value, "value", value))


@pytest.fixture(name="log")
def _log(monkeypatch):
    """What was asked of the hardware: (instruction, address or barrier, number)."""
    said = []

    def record(name):
        def instruction(*arguments, **keywords):
            said.append((name, *(plain(value) for value in (*arguments, *keywords.values()))))

        return instruction

    for name in ("init", "wait", "arrive", "arrive_and_expect_tx"):
        monkeypatch.setattr(cute.arch, f"mbarrier_{name}", record(name))
    monkeypatch.setattr(cute.arch, "mbarrier_init_fence", record("fence"))
    monkeypatch.setattr(cute.arch, "barrier", record("sync"))
    monkeypatch.setattr(cute.arch, "barrier_arrive", record("come"))
    monkeypatch.setattr(cute.arch, "elect_one", nullcontext)
    for owner, name in ((PingPong, "open"), (PingPong, "wait"), (PingPong, "give")):
        monkeypatch.setattr(owner, name, untraced(owner, name))
    return said


def untraced(owner, name):
    """A method as it stands in the text, without the DSL's compiler around it."""
    return getattr(getattr(owner, name), "__wrapped__", getattr(owner, name))


def addresses():
    """Model's name of each barrier -> its address."""
    found = {}
    for plan in TOPOLOGY.plans:
        ring, stages = ModelRing.of(SCHEDULE, plan), plan.edge.stages
        for stage in range(stages):
            found[ring.full(stage)] = BASE + plan.first_barrier + stage
            found[ring.empty(stage)] = BASE + plan.first_barrier + stages + stage
    return found


def as_logged(steps):
    """The model's steps in the words of the log; steps on buffers say nothing to the hardware."""
    place, said = addresses(), []
    for step in steps:
        if isinstance(step, Wait):
            said.append(("wait", place[step.barrier], step.parity))
        if isinstance(step, Arrive):
            announced = (place[step.barrier], step.bytes)
            said.append(("arrive_and_expect_tx", *announced) if step.bytes else ("arrive", place[step.barrier]))
    return said


def test_the_model_begins_with_the_counts_that_the_kernel_sets(log):
    RING.init_barriers.__wrapped__(TOPOLOGY, BASE)
    assert log.pop() == ("fence",)
    counts = {address: count for _, address, count in log}
    assert len(counts) == len(log) == TOPOLOGY.barriers
    things = {}
    for plan in TOPOLOGY.plans:
        things |= ModelRing.of(SCHEDULE, plan).things()
    model = {addresses()[name]: thing.count for name, thing in things.items() if isinstance(thing, MBarrier)}
    assert counts == model
    assert sorted(counts) == list(range(BASE, BASE + TOPOLOGY.barriers))


@pytest.mark.parametrize("operation", ("acquire", "commit", "wait", "release"))
@pytest.mark.parametrize("name", ("tile", "q", "k"))
def test_every_operation_is_the_kernels(log, operation, name):
    ring, model = RING.make_rings(TOPOLOGY, BASE)[name], ModelRing.of(SCHEDULE, TOPOLOGY[name])
    cursor = Cursor.start(ring.plan.edge.stages)
    for _ in range(2 * ring.plan.edge.stages + 1):
        log.clear()
        untraced(Ring, operation)(ring, cursor)
        assert log == as_logged(getattr(model, operation)(cursor))
        assert len(log) == (2 if operation == "acquire" and name != "tile" else 1)
        cursor = cursor.advance()


@pytest.mark.parametrize("name", ("q", "k"))
def test_the_copy_engine_reports_to_the_barrier_that_the_kernel_names(name):
    ring, model = RING.make_rings(TOPOLOGY, BASE)[name], ModelRing.of(SCHEDULE, TOPOLOGY[name])
    engines = model.engines(ring.plan.edge.stages)
    assert len(engines) == ring.plan.edge.stages
    for stage, program in enumerate(engines.values()):
        assert {addresses()[step.barrier] for step in program} == {ring.barrier(Cursor(stage, 0, 2))}
        assert sum(step.size for step in program) == ring.plan.edge.bytes


@pytest.mark.parametrize("operation", ("open", "wait", "give"))
@pytest.mark.parametrize(("group", "groups"), [(i, n) for n in (2, 3) for i in range(n)])
def test_turns_are_the_kernels(log, operation, group, groups):
    first = 5
    getattr(PingPong(first, group, groups), operation)()
    expected = []
    for step in getattr(ModelTurns(group, groups), operation)():
        if isinstance(step, Come):
            place = {turn(i): first + i for i in range(groups)}[step.barrier]
            expected.append(("sync" if step.wait else "come", place, step.threads))
        else:
            assert isinstance(step, Stay)
    assert log == expected


@pytest.mark.parametrize(("first", "group"), list(product((1, 4), (0, 2))))
def test_each_warpgroup_joins_its_own_barrier(log, first, group):
    untraced(WarpgroupBarrier, "join")(WarpgroupBarrier(first, group))
    assert log == [("sync", first + group, 128)]
