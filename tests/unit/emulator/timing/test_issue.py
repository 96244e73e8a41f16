"""List scheduling: hazards are kept, latencies are filled, waits move where the model says."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa3.emulator.timing.cost import UNITS, Cost
from fa3.emulator.timing.events import Arrive, Branch, Code, Math, WaitGroup
from fa3.emulator.timing.issue import Issue
from fa3.emulator.timing.ops import Op
from fa3.emulator.timing.schedule import Chunk, Scheduler

from .lists import chain
from .lists import math as independent

WAIT = WaitGroup("wgmma", 0, False, None)
REGISTERS = [f"r{i}" for i in range(4)]
OPS = st.builds(
    lambda kind, reads, write: Op(kind, tuple(reads), (write,)),
    st.sampled_from(["alu", "fma", "mufu", "free", "shuffle"]),
    st.lists(st.sampled_from(REGISTERS), max_size=2),
    st.sampled_from(REGISTERS),
)


def issued(*events: object, **constants: float):
    issue = Issue(events, Cost(**constants))  # type: ignore[arg-type]
    return issue.run(), issue.end


def meaning(ops: list[Op]) -> dict[str, object]:
    """What every register holds in the end, as the expression that made it."""
    values: dict[str, object] = {name: name for name in REGISTERS}
    for op in ops:
        values[op.writes[0]] = (op.kind, *(values[name] for name in op.reads))
    return values


@given(st.lists(OPS, max_size=12))
def test_another_order_computes_the_same(ops):
    order, _ = issued(Math(Code(tuple(ops))))
    assert len(order) == len(ops)
    assert meaning([each.op for each in order]) == meaning(ops)


@given(st.lists(OPS, min_size=1, max_size=30))
def test_it_is_never_faster_than_a_pipe_or_a_chain(ops):
    order, end = issued(Math(Code(tuple(ops))))
    for pipe in {unit.pipe for unit in UNITS.values()}:
        busy = [UNITS[op.kind].cycles for op in ops if UNITS[op.kind].pipe == pipe]
        assert end >= sum(busy) - max(busy, default=0) - 1e-9
    ready: dict[str, float] = dict.fromkeys(REGISTERS, 0.0)
    for each in order:
        assert each.time >= max((ready[name] for name in each.op.reads), default=0.0)
        ready[each.op.writes[0]] = each.time + UNITS[each.op.kind].latency
    assert end >= max(ready.values())
    starts = [each.time for each in order if each.op.kind != "free"]
    assert all(b - a >= 1 - 1e-9 for a, b in itertools.pairwise(starts))


def test_a_chain_waits_for_every_result_and_two_chains_fill_each_other():
    _, alone = issued(chain("alu", 32))
    assert alone == pytest.approx(32 * UNITS["alu"].latency)
    both = Code(tuple(Op("alu", (name,), (name,)) for _ in range(32) for name in ("x", "y")))
    _, together = issued(Math(both))
    assert together < 1.1 * alone


def test_independent_exponentials_take_eight_cycles_each():
    order, _ = issued(independent("mufu", 64))
    assert order[-1].time == pytest.approx(63 * 8)


def test_a_sum_runs_behind_its_exponentials_instead_of_waiting_for_each():
    """In the order of the PTX every addition would wait 20 cycles for its exponential."""
    ops = [op for i in range(32) for op in (Op("mufu", (), (f"p{i}",)), Op("fma", (f"p{i}", "sum"), ("sum",)))]
    _, end = issued(Math(Code(tuple(ops))))
    assert end <= 31 * 8 + UNITS["mufu"].latency + UNITS["fma"].latency + 1


@pytest.mark.parametrize("share", [0.1, 1 / 3, 0.5, 1.0])
def test_a_wait_stands_behind_its_share_of_the_exponentials(share):
    softmax, convert = independent("mufu", 30), independent("convert", 10)
    order, _ = issued(softmax, WAIT, convert, early_wait=share)
    at = next(i for i, each in enumerate(order) if each.op is None)
    assert sum(each.op.kind == "mufu" for each in order[:at]) == math.ceil(share * 30)
    assert all(each.op.kind == "mufu" for each in order[:at])
    assert sum(each.op is not None and each.op.kind == "convert" for each in order[at:]) == 10


def test_a_wait_without_exponentials_stays_where_it_is():
    order, _ = issued(independent("fma", 5), WAIT, independent("alu", 5))
    assert [each.op.kind if each.op else "wait" for each in order] == ["fma"] * 5 + ["wait"] + ["alu"] * 5


def test_an_arrival_follows_its_wait_at_once_and_holds_nothing_up():
    arrive = Arrive(1024, 1, 0, None)
    order, _ = issued(independent("mufu", 30), WAIT, arrive, independent("convert", 10), early_wait=0.5)
    marks = [i for i, each in enumerate(order) if each.op is None]
    assert marks == [15, 16]


def test_chunks_add_up_to_the_whole():
    scheduler = Scheduler(Cost(chunk=16))
    events = [independent("mufu", 40), Branch(None), chain("alu", 20)]
    first, second = (
        [item for item in group if isinstance(item, Chunk)]
        for _, group in itertools.groupby(scheduler.items(events), lambda item: isinstance(item, Branch))
        if not _
    )
    assert [chunk.ops for chunk in first] == [16, 16, 8]
    assert sum(chunk.span for chunk in first) == pytest.approx(39 * 8 + 20)
    assert sum(dict(chunk.use)[3] for chunk in first) == 40 * 8
    assert sum(chunk.span for chunk in second) == pytest.approx(20 * UNITS["alu"].latency)


def test_equal_code_is_scheduled_once_and_keeps_its_own_barriers():
    scheduler = Scheduler(Cost())
    code = independent("alu", 4)
    items = scheduler.items([Arrive(1, 1, 0, None), code, Branch(None), Arrive(2, 1, 0, None), code])
    assert [item.barrier for item in items if isinstance(item, Arrive)] == [1, 2]
    assert len(scheduler.known) == 1
