"""Tiles in shared memory: bijective, free of bank conflicts, readable both ways; and the plan that sums them."""

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fa3.layouts.int_tuple import LayoutError
from fa3.layouts.smem import (
    SHARED_MEMORY_PER_CTA,
    Buffer,
    SharedMemoryError,
    SharedMemoryPlan,
    bank_conflicts,
    k_major,
    line_bytes,
    mn_major,
    shared_k,
    shared_o,
    shared_q,
    shared_v,
)

BITS = st.sampled_from([8, 16])


@st.composite
def tiles(draw):
    """(rows, columns, bits, stages) of a k-major tile: 16-byte multiples across, 8-line multiples down."""
    bits = draw(BITS)
    columns = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 16])) * (128 // bits)
    return 8 * draw(st.integers(1, 3)), columns, bits, draw(st.integers(1, 2))


few = settings(max_examples=30, phases=[Phase.explicit, Phase.generate])
"""For properties that look at every element of a tile: shrinking a failure would take minutes and teach nothing."""


@few
@given(tiles())
def test_a_tile_is_a_bijection_onto_its_bytes(tile):
    rows, columns, bits, stages = tile
    shared = k_major(*tile)
    addresses = {shared.byte(i, j, s) for i in range(rows) for j in range(columns) for s in range(stages)}
    assert addresses == set(range(0, shared.bytes, bits // 8))
    assert shared.stage_bytes * stages == shared.bytes == rows * columns * stages * bits // 8


@given(tiles(), st.data())
def test_eight_rows_of_a_column_meet_no_bank_twice(tile, data):
    """What ldmatrix, stmatrix and WGMMA's core matrices need: 8 rows x 16 bytes in one phase."""
    rows, columns, bits, stages = tile
    shared = k_major(*tile)
    row = 8 * data.draw(st.integers(0, rows // 8 - 1))
    column = 128 // bits * data.draw(st.integers(0, columns * bits // 128 - 1))
    stage = data.draw(st.integers(0, stages - 1))
    assert bank_conflicts([shared.byte(row + r, column, stage) for r in range(8)]) == 0
    base = shared.byte(row, column, stage)
    assert [shared.byte(row, column + i, stage) - base for i in range(128 // bits)] == list(range(0, 16, bits // 8))


@few
@given(tiles())
def test_the_two_majors_are_one_tile(tile):
    """A k-major tile and the mn-major tile of its transpose are the same bytes, so V needs no copy to be V^T."""
    rows, columns, bits, stages = tile
    across, down = k_major(rows, columns, bits, stages), mn_major(columns, rows, bits, stages)
    assert across.bytes == down.bytes and across.swizzle == down.swizzle
    for i, j in np.ndindex(rows, columns):
        assert across.byte(i, j, stages - 1) == down.byte(j, i, stages - 1)


def tma_address(row, column_byte, line, rows):
    """Where TMA puts a byte, stated without layouts: boxes of one line's width, each box lines below each other,
    and within each 128 bytes of address the 16-byte piece exclusive-ored with the number of the 128 bytes."""
    box, within = divmod(column_byte, line)
    address = box * rows * line + row * line + within
    pieces = line // 16
    piece = address // 16 % pieces ^ address // 128 % pieces
    return address // line * line + piece * 16 + address % 16


@few
@given(tiles())
def test_a_tile_lies_as_tma_writes_it(tile):
    rows, columns, bits, _ = tile
    shared = k_major(*tile)
    for i, j in np.ndindex(rows, columns):
        assert shared.byte(i, j) == tma_address(i, j * bits // 8, shared.line, rows)


@pytest.mark.parametrize(
    ("contiguous", "bits", "line"),
    [(128, 16, 128), (64, 16, 128), (96, 16, 64), (80, 16, 32), (72, 16, 16), (128, 8, 128), (64, 8, 64), (96, 8, 32)],
)
def test_the_longest_line_that_divides(contiguous, bits, line):
    assert line_bytes(contiguous, bits) == line
    assert k_major(8, contiguous, bits).line == line


def test_impossible_tiles():
    with pytest.raises(LayoutError, match="16 bytes"):
        k_major(64, 72, 8)
    with pytest.raises(LayoutError, match="does not divide"):
        k_major(60, 64, 16)


def test_operands():
    assert (shared_q(128, 128).bytes, shared_k(176, 128).stage_bytes) == (32768, 45056)
    assert shared_v(176, 128).byte(5, 170, 1) == shared_k(176, 128).byte(170, 5, 1)
    assert shared_o(128, 96) == shared_q(128, 96)
    assert str(shared_q(128, 128)) == "S<3,4,3> o 0 o ((8,16),(64,2),(1,1)):((64,512),(1,8192),(0,0))"


def test_bank_conflicts():
    assert bank_conflicts([16 * i for i in range(8)]) == 0
    assert bank_conflicts([128 * i for i in range(8)]) == 7
    assert bank_conflicts([64 * i for i in range(8)]) == 3
    assert bank_conflicts([0] * 8) == bank_conflicts([]) == 0


BUFFERS = st.lists(st.tuples(st.integers(0, 60000), st.sampled_from([8, 16, 128, 1024])), max_size=8).map(
    lambda rows: [Buffer(f"b{i}", size, alignment) for i, (size, alignment) in enumerate(rows)]
)


@given(BUFFERS)
def test_a_plan_places_without_overlap(buffers):
    plan = SharedMemoryPlan.of(buffers)
    end = 0
    for field, buffer in zip(plan.fields, buffers, strict=True):
        assert (field.name, field.bytes, field.alignment) == (buffer.name, buffer.bytes, buffer.alignment)
        assert field.offset % field.alignment == 0 and end <= field.offset < end + field.alignment
        assert plan[field.name] is field
        end = field.end
    assert end <= plan.total_bytes < end + max([b.alignment for b in buffers], default=1)
    assert plan.padding_bytes == plan.total_bytes - sum(b.bytes for b in buffers)


@given(BUFFERS)
def test_a_plan_fits_or_shows_its_sum(buffers):
    plan = SharedMemoryPlan.of(buffers)
    if plan.total_bytes <= SHARED_MEMORY_PER_CTA:
        assert plan.check() is plan
        return
    with pytest.raises(SharedMemoryError) as caught:
        plan.check()
    lines = str(caught.value).splitlines()
    printed = {line.split()[0]: int(line.split()[1]) for line in lines[2:]}
    assert {b.name: b.bytes for b in buffers}.items() <= printed.items()
    summed = sum(printed[b.name] for b in buffers) + printed["(padding)"]
    assert summed == printed["total"] == printed["capacity"] + printed["over"]


def test_a_forward_plan():
    """128 x 176 tiles at head dim 128 with two stages fit; three stages do not, and the message says by how much."""

    def plan(stages):
        tiles = {
            "q": shared_q(128, 128),
            "k": shared_k(176, 128, stages=stages),
            "v": shared_v(176, 128, stages=stages),
        }
        buffers = [Buffer(name, tile.bytes) for name, tile in tiles.items()]
        return SharedMemoryPlan.of([Buffer("barriers", 16 * (2 * stages + 1), 8), *buffers])

    assert plan(2).check().total_bytes == 1024 + 32768 + 4 * 45056
    with pytest.raises(SharedMemoryError, match="71680 bytes over"):
        plan(3).check()
    assert plan(2).table().splitlines()[-1].split() == ["free", str(SHARED_MEMORY_PER_CTA - 214016)]


def test_plans_refuse_nonsense():
    with pytest.raises(SharedMemoryError, match="same name: q"):
        SharedMemoryPlan.of([Buffer("q", 8), Buffer("q", 8)])
    with pytest.raises(SharedMemoryError, match="power of two"):
        Buffer("q", 8, 12)
    with pytest.raises(SharedMemoryError, match="-8 bytes"):
        Buffer("q", -8)
    with pytest.raises(KeyError, match="it has q"):
        SharedMemoryPlan.of([Buffer("q", 8)])["k"]
    assert SharedMemoryPlan.of([]).total_bytes == 0


@pytest.mark.parametrize(("size", "fits"), [(232447, True), (232448, True), (232449, False)])
def test_the_last_byte_counts(size, fits):
    plan = SharedMemoryPlan.of([Buffer("all", size, alignment=1)])
    if fits:
        assert plan.check().total_bytes == size
    else:
        with pytest.raises(SharedMemoryError, match="1 bytes over"):
            plan.check()
