"""What the PTX of a kernel asks for: its matrix instructions and its register changes."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class Wgmma:
    """How often one form of `wgmma.mma_async` occurs. `operands`: A in shared memory (SS) or in registers (RS)."""

    shape: str
    types: str
    operands: str
    count: int

    def __str__(self) -> str:
        return f"{self.shape} {self.operands} {self.types} x{self.count}"


_WGMMA = re.compile(
    r"wgmma\.mma_async(?:\.sp)?\.sync\.aligned\.(m\d+n\d+k\d+)\.([\w.]+)\s+\{[^}]*\}\s*,\s*(\{?)", re.DOTALL
)


def wgmma_forms(ptx: str) -> tuple[Wgmma, ...]:
    """Counts the `wgmma` of each form, in the order in which they first occur."""
    found = Counter((shape, types, "RS" if brace else "SS") for shape, types, brace in _WGMMA.findall(ptx))
    return tuple(Wgmma(*form, count) for form, count in found.items())


def requested_registers(ptx: str) -> dict[str, tuple[int, ...]]:
    """The `setmaxnreg` values that the kernel asks for, whether or not ptxas honours them."""
    found = re.findall(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32\s+(\d+)", ptx)
    return {kind: tuple(dict.fromkeys(int(value) for name, value in found if name == kind)) for kind in ("dec", "inc")}
