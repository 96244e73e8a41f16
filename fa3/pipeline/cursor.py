"""Where a role stands in a ring: stage and phase, as one immutable value.

The arithmetic is branch-free and works alike on Python integers (tests, pictures, the model of the ring) and on the
DSL's run-time integers (kernels), so both run the same code.

A cursor that advances is a *new* cursor: `cursor = cursor.advance()` in the text of the loop that it belongs to. The
DSL carries a rebound local through a run-time loop; a cursor mutated in place, or advanced inside a helper that does
not return it, compiles without a word and then waits on stage 0, phase 0 for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


def _as_int(condition: Any) -> Any:
    """A run-time or Python truth value as 0 or 1."""
    return int(condition) if isinstance(condition, bool) else condition.to(type_of_int())


def type_of_int() -> Any:
    """The DSL's 32-bit integer; imported only when a run-time value is met, so that plain cursors need no DSL."""
    from cutlass import Int32

    return Int32


@dataclass(frozen=True)
class Cursor:
    """The `stage` of a ring of `stages`, and the `phase` (0 or 1) of the lap that the next step belongs to."""

    stage: Any
    phase: Any
    stages: int

    @classmethod
    def start(cls, stages: int) -> Cursor:
        """The first stage in its first lap, for producers and consumers alike, as Python integers."""
        return cls(0, 0, stages)

    def advance(self) -> Cursor:
        """The next stage; the phase flips when the ring wraps around."""
        following = self.stage + 1
        wrapped = _as_int(following == self.stages)
        return Cursor(following - wrapped * self.stages, self.phase ^ wrapped, self.stages)

    def advance_unless(self, last: Any) -> Cursor:
        """The next stage; after the last step this one again, as nothing more will come."""
        following = self.stage + 1 - _as_int(last)
        wrapped = _as_int(following == self.stages)
        return Cursor(following - wrapped * self.stages, self.phase ^ wrapped, self.stages)

    def next_lap(self) -> Cursor:
        """The same stage one lap later: where a consumer of a private edge goes, which has one stage to itself."""
        return Cursor(self.stage, self.phase ^ 1, self.stages)

    def __extract_mlir_values__(self) -> list[Any]:
        """The run-time part, for the DSL to carry through loops and branches."""
        return [self.stage.ir_value(), self.phase.ir_value()]

    def __new_from_mlir_values__(self, values: list[Any]) -> Cursor:
        integer = type_of_int()
        return Cursor(integer(values[0]), integer(values[1]), self.stages)


@dataclass(frozen=True)
class Lockstep:
    """Cursors of several rings that advance together: rings of the same depth share one, and its registers."""

    cursors: tuple[Cursor, ...]

    @classmethod
    def start(cls, *stages: int) -> Lockstep:
        """For rings of these depths, as run-time integers."""
        zero = type_of_int()
        return cls(tuple(Cursor(zero(0), zero(0), depth) for depth in sorted(set(stages))))

    def of(self, stages: int) -> Cursor:
        """Where a ring of this depth stands."""
        return next(cursor for cursor in self.cursors if cursor.stages == stages)

    def advance(self) -> Lockstep:
        return Lockstep(tuple(cursor.advance() for cursor in self.cursors))

    def __extract_mlir_values__(self) -> list[Any]:
        return [value for cursor in self.cursors for value in cursor.__extract_mlir_values__()]

    def __new_from_mlir_values__(self, values: list[Any]) -> Lockstep:
        pairs = zip(self.cursors, range(0, len(values), 2), strict=True)
        return Lockstep(tuple(cursor.__new_from_mlir_values__(values[at : at + 2]) for cursor, at in pairs))
