"""The layout algebra against models that enumerate: what an operation promises, checked at every coordinate."""

from itertools import pairwise
from itertools import product as cartesian

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fa3.layouts.algebra import (
    Layout,
    LayoutError,
    blocked_product,
    coalesce,
    complement,
    composition,
    concatenate,
    crd2idx,
    equivalent,
    idx2crd,
    logical_divide,
    logical_product,
    ordered_layout,
    right_inverse,
    tile_to_shape,
    tiled_divide,
    zipped_divide,
)
from fa3.layouts.int_tuple import congruent, flatten, product, show

EXTENTS = st.integers(1, 6)
ANY_STEP = st.integers(0, 40)
DIVIDING_STEP = st.sampled_from([0, 1, 1, 2, 3, 4, 6, 8, 12, 24])
"""Strides that often divide: of arbitrary ones nearly no composition exists."""


def profiles(leaves):
    """Nested tuples with up to three leaves on each of up to three levels."""
    return st.recursive(leaves, lambda inner: st.lists(inner, min_size=1, max_size=3).map(tuple), max_leaves=5)


SHAPES = profiles(EXTENTS).filter(lambda shape: product(shape) <= 400)


@st.composite
def layouts(draw, steps=ANY_STEP):
    """Any layout, stride 0 and repeated indices included."""
    shape = draw(SHAPES)
    return Layout(shape, like(shape, [draw(steps) for _ in flatten(shape)]))


@st.composite
def compact_layouts(draw):
    """A bijection onto 0 .. size-1: the modes numbered in a random order."""
    shape = draw(SHAPES)
    extents = flatten(shape)
    order = draw(st.permutations(range(len(extents))))
    strides, step = [0] * len(extents), 1
    for mode in order:
        strides[mode] = step
        step *= extents[mode]
    return Layout(shape, like(shape, strides))


@st.composite
def injective_layouts(draw):
    """Strides that grow past everything covered before, with gaps of a whole factor: what has a complement."""
    extents = draw(st.lists(EXTENTS, min_size=1, max_size=4))
    strides, step = [], draw(st.integers(1, 3))
    for extent in extents:
        strides.append(step)
        step *= extent * draw(st.integers(1, 3))
    order = draw(st.permutations(range(len(extents))))
    return Layout(tuple(extents[i] for i in order), tuple(strides[i] for i in order))


def like(shape, leaves):
    """The leaves, nested like the shape."""
    remaining = iter(leaves)

    def nest(part):
        return tuple(nest(p) for p in part) if isinstance(part, tuple) else next(remaining)

    return nest(shape)


def enumerated(layout):
    """An independent model of a layout: numpy's index grid of the leaves, in Fortran order, times the strides."""
    extents, strides = flatten(layout.shape), flatten(layout.stride)
    grid = np.indices(extents).reshape(len(extents), -1, order="F")
    return (np.array(strides)[:, None] * grid).sum(axis=0).tolist()


@given(layouts())
def test_a_layout_is_the_enumerated_function(layout):
    values = enumerated(layout)
    assert layout.indices() == values
    assert (layout.size, layout.cosize) == (len(values), max(values) + 1)
    assert [layout(coordinate) for coordinate in layout.coordinates()] == values


@given(layouts())
def test_a_mode_takes_one_integer(layout):
    """Coordinates may be given mode by mode, each as one integer."""
    ranges = [range(mode.size) for mode in reversed(layout.modes())]
    values = [layout(*reversed(point)) for point in cartesian(*ranges)]
    assert values == enumerated(layout)


@given(SHAPES, st.data())
def test_coordinates_and_numbers_are_inverse(shape, data):
    index = data.draw(st.integers(0, product(shape) - 1))
    coordinate = idx2crd(index, shape)
    assert congruent(coordinate, shape)
    assert Layout(shape)(coordinate) == index
    assert crd2idx(index, shape, Layout(shape).stride) == index


@given(layouts())
def test_coalesce_keeps_the_function_and_the_fewest_modes(layout):
    flat = coalesce(layout)
    assert flat.indices() == layout.indices()
    assert flat.rank <= max(1, sum(extent > 1 for extent, _ in layout.leaves()))
    leaves = flat.leaves()
    assert all(b[1] != a[0] * a[1] for a, b in pairwise(leaves))
    assert coalesce(flat) == flat


