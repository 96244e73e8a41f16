"""A timeline in the Trace Event Format, for chrome://tracing and https://ui.perfetto.dev.

A CTA is a process, a warp or a unit is a thread of it. Times are microseconds at a stated clock; every slice also
carries its cycles and its Python line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fa3.emulator.timing.timeline import Interval, Timeline

CLOCK_MHZ = 1755.0
"""The clock that cycles are turned into time with, unless another is given: an H200's under a lasting load is between
1500 and 1980 MHz."""
FIRST_UNIT = 100
"""Thread number of the first unit; below it are the warps."""


def chrome_trace(timelines: Iterable[Timeline], clock_mhz: float = CLOCK_MHZ) -> dict[str, Any]:
    """The object to be written as JSON. Slices of one thread do not overlap, and stand in the order of time."""
    if not clock_mhz > 0:
        raise ValueError(f"clock_mhz is {clock_mhz}; a clock above 0 is wanted")
    events: list[dict[str, Any]] = []
    for timeline in timelines:
        pid = timeline.number
        events.append(_name("process_name", pid, 0, f"CTA {pid} {timeline.kernel}".rstrip()))
        lanes = [(w, f"warp {w}", warp) for w, warp in enumerate(timeline.warps)]
        units = enumerate(timeline.units.items(), FIRST_UNIT)
        lanes += [(number, unit, intervals) for number, (unit, intervals) in units]
        for tid, name, intervals in lanes:
            if intervals:
                events.append(_name("thread_name", pid, tid, name))
                events += (_slice(interval, pid, tid, clock_mhz) for interval in intervals)
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"clock_mhz": clock_mhz}}


def write_chrome_trace(file: Path, timelines: Iterable[Timeline], clock_mhz: float = CLOCK_MHZ) -> None:
    """Writes `chrome_trace` to a file."""
    file.write_text(json.dumps(chrome_trace(timelines, clock_mhz), separators=(",", ":")))


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(interval: Interval, pid: int, tid: int, clock_mhz: float) -> dict[str, Any]:
    """One complete slice. Both ends are rounded alike, so that neighbours touch and never overlap."""
    start, end = (round(cycles / clock_mhz, 6) for cycles in (interval.start, interval.end))
    arguments: dict[str, Any] = {"cycles": round(interval.cycles, 1)}
    if interval.at is not None:
        arguments["line"] = str(interval.at)
    if interval.label:
        arguments["what"] = interval.label
    return {
        "ph": "X", "name": interval.kind, "cat": interval.kind, "pid": pid, "tid": tid, "ts": start,
        "dur": round(end - start, 6), "args": arguments,
    }  # fmt: skip
