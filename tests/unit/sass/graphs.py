"""Random control flow for property tests."""

from hypothesis import strategies as st

from fa3.sass.flow import Step


@st.composite
def listings(draw, most=9):
    """Random listings: every instruction may fall through, jump to one or two places, or both."""
    count = draw(st.integers(1, most))
    target = st.integers(0, count - 1)
    step = st.builds(Step, st.booleans(), st.lists(target, max_size=2).map(tuple))
    return draw(st.lists(step, min_size=count, max_size=count))
