"""Elementwise instructions against a model in plain Python, lane by lane, through whole kernels."""

from __future__ import annotations

import math
import struct
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa3.emulator import isa
from fa3.emulator.blocks import Code
from fa3.emulator.faults import Unsupported
from fa3.emulator.warp import UNWRITTEN

from .assembler import LANES, OnLanes, assemble, on_lanes, pointer, run
from .scalar import NAN, WIDTH, Case, fma, groups, number, pattern

GROUPS = groups()
BANK = {1: "%p", 8: "%h", 16: "%h", 32: "%r", 64: "%rd"}
STORED = {1: np.bool_, 8: np.uint16, 16: np.uint16, 32: np.uint32, 64: np.uint64}
UNTOUCHED = {1: 0, 16: 0xDEAD, 32: UNWRITTEN, 64: UNWRITTEN}
"""What a register holds that nobody wrote."""


class Kernel:
    """One kernel for all cases of a group: operands in registers 0, 1, 2 and 20, results behind them."""

    def __init__(self, cases: list[Case], masked: bool) -> None:
        self.cases = cases
        self.operands: dict[tuple[str, int], str] = {}
        """(type, position) -> register."""
        used = dict.fromkeys(BANK.values(), 0)

        def register(kind: str) -> str:
            bank = BANK[WIDTH[kind]]
            used[bank] += 1
            return f"{bank}{used[bank] - 1}"

        for case in cases:
            for position, kind in enumerate(case.operands):
                if (kind, position) not in self.operands:
                    self.operands[kind, position] = register(kind)
        self.results = [register(case.result) for case in cases]
        body = "\n".join(self._statement(case, result) for case, result in zip(cases, self.results, strict=True))
        inputs = {name: STORED[WIDTH[kind]] for (kind, _), name in self.operands.items()}
        if masked:
            inputs["%p15"] = np.bool_
            body = f"@!%p15 bra $SKIP;\n{body}\n$SKIP:"
        outputs = {r: STORED[WIDTH[case.result]] for case, r in zip(cases, self.results, strict=True)}
        self.run = OnLanes(body, inputs, outputs)

    def _statement(self, case: Case, result: str) -> str:
        operands = [self.operands[kind, position] for position, kind in enumerate(case.operands)]
        return f"{case.opcode} {', '.join([result, *operands])};"


@cache
def kernel(name: str, part: int, masked: bool) -> Kernel:
    return Kernel(parts(GROUPS[name])[part], masked)


def parts(cases: list[Case]) -> list[list[Case]]:
    """At most ten cases in a kernel: there are 16 predicates."""
    return [cases[i : i + 10] for i in range(0, len(cases), 10)]


PARTS = [(name, part) for name, cases in GROUPS.items() for part in range(len(parts(cases)))]


@cache
def edges(kind: str) -> list[int]:
    """Patterns of a type around which something changes."""
    width = WIDTH[kind]
    if kind == "pred":
        return [0, 1]
    if kind == "f32":
        return [bits | sign << 31 for bits in FLOATS for sign in (0, 1)]
    found = [0, 1, 2, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, (1 << width) - 1, (1 << width) - 2]
    found += [(1 << width - 1) + i for i in (-1, 0, 1)] + [1 << i for i in range(9, width, 10)]
    return sorted({edge % (1 << width) for edge in found})


FLOATS = [pattern(value, "f32") for value in (0.0, 1.0, 1.5, 3.0, 2.0**-126, 2.0**-149, 2.0**-127, 3.4e38, math.inf)]
FLOATS += [0x7FC00000, 0x3F800001, 0x3F7FFFFF, 0x4B800000, 0x4B800001, 0x007FFFFF]


