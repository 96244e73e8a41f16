"""Random cases for hypothesis, drawn densely around the places where tiles begin and end."""

from __future__ import annotations

from hypothesis import strategies as st

from fa3.config.backward_table import BACKWARD
from fa3.config.table import FORWARD
from tests.gpu.cases import DTYPES, LAYOUTS, Case
from tests.gpu.gradient_cases import DO_LAYOUTS, INCOMING, GradientCase

LONGEST = 1100


def edges(longest: int = LONGEST) -> list[int]:
    """Lengths around one, two and three tiles of every row of both tables, and the smallest ones."""
    rows = (*FORWARD, *BACKWARD)
    tiles = {row.tile_m for row in rows} | {row.tile_n for row in rows} | {64}
    near = {n * tile + off for tile in tiles for n in (1, 2, 3) for off in (-1, 0, 1)}
    return sorted({0, 1, 2, 3, 7, 8, 9} | {n for n in near if n <= longest})


def lengths(longest: int = LONGEST) -> st.SearchStrategy[int]:
    return st.one_of(st.sampled_from(edges(longest)), st.integers(0, longest))


def widths() -> st.SearchStrategy[tuple[int, int]]:
    """(head_dim, head_dim_v): mostly equal, sometimes (192, 128), sometimes any two multiples of 8."""
    one = st.sampled_from(range(8, 257, 8))
    tuned = st.sampled_from(sorted({(row.head_dim, row.head_dim_v) for row in FORWARD}))
    return st.one_of(tuned, one.map(lambda d: (d, d)), st.tuples(one, one))


def scales() -> st.SearchStrategy[float | None]:
    return st.one_of(
        st.none(),
        st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-6, 0.5, -0.125]),
        st.floats(-1, 1, allow_nan=False, allow_subnormal=False),
    )


@st.composite
def cases(draw: st.DrawFn, longest: int = LONGEST) -> Case:
    seqlen_q, seqlen_k = draw(lengths(longest)), draw(lengths(longest))
    if draw(st.booleans()):  # as in training: one length for both
        seqlen_k = seqlen_q
    head_dim, head_dim_v = draw(widths())
    layout = st.sampled_from(sorted(LAYOUTS))
    return Case(
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        batch=draw(st.integers(1, 3)),
        heads_kv=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 1, 2, 3, 4])),
        causal=draw(st.booleans()),
        dtype=draw(st.sampled_from(sorted(DTYPES))),
        scale=draw(scales()),
        amplitude=draw(st.sampled_from([1.0, 1.0, 0.1, 5.0])),
        layouts=(draw(layout), draw(layout), draw(layout)),
        seed=draw(st.integers(0, 1 << 30)),
    )


@st.composite
def gradient_cases(draw: st.DrawFn, longest: int = LONGEST) -> GradientCase:
    return GradientCase(
        draw(cases(longest)),
        do_layout=draw(st.one_of(st.just("contiguous"), st.sampled_from(sorted(DO_LAYOUTS)))),
        incoming=draw(st.sampled_from(["o", "o", *INCOMING])),
        deterministic=draw(st.booleans()),
    )
