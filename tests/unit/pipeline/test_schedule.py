"""Every warp of a CTA has exactly one role."""

import pytest

from fa3.pipeline import Role, RoleSchedule, load_and_math


@pytest.mark.parametrize("groups", range(1, 8))
def test_load_and_math(groups):
    schedule = load_and_math(groups)
    warps = [role.first_warp + i for role in schedule.roles for i in range(role.warps)]
    assert warps == list(range(4 + 4 * groups))
    assert schedule.threads == 128 * (1 + groups)
    assert [role.name for role in schedule.roles] == ["load", *(f"math{i}" for i in range(groups))]
    assert schedule["load"].issuing == 1
    assert all(schedule[f"math{i}"].issuing == 4 for i in range(groups))


def test_roles_are_found_by_name():
    assert load_and_math(2)["math1"].first_warp == 8
    with pytest.raises(KeyError, match=r"no role 'math2'; roles: \['load', 'math0', 'math1'\]"):
        load_and_math(2)["math2"]


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        ((Role("a", 4, 4, 1),), "role 'a' starts at warp 4, expected 0"),
        ((Role("a", 0, 4, 1), Role("b", 8, 4, 1)), "role 'b' starts at warp 8, expected 4"),
        ((Role("a", 0, 8, 1), Role("b", 4, 4, 1)), "role 'b' starts at warp 4, expected 8"),
        ((Role("a", 0, 3, 1),), "role 'a' must own whole warpgroups of 4 warps"),
        ((Role("a", 0, 4, 5),), "role 'a' issues from 5 of its 4 warps"),
        ((Role("a", 0, 4, 0),), "role 'a' issues from 0 of its 4 warps"),
        ((Role("a", 0, 0, 1),), "role 'a' issues from 1 of its 0 warps"),
        ((Role("a", 0, 36, 1),), "36 warps in a CTA; the hardware allows 32"),
        ((Role("a", 0, 4, 1), Role("a", 4, 4, 1)), r"role names must differ: \['a', 'a'\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_schedules_are_refused(roles, words):
    with pytest.raises(ValueError, match=words):
        RoleSchedule(roles)
