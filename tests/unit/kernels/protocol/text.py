"""Copies of the forward's modules that run as ordinary Python, with a changed line if a test wants one.

The DSL rewrites a function when it first traces it, so the copies are made from the source: nothing ever traces them.
"""

from __future__ import annotations

import linecache
import re
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

FILES = ("forward", "forward_overlap")
PATHS = {name: find_spec(f"fa3.kernels.{name}").origin for name in FILES}
EDITED = " (edited)"


@dataclass(frozen=True)
class Edit:
    """`old`, which stands exactly once in the file, becomes `new`.

    Both are written without the file's indent: lines of `old` match whatever theirs is, and lines of `new` are indented
    as the first of those that they replace is, and further by what they bring along.
    """

    file: str
    old: str
    new: str

    def apply(self, text: str) -> str:
        found = list(re.finditer(r"\n *".join(map(re.escape, self.old.split("\n"))), text))
        assert len(found) == 1, (
            f"{self.file}.py holds this {len(found)} times, not once; where the kernel has changed, "
            f"protocol/mistakes.py follows:\n{self.old}"
        )
        start, end = found[0].span()
        line = text[text.rfind("\n", 0, start) + 1 : start]
        indent = line[: len(line) - len(line.lstrip())]
        return text[:start] + self.new.replace("\n", "\n" + indent) + text[end:]


class PlainCutlass:
    """What the roles use of `cutlass`, on Python's integers."""

    range_constexpr, min, max, const_expr = range, min, max, bool

    @staticmethod
    def range(*bounds: int, unroll: int = 1) -> range:
        return range(*bounds)


def load(name: str, *edits: Edit) -> ModuleType:
    """A fresh copy of fa3.kernels.<name>, with plain functions for the DSL's."""
    text, path = Path(PATHS[name]).read_text(), PATHS[name]
    for edit in edits:
        text, path = edit.apply(text), PATHS[name] + EDITED
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)  # for tracebacks and messages
    module = module_from_spec(ModuleSpec(f"fa3.kernels.untraced_{name}", None, origin=path))
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(text, path, "exec"), vars(module))
    unwrap(module)
    for value in list(vars(module).values()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            unwrap(value)
    module.cutlass, module.Int32 = PlainCutlass, int
    return module


def unwrap(owner: Any) -> None:
    """Takes the DSL's decorators off the owner's functions."""
    for name, value in list(vars(owner).items()):
        if hasattr(value, "__wrapped__") and not isinstance(value, classmethod | staticmethod):
            setattr(owner, name, value.__wrapped__)


@dataclass(frozen=True)
class KernelText:
    """The two files of the forward."""

    forward: ModuleType
    overlap: ModuleType

    @classmethod
    def of(cls, *edits: Edit) -> KernelText:
        return cls(*(load(name, *(edit for edit in edits if edit.file == name)) for name in FILES))

    def main_loop(self, algorithm: str) -> Any:
        return {"plain": self.forward.PlainLoop, "overlap": self.overlap.OverlapLoop}[algorithm]
