"""What is written for others to look at: the trace for Perfetto, and the picture."""

from __future__ import annotations

import itertools
import json
import sys
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa3.emulator.timing import Interval, Timeline, replay
from fa3.emulator.timing.draw import draw, save
from fa3.emulator.timing.trace import CLOCK_MHZ, chrome_trace, write_chrome_trace
from fa3.sass.listing import Source

from .lists import PLAIN, gemm, loads, math, turn, warpgroups

LINE = Source("/somewhere/kernel.py", 12)


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    lists = [[e for _ in range(4) for e in (*turn(1 + i, 2 - i, gemm(8)), math("mufu", 64))] for i in range(2)]
    lists[1] = [turn(0, 1, [])[1], *lists[1]]
    return replay(warpgroups(*lists, load=loads(1024, 1032, 1, 4096), counts={1024: 1, 1032: 1}), PLAIN)


def slices(trace: dict) -> dict[tuple[int, int], list[dict]]:
    found = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


def test_the_file_is_json_with_named_threads(timeline, tmp_path):
    write_chrome_trace(tmp_path / "t.json", [timeline])
    trace = json.loads((tmp_path / "t.json").read_text())
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {"warp 0", "warp 4", "warp 8", "tensor cores", "MUFU 0", "TMA load"} <= names
    assert "warp 1" not in names  # it has nothing to show
    named = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert named == set(slices(trace))
    assert trace["otherData"] == {"clock_mhz": CLOCK_MHZ}


@given(st.lists(st.floats(1e-3, 1e5), min_size=1, max_size=40), st.floats(100.0, 3000.0))
def test_slices_of_a_thread_never_overlap_whatever_the_clock(lengths, clock):
    ends = list(itertools.accumulate(lengths))
    lane = [Interval(a, b, "softmax") for a, b in itertools.pairwise([0.0, *ends])]
    timeline = Timeline([lane], {"tensor cores": []}, ends[-1], ends[-1])
    (events,) = slices(chrome_trace([timeline], clock)).values()
    assert len(events) == len(lane)
    for a, b in itertools.pairwise(events):
        assert round(a["ts"] + a["dur"], 6) <= b["ts"]
    assert all(event["dur"] >= 0 for event in events)


def test_a_slice_carries_time_cycles_and_line():
    lane = [Interval(1000.0, 3000.0, "gemm", "WGMMA", LINE)]
    (event,) = slices(chrome_trace([Timeline([lane], {}, 3000, 3000, number=7)], 1000.0))[7, 0]
    assert (event["ts"], event["dur"], event["name"]) == (1.0, 2.0, "gemm")
    assert event["args"] == {"cycles": 2000.0, "line": "kernel.py:12", "what": "WGMMA"}


def test_a_clock_that_stands_is_refused(timeline):
    with pytest.raises(ValueError, match="clock_mhz"):
        chrome_trace([timeline], 0.0)


def spans(axes) -> list[list[tuple[float, float]]]:
    """(first, last) x of every bar, by lane."""
    lanes: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for collection in axes.collections:
        for path in collection.get_paths():
            box = path.get_extents()
            lanes[int(box.y0)].append((box.x0, box.x1))
    return [sorted(lanes[row]) for row in range(len(axes.get_yticklabels()))]


def test_the_picture_has_a_lane_for_each_warpgroup_and_unit(timeline):
    pytest.importorskip("matplotlib")
    (axes,) = draw(timeline).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["load warp", "warpgroup 0", "warpgroup 1", "tensor cores", "MUFU", "TMA load"]
    tensor = spans(axes)[names.index("tensor cores")]
    assert sum(last - first for first, last in tensor) == pytest.approx(timeline.busy("tensor cores"))


def test_a_part_of_the_picture_is_cut_at_its_ends(timeline):
    pytest.importorskip("matplotlib")
    (axes,) = draw(timeline, 500.0, 1500.0).axes
    assert axes.get_xlim() == (500.0, 1500.0)
    assert all(500 <= first < last <= 1500 for lane in spans(axes) for first, last in lane)


def test_nothing_to_draw_is_an_error(timeline):
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(timeline, 10.0, 10.0)


def test_it_is_written_as_png(timeline, tmp_path):
    pytest.importorskip("matplotlib")
    save(timeline, tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_how_to_get_it(timeline, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"fa3\[benchmarks\]"):
        draw(timeline)


def test_the_summary_names_what_the_warpgroups_do(timeline):
    text = timeline.summary()
    assert "tensor cores" in text and "warp 4: " in text and "warp 8: " in text and "softmax" in text
