"""The order of the tiles, from the kernel's own text run on plain integers."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .parts import fresh


class Divisor(int):
    """A divisor as the kernel has it: `divmod(n, divisor)` and `divisor.divisor`."""

    @property
    def divisor(self):
        return int(self)


class PlainCute:
    fast_divmod_create_divisor_v2 = Divisor


@pytest.fixture(scope="module")
def tiles():
    module = fresh("tiles")
    module.cute = PlainCute
    return module


@pytest.fixture(scope="module")
def space_of(tiles):
    """The tile space of a launch, with integers for the DSL's."""
    return tiles.TileSpace.over


def order(tiles, space, kind):
    tile = getattr(tiles, kind).tile
    run = getattr(tile, "__wrapped__", tile)
    return [run(getattr(tiles, kind)(space), number) for number in range(space.count)]


PROBLEMS = st.tuples(
    st.integers(1, 12),  # row blocks
    st.integers(1, 6),  # key heads
    st.integers(1, 4),  # query heads of a key head
    st.integers(1, 4),  # batches
    st.integers(1, 40 << 20),  # bytes of keys and values of a head
)


@pytest.mark.parametrize("kind", ["RowsFirst", "LongestFirst"])
@given(problem=PROBLEMS)
def test_every_tile_is_computed_once(tiles, space_of, kind, problem):
    m_blocks, heads_kv, group, batches, kv_bytes = problem
    found = Counter(order(tiles, space_of(m_blocks, heads_kv * group, heads_kv, batches, kv_bytes), kind))
    assert found == Counter(
        tiles.Tile(m, h, h // group, b)
        for b in range(batches)
        for h in range(heads_kv * group)
        for m in range(m_blocks)
    )


@given(problem=PROBLEMS)
def test_rows_of_a_head_follow_each_other_without_a_mask(tiles, space_of, problem):
    m_blocks, heads_kv, group, batches, kv_bytes = problem
    found = order(tiles, space_of(m_blocks, heads_kv * group, heads_kv, batches, kv_bytes), "RowsFirst")
    assert found == sorted(found, key=lambda tile: (tile.batch, tile.head, tile.m_block))


@given(problem=PROBLEMS)
def test_sections_fit_the_cache_are_even_and_start_with_their_longest_tiles(tiles, space_of, problem):
    m_blocks, heads_kv, group, batches, kv_bytes = problem
    total = heads_kv * group * batches
    found = order(tiles, space_of(m_blocks, heads_kv * group, heads_kv, batches, kv_bytes), "LongestFirst")
    sections, current = [], []
    for tile in found:
        if current and tile.m_block > current[-1].m_block:
            sections.append(current)
            current = []
        current.append(tile)
    sections.append(current)
    if m_blocks == 1:  # nothing marks where a section ends
        return
    sizes = [len(section) // m_blocks for section in sections]
    fitting = min(max(tiles.SECTION_BYTES // kv_bytes, 1), heads_kv * batches) * group
    assert len(sections) == math.ceil(total / fitting)
    assert max(sizes) - min(sizes) <= 1 and max(sizes) <= fitting
    for section, size in zip(sections, sizes, strict=True):
        assert len({(tile.batch, tile.head) for tile in section}) == size
        rows = [tile.m_block for tile in section]
        assert rows == sorted(rows, reverse=True) and Counter(rows) == dict.fromkeys(range(m_blocks), size)


def test_no_section_of_a_single_head_is_left_over(tiles, space_of):
    """64 heads where 7 fit: not nine sections of 7 and a last one of 1, which would keep half of the GPU idle."""
    space = space_of(66, 16, 16, 4, tiles.SECTION_BYTES // 7)
    found = order(tiles, space, "LongestFirst")
    last_rows = [i for i, tile in enumerate(found) if tile.m_block == 65]
    starts = [i for i in last_rows if i - 1 not in last_rows]
    assert len(starts) == 10
    assert {b - a for a, b in zip(starts, [*starts[1:], space.count], strict=True)} == {6 * 66, 7 * 66}


@pytest.mark.parametrize("heads", [1 << 14, 1 << 15, 1 << 20])
def test_many_heads_of_few_keys_do_not_overflow(tiles, space_of, heads):
    """One key of 256 bytes for all query heads: 131072 of it fit the cache, and times the heads that passes 2^31."""
    space = space_of(1, heads, 1, 1, 256)
    values = [space.count, space.boundary, space.boundary_head, *space.large, *space.small, space.heads, space.group]
    assert all(0 <= value < 1 << 31 for value in values)
