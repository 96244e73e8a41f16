"""Asynchronous operations: what a warp starts and somebody else carries out later.

An operation has up to two effects in a row. Loads and WGMMA have one. A store first reads shared
memory and later writes global memory, and `cp.async.bulk.wait_group.read` waits only for the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fa3.emulator.cta import Cta
    from fa3.emulator.sync import MBarrier
    from fa3.emulator.warp import Warp
    from fa3.sass.ptx_code import Statement

Kind = Literal[
    "tma.load", "tma.store", "tma.reduce", "bulk.load", "bulk.store", "bulk.reduce", "bulk.send", "st.async", "wgmma"
]
Words = NDArray[np.int64]
NO_WORDS: Words = np.empty(0, np.int64)


@dataclass(eq=False)
class Operation:
    """One asynchronous operation of one warp."""

    kind: Kind
    warp: Warp
    at: Statement
    effects: list[Callable[[], None]]
    """What is still to be done, in order."""
    reads: Words = field(default_factory=lambda: NO_WORDS)
    """Shared memory that it reads, as unique indices of 4-byte words (address // 4)."""
    writes: Words = field(default_factory=lambda: NO_WORDS)
    """Shared memory that it writes, of the CTA `target`."""
    target: Cta = field(default=None)  # type: ignore[assignment]
    """Whose shared memory it writes, and where its barrier is: that of the warp unless another one is given."""
    barrier: MBarrier | None = None
    """Where it reports its bytes."""
    nbytes: int = 0
    flops: int = 0
    """Multiplications and additions of a WGMMA, for the whole warpgroup."""
    registers_read: int = 0
    registers_written: int = 0
    """Registers that it reads and writes while it is under way, as sets of bits (`Step.reads`)."""
    global_range: tuple[int, int] = (0, 0)
    """[first, last) byte of global memory, where it is known in advance."""

    def __post_init__(self) -> None:
        self.target = self.target or self.warp.cta

    @property
    def done(self) -> bool:
        return not self.effects

    def advance(self) -> None:
        """The next effect happens."""
        self.effects.pop(0)()


@dataclass(eq=False)
class Group:
    """Operations of one warp between two commits: all WGMMA, or all bulk copies. `number` counts them per warp."""

    kind: Literal["wgmma", "bulk"]
    warp: Warp
    number: int
    operations: list[Operation] = field(default_factory=list)
    was_read: bool = False
    """Whether a `wait_group.read` has covered it. It stays in line for a wait that wants it complete."""

    @property
    def done(self) -> bool:
        return all(operation.done for operation in self.operations)
