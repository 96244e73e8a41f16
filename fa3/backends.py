"""Who serves CPU tensors: nobody, or the emulator inside `fa3.emulate()` or under FA3_BACKEND=emulator.

CUDA tensors never come here: `fa3.launch` asks only when it makes a plan, and only about CPU tensors.
"""

from __future__ import annotations

import importlib
import os
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from fa3.emulator.backend import Emulation

VARIABLE = "FA3_BACKEND"
NAMES = ("gpu", "emulator")

active: ContextVar[Emulation | None] = ContextVar("fa3_emulation", default=None)
"""The emulation of the innermost `fa3.emulate()`. A new thread starts outside of it."""


def emulation_for(*tensors: Any) -> Emulation | None:
    """The emulation that serves these tensors, or None: not all of them are on the CPU, or no emulator is on."""
    if not all(isinstance(tensor, Tensor) and tensor.device.type == "cpu" for tensor in tensors):
        return None
    return active.get() or _of_environment()


def _of_environment() -> Emulation | None:
    name = os.environ.get(VARIABLE) or NAMES[0]
    if name not in NAMES:
        raise ValueError(f"fa3: {VARIABLE} is {name!r}; {' or '.join(map(repr, NAMES))} is allowed")
    if name == NAMES[0]:
        return None
    return importlib.import_module("fa3.emulator.backend").of_environment()
