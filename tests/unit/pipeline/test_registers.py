"""Register budgets: what the CTA starts with is all there is."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa3.pipeline import BUDGETS, RegisterBudget

COUNTS = range(24, 257, 8)


def legal(load, math, groups):
    """The same rules, spelled out in registers per warp instead of per CTA."""
    even = min(65_536 // (32 * 4 * (1 + groups)) // 8 * 8, 256)
    given_back, taken = even - load, math - even
    return given_back >= 0 and taken >= 0 and taken * groups <= given_back


@pytest.mark.parametrize("groups", (1, 2, 3))
def test_the_table_holds_legal_budgets(groups):
    budget = BUDGETS[groups]
    assert budget.math_warpgroups == groups
    assert legal(budget.load, budget.math, groups)
    assert budget.total <= budget.pool <= 65_536


@pytest.mark.parametrize("groups", (1, 2, 3))
def test_no_budget_gives_more_to_math(groups):
    larger = [count for count in COUNTS if count > BUDGETS[groups].math]
    for load, math in product(COUNTS, larger):
        with pytest.raises(ValueError):
            RegisterBudget(load, math, groups)


@pytest.mark.parametrize(("groups", "entry", "pool"), [(1, 255, 65_536), (2, 168, 64_512), (3, 128, 65_536)])
def test_registers_at_launch(groups, entry, pool):
    assert (BUDGETS[groups].entry, BUDGETS[groups].pool) == (entry, pool)


@given(st.sampled_from(COUNTS), st.sampled_from(COUNTS), st.integers(1, 7))
def test_exactly_the_legal_budgets_are_accepted(load, math, groups):
    if legal(load, math, groups):
        budget = RegisterBudget(load, math, groups)
        assert budget.total == 128 * (load + groups * math)
    else:
        with pytest.raises(ValueError):
            RegisterBudget(load, math, groups)


def test_registers_that_the_sm_has_but_the_cta_does_not():
    """24 + 2 x 240 is the whole pool. 8 more for the producer fit into the SM, and would hang all the same."""
    assert RegisterBudget(24, 240, 2).total == RegisterBudget(24, 240, 2).pool
    words = r"32 x 128 \+ 240 x 128 x 2 = 65536 registers; the CTA starts with 64512 and gets no more"
    with pytest.raises(ValueError, match=words):
        RegisterBudget(32, 240, 2)


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ((20, 240, 2), "load asks for 20 registers; setmaxnreg takes multiples of 8 from 24 to 256"),
        ((16, 240, 2), "load asks for 16 registers"),
        ((24, 250, 2), "math asks for 250 registers"),
        ((24, 264, 1), "math asks for 264 registers"),
        ((24, 168, 3), r"24 x 128 \+ 168 x 128 x 3 = 67584 registers; the CTA starts with 65536"),
        ((24, 120, 3), r"threads start with 128 registers; load \(24\) may only give back and math \(120\) only take"),
        ((176, 160, 2), r"threads start with 168 registers; load \(176\) may only give back"),
    ],
)
def test_wrong_budgets_are_refused_with_the_arithmetic(budget, words):
    with pytest.raises(ValueError, match=words):
        RegisterBudget(*budget)
