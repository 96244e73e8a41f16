"""The table, the choice of a row, and what is refused before anything is compiled."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa3.config.budget import check_forward, forward_registers, forward_smem, forward_topology
from fa3.config.table import FORWARD, forward_config, forward_key

MULTIPLES_OF_8 = st.integers(1, 32).map(lambda n: 8 * n)


@pytest.mark.parametrize("row", FORWARD, ids=str)
def test_an_sm_can_hold_every_row(row):
    assert check_forward(row) is row
    assert forward_smem(row).total_bytes <= 232_448
    assert forward_registers(row).math_warpgroups == row.math_warpgroups
    assert forward_topology(row)["k"].edge.bytes == 2 * row.tile_n * row.head_dim


@given(head_dim=MULTIPLES_OF_8, head_dim_v=MULTIPLES_OF_8, causal=st.booleans())
def test_the_chosen_row_is_the_narrowest_that_holds_the_problem(head_dim, head_dim_v, causal):
    row = forward_config(head_dim, head_dim_v, causal)
    assert row.causal == causal and row.head_dim >= head_dim and row.head_dim_v >= head_dim_v
    for other in FORWARD:
        fits = other.causal == causal and other.head_dim >= head_dim and other.head_dim_v >= head_dim_v
        assert not fits or (other.head_dim, other.head_dim_v) >= (row.head_dim, row.head_dim_v)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "word"), [(0, 64, "head_dim"), (264, 64, "head_dim"), (64, 63, "_v")]
)
def test_other_head_dims_are_refused_by_name(head_dim, head_dim_v, word):
    with pytest.raises(ValueError, match=word):
        forward_config(head_dim, head_dim_v, False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"turns": "foo"}, "turns is 'foo'; it must be one of pingpong, free"),
        ({"store": "foo"}, "store is 'foo'"),
        ({"algorithm": "plian"}, "algorithm is 'plian'; it must be one of plain, overlap"),
        ({"rescale": "never"}, "rescale is 'never'; it must be one of always, rising, lazy"),
        ({"stages": 0}, "stages is 0"),
        ({"tile_m": 100}, "tile_m is 100"),
        ({"tile_m": 256}, "4 math warpgroups"),
        ({"tile_n": 24}, "tile_n is 24"),
        ({"head_dim": 72}, "head_dim is 72"),
        ({"stages": 9}, "over"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_a_row_that_cannot_work_is_refused_in_words(change, words):
    with pytest.raises(ValueError, match=words):
        check_forward(replace(FORWARD[0], **change))


def test_keys_have_different_names():
    keys = {
        forward_key(row.head_dim, row.head_dim_v, row.causal, dtype, negative)
        for row in FORWARD
        for dtype in ("bf16", "fp16")
        for negative in (False, True)
    }
    assert len({key.name for key in keys}) == len(keys) == 4 * len(FORWARD)
    assert all(name.replace("_", "").isalnum() for name in (key.name for key in keys))
