"""All instructions that are not elementwise: which function makes their executable form.

special_lanes.py    between lanes of a warp, and between lanes and memory
special_sync.py     barriers, fences, register budgets
special_async.py    TMA, bulk copies, WGMMA
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa3.emulator import special_async, special_lanes, special_sync
from fa3.emulator.operands import Operands, unsupported
from fa3.sass.ptx_code import Statement

if TYPE_CHECKING:
    from fa3.emulator.blocks import Run

_TABLE = {**special_lanes.TABLE, **special_sync.TABLE, **special_async.TABLE}
"""Beginning of an opcode -> maker. The longest beginning that fits wins."""
_BY_LENGTH = sorted(_TABLE, key=len, reverse=True)
_MAY_WAIT = (
    "mbarrier.try_wait", "bar.sync", "barrier.sync", "barrier.cluster.wait", "cp.async.bulk.wait_group", "ld.acquire",
    "ld.relaxed",
)  # fmt: skip


def may_wait(at: Statement) -> bool:
    """Whether a warp may have to stop at this instruction."""
    return at.opcode.startswith(_MAY_WAIT)


def decode(at: Statement, operands: Operands) -> tuple[str, Run]:
    """(kind, executable form). Unsupported if the instruction is unknown."""
    for beginning in _BY_LENGTH:
        if at.opcode.startswith(beginning) and at.opcode[len(beginning) :][:1] in ("", ".", ":"):
            return beginning, _TABLE[beginning](at, operands)
    raise unsupported(at)
