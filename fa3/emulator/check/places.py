"""Where something happened: role, warp, Python line, PTX line."""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import fa3

if TYPE_CHECKING:
    from fa3.sass.ptx_code import Statement

PACKAGE = Path(fa3.__file__).parent


@dataclass(frozen=True)
class Place:
    """A statement as a warp of some role executed it. `warp` is -1 where no single warp is meant."""

    role: str
    warp: int
    file: str
    """Relative to the package's parent where the file belongs to the package."""
    line: int
    text: str
    """The Python line, stripped; empty if the file cannot be read."""
    ptx_line: int
    ptx: str
    rank: int | None = None
    """Of the CTA in its cluster; None where a cluster is one CTA."""

    @classmethod
    def of(cls, role: str, warp: int, at: Statement | None, rank: int | None = None) -> Place:
        if at is None or at.source is None:
            ptx, line = (str(at), at.line) if at else ("", 0)
            return cls(role, warp, "", 0, "", line, ptx[:120], rank)
        file = at.source.file
        return cls(role, warp, shown(file), at.source.line, text_of(file, at.source.line), at.line, str(at)[:120], rank)

    @property
    def line_of_source(self) -> tuple[str, int]:
        """File and line; the PTX line where no Python line is known."""
        return (self.file, self.line) if self.file else ("PTX", self.ptx_line)

    def __str__(self) -> str:
        who = f"{self.role} (warp {self.warp})" if self.warp >= 0 else self.role
        who += "" if self.rank is None else f" of CTA rank {self.rank}"
        if not self.file:
            return f"{who} at PTX line {self.ptx_line}: {self.ptx}" if self.ptx_line else who
        return f"{who} at {self.file}:{self.line} (PTX line {self.ptx_line}): {self.text}"


def short(at: Statement | None) -> str:
    """The Python line for use within a sentence, such as "fa3/pipeline/ring.py:40"."""
    if at is None:
        return "an unknown line"
    return f"{shown(at.source.file)}:{at.source.line}" if at.source else f"PTX line {at.line}"


@cache
def shown(file: str) -> str:
    """A path as the report prints it: from the package on, wherever the kernel was compiled."""
    inside = _inside(file)
    return f"{PACKAGE.name}/{inside}" if inside else file


@cache
def text_of(file: str, line: int) -> str:
    """A line of Python, from this machine's own copy of the package if the path is another machine's."""
    found = linecache.getline(file, line)
    inside = _inside(file)
    if not found and inside:
        found = linecache.getline(str(PACKAGE / inside), line)
    return found.strip()


def _inside(file: str) -> str:
    """The path within the package, or "" if the file is not part of it."""
    _, separator, inside = file.rpartition(f"/{PACKAGE.name}/")
    return inside if separator and (PACKAGE / inside).exists() else ""
