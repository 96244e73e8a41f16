"""From PTX to machine instructions: kinds, contraction, what costs nothing."""

from __future__ import annotations

from collections import Counter

import pytest

from fa3.emulator.timing.ops import kind_of, lower, read_counts
from fa3.sass.ptx_code import Statement, parse_body

from ..assembler import module


def statements(body: str) -> tuple[Statement, ...]:
    return parse_body(module(body)).statements[:-1]


def kinds(body: str) -> list[str]:
    program = statements(body)
    return [op.kind for op in lower(program, read_counts(program))]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("add.f32 %r0, %r1, %r2;", "fma"),
        ("fma.rn.f32 %r0, %r1, %r2, %r3;", "fma"),
        ("max.f32 %r0, %r1, %r2;", "alu"),
        ("ex2.approx.ftz.f32 %r0, %r1;", "mufu"),
        ("rcp.approx.ftz.f32 %r0, %r1;", "mufu"),
        ("cvt.rn.bf16x2.f32 %r0, %r1, %r2;", "convert"),
        ("cvt.u32.u16 %r0, %h1;", "alu"),
        ("shfl.sync.bfly.b32 %r0, %r1, 1, 31, -1;", "shuffle"),
        ("elect.sync %r0|%p1, -1;", "vote"),
        ("mul.lo.s32 %r0, %r1, %r2;", "imad"),
        ("add.s64 %rd0, %rd1, 2;", "wide"),
        ("selp.f32 %r0, %r1, %r2, %p0;", "alu"),
        ("mov.b32 %r0, 1;", "free"),
        ("ld.param.u64 %rd0, [k_param_0];", "free"),
    ],
)
def test_kinds(text, kind):
    (at,) = statements(text)
    assert kind_of(at) == kind


def test_a_product_with_one_reader_becomes_part_of_the_sum():
    program = statements("mul.f32 %r2, %r0, %r1;\nsub.f32 %r4, %r2, %r3;\nex2.approx.ftz.f32 %r5, %r4;")
    ops = lower(program, read_counts(program))
    assert [op.kind for op in ops] == ["fma", "mufu"]
    assert set(ops[0].reads) == {"%r0", "%r1", "%r3"}
    assert ops[0].writes == ("%r4",)


def test_a_product_that_is_read_twice_stays():
    assert kinds("mul.f32 %r2, %r0, %r1;\nsub.f32 %r4, %r2, %r3;\nadd.f32 %r5, %r2, %r3;") == ["fma"] * 3


def test_a_product_that_nobody_adds_stays():
    assert kinds("mul.f32 %r2, %r0, %r1;\nmax.f32 %r4, %r2, %r3;") == ["fma", "alu"]


def test_two_products_of_one_sum_make_one_fma():
    assert kinds("mul.f32 %r2, %r0, %r0;\nmul.f32 %r3, %r1, %r1;\nadd.f32 %r4, %r2, %r3;") == ["fma", "fma"]


def test_readers_are_counted_by_statement():
    assert read_counts(statements("add.f32 %r1, %r0, %r0;\nadd.f32 %r2, %r0, %r1;")) == Counter({"%r0": 2, "%r1": 1})
