"""The layout algebra of CuTe on plain integers.

A layout is a function from coordinates to indices, written shape:stride. `(4,8):(8,1)` sends (i, j) to 8 i + j.
Both halves are nested tuples of the same profile. A coordinate may be given in three equivalent forms: nested like the
shape, one integer for each top-level mode, or one integer for all of them. An integer counts the positions of what it
stands for with the leftmost mode fastest (colexicographic order).

The algebra here follows the CuTe layout documentation of CUTLASS ("CuTe Layout Algebra", media/docs/cpp/cute) and
"CuTe Layout Representation and Algebra" (C. Cecka), with two deliberate differences, both on the safe side:

* A coordinate outside the shape is an error. (CuTe lets the last mode run over.)
* `composition` raises where the formula would not equal outer(inner(c)) at every c. (CuTe checks divisibility only,
  and only sometimes; it also leaves a carry between two modes of `inner` to the caller.)

Nothing here imports the DSL: the same expressions can be tested, printed and drawn on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Union

from fa3.layouts.int_tuple import (
    IntTuple,
    LayoutError,
    as_tuple,
    compact_strides,
    congruent,
    flatten,
    product,
    show,
)

__all__ = [
    "Layout",
    "LayoutError",
    "Tiler",
    "blocked_product",
    "coalesce",
    "complement",
    "composition",
    "concatenate",
    "crd2idx",
    "equivalent",
    "idx2crd",
    "logical_divide",
    "logical_product",
    "ordered_layout",
    "right_inverse",
    "tile_to_shape",
    "tiled_divide",
    "zipped_divide",
]


@dataclass(frozen=True, init=False)
class Layout:
    """A function from the coordinates of `shape` to integers: the inner product of coordinate and `stride`.

    Without a stride the layout is compact and its leftmost mode runs fastest. Shapes are positive, strides are not
    negative. Two layouts are `==` when shape and stride are equal; `equivalent` compares them as functions.
    """

    shape: IntTuple
    stride: IntTuple

    def __init__(self, shape: IntTuple, stride: IntTuple | None = None):
        stride = compact_strides(shape) if stride is None else stride
        if not congruent(shape, stride):
            raise LayoutError(f"shape {show(shape)} and stride {show(stride)} differ in profile")
        if any(extent < 1 for extent in flatten(shape)):
            raise LayoutError(f"every extent must be at least 1, got shape {show(shape)}")
        if any(step < 0 for step in flatten(stride)):
            raise LayoutError(f"strides must not be negative, got {show(stride)}")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "stride", stride)

    def __call__(self, *coordinate: IntTuple) -> int:
        """The index of a coordinate: `layout(5)`, `layout(1, 2)` or `layout((1, (0, 2)))`."""
        return crd2idx(coordinate[0] if len(coordinate) == 1 else coordinate, self.shape, self.stride)

    @property
    def size(self) -> int:
        """How many coordinates there are."""
        return product(self.shape)

    @property
    def cosize(self) -> int:
        """The largest index plus one: how many elements of memory the layout needs."""
        return 1 + sum((extent - 1) * step for extent, step in self.leaves())

    @property
    def rank(self) -> int:
        """The number of top-level modes."""
        return len(as_tuple(self.shape))

    def __getitem__(self, mode: int) -> Layout:
        """One top-level mode as a layout of its own."""
        return Layout(as_tuple(self.shape)[mode], as_tuple(self.stride)[mode])

    def modes(self) -> tuple[Layout, ...]:
        """All top-level modes."""
        return tuple(self[mode] for mode in range(self.rank))

    def leaves(self) -> tuple[tuple[int, int], ...]:
        """(extent, stride) of every leaf from left to right."""
        return tuple(zip(flatten(self.shape), flatten(self.stride), strict=True))

    def coordinates(self) -> Iterator[IntTuple]:
        """Every coordinate, nested like the shape, in the order of their integers."""
        return (idx2crd(index, self.shape) for index in range(self.size))

    def indices(self) -> list[int]:
        """The index of every coordinate, in the same order: the whole function as a list."""
        return [self(index) for index in range(self.size)]

    def __str__(self) -> str:
        return f"{show(self.shape)}:{show(self.stride)}"


Tiler = Union[int, Layout, "tuple[Tiler, ...]"]
"""What a layout can be divided by: a number of consecutive elements, a layout, or one of them for each mode."""


def crd2idx(coordinate: IntTuple, shape: IntTuple, stride: IntTuple) -> int:
    """The index of a coordinate under shape:stride. Raises LayoutError outside the shape."""
    if isinstance(coordinate, tuple):
        shapes, strides = as_tuple(shape), as_tuple(stride)
        if len(coordinate) != len(shapes):
            raise LayoutError(f"coordinate {show(coordinate)} does not fit shape {show(shape)}")
        return sum(crd2idx(c, s, d) for c, s, d in zip(coordinate, shapes, strides, strict=True))
    leaf_coordinates = flatten(idx2crd(coordinate, shape))
    return sum(c * d for c, d in zip(leaf_coordinates, flatten(stride), strict=True))


def idx2crd(index: int, shape: IntTuple) -> IntTuple:
    """The `index`-th coordinate of `shape`, leftmost mode fastest; nested like the shape."""
    if not 0 <= index < product(shape):
        raise LayoutError(f"coordinate {index} is outside shape {show(shape)}")
    if not isinstance(shape, tuple):
        return index
    parts: list[IntTuple] = []
    for extent in shape:
        parts.append(idx2crd(index % product(extent), extent))
        index //= product(extent)
    return tuple(parts)


def concatenate(*modes: Layout) -> Layout:
    """A layout whose top-level modes are the given layouts."""
    return Layout(tuple(mode.shape for mode in modes), tuple(mode.stride for mode in modes))


def ordered_layout(shape: tuple[int, ...], order: tuple[int, ...]) -> Layout:
    """A compact layout whose modes run fastest in the order of their `order` numbers (0 is the fastest)."""
    if sorted(order) != list(range(len(shape))):
        raise LayoutError(f"order {show(order)} is not a permutation of the {len(shape)} modes of {show(shape)}")
    strides, step = [0] * len(shape), 1
    for mode in sorted(range(len(shape)), key=lambda mode: order[mode]):
        strides[mode] = step
        step *= shape[mode]
    return Layout(shape, tuple(strides))


def equivalent(a: Layout, b: Layout) -> bool:
    """Whether two layouts are the same function of an integer coordinate, however they are written."""
    return a.size == b.size and a.indices() == b.indices()


def coalesce(layout: Layout) -> Layout:
    """The same function of an integer coordinate with as few modes as possible, flat.

    `coalesce((2,(1,6)):(1,(7,2))) == 12:1`. The result has one mode without parentheses, or a flat tuple of them.
    """
    return _from_leaves(_coalesced_leaves(layout.leaves()))


def _coalesced_leaves(leaves: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for extent, step in leaves:
        if extent == 1:
            continue
        if merged and step == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0] * extent, merged[-1][1])
        else:
            merged.append((extent, step))
    return merged or [(1, 0)]


def _from_leaves(leaves: list[tuple[int, int]]) -> Layout:
    if len(leaves) == 1:
        return Layout(*leaves[0])
    return Layout(tuple(extent for extent, _ in leaves), tuple(step for _, step in leaves))


def composition(outer: Layout, inner: Tiler) -> Layout:
    """The layout c -> outer(inner(c)), shaped like `inner`.

    A tuple composes mode by mode; modes of `outer` beyond its length stay as they are. An int n means n:1.
    Raises LayoutError where the result is not a layout, or would differ from outer(inner(c)) somewhere: when `inner`
    leaves the domain of `outer`, when a stride or extent does not divide a mode of `outer`, or when two modes of
    `inner` add up past a mode of `outer` (a carry).
    """
    if isinstance(inner, tuple):
        return _by_mode(composition, outer, inner)
    inner = _as_layout(inner)
    if inner.cosize > outer.size:
        raise LayoutError(
            f"composition of {outer} with {inner}: index {inner.cosize - 1} leaves the domain of the outer"
        )
    target = _coalesced_leaves(outer.leaves())
    reached = [0] * len(target)

    def compose(shape: IntTuple, stride: IntTuple) -> Layout:
        if isinstance(shape, tuple):
            assert isinstance(stride, tuple)
            return concatenate(*(compose(s, d) for s, d in zip(shape, stride, strict=True)))
        assert isinstance(stride, int)
        try:
            return _compose_leaf(target, reached, shape, stride)
        except LayoutError as error:
            raise LayoutError(f"composition of {outer} with {inner}: {error}") from None

    return compose(inner.shape, inner.stride)


def _compose_leaf(target: list[tuple[int, int]], reached: list[int], extent: int, step: int) -> Layout:
    """One mode extent:step of `inner` walked through the flat modes of `outer`; `reached` sums the largest digits."""
    if extent == 1 or step == 0:
        return Layout(extent, 0)
    walked: list[tuple[int, int]] = []
    rest, jump = extent, step
    for mode, (mode_extent, mode_stride) in enumerate(target):
        if rest == 1:
            break
        if jump >= mode_extent:
            if jump % mode_extent:
                raise LayoutError(f"stride of {extent}:{step} is not a multiple of mode {mode_extent}:{mode_stride}")
            jump //= mode_extent
            continue
        digits = _digits(mode_extent, rest, jump, f"{extent}:{step}")
        reached[mode] += (digits - 1) * jump
        if reached[mode] >= mode_extent:
            raise LayoutError(f"mode {extent}:{step} and an earlier mode carry over {mode_extent}:{mode_stride}")
        walked.append((digits, jump * mode_stride))
        rest, jump = rest // digits, 1
    return _from_leaves(walked)


def _digits(mode_extent: int, rest: int, jump: int, name: str) -> int:
    """How many of the `rest` steps of width `jump` stay inside a mode; they must stay all, or fill it exactly."""
    if (rest - 1) * jump < mode_extent:
        return rest
    if mode_extent % jump or rest % (mode_extent // jump):
        raise LayoutError(f"{name} does not divide a mode of extent {mode_extent}")
    return mode_extent // jump


def complement(layout: Layout, cotarget: int) -> Layout:
    """The gaps of an injective layout: what to add to its indices so that all together they cover 0 .. n-1 once.

    n is the smallest such number that is at least `cotarget`. `complement(4:2, 24) == (2,3):(1,8)`: {0,2,4,6} plus
    {0,1,8,9,16,17} is 0 .. 23. Raises LayoutError if the layout meets an index twice, or if its gaps are irregular.
    """
    gaps: list[tuple[int, int]] = []
    covered = 1
    for step, extent in sorted((step, extent) for extent, step in layout.leaves() if extent > 1):
        if step == 0 or step % covered:
            raise LayoutError(f"{layout} has no complement: stride {step} is not a positive multiple of {covered}")
        gaps.append((step // covered, covered))
        covered = extent * step
    gaps.append((-(-cotarget // covered), covered))
    return _from_leaves(_coalesced_leaves(tuple(gaps)))


def right_inverse(layout: Layout) -> Layout:
    """The longest layout R with layout(R(i)) == i for every i < R.size.

    Of a compact layout (a bijection onto 0 .. size-1) it is the inverse.
    """
    leaves = layout.leaves()
    positions = flatten(compact_strides(tuple(extent for extent, _ in leaves)))
    found: list[tuple[int, int]] = []
    reached = 1
    for step, extent, position in sorted((d, s, p) for (s, d), p in zip(leaves, positions, strict=True)):
        if extent == 1 or step < reached:
            continue
        if step > reached:
            break
        found.append((extent, position))
        reached *= extent
    return _from_leaves(_coalesced_leaves(tuple(found)))


def logical_divide(layout: Layout, tiler: Tiler) -> Layout:
    """Split a layout into (a tile, the positions of the tiles).

    With a layout or an int as tiler the result has these two modes; with a tuple every mode is split by its own tiler.
    `logical_divide(24:1, 4) == (4,6):(1,4)`. Raises LayoutError if the tiles do not fill the layout exactly.
    """
    if isinstance(tiler, tuple):
        return _by_mode(logical_divide, layout, tiler)
    tile = _as_layout(tiler)
    if layout.size % tile.size:
        raise LayoutError(f"cannot divide {layout}: its size {layout.size} is not a multiple of the tile {tile}")
    return composition(layout, concatenate(tile, complement(tile, layout.size)))


def zipped_divide(layout: Layout, tiler: Tiler) -> Layout:
    """`logical_divide` with the pieces gathered: ((all tile modes), (all positions)); rank 2.

    `zipped_divide((8,6):(6,1), (4,2)) == ((4,2),(2,3)):((6,1),(24,2))`: coordinate (element of the tile, which tile).
    """
    divided = logical_divide(layout, tiler)
    if not isinstance(tiler, tuple):
        return divided
    split, whole = divided.modes()[: len(tiler)], divided.modes()[len(tiler) :]
    return concatenate(concatenate(*(m[0] for m in split)), concatenate(*(m[1] for m in split), *whole))


def tiled_divide(layout: Layout, tiler: Tiler) -> Layout:
    """`zipped_divide` with the positions as modes of their own: ((tile), position, position, ...)."""
    tile, positions = zipped_divide(layout, tiler).modes()
    return concatenate(tile, *positions.modes())


def logical_product(block: Layout, repeat: Layout) -> Layout:
    """(`block`, copies of it laid out like `repeat`), the copies placed in the gaps and behind the block."""
    return concatenate(block, composition(complement(block, block.size * repeat.cosize), repeat))


def blocked_product(block: Layout, repeat: Layout) -> Layout:
    """`logical_product` mode by mode: mode i is (mode i of the block, mode i of the repeats). Equal ranks."""
    if block.rank != repeat.rank:
        raise LayoutError(f"blocked product of {block} and {repeat}: the ranks differ")
    inside, copies = logical_product(block, repeat).modes()
    return concatenate(*(concatenate(a, b) for a, b in zip(inside.modes(), copies.modes(), strict=True)))


def tile_to_shape(block: Layout, shape: tuple[int, ...], order: tuple[int, ...]) -> Layout:
    """Repeat a block until it fills `shape`; the copies lie one behind the other, fastest along the mode of order 0.

    The block may have fewer modes than the shape. Raises LayoutError if it does not divide the shape.
    """
    padded = concatenate(*block.modes(), *(Layout(1, 0) for _ in shape[block.rank :]))
    extents = [mode.size for mode in padded.modes()]
    if len(extents) != len(shape) or any(whole % part for whole, part in zip(shape, extents, strict=True)):
        raise LayoutError(f"block {block} does not divide shape {show(shape)}")
    counts = tuple(whole // part for whole, part in zip(shape, extents, strict=True))
    return blocked_product(_with_unit_strides_zero(padded), ordered_layout(counts, order))


def _with_unit_strides_zero(layout: Layout) -> Layout:
    """The same layout with stride 0 on modes of extent 1, the form the DSL prints."""

    def zeroed(shape: IntTuple, stride: IntTuple) -> IntTuple:
        if isinstance(shape, tuple) and isinstance(stride, tuple):
            return tuple(zeroed(s, d) for s, d in zip(shape, stride, strict=True))
        return 0 if shape == 1 else stride

    return Layout(layout.shape, zeroed(layout.shape, layout.stride))


def _as_layout(tiler: int | Layout) -> Layout:
    return tiler if isinstance(tiler, Layout) else Layout(tiler)


def _by_mode(operation: Callable[[Layout, Any], Layout], layout: Layout, tilers: tuple[Tiler, ...]) -> Layout:
    """Apply a binary operation to each mode with its tiler; modes without a tiler stay."""
    if len(tilers) > layout.rank:
        raise LayoutError(f"{len(tilers)} tilers for the {layout.rank} modes of {layout}")
    modes = layout.modes()
    changed = (operation(mode, tiler) for mode, tiler in zip(modes, tilers, strict=False))
    return concatenate(*changed, *modes[len(tilers) :])
