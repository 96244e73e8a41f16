"""Which exponentials run under a GEMM: known programs, then random ones against slow definitions."""

from hypothesis import given, settings
from hypothesis import strategies as st

from fa3.sass.flow import build
from fa3.sass.overlap import Effect, Issue, State, Wait, gemms_in_flight, states_before
from tests.unit.sass.graphs import listings
from tests.unit.sass.programs import COMMIT, EX2, EXIT, HGMMA, listing, wait


def under(*lines: str) -> list[bool]:
    """For each exponential, in order, whether a GEMM is in flight on every path to it."""
    found = listing(*lines)
    flights = gemms_in_flight(found)
    return [flights[i] > 0 for i, instruction in enumerate(found.instructions) if instruction.opcode == "MUFU.EX2"]


def test_before_the_first_gemm_and_behind_the_last_wait():
    assert under(EX2, HGMMA, COMMIT, EX2, wait(0), EX2, EXIT) == [False, True, False]


def test_a_group_is_in_flight_from_its_first_instruction():
    assert under(HGMMA, EX2, COMMIT, EXIT) == [True]


def test_a_wait_for_all_but_one_leaves_one():
    assert under(COMMIT, COMMIT, wait(1), EX2, wait(0), EX2) == [True, False]
    assert under(COMMIT, wait(1), EX2) == [True]


def test_a_wait_does_not_cover_an_open_group():
    assert under(HGMMA, wait(0), EX2) == [True]


def test_a_wait_on_only_one_path_does_not_count():
    assert under(COMMIT, "@P0 BRA `(.L_x_0)", wait(0), ".L_x_0:", EX2, EXIT) == [False]


def test_different_work_on_two_paths_counts_if_both_have_some():
    # one path leaves a closed group, the other an open one: neither is idle, though they share no number
    program = ["@P0 BRA `(.L_x_0)", COMMIT, "BRA `(.L_x_1)", ".L_x_0:", HGMMA, ".L_x_1:", EX2, EXIT]
    assert under(*program) == [True]


def test_a_predicated_wait_may_and_may_not_wait():
    assert under(COMMIT, f"@P0 {wait(0)}", EX2) == [False]


def test_a_predicated_gemm_may_not_have_been_issued():
    assert under(f"@P0 {COMMIT}", EX2) == [False]


def test_the_first_iteration_of_a_loop_counts():
    # the group of iteration i is in flight at the top of i + 1, but not at the top of the first iteration
    assert under(".L_x_0:", EX2, COMMIT, EX2, "@P0 BRA `(.L_x_0)", EXIT) == [False, True]
    assert under(COMMIT, ".L_x_0:", EX2, COMMIT, wait(1), EX2, "@P0 BRA `(.L_x_0)", EXIT) == [True, True]


def test_a_loop_without_a_wait_comes_to_an_end():
    assert under(".L_x_0:", COMMIT, EX2, "@P0 BRA `(.L_x_0)", wait(0), EX2, EXIT) == [True, False]


def test_algorithm_2_and_its_ruin_by_a_hoisted_wait():
    loop = [".L_x_0:", HGMMA, COMMIT, HGMMA, COMMIT, wait(1)]
    back = ["@P0 BRA `(.L_x_0)", EXIT]
    assert under(*loop, EX2, EX2, wait(0), *back) == [True, True]
    assert under(*loop, wait(0), EX2, EX2, *back) == [False, False]


def test_unreachable_code_is_not_under_a_gemm():
    assert under(COMMIT, EXIT, EX2, EXIT) == [False]


def test_waiting_loops_out_of_line_do_not_disturb():
    program = [COMMIT, "@!P0 BRA `(.L_x_2)", ".L_x_1:", EX2, wait(0), EXIT]
    program += [".L_x_2:", "@!P0 NANOSLEEP.SYNCS 0x989680", "@!P0 BRA `(.L_x_2)", "BRA `(.L_x_1)"]
    assert under(*program) == [True]


actions = st.one_of(st.booleans().map(Issue), st.integers(0, 3).map(Wait))
effects = st.none() | st.builds(Effect, actions)


def after(action: Issue | Wait, groups: int, is_open: bool) -> tuple[int, bool]:
    """The definition, with a count that never stops."""
    if isinstance(action, Wait):
        return min(groups, action.most), is_open
    return (groups + 1, False) if action.commits else (groups, True)


@given(st.lists(effects, max_size=60))
def test_straight_programs_against_a_simulation(program):
    from fa3.sass.flow import Step

    found = states_before(build([Step() for _ in program]), program)
    groups, is_open = 0, False
    for states, effect in zip(found, program, strict=True):
        (state,) = states
        assert (state.busy > 0) == (groups > 0 or is_open)
        assert state.open == is_open and state.groups <= groups
        if effect:
            groups, is_open = after(effect.action, groups, is_open)


@settings(max_examples=200)
@given(st.data())
def test_small_graphs_against_every_path(data):
    """Paths up to a length that reaches every state: some path finds each state that the dataflow has, and no other."""
    steps = data.draw(listings(most=6))
    some = st.none() | st.builds(Effect, actions, st.booleans())
    program = data.draw(st.lists(some, min_size=len(steps), max_size=len(steps)))
    cap = 1 + max((e.action.most for e in program if e and isinstance(e.action, Wait)), default=0)
    found = states_before(build(steps), program)
    seen: list[set[State]] = [set() for _ in steps]
    paths = {(0, State())}
    for _ in range(40 * len(steps)):
        arrived = {(index, state) for index, state in paths if index < len(steps) and state not in seen[index]}
        if not arrived:
            break
        for index, state in arrived:
            seen[index].add(state)
        paths = {
            following
            for index, state in arrived
            for following in _follow(steps[index], program[index], index, state, cap)
        }
    assert [set(states) for states in found] == seen


def _follow(step, effect, index, state, cap):
    states = {state}
    if effect:
        groups, is_open = after(effect.action, state.groups, state.open)
        moved = State(min(groups, cap), is_open)
        states = {moved} if effect.certain else {state, moved}
    places = [*step.targets, *([index + 1] if step.falls else [])]
    return {(place, new) for place in places for new in states}
