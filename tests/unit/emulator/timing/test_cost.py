"""The cost model against what an H200 did in micro-benchmarks (elements per clock and SM)."""

from __future__ import annotations

import pytest

from fa3.emulator.timing import Trace, replay
from fa3.emulator.timing.cost import FREE, PIPES, UNITS, Cost
from fa3.emulator.timing.events import Branch, Code, Math
from fa3.emulator.timing.ops import Op

ELEMENTS = 32
"""Of a thread, in one pass through the loop."""


def softmax_loop(exponentials: bool) -> Math:
    """Softmax on registers: per element a maximum, FFMA, exponential and addition in four chains each, per pair a
    conversion."""
    ops = [Op("alu", (f"m{i % 4}", f"s{i}"), (f"m{i % 4}",)) for i in range(ELEMENTS)]
    ops += [Op("alu", ("m0", "m1"), ("a",)), Op("alu", ("m2", "m3"), ("b",)), Op("alu", ("a", "b"), ("c",))]
    ops.append(Op("fma", ("c",), ("m",)))
    for i in range(ELEMENTS):
        ops.append(Op("fma", (f"s{i}", "m"), (f"t{i}",)))
        ops.append(Op("mufu" if exponentials else "free", (f"t{i}",), (f"s{i}",)))
        ops.append(Op("fma", (f"l{i % 4}", f"s{i}"), (f"l{i % 4}",)))
    for i in range(0, ELEMENTS, 4):
        ops += [Op("convert", (f"s{i + j}", f"s{i + j + 1}"), (f"w{i + j}",)) for j in (0, 2)]
        ops.append(Op("alu", ("sum", f"w{i}", f"w{i + 2}"), ("sum",)))
    return Math(Code(tuple(ops)))


def elements_per_clock(exponentials: bool, warps: int) -> float:
    passes, loop = 40, softmax_loop(exponentials)
    timeline = replay(Trace([[loop, Branch(None)] * passes] * warps), Cost(branch=4.0))
    return ELEMENTS * 32 * passes * warps / timeline.end


@pytest.mark.parametrize(("warps", "measured"), [(8, 13.9), (12, 15.4), (16, 15.4)])
def test_softmax_on_registers_is_as_fast_as_measured(warps, measured):
    assert elements_per_clock(True, warps) == pytest.approx(measured, rel=0.16)


def test_without_exponentials_it_is_half_as_fast_again():
    assert elements_per_clock(False, 16) == pytest.approx(24.8, rel=0.25)


@pytest.mark.parametrize(
    ("kind", "measured"),
    [("mufu", 16.0), ("fma", 120), ("alu", 63), ("convert", 63), ("shuffle", 32)],
)
def test_rates_of_single_instructions(kind, measured):
    ops = Math(Code(tuple(Op(kind, (), (f"r{i}",)) for i in range(400))))
    timeline = replay(Trace([[ops]] * 16), Cost())
    assert 400 * 32 * 16 / timeline.end == pytest.approx(measured, rel=0.04)


def test_every_unit_has_a_pipe():
    assert {unit.pipe for unit in UNITS.values()} <= set(PIPES)


def test_free_constants_exist_and_include_their_default():
    for name, values in FREE.items():
        assert getattr(Cost(), name) in values


def test_a_constant_that_does_not_exist_is_refused():
    with pytest.raises(TypeError, match="mma_quue"):
        Cost().with_constants(mma_quue=2)
