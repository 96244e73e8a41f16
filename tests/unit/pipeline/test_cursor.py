"""Cursors against integer arithmetic, as Python integers and as run-time integers of a compiled program."""

from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa3.pipeline import Cursor
from tests.unit.test_package import python


@given(st.integers(1, 9), st.integers(0, 60))
def test_k_steps_are_a_division(stages, k):
    cursor = Cursor.start(stages)
    for _ in range(k):
        cursor = cursor.advance()
    lap, stage = divmod(k, stages)
    assert (cursor.stage, cursor.phase, cursor.stages) == (stage, lap % 2, stages)


@given(st.integers(1, 9), st.data())
def test_a_lap_leads_to_the_same_stage_in_the_other_phase(stages, data):
    """So the owner of one stage of a private edge may flip its phase instead of advancing around the whole ring."""
    begin = cursor = Cursor(data.draw(st.integers(0, stages - 1)), data.draw(st.integers(0, 1)), stages)
    for _ in range(stages):
        cursor = cursor.advance()
    assert cursor == Cursor(begin.stage, begin.phase ^ 1, stages)


def test_advancing_makes_a_new_cursor():
    cursor = Cursor.start(2)
    assert cursor.advance() == Cursor(1, 0, 2)
    assert cursor == Cursor(0, 0, 2)
    with pytest.raises(FrozenInstanceError):
        cursor.stage = 1


def test_plain_cursors_need_no_dsl():
    assert (
        python(
            "import sys; from fa3.pipeline import Cursor; Cursor.start(2).advance(); print('cutlass' in sys.modules)"
        )
        == "False"
    )


@pytest.mark.parametrize("stages", (1, 2, 3))
def test_a_compiled_loop_carries_the_cursor(stages):
    """The DSL compiles host functions too: this loop runs on the CPU, with a length that it learns at run time."""
    torch = pytest.importorskip("torch")
    import cutlass
    import cutlass.cute as cute
    from cutlass import Int32
    from cutlass.cute.runtime import from_dlpack

    @cute.jit
    def walk(out: cute.Tensor, steps: Int32, stages: cutlass.Constexpr):
        cursor = Cursor(Int32(0), Int32(0), stages)
        for i in cutlass.range(steps, unroll=1):
            out[i, 0] = cursor.stage
            out[i, 1] = cursor.phase
            cursor = cursor.advance()

    out = torch.full((11, 2), -1, dtype=torch.int32)
    walk(from_dlpack(out), Int32(10), stages)
    expected = [[k % stages, k // stages % 2] for k in range(10)]
    assert out.tolist() == [*expected, [-1, -1]]


@given(st.integers(1, 6), st.integers(0, 40))
def test_the_next_lap_is_as_many_steps_away_as_there_are_stages(stages, steps):
    cursor = Cursor.start(stages)
    for _ in range(steps):
        cursor = cursor.advance()
    around = cursor
    for _ in range(stages):
        around = around.advance()
    assert cursor.next_lap() == around
