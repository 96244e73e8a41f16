"""What a warp did, without times: the list that the recorder makes and the replay gives times to.

Nothing here depends on a cost. Barriers are named as the hardware knows them: an mbarrier by its shared address, a
named barrier by its number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from fa3.emulator.timing.ops import Op
from fa3.sass.listing import Source

Place = Source | None
"""The Python line that an event comes from."""


@dataclass(frozen=True, eq=False)
class Code:
    """Instructions without a branch among them, in the order of the PTX. Two of them are equal if they are one."""

    ops: tuple[Op, ...]


class Math(NamedTuple):
    """A warp executes some code."""

    code: Code


class Branch(NamedTuple):
    """A branch over more than a few statements: a border that the compiler moves nothing across."""

    at: Place


class Wait(NamedTuple):
    """Goes on once `phases` phases of an mbarrier are complete."""

    barrier: int
    phases: int
    at: Place


class Arrive(NamedTuple):
    """Arrivals at an mbarrier, and bytes announced."""

    barrier: int
    arrivals: int
    expected: int
    at: Place


class Join(NamedTuple):
    """bar.sync (`waits`) or bar.arrive at a named barrier that joins `threads` threads."""

    number: int
    threads: int
    waits: bool
    at: Place


class Mma(NamedTuple):
    """One warp's part in issuing a WGMMA of m64 n k. `bits` of an input element; `registers`: A comes from them."""

    n: int
    k: int
    bits: int
    registers: bool
    at: Place


class Commit(NamedTuple):
    """Closes a group of WGMMAs or of bulk copies."""

    kind: Literal["wgmma", "bulk"]
    at: Place


class WaitGroup(NamedTuple):
    """Goes on once at most `left` of the youngest groups are unfinished; `reading`: once their sources are read."""

    kind: Literal["wgmma", "bulk"]
    left: int
    reading: bool
    at: Place


class Load(NamedTuple):
    """A copy from global to shared memory that reports its bytes to an mbarrier."""

    barrier: int
    nbytes: int
    at: Place


class Store(NamedTuple):
    """A copy from shared to global memory. `adds`: it is a reduction, which the L2 adds up."""

    nbytes: int
    at: Place
    adds: bool = False


class Access(NamedTuple):
    """Loads and stores by the lanes themselves. `wavefronts`: passes through the 128-byte-wide data path.
    `waits`: the warp needs the result."""

    space: Literal["shared", "global", "atomic"]
    wavefronts: int
    waits: bool
    at: Place


class Fence(NamedTuple):
    """A fence, setmaxnreg, or another instruction that takes its time and nothing else. `kind` is its opcode's name."""

    kind: str
    at: Place


Event = Math | Branch | Wait | Arrive | Join | Mma | Commit | WaitGroup | Load | Store | Access | Fence


@dataclass(frozen=True)
class Trace:
    """All that is needed to time one CTA."""

    warps: Sequence[Sequence[Event]]
    """By warp; a warp exits at the end of its list."""
    counts: Mapping[int, int] = field(default_factory=dict)
    """Arrivals that a phase of each mbarrier waits for, by address."""
    kernel: str = ""
    number: int = 0
    """Of the CTA in its grid."""

    @property
    def threads(self) -> int:
        return 32 * len(self.warps)
