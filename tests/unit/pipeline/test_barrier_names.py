"""Named barriers are given out by event: all different, never 0, never past 15."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa3.pipeline.barriers import LAST_BARRIER, BarrierNames, NoTurn, PingPong, make_turns


@st.composite
def fitting(draw):
    """Events whose barriers fit into the 15 that there are."""
    counts = draw(st.lists(st.integers(1, 4), max_size=8).filter(lambda counts: sum(counts) <= LAST_BARRIER))
    return tuple((f"event{i}", count) for i, count in enumerate(counts))


@given(fitting())
def test_no_two_events_meet_on_a_barrier(events):
    names = BarrierNames(events)
    given_out = [names.first(event) + i for event, count in events for i in range(count)]
    assert len(set(given_out)) == len(given_out)
    assert all(1 <= barrier <= 15 for barrier in given_out), "0 is the barrier of the whole CTA"


def test_all_fifteen_can_be_used():
    assert BarrierNames((("a", 8), ("b", 7))).first("b") + 6 == 15
    with pytest.raises(ValueError, match="a CTA has 15 named barriers"):
        BarrierNames((("a", 8), ("b", 8)))


@pytest.mark.parametrize("count", (0, -1))
def test_an_event_without_a_barrier_is_refused(count):
    """It would share the number of the event behind it."""
    with pytest.raises(ValueError, match="every event needs at least one barrier"):
        BarrierNames((("turn", count), ("rows", 2)))


def test_an_event_twice_is_refused():
    with pytest.raises(ValueError, match=r"barrier events must differ: \['a', 'a'\]"):
        BarrierNames((("a", 1), ("a", 1)))


def test_an_unknown_event():
    with pytest.raises(KeyError, match=r"no barrier event 'b'; events: \['a'\]"):
        BarrierNames((("a", 1),)).first("b")


@pytest.mark.parametrize(
    ("kind", "groups", "made"), [("pingpong", 2, PingPong), ("pingpong", 1, NoTurn), ("free", 3, NoTurn)]
)
def test_turns_by_name(kind, groups, made):
    assert type(make_turns(kind, 1, 0, groups)) is made


def test_no_turn_has_what_ping_pong_has():
    public = {name for name in vars(PingPong) if not name.startswith("_")} - set(PingPong.__dataclass_fields__)
    assert public == {"open", "wait", "give"}
    assert all(getattr(NoTurn(), name)() is None for name in public)