@given(layouts(), layouts(DIVIDING_STEP))
def test_composition_agrees_at_every_coordinate_or_raises(outer, inner):
    try:
        composed = composition(outer, inner)
    except LayoutError:
        return
    assert composed.indices() == [outer(index) for index in inner.indices()]
    # A mode of the result may split further, so the two shapes agree mode by mode in size.
    assert [mode.size for mode in composed.modes()] == [mode.size for mode in inner.modes()]


@given(compact_layouts(), st.data())
def test_composition_with_a_subset_of_modes_always_exists(outer, data):
    """Picking modes of a layout by their positions is a composition that must not be refused."""
    flat_extents = [extent for extent, _ in outer.leaves()]
    positions = flatten(Layout(tuple(flat_extents)).stride)
    picked = data.draw(st.lists(st.sampled_from(range(len(flat_extents))), unique=True, min_size=1))
    inner = Layout(tuple(flat_extents[i] for i in picked), tuple(positions[i] for i in picked))
    assert composition(outer, inner).indices() == [outer(index) for index in inner.indices()]


@given(layouts(), st.integers(1, 8), st.integers(1, 8))
def test_composition_is_associative(a, n, m):
    b, c = Layout((n, m), (m, 1)), Layout((m, n))
    try:
        left, right = composition(composition(a, b), c), composition(a, composition(b, c))
    except LayoutError:
        return
    assert left.indices() == right.indices()


@pytest.mark.parametrize(
    ("outer", "inner", "reason"),
    [
        (Layout(8), Layout(4, 3), "leaves the domain"),
        (Layout((4, 6), (1, 10)), Layout(3, 3), "does not divide"),
        (Layout((4, 6), (1, 10)), Layout(2, 6), "not a multiple"),
        (Layout((2, 4), (1, 10)), Layout((2, 2), (1, 1)), "carry"),
    ],
)
def test_composition_says_why_not(outer, inner, reason):
    with pytest.raises(LayoutError, match=reason):
        composition(outer, inner)


@given(injective_layouts(), st.integers(1, 300))
def test_a_complement_covers_everything_once(layout, cotarget):
    gaps = complement(layout, cotarget)
    covered = sorted(a + b for a in layout.indices() for b in gaps.indices())
    assert covered == list(range(layout.size * gaps.size))
    assert len(covered) >= cotarget
    assert gaps.indices() == sorted(gaps.indices())


@pytest.mark.parametrize("layout", [Layout(4, 0), Layout((2, 2), (1, 1)), Layout((2, 2), (2, 3))])
def test_a_complement_needs_regular_gaps(layout):
    with pytest.raises(LayoutError, match="no complement"):
        complement(layout, 24)


@given(compact_layouts())
def test_the_right_inverse_of_a_bijection_is_its_inverse(layout):
    inverse = right_inverse(layout)
    assert inverse.size == layout.size
    assert [layout(inverse(i)) for i in range(inverse.size)] == list(range(layout.size))
    assert [inverse(layout(i)) for i in range(layout.size)] == list(range(layout.size))


@given(layouts())
def test_a_right_inverse_is_one(layout):
    inverse = right_inverse(layout)
    assert [layout(index) for index in inverse.indices()] == list(range(inverse.size))


@given(layouts(), st.data())
def test_a_division_partitions(layout, data):
    """Tiles of consecutive elements: every element is in one tile, and tile by tile the order is the layout's."""
    divisors = [n for n in range(1, layout.size + 1) if layout.size % n == 0]
    tile = data.draw(st.sampled_from(divisors))
    try:
        divided = zipped_divide(layout, tile)
    except LayoutError:
        return
    assert [mode.size for mode in divided.modes()] == [tile, layout.size // tile]
    assert divided.indices() == layout.indices()


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=3), st.data())
def test_a_division_by_modes_partitions_a_matrix(modes, data):
    """Against numpy: a tile of the divided layout is the block that slicing gives."""
    extents = tuple(tile * count for tile, count in modes)
    tiler = tuple(tile for tile, _ in modes)
    order = data.draw(st.permutations(range(len(extents))))
    layout = ordered_layout(extents, tuple(order))
    array = np.array(layout.indices()).reshape(extents, order="F")
    zipped, tiled = zipped_divide(layout, tiler), tiled_divide(layout, tiler)
    for position in np.ndindex(*(count for _, count in modes)):
        block = array[tuple(slice(p * t, (p + 1) * t) for p, t in zip(position, tiler, strict=True))]
        expected = block.flatten(order="F").tolist()
        assert [zipped(i, position) for i in range(zipped[0].size)] == expected
        assert [tiled(i, *position) for i in range(tiled[0].size)] == expected
    assert logical_divide(layout, tiler).size == layout.size


