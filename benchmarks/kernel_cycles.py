"""How many cycles kernels take on a GPU: from Nsight Compute, or from torch's profiler and the clock at that moment.

Nsight Compute counts the cycles themselves, to 1 % from launch to launch, but not every machine lets it. The profiler
gives the time of every kernel; the clock comes from kernels that spin for a known number of cycles, right before. But
the clock drops as soon as the tensor cores work, so that this way an H200 seems to need 4 % (20 us) to 20 % (1 ms) more
cycles than it does.
"""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

OURS, SPIN = "fa3kernels", "spin_kernel"
"""What the names of our kernels, and of torch's `_sleep`, contain."""
SPINS = (200_000, 600_000)
"""Cycles of the two spinning kernels; the difference of their times has no overhead in it."""
METRIC = "sm__cycles_elapsed.max"
NCU = f"ncu --csv --clock-control none --cache-control none --kernel-name regex:{OURS} --metrics {METRIC}"


@dataclass(frozen=True)
class Cycles:
    """Of one launch, over its repetitions."""

    each: tuple[float, ...]
    clock_mhz: float | None = None


def profiled(calls: Sequence[Callable[[], object]], warm: int, repeats: int) -> list[Cycles]:
    """Runs every call `warm` + `repeats` times, each of which must launch one of our kernels; times the latter.

    RuntimeError if the profiler did not see all of them.
    """
    from torch.profiler import ProfilerActivity, profile

    torch.cuda._sleep(100_000_000)  # let the clock rise
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for call in calls:
            for _ in range(warm):
                call()
            for cycles in SPINS:
                torch.cuda._sleep(cycles)
            for _ in range(repeats):
                call()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        trace = json.loads(file.read_text())
    return from_trace(trace["traceEvents"], len(calls), warm, repeats)


def from_trace(events: Iterable[dict[str, object]], calls: int, warm: int, repeats: int) -> list[Cycles]:
    """Cycles of every call from the events of torch's trace: for each call in order `warm` kernels, two that spin, and
    `repeats` kernels. RuntimeError if there are others."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    kernels.sort(key=lambda event: float(str(event["ts"])))
    ours, spins = ([float(str(e["dur"])) for e in kernels if part in str(e["name"])] for part in (OURS, SPIN))
    spins = spins[len(spins) % len(SPINS) :]  # the one that let the clock rise may be in the trace
    if len(ours) != calls * (warm + repeats) or len(spins) != calls * len(SPINS):
        raise RuntimeError(
            f"the profiler saw {len(ours)} of {calls * (warm + repeats)} kernels and {len(spins)} of "
            f"{calls * len(SPINS)} spins"
        )
    found = []
    for number in range(calls):
        first = number * (warm + repeats) + warm
        short, long = spins[2 * number : 2 * number + 2]
        clock_mhz = (SPINS[1] - SPINS[0]) / (long - short)
        found.append(Cycles(tuple(us * clock_mhz for us in ours[first : first + repeats]), clock_mhz))
    return found


def from_ncu(text: str, calls: int, warm: int, repeats: int) -> list[Cycles]:
    """Cycles of every call from the output of `ncu --csv` (see `NCU`), which may begin with other lines.

    ValueError if it is not of that form, or has not as many kernels as expected.
    """
    lines = text.splitlines()
    header = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if header is None:
        raise ValueError('no line of the CSV begins with "ID"; is this the output of ncu --csv?')
    cycles = {
        int(row["ID"]): float(row["Metric Value"].replace(",", ""))
        for row in csv.DictReader(line for line in lines[header:] if line.startswith('"'))
        if row["Metric Name"] == METRIC and OURS in row["Kernel Name"]
    }
    if len(cycles) != calls * (warm + repeats):
        raise ValueError(f"the CSV has {METRIC} of {len(cycles)} kernels; {calls * (warm + repeats)} are expected")
    values = [cycles[number] for number in sorted(cycles)]
    step = warm + repeats
    return [Cycles(tuple(values[first + warm : first + step])) for first in range(0, len(values), step)]
