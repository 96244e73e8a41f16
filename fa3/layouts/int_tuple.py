"""Nested tuples of integers: what shapes, strides and coordinates are made of.

An IntTuple is an int or a tuple of IntTuples, e.g. `4`, `(4, 8)` or `((2, 2, 16), 1)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias, Union

IntTuple: TypeAlias = Union[int, "tuple[IntTuple, ...]"]


class LayoutError(ValueError):
    """An operation of the layout algebra that has no answer, or whose operands do not fit each other."""


def flatten(value: IntTuple) -> tuple[int, ...]:
    """The leaves of a nested tuple from left to right; an int gives one leaf."""
    return tuple(_leaves(value))


def _leaves(value: IntTuple) -> Iterator[int]:
    if isinstance(value, tuple):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def product(value: IntTuple) -> int:
    """The product of all leaves; 1 for an empty tuple."""
    total = 1
    for leaf in _leaves(value):
        total *= leaf
    return total


def congruent(a: IntTuple, b: IntTuple) -> bool:
    """Whether two nested tuples have the same profile, that is the same nesting with an int at the same places."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(congruent(x, y) for x, y in zip(a, b, strict=True))
    return not isinstance(a, tuple) and not isinstance(b, tuple)


def compact_strides(shape: IntTuple, start: int = 1) -> IntTuple:
    """Strides that number the elements of `shape` without gaps, the leftmost mode fastest ("column-major").

    `compact_strides((4, (2, 8))) == (1, (4, 8))`. `start` multiplies all of them.
    """
    if not isinstance(shape, tuple):
        return start
    strides: list[IntTuple] = []
    for part in shape:
        strides.append(compact_strides(part, start))
        start *= product(part)
    return tuple(strides)


def as_tuple(value: IntTuple) -> tuple[IntTuple, ...]:
    """The modes of a nested tuple; an int is one mode."""
    return value if isinstance(value, tuple) else (value,)


def show(value: IntTuple) -> str:
    """CuTe's way to print a nested tuple: no spaces, no comma after a single mode."""
    if isinstance(value, tuple):
        return "(" + ",".join(show(part) for part in value) + ")"
    return str(value)