def check(k: Kernel, columns: list[list[int]], active: list[bool]) -> None:
    """Runs the kernel on a column of patterns for each operand, and compares every lane of every result."""
    stored = {name: STORED[WIDTH[kind]] for (kind, _), name in k.operands.items()}
    inputs = {name: np.array(column, stored[name]) for name, column in zip(stored, columns, strict=True)}
    got = k.run({**inputs, "%p15": np.array(active)})
    of = dict(zip(k.operands, columns, strict=True))
    for case, register in zip(k.cases, k.results, strict=True):
        for lane in range(LANES):
            operands = [of[kind, position][lane] for position, kind in enumerate(case.operands)]
            expected = expect(case, operands) if active[lane] else UNTOUCHED[WIDTH[case.result]]
            found = int(got[register][lane])
            shown = [number(bits, kind) for bits, kind in zip(operands, case.operands, strict=True)]
            assert same(case, found, expected), f"{case.opcode} of {shown}: {found:#x}, not {expected:#x}"


@pytest.mark.parametrize(("name", "part"), PARTS, ids=[f"{name} {part}" for name, part in PARTS])
def test_elementwise_instructions_at_their_edges(name: str, part: int) -> None:
    """All pairs of edges for the first two operands; what a third is goes round."""
    k = kernel(name, part, False)
    most = [max((len(edges(kind)) for kind, p in k.operands if p == position), default=1) for position in range(2)]
    count = -(-most[0] * most[1] // LANES) * LANES
    order = {0: lambda i: i, 1: lambda i: i // most[0], 2: lambda i: i + i // 7}
    columns = [
        [edges(kind)[order[position](i) % len(edges(kind))] for i in range(count)] for kind, position in k.operands
    ]
    for start in range(0, count, LANES):
        check(k, [column[start : start + LANES] for column in columns], [True] * LANES)


@st.composite
def lanes(draw: st.DrawFn, kinds: list[str]) -> list[list[int]]:
    """For each type a pattern in every lane; few are drawn and repeated."""
    values = [st.sampled_from(edges(kind)) | st.integers(0, (1 << WIDTH[kind]) - 1) for kind in kinds]
    drawn = draw(st.lists(st.tuples(*values), min_size=1, max_size=12))
    return [[drawn[lane % len(drawn)][i] for lane in range(LANES)] for i in range(len(kinds))]


@pytest.mark.parametrize(("name", "part"), PARTS, ids=[f"{name} {part}" for name, part in PARTS])
@given(data=st.data())
@settings(max_examples=5)
def test_elementwise_instructions_in_some_lanes(name: str, part: int, data: Any) -> None:
    """Random operands; lanes that are not active keep what they have."""
    k = kernel(name, part, True)
    columns = data.draw(lanes([kind for kind, _ in k.operands]))
    check(k, columns, data.draw(st.lists(st.booleans(), min_size=LANES, max_size=LANES)))


def test_fma_rounds_once() -> None:
    """Sums next to the middle between two fp32 numbers, by less than fp64 has room for."""
    k = Kernel([case for case in GROUPS["f32"] if case.opcode == "fma.rn.f32"], masked=False)
    rows = []
    for i in range(1, 33):
        a, b = 2.0**-12 * (1 + i * 2.0**-23), 2.0**-12 * (1 - i * 2.0**-23)
        rows += [
            (sa * a, sb * b, sc * c) for sa in (1, -1) for sb in (1, -1) for sc in (1, -1) for c in (1.0, 1 + 2.0**-23)
        ]
    patterns = [[pattern(x, "f32") for x in column] for column in zip(*rows, strict=True)]
    for start in range(0, len(rows), LANES):
        check(k, [column[start : start + LANES] for column in patterns], [True] * LANES)
    double = [pattern(a * b + c, "f32") for a, b, c in rows]
    assert double != [pattern(fma(a, b, c), "f32") for a, b, c in rows], "fp64 alone would do"


def expect(case: Case, operands: list[int]) -> int:
    numbers = [number(bits, kind) for bits, kind in zip(operands, case.operands, strict=True)]
    return pattern(case.model(*numbers), case.result)


def same(case: Case, found: int, expected: int) -> bool:
    """Bit for bit; but any NaN is one, and it is left open which of two zeros is the smaller."""
    if case.result != "f32":
        return found == expected
    a, b = number(found, "f32"), number(expected, "f32")
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return found == expected or (a == b == 0 and case.opcode[:3] in ("min", "max"))


def test_every_instruction_has_a_case() -> None:
    tested = {case.opcode.split(".")[0] for cases in GROUPS.values() for case in cases}
    assert set(isa._MAKERS) - tested == {"ex2", "lg2", "rcp", "cvta"}  # tested below


# ------------------------------------------------------------------------------------------------ runs of them
STEPS = {"add.u32": np.add, "max.u32": np.maximum, "xor.b32": np.bitwise_xor}
register = st.integers(0, 4)
chained = st.tuples(st.sampled_from(["add.u32"] * 6 + ["max.u32", "xor.b32"]), register, st.just(-1), register)
any_step = st.tuples(st.sampled_from(list(STEPS)), register, register, register)


@given(st.lists(chained | chained | chained | any_step, min_size=4, max_size=9))
@settings(max_examples=100)
def test_a_run_is_what_its_instructions_are_one_after_the_other(steps: list[tuple[str, int, int, int]]) -> None:
    """Sums and maxima that go on with the result before (-1), which the emulator takes together where it may."""
    start = [np.arange(LANES, dtype=np.uint32) * (1000003 * (i + 1)) for i in range(5)]
    expected, body, last = list(start), "", 0
    for opcode, result, a, b in steps:
        a = last if a < 0 else a
        expected[result] = STEPS[opcode](expected[a], expected[b])
        body += f"{opcode} %r{result}, %r{a}, %r{b};"
        last = result
    got = on_lanes(body, {f"%r{i}": values for i, values in enumerate(start)}, {f"%r{i}": np.uint32 for i in range(5)})
    for i, values in enumerate(expected):
        assert (got[f"%r{i}"] == values).all()


# ------------------------------------------------------------------------------------------------ approximations
def ulps(found: Any, exact: float) -> float:
    """Distance from an exact result, in units of its last place."""
    return abs(float(found) - exact) / float(np.spacing(np.float32(abs(exact))))


def of_floats(opcode: str, inputs: list[float]) -> list[float]:
    lanes = np.array((inputs * LANES)[:LANES], np.float32)
    return [float(x) for x in on_lanes(f"{opcode} %r1, %r0;", {"%r0": lanes}, {"%r1": np.float32})["%r1"]][
        : len(inputs)
    ]


@given(st.lists(st.floats(-125, 127, width=32), min_size=1, max_size=32))
@settings(max_examples=20)
def test_ex2(inputs: list[float]) -> None:
    for x, y in zip(inputs, of_floats("ex2.approx.ftz.f32", inputs), strict=True):
        assert ulps(y, 2.0**x) <= 1


@given(st.lists(st.floats(2.0**-126, 2.0**127, width=32), min_size=1, max_size=32))
@settings(max_examples=20)
def test_lg2_and_rcp(inputs: list[float]) -> None:
    for x, y in zip(inputs, of_floats("lg2.approx.ftz.f32", inputs), strict=True):
        assert abs(y - math.log2(x)) <= 1e-30 or ulps(y, math.log2(x)) <= 1
    for x, y in zip(inputs, of_floats("rcp.approx.ftz.f32", inputs), strict=True):
        assert ulps(y, 1 / x) <= 1 if 1 / x >= 2.0**-126 else y == 0


@pytest.mark.parametrize(
    ("opcode", "operand", "result"),
    [
        ("ex2", -math.inf, 0.0), ("ex2", math.inf, math.inf), ("ex2", -127.0, 0.0), ("ex2", 128.0, math.inf),
        ("ex2", 2.0**-149, 1.0), ("lg2", 0.0, -math.inf), ("lg2", 2.0**-127, -math.inf), ("lg2", math.inf, math.inf),
        ("rcp", -0.0, -math.inf), ("rcp", -(2.0**-127), -math.inf), ("rcp", math.inf, 0.0), ("rcp", 2.0**127, 0.0),
    ],
)  # fmt: skip
def test_edges_of_approximations(opcode: str, operand: float, result: float) -> None:
    assert of_floats(f"{opcode}.approx.ftz.f32", [operand]) == [result]


@pytest.mark.parametrize("opcode", ["ex2", "lg2", "rcp"])
def test_approximations_of_nan(opcode: str) -> None:
    assert math.isnan(of_floats(f"{opcode}.approx.ftz.f32", [math.nan])[0])
    if opcode == "lg2":
        assert math.isnan(of_floats("lg2.approx.ftz.f32", [-1.0])[0])


# ------------------------------------------------------------------------------------------------ small floats
def bf16(value: float) -> int:
    """Rounded to nearest even from the fp32 pattern."""
    bits = pattern(value, "f32")
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def f16(value: float) -> int:
    try:
        return int(struct.unpack("<H", struct.pack("<e", value))[0])
    except OverflowError:
        return 0x7C00 | (value < 0) << 15


small = (
    st.floats(-7e4, 7e4, width=32) | st.floats(width=32, allow_nan=False) | st.sampled_from([65519.0, 65520.0, 1e-8])
)


@given(st.lists(st.tuples(small, small), min_size=LANES, max_size=LANES))
@settings(max_examples=20)
def test_conversions_to_16_bits(pairs: list[tuple[float, float]]) -> None:
    """The first operand goes to the upper half."""
    high, low = (np.array(column, np.float32) for column in zip(*pairs, strict=True))
    body = """
      cvt.rn.f16x2.f32 %r2, %r0, %r1;
      cvt.rn.bf16x2.f32 %r3, %r0, %r1;
      cvt.rn.f16.f32 %h0, %r0;
      cvt.rn.bf16.f32 %h1, %r0;
      cvt.f32.f16 %r4, %h0;
      cvt.f32.bf16 %r5, %h1;"""
    outputs = {"%r2": np.uint32, "%r3": np.uint32, "%h0": np.uint16, "%h1": np.uint16, "%r4": np.float32}
    got = on_lanes(body, {"%r0": high, "%r1": low}, {**outputs, "%r5": np.uint32})
    for lane, (a, b) in enumerate(pairs):
        assert int(got["%r2"][lane]) == f16(a) << 16 | f16(b)
        assert int(got["%r3"][lane]) == bf16(a) << 16 | bf16(b)
        assert (int(got["%h0"][lane]), int(got["%h1"][lane])) == (f16(a), bf16(a))
        assert float(got["%r4"][lane]) == struct.unpack("<e", struct.pack("<H", f16(a)))[0]
        assert int(got["%r5"][lane]) == bf16(a) << 16


def test_conversions_of_nan() -> None:
    body = "cvt.rn.f16.f32 %h0, %r0; cvt.rn.bf16.f32 %h1, %r0; cvt.rn.f16x2.f32 %r1, %r0, %r0;"
    nan = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF] * 8, np.uint32)
    got = on_lanes(body, {"%r0": nan}, {"%h0": np.uint16, "%h1": np.uint16, "%r1": np.uint32})
    assert {int(bits) for bits in (*got["%h0"], *got["%h1"])} == {NAN & 0xFFFF ^ 0x8000}
    assert set(got["%r1"].tolist()) == {0x7FFF7FFF}


