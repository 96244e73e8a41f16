"""The steps that programs are made of. A step names the things that it touches, and nothing else changes them.

`ready`: whether its actor may take it now. `apply`: what it changes. `why`: what it waits for, in words.
`awaits`: the barrier it waits at. `completes`: the barrier that it may open for others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .things import Thing

Things = Mapping[str, Thing]


@dataclass(frozen=True, repr=False)
class Step:
    """Does nothing; also a mark in a program (`label`), to which a timeline may give a duration."""

    label: str = ""

    def ready(self, things: Any, who: str) -> bool:
        return True

    def apply(self, things: Any, who: str) -> dict[str, Thing]:
        return {}

    def why(self, things: Any) -> str:
        return str(self)

    def awaits(self) -> str | None:
        return None

    def completes(self) -> str | None:
        return None

    def __repr__(self) -> str:
        """The step's name and what it touches: `Wait k.full[0] parity=1`."""
        words = []
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in ("item", "parity") or (f.name != "readers" and value != f.default):
                words.append(value if isinstance(value, str) else f"{f.name}={value}")
        return " ".join([type(self).__name__, *words])


@dataclass(frozen=True, repr=False)
class Wait(Step):
    """Until the barrier's phase of this parity is complete (`mbarrier.try_wait.parity`)."""

    barrier: str = ""
    parity: int = 0

    def ready(self, things: Any, who: str) -> bool:
        return things[self.barrier].passes(self.parity)

    def awaits(self) -> str:
        return self.barrier

    def why(self, things: Any) -> str:
        b = things[self.barrier]
        came = f"{len(b.arrived)} of {b.count} arrivals" + (f", {b.bytes} bytes to come" if b.bytes else "")
        return f"waits for {self.barrier} with parity {self.parity}: phase {b.phase} has {came}"


@dataclass(frozen=True, repr=False)
class Arrive(Step):
    """One arrival at an mbarrier, with `bytes` announced."""

    barrier: str = ""
    bytes: int = 0

    def apply(self, things: Any, who: str) -> dict[str, Thing]:
        return {self.barrier: things[self.barrier].arrive(who, self.bytes)}

    def completes(self) -> str:
        return self.barrier


@dataclass(frozen=True, repr=False)
class Begin(Step):
    """From now on parts of `item` land in the buffer."""

    buffer: str = ""
    item: int = 0
    size: int = 1
    readers: frozenset[str] = frozenset()

    def apply(self, things: Any, who: str) -> dict[str, Thing]:
        return {self.buffer: things[self.buffer].begin(who, self.item, self.size, self.readers)}


@dataclass(frozen=True, repr=False)
class Bring(Step):
    """A part of `item` lands, once somebody has begun it. The copy engine reports its bytes to a barrier."""

    buffer: str = ""
    item: int = 0
    size: int = 1
    barrier: str | None = None

    def ready(self, things: Any, who: str) -> bool:
        return things[self.buffer].item == self.item

    def apply(self, things: Any, who: str) -> dict[str, Thing]:
        changes: dict[str, Thing] = {self.buffer: things[self.buffer].bring(self.size)}
        if self.barrier is not None:
            changes[self.barrier] = things[self.barrier].bring(self.size)
        return changes

    def why(self, things: Any) -> str:
        return f"waits for item {self.item} to be asked for in {self.buffer}"

    def completes(self) -> str | None:
        return self.barrier


@dataclass(frozen=True, repr=False)
class Read(Step):
    """The warp begins to read the item."""

    buffer: str = ""
    item: int = 0

    def apply(self, things: Any, who: str) -> dict[str, Thing]:
        return {self.buffer: things[self.buffer].read(who, self.item)}


@dataclass(frozen=True, repr=False)
class Done(Step):
    """The warp has finished reading the item, or passes it over. Hardware does not see this: only `Arrive` tells."""

    buffer: str = ""

    def apply(self, things: Any, who: str) -> dict[str, Thing]:
        return {self.buffer: things[self.buffer].done(who)}


@dataclass(frozen=True, repr=False)
class Come(Step):
    """`bar.arrive`, and with `wait` the first half of `bar.sync`: `size` threads come to a barrier of `threads`."""

    barrier: str = ""
    size: int = 0
    threads: int = 0
    wait: bool = False

    def apply(self, things: Any, who: str) -> dict[str, Thing]:
        return {self.barrier: things[self.barrier].arrive(who, self.size, self.threads, self.wait)}

    def completes(self) -> str:
        return self.barrier


@dataclass(frozen=True, repr=False)
class Stay(Step):
    """The second half of `bar.sync`: until the barrier opens."""

    barrier: str = ""

    def ready(self, things: Any, who: str) -> bool:
        return who not in things[self.barrier].waiting

    def awaits(self) -> str:
        return self.barrier

    def why(self, things: Any) -> str:
        b = things[self.barrier]
        came = sum(count for _, count in b.arrived)
        return f"waits at {self.barrier}: {came} of {b.threads} threads have come"


@dataclass(frozen=True, repr=False)
class Enter(Step):
    """Onto the tensor cores."""

    cores: str = ""

    def apply(self, things: Any, who: str) -> dict[str, Thing]:
        return {self.cores: things[self.cores].enter(who)}


@dataclass(frozen=True, repr=False)
class Leave(Step):
    """Off the tensor cores."""

    cores: str = ""

    def apply(self, things: Any, who: str) -> dict[str, Thing]:
        return {self.cores: things[self.cores].leave(who)}


Program = list[Step]
