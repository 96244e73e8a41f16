"""How many key blocks a tile walks and which of them need the mask, from the kernel's own text on plain integers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa3.reference import visible

from .parts import fresh


@pytest.fixture(scope="module")
def masks():
    module = fresh("mask")
    module.ceil_div_clamped = module.ceil_div_clamped.__wrapped__
    return module


@given(
    causal=st.booleans(),
    seqlen_q=st.integers(1, 90),
    seqlen_k=st.integers(1, 90),
    tile_n=st.sampled_from([4, 7, 16]),
    rows=st.sampled_from([4, 8, 12]),
    m_block=st.integers(0, 30),
)
def test_blocks_are_exactly_those_that_some_row_sees(masks, causal, seqlen_q, seqlen_k, tile_n, rows, m_block):
    mask = masks.MASKS[causal](seqlen_q, seqlen_k, tile_n)
    first = m_block * rows
    seen = visible(seqlen_q, seqlen_k, causal)[first : first + rows]
    blocks = type(mask).blocks.__wrapped__(mask, first, rows)
    columns = seen.any(0).nonzero().flatten().tolist() if len(seen) else []
    assert blocks == (columns[-1] // tile_n + 1 if columns else 0)
    clear = min(mask.clear_blocks(first), blocks)
    for n in range(clear):
        assert bool(seen[:, n * tile_n : (n + 1) * tile_n].all()), "a block without the mask has a hidden key"
        assert (n + 1) * tile_n <= seqlen_k, "a block without the mask reaches past the last key"
    if mask.cuts_one_block:
        assert blocks - clear <= 1