def test_conversions_to_8_bits() -> None:
    """The first operand goes to the upper byte; finite values beyond the range become the largest one."""
    high = np.array([1.0, -2.0, 448.0, 1e9] * 8, np.float32)
    body = "cvt.rn.satfinite.e4m3x2.f32 %h0, %r0, %r1; cvt.rn.satfinite.e5m2x2.f32 %h1, %r0, %r1;"
    got = on_lanes(body, {"%r0": high, "%r1": np.full(LANES, 0.5, np.float32)}, {"%h0": np.uint16, "%h1": np.uint16})
    assert got["%h0"][:4].tolist() == [0x3830, 0xC030, 0x7E30, 0x7E30]
    assert got["%h1"][:4].tolist() == [0x3C38, 0xC038, 0x5F38, 0x7B38]


# ------------------------------------------------------------------------------------------------ moves
def test_moves_that_join_and_split() -> None:
    rng = np.random.default_rng(0)
    body = """
      mov.b32 %r4, {%h0, %h1};
      mov.b64 %rd1, {%r0, %r1};
      mov.b32 {%h2, %h3}, %r0;
      mov.b64 {%r2, %r3}, %rd0;
      mov.b64 {_, %r5}, %rd0;"""
    inputs: dict[str, Any] = {f"%h{i}": rng.integers(0, 1 << 16, LANES, np.uint16) for i in (0, 1)}
    inputs |= {f"%r{i}": rng.integers(0, 1 << 32, LANES, np.uint32) for i in (0, 1)}
    inputs["%rd0"] = rng.integers(0, 1 << 63, LANES, np.uint64)
    outputs: dict[str, Any] = {"%r2": np.uint32, "%r3": np.uint32, "%r4": np.uint32, "%r5": np.uint32}
    got = on_lanes(body, inputs, {**outputs, "%rd1": np.uint64, "%h2": np.uint16, "%h3": np.uint16})
    for lane in range(LANES):
        of = {name: int(column[lane]) for name, column in (*inputs.items(), *got.items())}
        assert of["%r4"] == of["%h0"] | of["%h1"] << 16
        assert of["%rd1"] == of["%r0"] | of["%r1"] << 32
        assert (of["%h2"], of["%h3"]) == (of["%r0"] & 0xFFFF, of["%r0"] >> 16)
        assert (of["%r2"], of["%r3"], of["%r5"]) == (of["%rd0"] & 0xFFFFFFFF, of["%rd0"] >> 32, of["%rd0"] >> 32)


