"""Pictures of layouts, for notebooks and documentation. matplotlib is imported when the first one is drawn.

Every function takes an optional matplotlib axis, draws into it and returns it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fa3.layouts.algebra import Layout, right_inverse
from fa3.layouts.fragments import ROWS, THREADS
from fa3.layouts.smem import PIECE, SharedLayout

__all__ = ["bank_groups", "grid", "holders", "permutation", "registers"]

Cell = Callable[[int, int], int]
"""(row, column) -> a number."""


def grid(rows: int, columns: int, label: Cell, colour: Cell, colours: int, title: str = "", ax: Any = None) -> Any:
    """A table of cells: each with a label, and with one of `colours` colours. A negative label is left blank."""
    ax = _axis(ax, columns, rows)
    values = [[colour(i, j) for j in range(columns)] for i in range(rows)]
    ax.imshow(values, cmap=_palette(colours), vmin=-1, vmax=colours - 1, aspect="auto")
    for i in range(rows):
        for j in range(columns):
            if label(i, j) >= 0:
                ax.text(j, i, str(label(i, j)), ha="center", va="center", fontsize=7)
    ax.set_xticks([x - 0.5 for x in range(columns + 1)], minor=True)
    ax.set_yticks([y - 0.5 for y in range(rows + 1)], minor=True)
    ax.grid(which="minor", color="white", linewidth=0.8)
    ax.tick_params(which="minor", length=0)
    ax.set_title(title, fontsize=9)
    return ax


def bank_groups(shared: SharedLayout, rows: int = 8, swizzled: bool = True, ax: Any = None) -> Any:
    """The first swizzled line of some rows, in 16-byte pieces: in which group of four banks each piece lies.

    Eight lanes that read one column of this table at once are served together if its eight numbers differ.
    `swizzled=False` shows the same tile as it would be without its swizzle.
    """
    per_piece = 8 * PIECE // shared.element_bits

    def group(row: int, piece: int) -> int:
        column = piece * per_piece
        plain = shared.outer(row, column, 0) * shared.element_bits // 8
        return (shared.swizzle(plain) if swizzled else plain) // PIECE % 8

    name = str(shared.swizzle) if swizzled else "without swizzle"
    ax = grid(rows, shared.line // PIECE, group, group, 8, f"bank group of each 16-byte piece, {name}", ax)
    ax.set(xlabel="piece of the row", ylabel="row")
    return ax


def holders(fragment: Layout, rows: int = 16, columns: int = 16, ax: Any = None) -> Any:
    """Which thread holds each element of a fragment (thread, register) -> row + 64 column; coloured by quad."""
    position = right_inverse(fragment)

    def thread(row: int, column: int) -> int:
        return position(row + ROWS * column) % THREADS

    title = "thread that holds (row, column); a colour is a quad"
    ax = grid(rows, columns, thread, lambda i, j: thread(i, j) // 4 % 8, 8, title, ax)
    ax.set(xlabel="column", ylabel="row")
    return ax


def registers(fragment: Layout, thread: int, columns: int, rows: int = 16, title: str = "", ax: Any = None) -> Any:
    """The elements of one thread, each with the number of its register; the other threads' elements stay blank."""
    position = right_inverse(fragment)

    def register(row: int, column: int) -> int:
        found = position(row + ROWS * column)
        return found // THREADS if found % THREADS == thread else -1

    ax = grid(rows, columns, register, lambda i, j: min(register(i, j), 0), 1, title or f"registers of {thread}", ax)
    ax.set(xlabel="column", ylabel="row")
    return ax


def permutation(columns: Sequence[int], title: str = "", ax: Any = None) -> Any:
    """A permutation as strands: place `slot` of the lower line takes what stands at `columns[slot]` of the upper."""
    ax = _axis(ax, len(columns), 3)
    palette = _palette(8)
    for slot, column in enumerate(columns):
        colour = palette((column // 2 % 8 + 1) / 8)
        ax.plot([column, slot], [1, 0], color=colour, linewidth=2)
        ax.text(column, 1.08, str(column), ha="center", fontsize=7)
        ax.text(slot, -0.16, str(slot), ha="center", fontsize=7)
    ax.set(ylim=(-0.4, 1.4), yticks=[0, 1], yticklabels=["k-slot", "column"], xticks=[])
    ax.set_title(title, fontsize=9)
    return ax


def _axis(ax: Any, width: int, height: int) -> Any:
    """The given axis, or a new one about as large as a table of width x height cells needs."""
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    _, new = plt.subplots(figsize=(1 + 0.32 * width, 1 + 0.26 * height), layout="constrained")
    return new


def _palette(colours: int) -> Any:
    """`colours` light colours for 0, 1, ..., and almost white for -1."""
    from matplotlib.colors import ListedColormap

    wheel = ["#8fc1e3", "#f7c27a", "#9bd3a0", "#e9a3a3", "#c3b1e1", "#d8c3a5", "#f2b8d6", "#a8d8d8"]
    return ListedColormap(["#f2f2f2", *(wheel[i % len(wheel)] for i in range(colours))])
