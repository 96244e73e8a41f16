"""The protocol of the forward, as rules that a record is read against from its first event to its last.

A rule speaks of one role and needs no interleaving; what two roles do to one another is for `machine`. The rules know
the tiles of the case, and nothing of the main loops: Algorithm 1 and Algorithm 2 keep the same ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fa3.config.types import ROWS_OF_WARPGROUP

from .record import Case, Cta, Event, Part, Spot

SHOWN = 6
"""Events that a message shows before the one that broke a rule."""


class BrokenRule(AssertionError):
    """The message names role, tile and rule, and shows the kernel's lines that led there."""


def check(cta: Cta) -> None:
    """Raises BrokenRule for the first rule that a role of the CTA breaks."""
    LoadRules(cta.case).read(cta.load)
    for group, events in enumerate(cta.math):
        MathRules(cta.case, group).read(events)


def spot_of(ring: str, item: int, stages: int) -> Spot:
    """Where the ring's item number `item` lies, from 0."""
    return Spot(ring, item % stages, item // stages % 2)


@dataclass
class Rules:
    """Hands each event to the method of its name, and words what goes wrong."""

    case: Case
    read_so_far: list[Event] = field(default_factory=list, init=False)

    who = "nobody"

    def read(self, events: Sequence[Event]) -> None:
        for event in events:
            self.read_so_far.append(event)
            getattr(self, "on_" + event.what.lower().replace(" ", "_"))(event)
        self.end()

    def end(self) -> None:
        """After the last event."""

    def where(self) -> str:
        return self.who

    def require(self, holds: Any, broken: str) -> None:
        if holds:
            return
        shown = self.read_so_far[-SHOWN - 1 :]
        lines = [
            f"  {'->' if event is shown[-1] else '  '} {event!s:<38} {event.place:<32} {event.source[:72]}"
            for event in shown
        ]
        raise BrokenRule("\n".join([f"{self.where()}: {broken}", *lines]))

    def require_spot(self, spot: Spot, item: int, doing: str) -> None:
        """The cursor stands where the ring's next item lies."""
        stages = self.case.stages_of[spot.ring]
        expected = spot_of(spot.ring, item, stages)
        before = item > 0 and spot == spot_of(spot.ring, item - 1, stages)
        hint = "; the cursor has not advanced since the item before" if before else ""
        self.require(spot == expected, f"{doing} {spot}, but item {item} of the ring lies in {expected}{hint}")


# ----------------------------------------------------------------------------------------------------------------- load


@dataclass
class LoadRules(Rules):
    """Every stage is acquired in the ring's order, and filled with what is due: Q in the order of the warpgroups, K and
    V from the last block to the first, the numbers of the tiles as they were drawn."""

    acquired: dict[str, Spot | None] = field(default_factory=dict, init=False)
    fills: Counter[str] = field(default_factory=Counter, init=False)
    written: bool = field(default=False, init=False)
    draws: int = field(default=0, init=False)

    who = "load"

    def __post_init__(self) -> None:
        self.due = {name: list(self._due(name)) for name in ("q", "k", "v", "tile")}

    def _due(self, ring: str) -> Iterator[tuple[int, int, Any]]:
        """(tile, block or number, what the copy must be given) of each item."""
        for index, tile in enumerate(self.case.tiles):
            at = self.case.tile(self.case.number(index))
            if ring == "tile":
                yield index, self.case.number(index + 1), None
            elif ring == "q" and tile.blocks:
                for group in range(self.case.groups):
                    yield index, at.m_block * self.case.groups + group, (at.head, at.batch)
            elif ring in "kv":
                for block in reversed(range(tile.blocks)):
                    yield index, block, (at.head_kv, at.batch)

    def on_tile(self, event: Event) -> None:
        pass

    def on_draw(self, event: Event) -> None:
        self.draws += 1

    def on_acquire(self, event: Event) -> None:
        ring = event.spot.ring
        before = self.acquired.get(ring)
        self.require(before is None, f"acquires {event.spot} before {before} is filled and committed")
        self.require_spot(event.spot, self.fills[ring], "acquires")
        self.acquired[ring] = event.spot

    def on_copy(self, event: Event) -> None:
        ring, stage, boxes = event.facts["smem"], event.facts["stage"], event.facts["boxes"]
        self._must_hold(ring, stage)
        self.require(event.facts["atom"] == boxes.name == ring, f"copies {boxes.name} into the stages of {ring}")
        self.require(event.facts["barrier"] == (ring, stage), f"the copy into {ring}[{stage}] reports to another stage")
        self._must_be_due(ring, event.facts["block"], boxes.index[:-1])
        self.acquired[ring] = None

    def on_write_number(self, event: Event) -> None:
        self._must_hold("tile", event.facts["stage"])
        self.require(self.draws == self.fills["tile"] + 1, "publishes a number that it has not just drawn")
        self._must_be_due("tile", event.facts["number"], None)
        self.written = True

    def on_commit(self, event: Event) -> None:
        self.require(event.spot == self.acquired.get("tile"), f"commits {event.spot}, which it does not hold")
        self.require(self.written, f"commits {event.spot} before the number is written")
        self.acquired["tile"], self.written = None, False

    def _must_hold(self, ring: str, stage: int) -> None:
        held = self.acquired.get(ring)
        self.require(held and held.stage == stage, f"fills {ring}[{stage}] without having acquired it")

    def _must_be_due(self, ring: str, block: int, source: Any) -> None:
        item = self.fills[ring]
        self.require(item < len(self.due[ring]), f"fills {ring} once more than its {len(self.due[ring])} items")
        tile, expected, place = self.due[ring][item]
        doing = f"item {item} of {ring}, in tile {tile}, is block {block}"
        self.require(block == expected, f"{doing}; due is block {expected}")
        self.require(source == place, f"{doing} of (head, batch) {source}; due is {place}")
        self.fills[ring] += 1

    def end(self) -> None:
        for ring, due in self.due.items():
            self.require(self.fills[ring] == len(due), f"fills {ring} {self.fills[ring]} times; due are {len(due)}")
        self.require(
            not any(self.acquired.values()), "ends before it has filled and committed a stage that it acquired"
        )


# ----------------------------------------------------------------------------------------------------------------- math


@dataclass(frozen=True)
class Gemm:
    """In flight: what it computes, for which block, and the items that it reads."""

    kind: str
    block: int
    reads: tuple[tuple[str, int], ...]


@dataclass
class MathRules(Rules):
    """A warpgroup waits for what its GEMMs read, releases it once they are done, and adds each block's P V once."""

    group: int = 0

    def __post_init__(self) -> None:
        self.who = f"math{self.group}"
        self.tile_index = -1
        self.waited: Counter[str] = Counter()
        self.released: Counter[str] = Counter()
        self.read_items: set[tuple[str, int]] = set()
        self.used_tiles = 0  # with blocks, before this one: laps of the Q ring
        self.first_block = 0  # number, in the rings of K and V, of this tile's first block
        self.holds_turn = self.opened = self.drained = False
        self.finished = self.stored = self.lse_stored = True

    def where(self) -> str:
        return f"{self.who}, tile {self.tile_index}"

    # A tile begins and ends

    @property
    def tile(self) -> Any:
        return self.case.tiles[self.tile_index]

    @property
    def own(self) -> int:
        return self.tile.own[self.group]

    @property
    def passes(self) -> int:
        """Blocks of the tile that go by first."""
        return self.tile.blocks - self.own

    def block_of(self, item: int) -> int:
        return self.tile.blocks - 1 - (item - self.first_block)

    def on_tile(self, event: Event) -> None:
        self._tile_is_over()
        if self.tile_index >= 0 and self.tile.blocks:
            self.used_tiles += 1
            self.first_block += self.tile.blocks
        self.tile_index += 1
        self.require(event.facts["number"] == self.case.number(self.tile_index), "computes another tile's number")
        self.in_flight: list[Gemm] = []
        self.scores: tuple[int, str] | None = None  # block, "running" or "there" or "P"
        self.p: int | None = None  # block whose P waits in 16 bits
        self.correction: int | None = None  # block whose softmax asks for a rescale of O
        self.hidden: set[int] = set()
        self.steps = self.outputs = self.turns = 0
        self.was_reset = self.cleared = self.finished = self.stored = self.lse_stored = False
        self.number_read = self.warp_met = False
        self.q_waited = self.q_released = False

    def on_reset(self, event: Event) -> None:
        self.require(self.steps == 0, "resets the softmax after its first step")
        self.was_reset = True

    def on_fill(self, event: Event) -> None:
        self.require(event.facts == {"acc": "O", "value": 0.0} and not self.outputs, "fills something else than O")
        self.cleared = True

    def on_finish(self, event: Event) -> None:
        self.require(not self.in_flight, "finishes O while a GEMM is in flight; wait_gemms comes first")
        self.require(self.was_reset, "the softmax has not been reset for this tile")
        self.require(self.cleared, "O has not been set to 0 for this tile")
        self.require(
            self.outputs == self.own, f"adds {self.outputs} blocks' P V to O; the warpgroup sees {self.own} blocks"
        )
        for ring in ("k", "v"):
            due = self.first_block + self.tile.blocks
            self.require(self.released[ring] == due, f"has released {self.released[ring]} items of {ring}, not {due}")
            self.require(self.waited[ring] == due, f"has waited for {self.waited[ring]} items of {ring}, not {due}")
        self.require(self.q_released or not self.tile.blocks, "has not released q")
        self._turns_are_taken()
        self.finished = True

    def _turns_are_taken(self) -> None:
        if self.case.turns == "free":
            return
        self.require(not self.holds_turn, "keeps its turn past the tile; turns.give() is missing")
        due = max(self.tile.blocks - self._blocks_without_turn(), 0)
        self.require(self.turns == due, f"takes {self.turns} turns; the tile has {due}, for every warpgroup alike")

    def _blocks_without_turn(self) -> int:
        """The first blocks of a tile that a main loop computes outside a turn."""
        return {"plain": 0, "overlap": 1}[self.case.algorithm]

    def on_store_lse(self, event: Event) -> None:
        self.require(self.finished and event.facts["lse"] == "lse", "stores LSE before the softmax is finished")
        self._stores_its_rows(event)
        self.lse_stored = True

    def on_store_o(self, event: Event) -> None:
        self.require(self.finished, "stores O before the softmax is finished")
        self.require(self.released["tile"] == self.tile_index + 1, "stores O before the next tile's number is fetched")
        self._stores_its_rows(event)
        self.stored, self.drained = True, False

    def _stores_its_rows(self, event: Event) -> None:
        at = self.case.tile(self.case.number(self.tile_index))
        rows = at.m_block * self.case.groups + self.group
        self.require((event.facts["tile"], event.facts["row_block"]) == (at, rows), "stores to another tile's rows")

    def on_drain_stores(self, event: Event) -> None:
        self.drained = True

    def _tile_is_over(self) -> None:
        self.require(self.finished, "leaves the tile without softmax.finish")
        self.require(self.stored, "leaves the tile without storing O")
        self.require(self.lse_stored, "leaves the tile without storing LSE")

    def end(self) -> None:
        self._tile_is_over()
        self.require(self.tile_index + 1 == len(self.case.tiles), "stops before the last tile")
        self.require(self.drained, "ends before its stores have left shared memory")

    # Rings

    def on_wait(self, event: Event) -> None:
        ring = event.spot.ring
        if ring == "q":
            self.require(not self.q_waited, "waits for q a second time")
            self._q_spot(event.spot, "waits for")
            self.q_waited = True
            return
        item = self.waited[ring]
        self.require_spot(event.spot, item, "waits for")
        holds = item - self.case.stages_of[ring] >= self.released[ring]
        self.require(
            not holds, f'waits for {event.spot} and holds that stage itself: rings["{ring}"].release is missing'
        )
        self.waited[ring] += 1

    def on_release(self, event: Event) -> None:
        ring = event.spot.ring
        if ring == "q":
            self._q_spot(event.spot, "releases")
            self.require(self.q_waited, "releases q before it has arrived: no wait")
            self.require(not self.q_released, "releases q a second time")
            self._not_in_flight(event.spot, self.used_tiles)
            self.q_released = True
            return
        item = self.released[ring]
        self.require_spot(event.spot, item, "releases")
        self.require(item < self.waited[ring], f"releases {event.spot} before it has arrived: no wait")
        self._not_in_flight(event.spot, item)
        if ring == "tile":
            self.require(self.number_read, "releases the tile's number before it is read")
            self.require(self.warp_met, "one lane releases the tile's number while others may still read it")
        else:
            block, due = self.block_of(item), item - self.first_block >= self.passes
            self.require((ring, item) in self.read_items or not due, f"releases {ring} of block {block} unread")
        self.released[ring] += 1

    def _q_spot(self, spot: Spot, doing: str) -> None:
        expected = Spot("q", self.group, self.used_tiles % 2)
        self.require(spot == expected, f"{doing} {spot}, but its rows of this tile lie in {expected}")

    def _not_in_flight(self, spot: Spot, item: int) -> None:
        readers = [gemm for gemm in self.in_flight if (spot.ring, item) in gemm.reads]
        if readers:
            gemm = readers[0]
            self.require(
                False, f"releases {spot} while {gemm.kind} of block {gemm.block} may still read it: no wait_gemms"
            )

    def _held_item(self, spot: Spot, doing: str) -> int:
        """The item that lies in this stage, and that a wait has covered."""
        ring = spot.ring
        for item in range(self.released[ring], self.waited[ring]):
            if spot == spot_of(ring, item, self.case.stages_of[ring]):
                return item
        last = self.released[ring] - 1
        gone = last >= 0 and spot == spot_of(ring, last, self.case.stages_of[ring])
        why = "it has been released" if gone else f'rings["{ring}"].wait is missing before it'
        self.require(False, f"{doing} reads {spot}, which is not held: {why}")
        raise AssertionError

    def _read(self, item: tuple[str, int], doing: str) -> int:
        """Marks an item of K or V as read; returns its block, which must be the next one."""
        ring, number = item
        block = self.block_of(number)
        self.require(item not in self.read_items, f"{doing} reads {ring} of block {block} a second time")
        done = sum(name == ring and at >= self.first_block for name, at in self.read_items)
        self.require(done < self.own, f"{doing} once more than the {self.own} blocks that the warpgroup sees")
        due = self.own - 1 - done
        self.require(block == due, f"{doing} reads {ring} of block {block}; due is block {due}")
        self.read_items.add(item)
        return block

    # GEMMs

    def on_start_scores(self, event: Event) -> None:
        doing = "start_scores"
        q, k = event.spots
        self._q_spot(q, f"{doing} reads")
        self.require(self.q_waited, f'{doing} reads {q}, which is not held: rings["q"].wait is missing before it')
        self.require(not self.q_released, f"{doing} reads {q}, which is not held: it has been released")
        item = self._held_item(k, doing)
        block = self._read(("k", item), doing)
        if self.scores is not None:
            overwritten, state = self.scores
            what = {"P": "P", "running": "unfinished scores", "there": "scores"}[state]
            self.require(
                False, f"{doing} of block {block} overwrites {what} of block {overwritten}, not taken by take_p"
            )
        if self.case.turns == "pingpong" and self.own - 1 - block >= self._blocks_without_turn():
            self.require(self.holds_turn, f"{doing} of block {block} outside a turn: turns.wait() is missing before it")
        expected = ("qk", "S", ("q", q.stage), ("k", k.stage), False)
        self._operands_are(event, expected)
        self.scores = (block, "running")
        self.in_flight.append(Gemm("S = Q K^T", block, (("q", self.used_tiles), ("k", item))))

    def on_start_output(self, event: Event) -> None:
        doing = "start_output"
        item = self._held_item(event.spot, doing)
        block = self._read(("v", item), doing)
        self.require(self.p is not None, f"{doing} of block {block} without P: take_p is missing before it")
        self.require(self.p == block, f"{doing} multiplies P of block {self.p} with V of block {block}")
        self.require(self.cleared, "O has not been set to 0 for this tile")
        if self.correction == block and self.outputs > 0:
            self.require(False, f"{doing} adds P V of block {block} to an O that has not been rescaled for it")
        self._operands_are(event, ("pv", "O", "P", ("v", event.spot.stage), True))
        self.p, self.outputs = None, self.outputs + 1
        if self.correction == block:
            self.correction = None  # the first block's: O is still 0
        self.in_flight.append(Gemm("O += P V", block, (("v", item),)))

    def _operands_are(self, event: Event, expected: tuple[Any, ...]) -> None:
        given = tuple((part.name, *part.index) if isinstance(part, Part) else part for part in event.facts["gemm"])
        self.require(given == expected, f"the GEMM (mma, acc, a, b, accumulate) is {given}, not {expected}")

    def on_wait_gemms(self, event: Event) -> None:
        running = event.facts["in_flight"]
        done = self.in_flight[: len(self.in_flight) - running] if running else self.in_flight
        if any(gemm.kind == "S = Q K^T" and self.scores == (gemm.block, "running") for gemm in done):
            self.scores = (self.scores[0], "there")
        self.in_flight = self.in_flight[len(done) :]

    def _adding_to_o(self) -> Gemm | None:
        return next((gemm for gemm in self.in_flight if gemm.kind == "O += P V"), None)

    # Softmax

    def _scores_are_there(self, doing: str) -> int:
        self.require(self.scores is not None, f"{doing} without scores")
        block, state = self.scores
        self.require(state != "running", f"{doing} of block {block} while its GEMM may be running: no wait_gemms")
        self.require(state == "there", f"{doing} of block {block} after its softmax")
        return block

    def on_hide(self, event: Event) -> None:
        block = self._scores_are_there("the mask")
        self.require(event.facts["acc"] == "S" and event.facts["hidden"] == "hidden", "masks something else than S")
        self.require(event.facts["block"] == block, f"masks block {block} as if it were {event.facts['block']}")
        first_row = self.tile_index * self.case.config.tile_m + ROWS_OF_WARPGROUP * self.group
        self.require(event.facts["first_row"] == first_row, "masks as if its rows were another warpgroup's")
        self.require(block not in self.hidden, f"masks block {block} a second time")
        needless = block < self.tile.clear[self.group] and block != self.own - 1
        self.require(not needless, f"masks block {block}, which all rows see whole")
        self.hidden.add(block)

    def on_step(self, event: Event) -> None:
        self.require(event.facts["acc"] == "S", "softmax of something else than S")
        block = self._scores_are_there("softmax")
        self.require(self.was_reset, "the softmax has not been reset for this tile")
        masked = block < self.tile.clear[self.group] or block in self.hidden
        self.require(masked, f"softmax of block {block} without its mask")
        if self.correction is not None and self.steps > 1:
            self.require(False, f"softmax of block {block} before O has been rescaled for block {self.correction}")
        self.scores, self.correction, self.steps = (block, "P"), block, self.steps + 1

    def on_take_p(self, event: Event) -> None:
        self.require(event.facts == {"source": "S", "target": "P"}, "takes something else than S as P")
        self.require(self.scores is not None and self.scores[1] == "P", "take_p before softmax.step")
        busy = self._adding_to_o()
        if busy:
            self.require(
                False, f"take_p overwrites P of block {busy.block} while its GEMM may still read it: no wait_gemms"
            )
        self.require(self.p is None, f"take_p overwrites P of block {self.p}, which no start_output has used")
        self.p, self.scores = self.scores[0], None

    def on_rescale(self, event: Event) -> None:
        self.require(str(event.facts["acc"]) == "O", "rescales something else than O")
        busy = self._adding_to_o()
        if busy:
            self.require(False, f"rescale while P V of block {busy.block} may still be added to O: no wait_gemms")
        self.require(self.correction is not None, "rescales O a second time for one softmax.step")
        waiting = self.outputs == self.steps - 1
        self.require(waiting, f"rescales O for block {self.correction} before P V of the block before is added")
        self.correction = None

    # Turns

    def on_open_turn(self, event: Event) -> None:
        self.require(not self.opened, "opens the turns a second time")
        self.opened = True

    def on_wait_turn(self, event: Event) -> None:
        self.require(self.opened, "takes a turn before turns.open()")
        self.require(not self.holds_turn, "takes a turn while it still has one: turns.give() is missing before it")
        self.holds_turn, self.turns = True, self.turns + 1

    def on_give_turn(self, event: Event) -> None:
        self.require(self.holds_turn, "gives a turn that it does not have: turns.wait() is missing before it")
        self.holds_turn = False

    # The next tile's number

    def on_read_number(self, event: Event) -> None:
        spot = spot_of("tile", self.released["tile"], self.case.stages_of["tile"])
        self.require(
            self.waited["tile"] > self.released["tile"], "reads the tile's number before it has arrived: no wait"
        )
        self.require(
            event.facts["stage"] == spot.stage, f"reads the number in stage {event.facts['stage']}, not {spot}"
        )
        self.number_read, self.warp_met = True, False

    def on_sync_warp(self, event: Event) -> None:
        self.warp_met = True
