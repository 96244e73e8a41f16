"""The rules of the things that warps share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa3.pipeline.model import Buffer, Fault, MBarrier, NamedBarrier, TensorCores
from fa3.pipeline.model.things import MAX_ARRIVALS

# mbarriers


def test_a_fresh_mbarrier_passes_parity_1():
    fresh = MBarrier(3)
    assert fresh.passes(1)
    assert not fresh.passes(0)


@given(st.integers(1, 5), st.integers(0, 40))
def test_every_count_arrivals_complete_a_phase(count, arrivals):
    barrier = MBarrier(count)
    for i in range(arrivals):
        barrier = barrier.arrive(f"warp{i}")
    assert (barrier.phase, len(barrier.arrived)) == divmod(arrivals, count)
    assert barrier.passes(1) == (barrier.phase % 2 == 0)
    assert barrier.passes(0) == (barrier.phase % 2 == 1)


def test_a_phase_waits_for_its_bytes():
    announced = MBarrier(1).arrive("load", bytes=48)
    assert (announced.phase, announced.bytes) == (0, 48)
    half = announced.bring(16)
    assert (half.phase, half.bytes) == (0, 32)
    assert half.bring(32) == MBarrier(1, phase=1)


def test_bytes_may_come_before_they_are_announced():
    early = MBarrier(1).bring(32)
    assert (early.phase, early.bytes) == (0, -32)
    assert early.arrive("load", bytes=32) == MBarrier(1, phase=1)


def test_one_arrival_too_many_is_an_error():
    """All arrived, bytes outstanding: the phase cannot complete, and a further arrival has nowhere to go."""
    waiting = MBarrier(2).arrive("a", bytes=16).arrive("b")
    assert waiting.phase == 0
    with pytest.raises(Fault, match="c is arrival 3 of 2, after a, b"):
        waiting.arrive("c")


@pytest.mark.parametrize("count", (0, -1, MAX_ARRIVALS + 1))
def test_a_count_that_hardware_does_not_take(count):
    with pytest.raises(Fault, match=f"cannot wait for {count} arrivals"):
        MBarrier(count)


# buffers


def arrived(item: int = 7, readers: str = "ab") -> Buffer:
    return Buffer().begin("load", item, 2, frozenset(readers)).bring(2)


def test_the_life_of_a_buffer():
    empty = Buffer()
    filling = empty.begin("load", 7, 2, frozenset("ab"))
    full = filling.bring(1).bring(1)
    reading = full.read("a", 7)
    half = reading.done("a")
    free = half.read("b", 7).done("b")
    owners = [buffer.owner for buffer in (empty, filling, full, reading, half, free)]
    assert owners == ["free", "filling", "arrived", "reading", "arrived", "free"]
    assert free.begin("load", 8, 2, frozenset("ab")).item == 8


def test_an_unread_buffer_must_not_be_overwritten():
    with pytest.raises(Fault, match="load overwrites item 7 with 8; unread by b"):
        arrived().read("a", 7).done("a").begin("load", 8, 2, frozenset("ab"))


def test_a_buffer_in_flight_must_not_be_overwritten():
    filling = Buffer().begin("load", 7, 2, frozenset()).bring(1)
    with pytest.raises(Fault, match="has not arrived yet"):
        filling.begin("load", 8, 2, frozenset())


def test_a_read_finds_what_it_means():
    with pytest.raises(Fault, match="a reads item 7, expected 8"):
        arrived().read("a", 8)
    with pytest.raises(Fault, match="before it has arrived"):
        Buffer().begin("load", 7, 2, frozenset("a")).bring(1).read("a", 7)
    with pytest.raises(Fault, match="second time"):
        arrived().read("a", 7).done("a").read("a", 7)
    with pytest.raises(Fault, match="none of its readers"):
        arrived().read("c", 7)


def test_no_more_may_land_than_is_missing():
    with pytest.raises(Fault, match="gets 1 more, where 0 are missing"):
        arrived().bring(1)


def test_several_warps_may_fill_one_item_together():
    together = Buffer().begin("load.0", 7, 2, frozenset("a")).bring(1).begin("load.1", 7, 2, frozenset("a")).bring(1)
    assert together.owner == "arrived"


# named barriers


def test_a_named_barrier_opens_and_begins_anew():
    closed = NamedBarrier().arrive("a", 128, 256, wait=True)
    assert closed.waiting == {"a"}
    opened = closed.arrive("b", 128, 256, wait=False)
    assert (opened.waiting, opened.arrived) == (frozenset(), ())
    assert opened.arrive("b", 128, 256, wait=True).waiting == {"b"}


def test_wrong_uses_of_a_named_barrier():
    closed = NamedBarrier().arrive("a", 128, 256, wait=False)
    with pytest.raises(Fault, match="128 threads; it began with 256"):
        closed.arrive("b", 128, 128, wait=True)
    with pytest.raises(Fault, match="a comes a second time"):
        closed.arrive("a", 128, 256, wait=True)
    with pytest.raises(Fault, match="384 threads to a barrier of 256"):
        closed.arrive("b", 256, 256, wait=True)


# tensor cores


def test_warpgroups_take_turns_with_all_their_warps():
    cores = TensorCores((("a0", "a1"), ("b0", "b1")))
    cores = cores.enter("a0").leave("a0").enter("a1").leave("a1")
    assert cores.enter("b1").turn == 1


def test_turns_out_of_order():
    cores = TensorCores((("a0", "a1"), ("b0", "b1")))
    with pytest.raises(Fault, match="it is the turn of a0, a1"):
        cores.enter("b0")
    with pytest.raises(Fault, match="b0 enters while a0 is inside"):
        cores.enter("a0").enter("b0")
    with pytest.raises(Fault, match="it is the turn of a1"):
        cores.enter("a0").leave("a0").enter("b0")
    with pytest.raises(Fault, match="it is the turn of b0, b1"):
        cores.enter("a0").leave("a0").enter("a1").leave("a1").enter("a0")