def test_addresses_are_the_same_in_all_spaces() -> None:
    body = "cvta.to.global.u64 %rd1, %rd0; cvta.shared.u64 %rd2, %rd1;"
    inputs = {"%rd0": np.arange(LANES, dtype=np.uint64) << np.uint64(40)}
    assert (on_lanes(body, inputs, {"%rd2": np.uint64})["%rd2"] == inputs["%rd0"]).all()


# ------------------------------------------------------------------------------------------------ operands
@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("add.s32 %r1, %r0, -1", 9), ("add.u32 %r1, %r0, 0x10", 26), ("add.u32 %r1, %r0, 5U", 15),
        ("sub.s32 %r1, 3, %r0", 3 - 10 + (1 << 32)), ("mov.b32 %r1, 0f3F800000", 0x3F800000),
        ("add.f32 %r1, 0f3F800000, 0f40000000", 0x40400000),
        ("fma.rn.f32 %r1, 0f40000000, 0f40000000, 0f3F800000", 0x40A00000),
        ("mul.f32 %r1, 0f40000000, 0f40400000", 0x40C00000), ("selp.b32 %r1, -1, 0, %p0", 0),
        ("shl.b32 %r1, 1, %r0", 1024), ("div.s32 %r1, -7, 2", (1 << 32) - 3),
        ("prmt.b32 %r1, %r0, 0x80, 0x0ccc", 0x0AFFFFFF),
        ("mov.u32 %r1, 4294967295", 0xFFFFFFFF), ("mul.hi.s32 %r1, -1, %r0", 0xFFFFFFFF),
    ],
)  # fmt: skip
def test_literals(statement: str, expected: int) -> None:
    ten = np.full(LANES, 10, np.uint32)
    got = on_lanes(f"setp.eq.u32 %p0, %r0, 11; {statement};", {"%r0": ten}, {"%r1": np.uint32})
    assert set(got["%r1"].tolist()) == {expected}


