"""What elementwise PTX instructions do to one lane, in plain Python: integers, floats and fractions.

An independent model for the tests. A value travels as a bit pattern; `number` and `pattern` translate it for a type.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

WIDTH = {"pred": 1, "f32": 32} | {f"{kind}{bits}": bits for kind in "bus" for bits in (8, 16, 32, 64)}
NAN = 0x7FFFFFFF
SMALLEST_NORMAL = 2.0**-126


def number(bits: int, kind: str) -> Any:
    """The value of a pattern: a float for f32, a bool for pred, else an integer."""
    bits &= (1 << WIDTH[kind]) - 1
    if kind == "f32":
        return struct.unpack("<f", struct.pack("<I", bits))[0]
    if kind == "pred":
        return bool(bits)
    return bits - (1 << WIDTH[kind]) if kind[0] == "s" and bits >> (WIDTH[kind] - 1) else bits


def pattern(value: Any, kind: str) -> int:
    """The pattern of a value, wrapped around or rounded to nearest even."""
    if kind == "f32":
        return _f32(value)
    return int(value) & ((1 << WIDTH[kind]) - 1)


def _f32(value: float | Fraction) -> int:
    if isinstance(value, Fraction):
        return _f32_of_fraction(value)
    try:
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    except OverflowError:
        return 0x7F800000 | (value < 0) << 31


def _f32_of_fraction(value: Fraction) -> int:
    """Rounded once, to nearest even."""
    size = abs(value)
    if size == 0:
        return 0
    exponent = max(size.numerator.bit_length() - size.denominator.bit_length() - 1, -127)
    while size >= Fraction(2) ** (exponent + 1):
        exponent += 1
    exponent = max(exponent, -126)
    steps = round(size / Fraction(2) ** (exponent - 23))  # half to even
    if steps >= 1 << 24:
        exponent, steps = exponent + 1, steps // 2
    bits = (exponent + 126 << 23) + steps if exponent <= 127 else 0x7F800000
    return bits | (value < 0) << 31


class Case(NamedTuple):
    """An instruction: the types of its result and operands, and what it does to numbers."""

    opcode: str
    result: str
    operands: tuple[str, ...]
    model: Callable[..., Any]


# ------------------------------------------------------------------------------------------------ integers
def quotient(a: int, b: int) -> int:
    """Towards zero; all ones for a division by zero."""
    if b == 0:
        return -1
    return abs(a) // abs(b) * (-1 if (a < 0) != (b < 0) else 1)


def prmt(a: int, b: int, selector: int) -> int:
    """Bytes of b:a by 4-bit fields; bit 3 of a field spreads the sign."""
    source = a | b << 32
    result = 0
    for i in range(4):
        field = selector >> 4 * i & 15
        byte = source >> 8 * (field & 7) & 255
        if field & 8:
            byte = 255 if byte & 128 else 0
        result |= byte << 8 * i
    return result


def _integer_cases(kind: str) -> list[Case]:
    two = (kind, kind)
    wide = f"{kind[0]}{2 * WIDTH[kind]}" if WIDTH[kind] < 64 else ""
    cases = [
        Case(f"add.{kind}", kind, two, lambda a, b: a + b),
        Case(f"sub.{kind}", kind, two, lambda a, b: a - b),
        Case(f"mul.lo.{kind}", kind, two, lambda a, b: a * b),
        Case(f"mad.lo.{kind}", kind, (*two, kind), lambda a, b, c: a * b + c),
        Case(f"div.{kind}", kind, two, quotient),
        Case(f"rem.{kind}", kind, two, lambda a, b: a - quotient(a, b) * b),
    ]
    if wide:
        cases.append(Case(f"mul.wide.{kind}", wide, two, lambda a, b: a * b))
        cases.append(Case(f"mad.wide.{kind}", wide, (*two, wide), lambda a, b, c: a * b + c))
    if WIDTH[kind] == 32:
        cases.append(Case(f"mul.hi.{kind}", kind, two, lambda a, b: a * b >> 32))
    if WIDTH[kind] >= 32:
        cases += [Case(f"min.{kind}", kind, two, min), Case(f"max.{kind}", kind, two, max)]
    if kind[0] == "s":
        cases += [Case(f"neg.{kind}", kind, (kind,), lambda a: -a), Case(f"abs.{kind}", kind, (kind,), abs)]
    cases += [Case(f"{name}.{kind}", "pred", two, f) for name, f in compare(kind)]
    cases.append(Case(f"shr.{kind}", kind, (kind, "u32"), lambda a, n: a >> min(n, 64)))
    return cases


def compare(kind: str) -> list[tuple[str, Callable[[Any, Any], bool]]]:
    """setp.<comparison> for integers."""
    names = {"eq": lambda a, b: a == b, "ne": lambda a, b: a != b}
    if kind[0] != "b":
        names |= {"lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b}
        names["ge"] = lambda a, b: a >= b
    if kind[0] == "u":
        names |= {"lo": names["lt"], "ls": names["le"], "hi": names["gt"], "hs": names["ge"]}
    return [(f"setp.{name}", function) for name, function in names.items()]


def _bit_cases(kind: str) -> list[Case]:
    two = (kind, kind)
    cases = [
        Case(f"and.{kind}", kind, two, lambda a, b: a & b),
        Case(f"or.{kind}", kind, two, lambda a, b: a | b),
        Case(f"xor.{kind}", kind, two, lambda a, b: a ^ b),
        Case(f"not.{kind}", kind, (kind,), lambda a: not a if kind == "pred" else ~a),
        Case(f"mov.{kind}", kind, (kind,), lambda a: a),
    ]
    if kind == "pred":
        return cases
    cases += [Case(f"{name}.{kind}", "pred", two, f) for name, f in compare(kind)]
    return [
        *cases,
        Case(f"shl.{kind}", kind, (kind, "u32"), lambda a, n: a << min(n, 64)),
        Case(f"shr.{kind}", kind, (kind, "u32"), lambda a, n: a >> min(n, 64)),
        Case(f"selp.{kind}", kind, (*two, "pred"), lambda a, b, p: a if p else b),
    ]


def combined(kind: str, name: str, function: Callable[[Any, Any], bool]) -> list[Case]:
    """A comparison joined with a predicate."""
    operands = (kind, kind, "pred")
    return [
        Case(f"{name}.and.{kind}", "pred", operands, lambda a, b, p: function(a, b) and p),
        Case(f"{name}.or.{kind}", "pred", operands, lambda a, b, p: function(a, b) or p),
        Case(f"{name}.xor.{kind}", "pred", operands, lambda a, b, p: function(a, b) != p),
    ]


# ------------------------------------------------------------------------------------------------ conversions
def extended(value: int, kind: str) -> int:
    """The number that the low bits of a register are for a type."""
    return int(number(value, kind))


def conversions(source: str, register: str) -> list[Case]:
    """cvt between integers, from a register that is as wide as the type or wider."""
    cases = []
    for target in (f"{sign}{bits}" for sign in "su" for bits in (8, 16, 32, 64)):
        result = target if WIDTH[target] > 8 else f"{target[0]}16"

        def model(a: int, target: str = target) -> int:
            return extended(extended(a, source), target)

        cases.append(Case(f"cvt.{target}.{source}", result, (register,), model))
    if WIDTH[source] == WIDTH[register]:
        cases.append(Case(f"cvt.rn.f32.{source}", "f32", (register,), lambda a: Fraction(extended(a, source))))
    return cases


# ------------------------------------------------------------------------------------------------ floats
def flushed(value: float) -> float:
    return math.copysign(0.0, value) if abs(value) < SMALLEST_NORMAL else value


def fma(a: float, b: float, c: float) -> float | Fraction:
    """a b + c, exact where all are finite and the result is not zero."""
    if not all(map(math.isfinite, (a, b, c))):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    return exact if exact else a * b + c


def _of_two(choose: Callable[[float, float], float], a: float, b: float) -> float:
    """The minimum or maximum: a number beats a NaN."""
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    return choose(a, b)


def ordered(name: str) -> Callable[[float, float], bool]:
    """setp.<comparison>.f32: false for NaN, but true for NaN where the name ends with `u`."""
    plain = {
        "eq": lambda a, b: a == b, "ne": lambda a, b: a < b or a > b, "lt": lambda a, b: a < b,
        "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    }  # fmt: skip
    if name in ("num", "nan"):
        return lambda a, b: (math.isnan(a) or math.isnan(b)) == (name == "nan")
    if name in plain:
        return plain[name]
    return lambda a, b: plain[name[:-1]](a, b) or math.isnan(a) or math.isnan(b)


FLOAT_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")


def float_cases() -> list[Case]:
    """fp32, with and without flushing subnormal numbers."""
    two = ("f32", "f32")
    plain = [
        ("add", two, lambda a, b: a + b),
        ("sub", two, lambda a, b: a - b),
        ("mul", two, lambda a, b: a * b),
        ("fma.rn", (*two, "f32"), fma),
        ("min", two, lambda a, b: _of_two(min, a, b)),
        ("max", two, lambda a, b: _of_two(max, a, b)),
        ("neg", ("f32",), lambda a: -a),
        ("abs", ("f32",), abs),
    ]
    cases = []
    for name, operands, model in plain:
        cases.append(Case(f"{name}.f32", "f32", operands, model))
        cases.append(Case(f"{name}.ftz.f32", "f32", operands, _flushing(model)))
        if name in ("add", "sub", "mul"):
            cases.append(Case(f"{name}.rn.f32", "f32", two, model))
    for name in FLOAT_COMPARISONS:
        cases.append(Case(f"setp.{name}.f32", "pred", two, ordered(name)))
        cases.append(Case(f"setp.{name}.ftz.f32", "pred", two, _comparing_flushed(ordered(name))))
    cases.append(Case("mov.f32", "f32", ("f32",), lambda a: a))
    cases.append(Case("selp.f32", "f32", (*two, "pred"), lambda a, b, p: a if p else b))
    return cases


def _flushing(model: Callable[..., Any]) -> Callable[..., Any]:
    def flush_all(*operands: float) -> float:
        value = number(pattern(model(*map(flushed, operands)), "f32"), "f32")
        return flushed(value)

    return flush_all


def _comparing_flushed(model: Callable[..., bool]) -> Callable[..., bool]:
    return lambda a, b: model(flushed(a), flushed(b))


def groups() -> dict[str, list[Case]]:
    """All cases, in groups whose operands have the same types."""
    found = {kind: _integer_cases(kind) for kind in ("s16", "u16", "s32", "u32", "s64", "u64")}
    found |= {kind: _bit_cases(kind) for kind in ("pred", "b16", "b32", "b64")}
    found["f32"] = float_cases()
    found["prmt"] = [Case("prmt.b32", "b32", ("b32", "b32", "b32"), prmt)]
    for kind in ("s32", "u64"):
        found[f"combined {kind}"] = combined(kind, "setp.lt", lambda a, b: a < b)
    found["combined f32"] = combined("f32", "setp.geu", ordered("geu"))
    for source in (f"{sign}{bits}" for sign in "su" for bits in (8, 16, 32, 64)):
        for width in (16, 32, 64):
            if width >= WIDTH[source]:
                found[f"cvt from {source} in {width} bits"] = conversions(source, f"b{width}")
    for kind in ("b", "u", "s"):
        for width in (16, 32, 64):
            found.setdefault(f"mov and selp {width}", []).append(
                Case(f"selp.{kind}{width}", f"{kind}{width}", (f"{kind}{width}",) * 2 + ("pred",), _select)
            )
            found[f"mov and selp {width}"].append(
                Case(f"mov.{kind}{width}", f"{kind}{width}", (f"{kind}{width}",), lambda a: a)
            )
    return found


def _select(a: Any, b: Any, p: bool) -> Any:
    return a if p else b
