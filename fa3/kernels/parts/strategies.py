"""What the exchangeable parts of a kernel must offer. A new mask, order, epilogue or turnstile has these methods.

Methods that branch on run-time values are `@cute.jit`; `Int32` is the DSL's run-time integer. Nothing here is inherited
from: a strategy is any object that fits.
"""

from typing import Any, Protocol

import cutlass.cute as cute
from cutlass import Int32

from fa3.pipeline.cursor import Cursor

from .tiles import Tile, TileSpace


class Order(Protocol):
    """Which tile has which number (`parts/tiles.py`)."""

    space: TileSpace

    def tile(self, number: Int32) -> Tile: ...


class Mask(Protocol):
    """Which keys a row sees, in terms of key blocks (`parts/mask.py`)."""

    cuts_one_block: bool
    """Known while compiling: at most one block of a tile is cut, so that no loop for more is needed."""

    def blocks(self, first_row: Int32, rows: int) -> Int32:
        """Key blocks that some of these query rows see; 0 for rows past the last query."""

    def clear_blocks(self, first_row: Int32) -> Int32:
        """Leading key blocks that all rows from `first_row` see whole."""

    def hide(self, acc_S: cute.Tensor, hidden: float, first_row: Int32, n_block: Int32) -> None:
        """Sets the scores of one block that may not be seen to `hidden`."""


class KeyMask(Protocol):
    """The same mask as the backward sees it, whose CTAs own keys (`parts/key_mask.py`)."""

    def first_block(self, n_block: Int32) -> Int32:
        """The first query block of which some row sees some key of this key block."""

    def cut_blocks(self, n_block: Int32, first: Int32) -> Int32:
        """How many query blocks, from block `first` on, need `hide`."""

    def rank(self, n_block: Int32, m_block: Int32) -> Int32:
        """How many of the key blocks that a query block sees come before this one in a fixed order of sums."""

    def hide(self, acc_P: cute.Tensor, first_key: Int32, m_block: Int32) -> None:
        """P = 0 where it may not be seen; each row is a key. `hide_columns`: each column is one."""


class DQTurnstile(Protocol):
    """Who of the CTAs may put its part of dQ into global memory, and when (`parts/turnstile.py`)."""

    def wait(self, m_block: Int32, head: Int32) -> Any:
        """Until this CTA may. Returns whether it is the first, which stores its part."""

    def put(self, target: cute.Pointer, source: cute.Pointer, count: int, is_first: Any) -> None: ...
    def give(self, m_block: Int32, head: Int32, is_first: Any) -> None:
        """All of this CTA's part is on its way."""

    def close(self, m_block: Int32, head: Int32) -> None:
        """After the last query block of a head."""


class Turns(Protocol):
    """Who may issue to the tensor cores (`PingPong` and `NoTurn` in `fa3/pipeline/barriers.py`)."""

    def open(self) -> None: ...
    def wait(self) -> None: ...
    def give(self) -> None: ...


class Epilogue(Protocol):
    """The way of O to global memory (`parts/epilogue.py`)."""

    def store(self, acc_O: cute.Tensor, tile: Tile, row_block: Int32) -> None:
        """64 rows; `row_block` counts them among all rows of the sequence."""

    def drain(self) -> None:
        """Before the CTA ends."""


class MainLoop(Protocol):
    """What happens between Q and O (`PlainLoop`, `OverlapLoop`)."""

    gemms: Any
    softmax: Any
    turns: Turns
    blocks_without_turn: int
    """How many blocks of a tile are computed without a turn; whoever passes over a tile must skip as many."""

    def run(self, q: Cursor, k: Cursor, v: Cursor, first_row: Int32, blocks: Int32) -> tuple[Cursor, Cursor]:
        """Waits for Q, walks the key blocks from the last, releases everything, returns the cursors of K and V."""