def test_a_negated_predicate_is_read_when_it_is_there() -> None:
    """`!%p` names a register: an instruction with it must not move before the one that writes the register, and is
    another one than without the `!`."""
    body = """
      setp.lt.s32 %p0, %r0, 16;
      setp.ge.and.s32 %p1, %r0, 3, !%p0; setp.ge.and.s32 %p2, %r0, 3, %p0; setp.ge.and.s32 %p3, %r0, 3, !%p0;
      setp.lt.s32 %p0, %r0, 4;"""
    got = on_lanes(body, {"%r0": np.arange(LANES, dtype=np.int32)}, dict.fromkeys(("%p0", "%p1", "%p2", "%p3"), bool))
    assert got["%p1"].tolist() == got["%p3"].tolist() == [lane >= 16 for lane in range(LANES)]
    assert got["%p2"].tolist() == [3 <= lane < 16 for lane in range(LANES)]
    assert got["%p0"].tolist() == [lane < 4 for lane in range(LANES)]


SPECIAL = {
    "%tid.x": lambda t: t % 8, "%tid.y": lambda t: t // 8 % 4, "%tid.z": lambda t: t // 32, "%ntid.x": lambda t: 8,
    "%ntid.y": lambda t: 4, "%ntid.z": lambda t: 2, "%laneid": lambda t: t % 32, "%warpid": lambda t: t // 32,
    "%lanemask_lt": lambda t: (1 << t % 32) - 1, "%ctaid.x": lambda t: 0, "%nctaid.z": lambda t: 1,
    "%cluster_ctarank": lambda t: 0, "%cluster_nctarank": lambda t: 1,
}  # fmt: skip


