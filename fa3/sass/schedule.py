"""The order of events in a stretch of SASS, short enough to read: what the paper's appendix B.2 prints by hand.

wait K | my turn | HGMMA m64n128k16 SS x8 | HGMMA m64n128k16 RS x8 | wait <=1 | EX2 x66 (in flight) | wait <=0 | ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from fa3.sass.listing import Instruction, Listing, mma_of, wait_of


@dataclass(frozen=True)
class Event:
    """A run of like instructions. `lane` is where a picture draws it; `in_flight` counts those under a GEMM."""

    lane: str
    text: str
    count: int
    in_flight: int
    first: int
    """Position of the run's first instruction in the stretch."""

    def __str__(self) -> str:
        times = f" x{self.count}" if self.count > 1 else ""
        if self.lane != "exp":
            return self.text + times
        if self.in_flight == 0:
            return f"{self.text}{times}"
        return f"{self.text}{times} (" + ("" if self.in_flight == self.count else f"{self.in_flight} ") + "in flight)"


_ARITHMETIC = {"FFMA": "fma", "FADD": "fma", "FMUL": "fma", "FMNMX": "max", "F2FP": "convert"}


def lane_of(instruction: Instruction) -> tuple[str, str]:
    """Which unit an instruction keeps busy, and its name in a schedule; ("", "") if it is of no interest."""
    if mma := mma_of(instruction):
        return "gemm", f"HGMMA {mma}" if instruction.base == "HGMMA" else f"{instruction.base} {mma}"
    if (most := wait_of(instruction)) is not None:
        return "wait", f"wait <={most}"
    opcode, base = instruction.opcode, instruction.base
    if opcode.startswith("MUFU.EX2"):
        return "exp", "EX2"
    if base == "BAR":
        return "barrier", "BAR.ARV" if ".ARV" in opcode else "BAR.SYNC"
    if base == "SYNCS":
        return _mbarrier(opcode)
    if base in ("UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "UBLKRED", "REDG"):
        return "barrier", base
    return (_ARITHMETIC[base], base) if base in _ARITHMETIC else ("", "")


def _mbarrier(opcode: str) -> tuple[str, str]:
    if ".TRYWAIT" in opcode:
        return "barrier", "mbarrier wait"
    return ("barrier", "mbarrier arrive") if ".ARRIVE" in opcode else ("", "")


def events(listing: Listing, indices: Sequence[int], flights: Sequence[int]) -> list[Event]:
    """Every run of instructions of one kind, arithmetic included: the picture's data."""
    marked = [(lane_of(listing.instructions[index]), position) for position, index in enumerate(indices)]
    found = []
    for (lane, text), group in groupby((mark for mark in marked if mark[0][0]), key=lambda mark: mark[0]):
        positions = [position for _, position in group]
        under = sum(flights[indices[position]] > 0 for position in positions)
        found.append(Event(lane, text, len(positions), under, positions[0]))
    return found


LEAST_ARITHMETIC = 16
"""Fewer arithmetic instructions than this between two events are left out of a schedule."""


def schedule(listing: Listing, indices: Sequence[int], flights: Sequence[int]) -> list[str]:
    """The stretch as words. Arithmetic is summed between two events of synchronisation, GEMM issue or exponentials.

    Exponentials that arithmetic interleaves count as one run; a run ends where a GEMM is issued, or something waits.
    """
    words: list[str] = []
    pending: list[Event] = []
    for event in events(listing, indices, flights):
        if event.lane in ("exp", "fma", "max", "convert"):
            pending.append(event)
            continue
        words += _summary(pending)
        pending = []
        words.append(str(event))
    return words + _summary(pending)


def _summary(pending: Sequence[Event]) -> list[str]:
    """What happens between two events: its exponentials if there are any, else its arithmetic if it is much."""
    exponentials = [event for event in pending if event.lane == "exp"]
    if exponentials:
        count, under = sum(e.count for e in exponentials), sum(e.in_flight for e in exponentials)
        return [str(Event("exp", "EX2", count, under, exponentials[0].first))]
    counts: Counter[str] = Counter()
    for event in pending:
        counts[event.text] += event.count
    return [f"{name} x{count}" for name, count in counts.items() if count >= LEAST_ARITHMETIC]
