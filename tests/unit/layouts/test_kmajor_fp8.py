"""The in-place byte transpose: right in every byte, free of bank conflicts, in the order P expects."""

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fa3.layouts.fp8_operand import slot_columns
from fa3.layouts.int_tuple import LayoutError
from fa3.layouts.kmajor_fp8 import EVEN_BYTES, ODD_BYTES, Transpose, ldmatrix_x4_trans, prmt, stmatrix_x4

TILES = st.tuples(st.integers(1, 5).map(lambda n: 32 * n), st.integers(1, 10).map(lambda n: 16 * n))


def stored(shared, matrix):
    """The bytes of a shared tile that holds a matrix."""
    memory = bytearray(shared.bytes)
    for i, j in np.ndindex(matrix.shape):
        memory[shared.byte(i, j)] = matrix[i, j]
    return memory


# A failure is plain in any tile, and shrinking a transpose would take minutes.
@settings(max_examples=15, phases=[Phase.explicit, Phase.generate])
@given(TILES, st.sampled_from([1, 2, 4]), st.integers(0, 2**32 - 1))
def test_every_byte_arrives(tile, warps, seed):
    transpose = Transpose(*tile, warps)
    v = np.random.default_rng(seed).integers(0, 256, tile, dtype=np.uint8)
    moved = transpose.run(stored(transpose.source, v))
    expected = v[slot_columns(transpose.tile_n)].T
    assert moved == stored(transpose.target, expected)


@pytest.mark.parametrize("tile", [(128, 64), (160, 96), (128, 128), (96, 192), (128, 192), (64, 256), (224, 128)])
def test_no_bank_is_met_twice(tile):
    assert Transpose(*tile).conflicts() == (0, 0)


def test_swapping_parity_is_what_avoids_conflicts():
    """Had all eight rows of a store the same parity, they would meet only four bank groups."""
    transpose = Transpose(128, 128)
    same_parity = [transpose.target.byte(2 * row, 0) for row in range(8)]
    assert len({address // 16 % 8 for address in same_parity}) == 4
    spread = [transpose.store_address(0, lane) for lane in range(8)]
    assert len({address // 16 % 8 for address in spread}) == 8


@given(TILES, st.integers(1, 4))
def test_every_block_belongs_to_one_warp(tile, warps):
    transpose = Transpose(*tile, warps)
    dealt = [block for warp in range(warps) for block in transpose.blocks_of(warp)]
    assert sorted(dealt) == list(range(transpose.blocks))
    assert len({transpose.origin(block) for block in dealt}) == transpose.blocks


@given(st.lists(st.integers(0, 255), min_size=8, max_size=8), st.integers(0, 0xFFFF))
def test_prmt_picks_bytes(values, selector):
    selector &= 0x7777
    expected = [values[(selector >> (4 * i)) & 0xF] for i in range(4)]
    assert list(prmt(tuple(values[:4]), tuple(values[4:]), selector)) == expected


def test_the_selectors_part_even_from_odd():
    a, b = (0, 1, 2, 3), (4, 5, 6, 7)
    assert prmt(a, b, EVEN_BYTES) == (0, 2, 4, 6) and prmt(a, b, ODD_BYTES) == (1, 3, 5, 7)


def test_matrix_loads_and_stores_as_matrices():
    """ldmatrix.trans, then stmatrix: four 8 x 8 matrices of 16-bit units come out transposed."""
    units = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    rows = [128 * matrix + 16 * row for matrix in range(4) for row in range(8)]
    memory = bytearray(512)
    stmatrix_x4(memory, rows, ldmatrix_x4_trans(units.tobytes(), rows))
    assert np.array_equal(np.frombuffer(bytes(memory), np.uint16).reshape(4, 8, 8), units.transpose(0, 2, 1))


def test_impossible_tiles():
    with pytest.raises(LayoutError, match="32 x 16 blocks"):
        Transpose(48, 128)
    with pytest.raises(LayoutError, match="32 x 16 blocks"):
        Transpose(128, 72)
    with pytest.raises(LayoutError, match="got 3"):
        Transpose(128, 128).run(b"abc")