def test_special_registers_of_a_block_of_three_dimensions() -> None:
    out = np.zeros((len(SPECIAL), 64), np.uint32)
    body = (
        "mov.u32 %r80, %tid.y; mad.lo.u32 %r80, %r80, 8, %tid.x; mov.u32 %r81, %tid.z; mad.lo.u32 %r80, %r81, 32, %r80;"
    )
    for i, name in enumerate(SPECIAL):
        body += f"{pointer(0, '%rd0', 4, '%r80')} mov.u32 %r0, {name}; st.global.b32 [%rd0+{256 * i}], %r0;"
    run(body, out, threads=(8, 4, 2))
    for row, (name, model) in zip(out, SPECIAL.items(), strict=True):
        assert row.tolist() == [model(thread) for thread in range(64)], name


# ------------------------------------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    "statement",
    [
        "add.sat.s32 %r0, %r0, %r1", "add.cc.u32 %r0, %r0, %r1", "add.rz.f32 %r0, %r0, %r1",
        "mul.rz.f32 %r0, %r0, %r1", "mul.sat.f32 %r0, %r0, %r1", "fma.rz.f32 %r0, %r0, %r1, %r1",
        "fma.rn.relu.f32 %r0, %r0, %r1, %r1", "max.NaN.f32 %r0, %r0, %r1", "max.u16 %h0, %h0, %h1",
        "cvt.rn.relu.bf16x2.f32 %r0, %r0, %r1", "cvt.rz.f16.f32 %h0, %r0", "cvt.sat.f32.f16 %r0, %h0",
        "cvt.sat.u8.s32 %h0, %r0", "cvt.rz.bf16x2.f32 %r0, %r0, %r1", "cvt.rn.e4m3x2.f32 %h0, %r0, %r1",
        "mul.hi.u64 %rd0, %rd0, %rd1", "div.rn.f32 %r0, %r0, %r1", "popc.b32 %r0, %r1", "setp.eq.f64 %p0, %rd0, %rd1",
        "setp.eq.b32 %p0|%p1, %r0, %r1", "lop3.b32 %r0, %r1, %r2, %r3, 0x80", "add.s32 %r0, %r0",
        "add.s32 %r0, %r0, %nonsense", "add.s32 %rd0, %rd1, %rd2", "add.s64 %r0, %r1, %r2", "mov.b32 %h0, %r0",
        "add.s32 %r0, %r1, %h1", "and.pred %r0, %p0, %p1", "and.pred %p0, %p1, !%p2", "ex2.approx.f32 %r0, %r1",
        "prmt.b32.f4e %r0, %r1, %r2, %r3", "cvt.u32.u16 %h0, %h1", "cvt.u16.u32 %h0, %h1",
    ],
)  # fmt: skip
def test_what_is_not_modelled_is_refused(statement: str) -> None:
    """Not one instruction is executed as if its modifiers or the sizes of its registers did not matter."""
    with pytest.raises(Unsupported, match=r"PTX line \d+"):
        Code(assemble(f"{statement};")).check()
