"""The problems of a kernel, whichever it is."""

from __future__ import annotations

from typing import Any

from fa3.config.backward import AnyKey, BackwardKey
from fa3.emulator.mutate import backward_problems, forward_problems
from fa3.emulator.mutate.case import Case


def shapes(key: AnyKey) -> tuple[Any, ...]:
    """Their lengths are chosen so that every bound and every mask limit decides somewhere."""
    return backward_problems.shapes(key) if isinstance(key, BackwardKey) else forward_problems.shapes(key)


def case(key: AnyKey, shape: Any) -> Case:
    """The launch of a kernel for one of its shapes."""
    return backward_problems.case(key, shape) if isinstance(key, BackwardKey) else forward_problems.case(key, shape)
