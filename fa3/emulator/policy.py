"""Who goes next: the choices that hardware leaves open.

Warps may run in any order, and an asynchronous operation may take effect at any time between its start and the wait
that covers it. A kernel is right only if every choice gives the same result.

    early          operations take effect when they are started; warps take turns
    late           as late as possible: WGMMA at its wait, copies only when no warp can go on
    random         warps and operations in random order, in pieces of random length
    starve:4-7     as random, but these warps run only when no other can
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fa3.emulator.warp import Warp

UNTIL_IT_WAITS = 1 << 12
"""Basic blocks that a warp runs if nothing stops it. Then others have a turn: it may spin on memory that they write."""
POLICIES = ("early", "late", "random")
_STARVE = re.compile(r"starve:(\d+)-(\d+)$")


class Policy:
    """Warps in turn, each until it has to wait; operations as late as possible."""

    immediate = False
    """Whether operations take effect when they are started."""

    def operation_first(self) -> bool:
        """Whether a pending operation takes effect before the next warp runs."""
        return False

    def mma_at_once(self) -> bool:
        """Whether a group of WGMMA takes effect at its commit."""
        return self.immediate

    def mma_between(self) -> bool:
        """Whether a group of WGMMA may take effect between its commit and its wait."""
        return False

    def pick_operation(self, count: int) -> int:
        return 0

    def pick_warp(self, runnable: Sequence[Warp]) -> int:
        return 0

    def blocks(self) -> int:
        """How many basic blocks the chosen warp may run."""
        return UNTIL_IT_WAITS


class Early(Policy):
    """Operations take effect when they are started."""

    immediate = True


class Random(Policy):
    """Everything at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def operation_first(self) -> bool:
        return self.random.random() < 0.4

    def mma_at_once(self) -> bool:
        return self.random.random() < 0.3

    def mma_between(self) -> bool:
        return True

    def pick_operation(self, count: int) -> int:
        return int(self.random.random() * count)

    def pick_warp(self, runnable: Sequence[Warp]) -> int:
        return int(self.random.random() * len(runnable))

    def blocks(self) -> int:
        return self.random.choice((2, 8, 32, UNTIL_IT_WAITS))


class Starve(Random):
    """As random, but some warps run only when no other can."""

    def __init__(self, seed: int, first: int, last: int) -> None:
        super().__init__(seed)
        self.starved = range(first, last + 1)

    def pick_warp(self, runnable: Sequence[Warp]) -> int:
        others = [i for i, warp in enumerate(runnable) if warp.index not in self.starved]
        return self.random.choice(others) if others else super().pick_warp(runnable)


def make_policy(name: str, seed: int) -> Policy:
    """The policy of a name. ValueError for an unknown one."""
    if name == "random":
        return Random(seed)
    if name in ("early", "late"):
        return Early() if name == "early" else Policy()
    if found := _STARVE.match(name):
        return Starve(seed, int(found[1]), int(found[2]))
    raise ValueError(f"policy {name!r} is unknown; there are {', '.join(POLICIES)} and starve:<first warp>-<last warp>")
