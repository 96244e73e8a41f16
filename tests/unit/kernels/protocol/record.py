"""Runs the text of `Load.run` and `Math.run` for a few tiles, and writes down what it asks of the hardware.

Rings, GEMMs, softmax, mask, tile order and epilogue are stand-ins that note each call. An event remembers the lines of
the kernel that it came from.
"""

from __future__ import annotations

import linecache
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from fa3.config.budget import forward_topology
from fa3.config.types import ROWS_OF_WARPGROUP, ForwardConfig
from fa3.kernels.parts.tiles import Tile
from fa3.pipeline import Cursor
from fa3.pipeline.barriers import NoTurn

from .text import EDITED, PATHS, KernelText

MAX_EVENTS = 10_000
"""More than any case needs: a loop that runs on is a mistake, too."""


# ------------------------------------------------------------------------------------------------------------- problems


@dataclass(frozen=True)
class TileCase:
    """What the mask says of a tile: warpgroup i sees the first `own[i]` key blocks, the first `clear[i]` of them whole.

    Without `clear`, the last block that a warpgroup sees is cut.
    """

    own: tuple[int, ...]
    clear: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.clear:
            object.__setattr__(self, "clear", tuple(max(blocks - 1, 0) for blocks in self.own))

    @property
    def blocks(self) -> int:
        return max(self.own)


@dataclass(frozen=True)
class Case:
    """The tiles that one CTA computes, one after the other, and the row of the table that it runs by."""

    algorithm: str
    tiles: tuple[TileCase, ...]
    stages: int = 2
    turns: str = "pingpong"
    cuts_one_block: bool = False
    blocks_without_turn: int | None = None
    """None: what the main loop says."""

    @property
    def groups(self) -> int:
        return len(self.tiles[0].own)

    @property
    def config(self) -> ForwardConfig:
        return ForwardConfig(
            64,
            64,
            causal=not self.cuts_one_block,
            tile_m=ROWS_OF_WARPGROUP * self.groups,
            tile_n=64,
            stages=self.stages,
            algorithm=self.algorithm,
            turns=self.turns,
        )

    @cached_property
    def stages_of(self) -> dict[str, int]:
        """How many stages each ring has."""
        return {plan.edge.name: plan.edge.stages for plan in forward_topology(self.config).plans}

    def number(self, index: int) -> int:
        """The number of the CTA's tile, or the first number past all tiles."""
        return 5 + 3 * min(index, len(self.tiles))

    def tile(self, number: int) -> Tile:
        """Four different numbers, so that none can stand for another."""
        index = self.index(number)
        return Tile(m_block=index, head=100 + index, head_kv=200 + index, batch=300 + index)

    def index(self, number: int) -> int:
        return (number - 5) // 3


# --------------------------------------------------------------------------------------------------------------- events


class Spot(NamedTuple):
    """A stage of a ring in one of its laps."""

    ring: str
    stage: int
    phase: int

    @classmethod
    def of(cls, ring: str, cursor: Cursor) -> Spot:
        return cls(ring, cursor.stage, cursor.phase)

    def __str__(self) -> str:
        return f"{self.ring}[{self.stage}] phase {self.phase}"


