"""What the forward's GEMMs compute with: the blocks of Q, K and V that they read, and the keys that get weight.

A wrong number in O does not say where it came from. These checks do: a box loaded from the wrong rows is found at its
load, and a mask that hides a key too many or too few at the GEMM that takes P.

    wrong block   for the rows whose LSE a warpgroup stores, its GEMMs must have read those rows of Q, and all blocks of
                  keys and values that they see, from the last to the first, of their own head
    wrong mask    an element of P is 0 exactly where the key is hidden; good for scores of a row that lie within a
                  factor of e^16, or the weight of a visible key may round to 0
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fa3.config.types import ROWS_OF_WARPGROUP
from fa3.emulator.check.boxes import box_of
from fa3.emulator.check.checker import Checker, Site, site_of
from fa3.emulator.check.names import ForwardNames
from fa3.emulator.operands import parts
from fa3.emulator.warp import ALL_LANES, lanes_of
from fa3.pipeline.schedule import WARPS_PER_WARPGROUP

if TYPE_CHECKING:
    from fa3.emulator.blocks import Step
    from fa3.emulator.machine import Machine
    from fa3.emulator.observe import Addresses
    from fa3.emulator.operations import Operation, Words
    from fa3.emulator.sync import MBarrier
    from fa3.emulator.warp import Mask, Warp
    from fa3.sass.ptx_code import Statement

BLOCK, MASK = "wrong block", "wrong mask"
K_OF_MMA = 16
ROW_STEP = 8
"""Between the two rows of a thread."""
_LANES = np.arange(32)
_DOWN, _RIGHT = np.array([0, 8, 0, 8]), np.array([0, 0, 8, 8])
_ROWS = np.broadcast_to(_DOWN[None, :, None] + _LANES // 4, (2, 4, 32))
_COLUMNS = np.arange(2)[:, None, None] + _RIGHT[None, :, None] + _LANES % 4 * 2
"""(half, register, lane) -> row and column of an element of A (`fa3.layouts.fragments.a_operand_16`)."""
_LOW, _HIGH = np.uint32(0x7FFF), np.uint32(0x7FFF0000)
"""The bits of the two elements of a register, without their signs."""


@dataclass(frozen=True)
class Box:
    """A box in shared memory and the load that brought it. `place`: (row, head, batch) of its first element."""

    ring: str
    place: tuple[int, int, int]
    load: Site


@dataclass
class Gemms:
    """What the GEMMs of a warp have read since it last stored: by batch, the boxes and the first WGMMA."""

    scores: list[tuple[set[Box], Site]] = field(default_factory=list)
    outputs: list[tuple[set[Box], Site]] = field(default_factory=list)


class Dataflow(Checker):
    def __init__(self, names: ForwardNames) -> None:
        super().__init__(names)
        self.config = names.key.config
        self._lanes: dict[Warp, int] = {}
        self._boxes: defaultdict[Any, dict[int, Box]] = defaultdict(dict)
        """CTA -> first word in shared memory -> box."""
        self._starts: dict[int, tuple[Words, list[int]]] = {}
        self._step: defaultdict[Warp, int] = defaultdict(int)
        """WGMMAs since the last fence."""
        self._gemms: defaultdict[Warp, Gemms] = defaultdict(Gemms)
        self._expectations: dict[tuple[int, int], tuple[NDArray[np.bool_], NDArray[np.bool_]]] = {}
        self._waited: dict[Warp, Site] = {}
        """The last wait for keys or values."""

    def started(self, machine: Machine) -> None:
        tensors = machine.launch.tensors
        self.rows, self.heads = tensors["q"].shape[1:3]
        self.keys, heads_kv = tensors["k"].shape[1:3]
        self.group = self.heads // heads_kv
        self.lse = tensors["lse"]
        self.rows_of = {
            at.line: [machine.program.registers[name].row for name in parts(at.operands[1])]
            for at in machine.program.statements
            if at.opcode.startswith("wgmma.mma_async") and at.operands[1].startswith("{")
        }

    def stepping(self, warp: Warp, step: Step, mask: Mask | None) -> None:
        if step.kind.startswith("cp.async.bulk.tensor"):
            self._lanes[warp] = lanes_of(mask)

    def fenced(self, warp: Warp, at: Statement) -> None:
        if at.opcode.startswith("wgmma.fence"):
            self._step[warp] = 0

    def passed(self, warp: Warp, at: Statement, barrier: MBarrier, parity: int) -> None:
        plan = self.names.plan(barrier.address)
        if plan and plan.edge in ("k", "v"):
            self._waited[warp] = site_of(warp, at)

    # ---- what is read
    def issued(self, warp: Warp, operation: Operation) -> None:
        if operation.kind == "tma.load":
            self._loaded(warp, operation)
        elif operation.kind == "wgmma":
            self._multiplied(warp, operation)

    def _loaded(self, warp: Warp, operation: Operation) -> None:
        box = box_of(operation, self._lanes.get(warp, ALL_LANES))
        if box is not None and len(operation.writes):
            first = int(operation.writes[0])
            row, head, batch = box[1][1:]
            self._boxes[warp.cta][first] = Box(
                self.names.buffer(4 * first), (row, head, batch), site_of(warp, operation.at)
            )

    def _multiplied(self, warp: Warp, operation: Operation) -> None:
        step, site = self._step[warp], site_of(warp, operation.at)
        self._step[warp] += 1
        read = {box for start in self._starts_of(warp, operation.reads) if (box := self._boxes[warp.cta].get(start))}
        gemms = self._gemms[warp]
        batches = gemms.outputs if operation.registers_read else gemms.scores
        if step == 0:
            batches.append((set(), site))
        if batches:
            batches[-1][0].update(read)
        if operation.registers_read and gemms.scores:
            self._weights(warp, operation, step, read, gemms)

    def _starts_of(self, warp: Warp, words: Words) -> list[int]:
        """First words of the boxes that these words lie in."""
        known = self._starts.get(id(words))
        if known is None or known[0] is not words:
            starts = np.array(sorted(self._boxes[warp.cta]))
            found = np.unique(np.searchsorted(starts, words, "right")) - 1 if len(starts) else np.empty(0, int)
            known = self._starts[id(words)] = (words, [int(starts[i]) for i in found if i >= 0])
        return known[1]

    # ---- which keys get weight
    def _weights(self, warp: Warp, operation: Operation, step: int, read: set[Box], gemms: Gemms) -> None:
        scores = gemms.scores[min(len(gemms.outputs), len(gemms.scores)) - 1]
        queries = next((box for box in scores[0] if box.ring == "q"), None)
        values = next((box for box in read if box.ring == "v"), None)
        if queries is None or values is None:
            return
        row = queries.place[0] + ROWS_OF_WARPGROUP // WARPS_PER_WARPGROUP * (warp.index % WARPS_PER_WARPGROUP)
        key = values.place[0] + K_OF_MMA * step
        pairs = warp.registers[self.rows_of[operation.at.line]]
        zero = np.stack([pairs & _LOW, pairs & _HIGH]) == 0
        hidden, stored = self._expected(row, key)
        wrong = (hidden != zero) & stored
        if wrong.any():
            half, register, lane = (int(i[0]) for i in np.nonzero(wrong))
            self._mask(
                warp, operation, row + int(_ROWS[half, register, lane]), key + int(_COLUMNS[half, register, lane]),
                scores[1],
            )  # fmt: skip

    def _expected(self, row: int, key: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """(half, register, lane): which elements of P are hidden, and which belong to rows that exist, for the first
        row of a warp and the first key of a WGMMA."""
        known = self._expectations.get((row, key))
        if known is None:
            rows = row + _ROWS
            known = self._expectations[row, key] = (key + _COLUMNS >= self._limit(rows), rows < self.rows)
        return known

    def _limit(self, row: Any) -> Any:
        """The first key that a row does not see."""
        limit = row + 1 + self.keys - self.rows if self.config.causal else np.full_like(row, self.keys)
        return np.minimum(limit, self.keys)

    def _mask(self, warp: Warp, operation: Operation, row: int, key: int, scores: Site) -> None:
        limit = int(self._limit(np.array(row)))
        gives = "gives weight to" if key >= limit else "gives no weight to"
        happened = (
            f"{self.names.warp(warp.index)} {gives} key {key} in row {row}, which sees the keys below {max(limit, 0)}."
        )
        self.find(MASK, site_of(warp, operation.at), happened, scores)

    # ---- whose rows they are
    def memory(self, warp: Warp, at: Statement, addresses: Addresses, nbytes: int, write: bool) -> None:
        if not write or warp.index % WARPS_PER_WARPGROUP or not len(addresses):
            return
        index = (int(addresses[0]) - self.lse.data_ptr()) // self.lse.element_size()
        if 0 <= index < self.lse.numel():
            batch, head, row = (int(i) for i in np.unravel_index(index, self.lse.shape))
            if row % ROWS_OF_WARPGROUP < ROW_STEP:  # its upper rows, which it stores first
                self._compare(warp, self._gemms.pop(warp, Gemms()), (row - row % ROWS_OF_WARPGROUP, head, batch))

    def _compare(self, warp: Warp, gemms: Gemms, rows: tuple[int, int, int]) -> None:
        """Everything that was read for these (first row, head, batch)."""
        first, head, batch = rows
        last = min(first + ROWS_OF_WARPGROUP, self.rows) - 1
        n = self.config.tile_n
        blocks = -(-max(int(self._limit(np.array(last))), 0) // n)
        due = [(n * block, head // self.group, batch) for block in reversed(range(blocks))]
        for what, batches in (("scores", gemms.scores), ("outputs", gemms.outputs)):
            if len(batches) != len(due):
                happened = (
                    f"{self.names.warp(warp.index)} reads {len(batches)} blocks for the {what} of rows {first} to "
                    f"{last} of head {head}, which see {len(due)}."
                )
                site = batches[-1][1] if batches else self._waited.get(warp, Site(warp.index, None))
                self.find(BLOCK, site, happened)
            for (boxes, gemm), place in zip(batches, due, strict=False):
                for box in boxes:
                    self._place(warp, box, rows if box.ring == "q" else place, gemm, rows)

    def _place(self, warp: Warp, box: Box, due: tuple[int, int, int], gemm: Site, rows: tuple[int, int, int]) -> None:
        if box.place != due:
            happened = (
                f"{self.names.warp(warp.index)} computes rows {rows[0]} and following of head {rows[1]} with "
                f"{box.ring} from row {box.place[0]}, head {box.place[1]}, batch {box.place[2]}, which were loaded "
                f"here; due are those from row {due[0]}, head {due[1]}, batch {due[2]}."
            )
            self.find(BLOCK, box.load, happened, gemm, box.ring)