def test_a_division_must_come_out_even():
    with pytest.raises(LayoutError, match="not a multiple"):
        logical_divide(Layout(10), 4)
    with pytest.raises(LayoutError, match="3 tilers"):
        logical_divide(Layout((4, 4)), (2, 2, 2))
    assert zipped_divide(Layout((8, 6, 5)), (4, 2)).shape == ((4, 2), (2, 3, 5))


@given(compact_layouts(), st.lists(EXTENTS, min_size=1, max_size=2))
def test_a_product_repeats_the_block_without_overlap(block, repeats):
    assume(block.size * product(tuple(repeats)) <= 2000)
    result = logical_product(block, Layout(tuple(repeats)))
    assert sorted(result.indices()) == list(range(result.size))
    first, copies = result.modes()
    assert first == block
    assert all((copy - copies(0)) % block.size == 0 for copy in copies.indices())


@given(
    st.tuples(EXTENTS, EXTENTS),
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)),
    st.permutations(range(3)),
    st.permutations(range(2)),
)
def test_tile_to_shape_against_numpy(block_shape, counts, order, block_order):
    """Copies of a block, one behind the other, are blocks of consecutive numbers in the order asked for."""
    block = ordered_layout(block_shape, tuple(block_order))
    shape = (block_shape[0] * counts[0], block_shape[1] * counts[1], counts[2])
    tiled = tile_to_shape(block, shape, tuple(order))
    number = ordered_layout(counts, tuple(order))
    assert [mode.size for mode in tiled.modes()] == list(shape)
    for i, j, k in np.ndindex(*shape):
        tile = (i // block_shape[0], j // block_shape[1], k)
        inside = block(i % block_shape[0], j % block_shape[1])
        assert tiled(i, j, k) == inside + block.size * number(*tile)


def test_products_refuse_what_does_not_fit():
    with pytest.raises(LayoutError, match="does not divide"):
        tile_to_shape(Layout((8, 64)), (12, 64), (0, 1))
    with pytest.raises(LayoutError, match="ranks differ"):
        blocked_product(Layout((2, 2)), Layout(3))
    with pytest.raises(LayoutError, match="not a permutation"):
        ordered_layout((2, 2), (0, 2))
    checkers = blocked_product(Layout((2, 2)), Layout((3, 4), (4, 1)))
    assert str(checkers) == "((2,3),(2,4)):((1,16),(2,4))"


@pytest.mark.parametrize(
    ("shape", "stride", "reason"),
    [((4, 8), 1, "profile"), ((4, (2, 2)), (1, 4), "profile"), ((0, 2), None, "at least 1"), (4, -1, "negative")],
)
def test_a_layout_checks_its_halves(shape, stride, reason):
    with pytest.raises(LayoutError, match=reason):
        Layout(shape, stride)


@pytest.mark.parametrize("coordinate", [(4, 0), (0, 8), (0, -1), (1, 2, 3), 32, -1])
def test_a_coordinate_outside_is_an_error(coordinate):
    with pytest.raises(LayoutError):
        Layout((4, 8), (8, 1))(coordinate)


def test_documented_examples():
    assert Layout((4, 8), (8, 1))(2, 3) == 19
    assert str(Layout((4, (2, 8)))) == "(4,(2,8)):(1,(4,8))"
    assert coalesce(Layout((2, (1, 6)), (1, (7, 2)))) == Layout(12, 1)
    assert str(complement(Layout(4, 2), 24)) == "(2,3):(1,8)"
    assert str(logical_divide(Layout(24), 4)) == "(4,6):(1,4)"
    assert str(zipped_divide(Layout((8, 6), (6, 1)), (4, 2))) == "((4,2),(2,3)):((6,1),(24,2))"
    assert equivalent(Layout((2, 6), (1, 2)), Layout(12)) and not equivalent(Layout(12), Layout(12, 2))
    assert concatenate(Layout(2), Layout((3, 4))) == Layout((2, (3, 4)), (1, (1, 3)))
    assert show(((2, 2), 1)) == "((2,2),1)"
