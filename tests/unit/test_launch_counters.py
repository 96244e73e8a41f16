"""Which launches share a counter: eager ones on one stream, captured ones never."""

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


def test_eager_launches_share_a_counter_on_one_stream_only(device, monkeypatch):
    streams = [0, 7, 0, 9, 7, 0, 11]
    taken = []
    for stream in streams:
        monkeypatch.setattr(device, "_stream", lambda stream=stream: stream)
        taken.append(device.take())
    assert len({slot for _, slot in taken}) == 4
    for stream in streams:
        assert len({slot for s, (_, slot) in zip(streams, taken, strict=True) if s == stream}) == 1
    assert len({zeros.data_ptr() for zeros, _ in taken}) == 1 and not taken[0][0].any()


def test_streams_past_the_block_get_counters_of_their_own(device, monkeypatch):
    monkeypatch.setattr(counters, "STREAMS", 3)
    taken = []
    for stream in [*range(6), *range(6)]:
        monkeypatch.setattr(device, "_stream", lambda stream=stream: stream)
        zeros, slot = device.take()
        taken.append((zeros.data_ptr(), slot))
    assert taken[:6] == taken[6:] and len(set(taken)) == 6


def test_captured_launches_never_share(device, capturing):
    device.take()
    capturing["on"] = True
    captured = [device.take() for _ in range(1000)]
    capturing["on"] = False
    slots = {slot for _, slot in captured}
    assert len(slots) == 1000 and min(slots) == counters.STREAMS and device.take()[1] not in slots


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


def test_threads_on_streams_of_their_own_never_share(device, monkeypatch):
    monkeypatch.setattr(device, "_stream", threading.get_ident)
    drawn: list[set[int]] = []
    together = threading.Barrier(8)

    def launch_often():
        together.wait()
        drawn.append({device.take()[1] for _ in range(500)})

    threads = [threading.Thread(target=launch_often) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(len(slots) == 1 for slots in drawn) and len(set.union(*drawn)) == 8
