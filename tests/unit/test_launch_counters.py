"""Which launches share a counter: eager ones only far apart, captured ones never."""

from __future__ import annotations

import threading

import pytest
import torch

from fa3 import counters


@pytest.fixture
def device(stand_in):
    return counters.device(-1)


@pytest.fixture
def capturing(monkeypatch):
    """A switch for what torch says about the current stream."""
    state = {"on": False}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["on"])
    return state


def test_eager_launches_take_turns_in_the_ring(device):
    taken = [device.take() for _ in range(counters.RING + 3)]
    slots = [slot for _, slot in taken]
    assert slots[:3] == slots[-3:] and sorted(set(slots)) == list(range(counters.RING))
    assert len({zeros.data_ptr() for zeros, _ in taken}) == 1 and not taken[0][0].any()


def test_captured_launches_never_share(device, capturing):
    device.take()
    capturing["on"] = True
    captured = [device.take() for _ in range(1000)]
    capturing["on"] = False
    eager = [device.take() for _ in range(counters.RING)]
    slots = {slot for _, slot in captured}
    assert len(slots) == 1000 and min(slots) == counters.RING and slots.isdisjoint(slot for _, slot in eager)


@pytest.mark.parametrize("reason", ["first use is a capture", "reserve used up"])
def test_without_a_reserve_a_capture_allocates_its_own(reason, device, capturing, monkeypatch):
    if reason == "reserve used up":
        monkeypatch.setattr(counters, "RESERVE", 2)
        device.take()
    capturing["on"] = True
    taken = [device.take() for _ in range(5)]
    own = [zeros for zeros, slot in taken if slot == 0 and len(zeros) == 1]
    assert len(own) == (3 if reason == "reserve used up" else 5)
    assert len({zeros.data_ptr() for zeros in own}) == len(own) and not any(zeros.any() for zeros in own)


def test_threads_never_draw_the_same_slot(device):
    drawn = []
    threads = [threading.Thread(target=lambda: drawn.extend(device.take() for _ in range(500))) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len({slot for _, slot in drawn}) == 4000 and len({id(zeros) for zeros, _ in drawn}) == 1
