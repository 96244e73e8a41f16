"""A warp: registers of 32 lanes, and where in the program each of its lanes is.

Lanes that branched apart are *fragments* with a program counter and a mask each. The fragment with the lowest counter
runs, and fragments that meet become one; nobody overtakes a fragment that waits. That is what the compiler's
convergence barriers amount to in code without irreducible loops.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fa3.emulator.operands import DTYPES
from fa3.emulator.operations import Group, Operation
from fa3.emulator.sync import Wait

if TYPE_CHECKING:
    from fa3.emulator.blocks import Block
    from fa3.emulator.cta import Cta
    from fa3.sass.ptx_code import Statement

LANES = 32
ALL_LANES = (1 << LANES) - 1
Mask = NDArray[np.bool_]
UNWRITTEN = 0x7FC0DEAD
"""What registers hold before they are written: a NaN that is easy to recognise."""


@dataclass(eq=False)
class Fragment:
    """Lanes of a warp that are at the same place; `mask` None means all 32."""

    at: int
    mask: Mask | None


class Warp:
    """One warp of a CTA."""

    def __init__(self, cta: Cta, index: int) -> None:
        self.cta, self.index = cta, index
        self.fragments = [Fragment(0, None)]
        self.views = _banks(cta.machine.program.bank_sizes)
        self.registers: NDArray[np.uint32] = self.views["u4"]
        self.at: Statement = cta.machine.program.statements[0]
        self.waiting: Wait | None = None
        self.inside: int | None = None
        """Generation of the named barrier that it has entered and not left."""
        self.polled: tuple[int, int] | None = None
        """Address and value of its last acquiring load."""
        self.retrying = False
        """Whether it comes back to an instruction at which it had to wait."""
        self.setmaxnreg: int | None = None
        self.executed = 0
        self.open: dict[str, list[Operation]] = {"wgmma": [], "bulk": []}
        """Operations that no commit has closed yet."""
        self.groups: dict[str, list[Group]] = {"wgmma": [], "bulk": []}
        """Closed groups that no wait has covered yet, oldest first."""
        self.committed = {"wgmma": 0, "bulk": 0}
        self.symbols = _special_registers(cta, index)

    @property
    def exited(self) -> bool:
        return not self.fragments

    @property
    def lanes(self) -> int:
        """The lanes that have not exited, as a set of bits."""
        found = 0
        for fragment in self.fragments:
            found |= lanes_of(fragment.mask)
        return found

    def special(self, name: str) -> Any:
        """A special register such as %tid.x."""
        return self.symbols[name]

    def run(self, blocks: int) -> None:
        """Executes up to `blocks` basic blocks; ends earlier when the warp exits or has to wait."""
        code = self.cta.machine.code
        while blocks and self.fragments:
            blocks -= 1
            fragment = self._lowest()
            block = code.block(fragment.at)
            if not self._steps(block, fragment.mask):
                return
            self._leave(block, fragment)
        if not self.fragments:
            self.cta.warp_exited(self)

    def _steps(self, block: Block, mask: Mask | None) -> bool:
        """False if the warp has to wait."""
        observers = self.cta.machine.observers
        for step in block.steps:
            self.at = step.statements[0]
            if observers and not self.retrying:
                for observer in observers:
                    observer.stepping(self, step, mask)
            self.retrying = False
            if step.run(self, mask):
                self.retrying = True
                for observer in observers:
                    observer.blocked(self, self.at)
                return False
            self.executed += len(step.statements)
        return True

    def _lowest(self) -> Fragment:
        """The fragment to run; all that are at its place join it."""
        fragments = self.fragments
        if len(fragments) == 1:
            return fragments[0]
        lowest = min(fragments, key=lambda fragment: fragment.at)
        for other in [f for f in fragments if f is not lowest and f.at == lowest.at]:
            joined = lowest.mask | other.mask  # type: ignore[operator]
            lowest.mask = None if joined.all() else joined
            fragments.remove(other)
        return lowest

    def _leave(self, block: Block, fragment: Fragment) -> None:
        """Where the fragment goes at the end of a block."""
        if block.branch is None:
            fragment.at = block.following
            return
        self.at = block.branch
        self.executed += 1
        if block.predicate is None:
            self._jump(fragment, block.target)
            return
        taken = self.views["p"][block.predicate]
        if block.branch.negated:
            taken = ~taken
        if fragment.mask is not None:
            taken = taken & fragment.mask
            rest = fragment.mask & ~taken
        else:
            rest = ~taken
        if not taken.any():
            fragment.at = block.following
        elif not rest.any():
            self._jump(fragment, block.target)
        else:
            fragment.at, fragment.mask = block.following, rest
            if block.target >= 0:
                self.fragments.append(Fragment(block.target, taken.copy()))
            else:
                self.cta.cluster.barrier.try_complete()

    def _jump(self, fragment: Fragment, target: int) -> None:
        """To the block of a branch, or out of the kernel."""
        if target < 0:
            self.fragments.remove(fragment)
            self.cta.cluster.barrier.try_complete()
        else:
            fragment.at = target


def lanes_of(mask: Mask | None) -> int:
    """The lanes of a mask as a set of bits."""
    if mask is None:
        return ALL_LANES
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


def _banks(sizes: dict[str, int]) -> dict[str, Any]:
    """All views of the register banks: one row for each register, one column for each lane."""
    r = np.full((max(1, sizes["r"]), LANES), UNWRITTEN, np.uint32)
    d = np.full((max(1, sizes["d"]), LANES), UNWRITTEN, np.uint64)
    h = np.full((max(1, sizes["h"]), LANES), 0xDEAD, np.uint16)
    banks: dict[str, Any] = {"u4": r, "u8": d, "u2": h, "p": np.zeros((max(1, sizes["p"]), LANES), np.bool_)}
    for view, of in (("i4", "u4"), ("f4", "u4"), ("i8", "u8"), ("i2", "u2")):
        banks[view] = banks[of].view(DTYPES[view])
    return banks


def _special_registers(cta: Cta, index: int) -> dict[str, Any]:
    lane = np.arange(LANES, dtype=np.uint32)
    thread = lane + np.uint32(LANES * index)
    x, y, z = cta.machine.launch.block
    bx, by, bz = cta.block
    gx, gy, gz = cta.machine.launch.grid
    scalars = {
        "%warpid": index, "%ctaid.x": bx, "%ctaid.y": by, "%ctaid.z": bz, "%nctaid.x": gx, "%nctaid.y": gy,
        "%nctaid.z": gz, "%ntid.x": x, "%ntid.y": y, "%ntid.z": z, **_cluster_registers(cta),
    }  # fmt: skip
    arrays = {
        "%tid.x": thread % x, "%tid.y": thread // x % y, "%tid.z": thread // (x * y), "%laneid": lane,
        "%lanemask_lt": (np.uint32(1) << lane) - np.uint32(1),
    }  # fmt: skip
    return {**arrays, **{name: np.uint32(value) for name, value in scalars.items()}}


def _cluster_registers(cta: Cta) -> dict[str, int]:
    launch, cluster = cta.machine.launch, cta.cluster
    found = {
        "%cluster_ctarank": cta.rank,
        "%cluster_nctarank": prod(launch.cluster),
        "%is_explicit_cluster": int(cta.machine.explicit_cluster),
    }
    grid = [ctas // size for ctas, size in zip(launch.grid, launch.cluster, strict=True)]
    for name, sizes in (
        ("%cluster_ctaid", cta.inside), ("%cluster_nctaid", launch.cluster), ("%clusterid", cluster.place),
        ("%nclusterid", grid),
    ):  # fmt: skip
        found |= {f"{name}.{axis}": size for axis, size in zip("xyz", sizes, strict=True)}
    return found