@dataclass(frozen=True)
class Event:
    """One call: what, on which stages, with which further facts, and the kernel's lines, outermost first."""

    what: str
    spots: tuple[Spot, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    lines: tuple[tuple[str, int], ...] = ()

    @property
    def spot(self) -> Spot:
        return self.spots[-1]

    def __str__(self) -> str:
        facts = [f"{name}={value}" for name, value in self.facts.items() if name in ("block", "in_flight", "number")]
        return " ".join([self.what, *(str(spot) for spot in self.spots), *facts])

    @property
    def place(self) -> str:
        """The last two of the lines; a file's name only where it changes."""
        words, before = [], ""
        for path, line in self.lines[-2:]:
            name = Path(path.removesuffix(EDITED)).name
            words.append(str(line) if name == before else f"{name}:{line}")
            before = name
        return " > ".join(words)

    @property
    def source(self) -> str:
        """The text of the innermost line."""
        return linecache.getline(*self.lines[-1]).strip() if self.lines else ""


@dataclass
class Record:
    """What one role did, call by call."""

    who: str
    events: list[Event] = field(default_factory=list)

    def __call__(self, what: str, *spots: Spot, **facts: Any) -> None:
        if len(self.events) == MAX_EVENTS:
            raise AssertionError(f"{self.who}: more than {MAX_EVENTS} steps; does a loop never end?")
        self.events.append(Event(what, spots, facts, kernel_lines()))

    def noting(self, what: str, *names: str) -> Any:
        """A function that notes its arguments under these names."""

        def call(*arguments: Any) -> None:
            self(what, **dict(zip(names, arguments, strict=True)))

        return call


def kernel_lines() -> tuple[tuple[str, int], ...]:
    """Files and lines of the kernel that are being run, outermost first."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.removesuffix(EDITED) in PATHS.values():
            found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(reversed(found))


# ------------------------------------------------------------------------------------------------------------ stand-ins


@dataclass(frozen=True)
class RecordedRing:
    """Stands for `fa3.pipeline.ring.Ring`, which tests/unit/pipeline/test_ring_twin.py holds against the model."""

    record: Record
    name: str
    stages: int

    def cursor(self) -> Cursor:
        return Cursor.start(self.stages)

    def acquire(self, cursor: Cursor) -> None:
        self.record("acquire", Spot.of(self.name, cursor))

    def commit(self, cursor: Cursor) -> None:
        self.record("commit", Spot.of(self.name, cursor))

    def wait(self, cursor: Cursor) -> None:
        self.record("wait", Spot.of(self.name, cursor))

    def release(self, cursor: Cursor) -> None:
        self.record("release", Spot.of(self.name, cursor))

    def barrier(self, cursor: Cursor) -> tuple[str, int]:
        return (self.name, cursor.stage)


@dataclass(frozen=True)
class Part:
    """Something with a name that is indexed: shared memory by stage, coordinates by (head, batch), boxes by block."""

    name: str
    index: tuple[Any, ...] = ()

    def __getitem__(self, index: Any) -> Part:
        return Part(self.name, (*self.index, *(i for i in index if i is not None)))


@dataclass(frozen=True)
class Numbers:
    """The slots for tile numbers in shared memory, as `load` writes them and a math warpgroup reads them."""

    record: Record
    case: Case

    def __setitem__(self, stage: int, number: int) -> None:
        self.record("write number", stage=stage, number=number)

    def __getitem__(self, stage: int) -> int:
        self.record("read number", stage=stage)
        return self.case.number(sum(event.what == "read number" for event in self.record.events))


@dataclass(frozen=True)
class Counter:
    record: Record
    case: Case

    def draw(self) -> int:
        self.record("draw")
        return self.case.number(sum(event.what == "draw" for event in self.record.events))


@dataclass(frozen=True)
class Order:
    record: Record
    case: Case

    @property
    def space(self) -> SimpleNamespace:
        return SimpleNamespace(count=self.case.number(len(self.case.tiles)))

    def tile(self, number: int) -> Tile:
        self.record("tile", number=number)
        return self.case.tile(number)


@dataclass(frozen=True)
class Mask:
    """Stands for fa3.kernels.parts.mask, whose numbers tests/unit/kernels/test_mask.py checks."""

    record: Record
    case: Case

    @property
    def cuts_one_block(self) -> bool:
        return self.case.cuts_one_block

    def blocks(self, first_row: int, rows: int) -> int:
        tile, group = self._place(first_row)
        if rows == self.case.config.tile_m:
            assert group == 0, f"row {first_row} is not a tile's first"
            return tile.blocks
        assert rows == ROWS_OF_WARPGROUP, f"{rows} rows are neither a tile's nor a warpgroup's"
        return tile.own[group]

    def clear_blocks(self, first_row: int) -> int:
        tile, group = self._place(first_row)
        return tile.clear[group]

    def hide(self, acc_S: Any, hidden: Any, first_row: int, n_block: int) -> None:
        self.record("hide", acc=acc_S, hidden=hidden, first_row=first_row, block=n_block)

    def _place(self, row: int) -> tuple[TileCase, int]:
        index, rest = divmod(row, self.case.config.tile_m)
        return self.case.tiles[index], rest // ROWS_OF_WARPGROUP


@dataclass(frozen=True)
class Accumulator:
    record: Record
    name: str

    def fill(self, value: float) -> None:
        self.record("fill", acc=self.name, value=value)

    def __str__(self) -> str:
        return self.name


class RecordedGemms:
    """The kernel's `Gemms`, with operands that know their stage. An event names the stages by the cursors that the main
    loop handed over, and `a`, `b` as they reached the GEMM."""

    def __init__(self, text: KernelText, record: Record, plan: Any):
        self.record, self.issued = record, []
        self.acc_S, self.acc_O = "S", Accumulator(record, "O")
        operands = [Part(name) for name in ("q", "k", "v")]
        self.kernels = text.forward.Gemms(plan, *operands, self.acc_S, "P", self.acc_O)
        text.forward.start_gemm = lambda *issued: self.issued.append(issued)
        text.forward.as_a_operand_16 = lambda registers: registers
        text.forward.convert_16 = record.noting("take_p", "source", "target")

    def start_scores(self, q: Cursor, k: Cursor) -> None:
        self.kernels.start_scores(q, k)
        self._note("start_scores", Spot.of("q", q), Spot.of("k", k))

    def start_output(self, v: Cursor) -> None:
        self.kernels.start_output(v)
        self._note("start_output", Spot.of("v", v))

    def take_p(self) -> None:
        self.kernels.take_p()

    def _note(self, what: str, *spots: Spot) -> None:
        mma, acc, a, b, accumulate = self.issued.pop()
        assert not self.issued, f"{what} issues more than one GEMM"
        self.record(what, *spots, gemm=(mma, str(acc), a, b, accumulate))


# ---------------------------------------------------------------------------------------------------------------- roles


def bind(text: KernelText, record: Record) -> None:
    """Lets the modules' own helpers report to this record."""
    for module in (text.forward, text.overlap):
        module.wait_gemms = record.noting("wait_gemms", "in_flight")
    text.forward.store_lse = record.noting("store lse", "target", "lse", "tile", "row_block")
    text.forward.partition = lambda operand, smem, boxes: (smem, boxes)


def plain_cute(record: Record, case: Case) -> SimpleNamespace:
    """What the roles use of `cute`."""

    def copy(atom: str, boxes: Part, smem: Part, tma_bar_ptr: Any) -> None:
        (stage,), block = smem.index, boxes.index[-1]
        record("copy", atom=atom, boxes=boxes, smem=smem.name, stage=stage, barrier=tma_bar_ptr, block=block)

    arch = SimpleNamespace(
        block_idx=lambda: (case.number(0), 0, 0), elect_one=nullcontext, sync_warp=record.noting("sync_warp")
    )
    return SimpleNamespace(arch=arch, copy=copy, local_tile=lambda tensor, shape, coordinate: tensor)


def rings(record: Record, case: Case) -> dict[str, RecordedRing]:
    return {name: RecordedRing(record, name, stages) for name, stages in case.stages_of.items()}


def plan(case: Case) -> SimpleNamespace:
    return SimpleNamespace(config=case.config, qk="qk", pv="pv")


def record_load(text: KernelText, case: Case) -> list[Event]:
    """What the load warp does."""
    record = Record("load")
    bind(text, record)
    text.forward.cute = plain_cute(record, case)
    operands = SimpleNamespace(**{name: SimpleNamespace(atom=name, coordinates=Part(name)) for name in ("q", "k", "v")})
    text.forward.Load(
        plan(case),
        operands,
        rings(record, case),
        Part("q"),
        Part("k"),
        Part("v"),
        Numbers(record, case),
        Order(record, case),
        Counter(record, case),
        Mask(record, case),
    ).run()
    return record.events


def record_math(text: KernelText, case: Case, group: int) -> list[Event]:
    """What a warp of math warpgroup `group` does."""
    record = Record(f"math{group}")
    bind(text, record)
    text.forward.cute = plain_cute(record, case)
    softmax = SimpleNamespace(
        extremum=SimpleNamespace(hidden="hidden"),
        reset=record.noting("reset"),
        step=record.noting("step", "acc"),
        rescale=record.noting("rescale", "acc"),
        finish=lambda acc: record("finish", acc=acc) or "lse",
    )
    turns = SimpleNamespace(**{name: record.noting(f"{name} turn") for name in ("open", "wait", "give")})
    mask, shared = Mask(record, case), rings(record, case)
    rule = {} if case.blocks_without_turn is None else {"blocks_without_turn": case.blocks_without_turn}
    main_loop = text.main_loop(case.algorithm)(
        RecordedGemms(text, record, plan(case)),
        shared,
        turns if case.turns == "pingpong" else NoTurn(),
        softmax,
        mask,
        **rule,
    )
    epilogue = SimpleNamespace(
        store=record.noting("store O", "acc", "tile", "row_block"), drain=record.noting("drain stores")
    )
    text.forward.Math(
        plan(case), shared, Numbers(record, case), Order(record, case), mask, main_loop, epilogue, "LSE", group
    ).run()
    return record.events


@dataclass(frozen=True)
class Cta:
    """What all roles of a CTA do."""

    case: Case
    load: list[Event]
    math: tuple[list[Event], ...]

    @classmethod
    def of(cls, text: KernelText, case: Case) -> Cta:
        return cls(case, record_load(text, case), tuple(record_math(text, case, i) for i in range(case.groups)))
