"""The elementwise instructions: those whose lanes do not look at each other, and that touch registers only.

Each is a function of arrays, so that many instructions of one kind can run as one call on a stack of registers
(`fa3.emulator.pack`). Semantics from the PTX ISA, sections "Integer Arithmetic", "Floating Point", "Comparison and
Selection", "Logic and Shift" and "Data Movement and Conversion". `mul` and `add` are rounded one by one here, while
ptxas may contract them to one FMA.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from fa3.emulator import numerics
from fa3.emulator.operands import DTYPES, VIEWS, unsupported
from fa3.sass.ptx_code import Statement


@dataclass(frozen=True)
class Elementwise:
    """`result` and `operands` are views (see `fa3.emulator.operands`); equal `name` means equal function."""

    name: str
    result: str
    operands: tuple[str, ...]
    function: Callable[..., Any]
    chain: Callable[..., Any] | None = None
    """For an associative-looking function: numpy's `accumulate`, which does a chain of it in order."""


def decode(at: Statement) -> Elementwise | None:
    """The elementwise instruction of a statement, or None if it is of another kind."""
    op, *mods = at.opcode.split(".")
    maker = _MAKERS.get(op)
    return maker(at, mods) if maker else None


# ------------------------------------------------------------------------------------------------ arithmetic
_ARITHMETIC = {"add": np.add, "sub": np.subtract, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_LARGEST = {"max": (np.maximum, np.fmax), "min": (np.minimum, np.fmin)}


def _arithmetic(at: Statement, mods: list[str]) -> Elementwise:
    op, view = at.opcode.split(".")[0], _view(at, mods[-1])
    _need_known(at, mods[:-1], {"rn", "ftz"} if view == "f4" else set())
    if "ftz" in mods:
        return Elementwise(at.opcode, view, (view, view), _flushing(_ARITHMETIC[op]))
    function = _ARITHMETIC[op]
    return Elementwise(at.opcode, view, (view, view), function, function.accumulate if op == "add" else None)


def _largest(at: Statement, mods: list[str]) -> Elementwise:
    _need_known(at, mods, {"f32", "ftz", "s32", "u32", "s64", "u64"})
    view = _view(at, mods[-1])
    function = _LARGEST[at.opcode.split(".")[0]][view == "f4"]  # fmax: a number beats a NaN
    if "ftz" in mods:
        return Elementwise(at.opcode, view, (view, view), _flushing(function))
    return Elementwise(at.opcode, view, (view, view), function, function.accumulate)


def _mul(at: Statement, mods: list[str]) -> Elementwise:
    view = _view(at, mods[-1])
    if view == "f4":
        _need_known(at, mods[:-1], {"rn", "ftz"})
        return Elementwise(at.opcode, view, (view, view), _flushing(np.multiply) if "ftz" in mods else np.multiply)
    _need_known(at, mods[1:-1], set())
    if mods[0] == "lo":
        return Elementwise(at.opcode, view, (view, view), np.multiply)
    wide = f"{view[0]}{2 * int(view[1])}"
    if mods[0] == "wide":
        return Elementwise(at.opcode, wide, (view, view), lambda a, b: _wide(a, wide) * _wide(b, wide))
    if mods[0] == "hi" and view in ("i4", "u4"):
        narrow = DTYPES[view]
        return Elementwise(
            at.opcode, view, (view, view), lambda a, b: ((_wide(a, wide) * _wide(b, wide)) >> 32).astype(narrow)
        )
    raise unsupported(at)


def _mad(at: Statement, mods: list[str]) -> Elementwise:
    view = _view(at, mods[-1])
    _need_known(at, mods[1:-1], set())
    if mods[0] == "lo":
        return Elementwise(at.opcode, view, (view, view, view), lambda a, b, c: a * b + c)
    if mods[0] == "wide":
        wide = f"{view[0]}{2 * int(view[1])}"
        return Elementwise(at.opcode, wide, (view, view, wide), lambda a, b, c: _wide(a, wide) * _wide(b, wide) + c)
    raise unsupported(at)


def _fma(at: Statement, mods: list[str]) -> Elementwise:
    _need_known(at, mods, {"rn", "ftz", "f32"})
    return Elementwise(at.opcode, "f4", ("f4", "f4", "f4"), _flushing(numerics.fma) if "ftz" in mods else numerics.fma)


def _divide(at: Statement, mods: list[str]) -> Elementwise:
    view = _view(at, mods[-1])
    _need_known(at, mods, {"s16", "u16", "s32", "u32", "s64", "u64"})
    function = _quotient if at.opcode.startswith("div") else _remainder
    return Elementwise(at.opcode, view, (view, view), function)


def _quotient(a: Any, b: Any) -> Any:
    """Rounds towards zero. A division by zero gives all ones, as the hardware's routine does."""
    a, b = np.broadcast_arrays(a, b)
    unsigned = f"u{a.dtype.itemsize}"  # has room for the size of the most negative number
    size = (np.abs(a).astype(unsigned) // np.maximum(np.abs(b).astype(unsigned), 1)).astype(a.dtype)
    signed = np.where((a < 0) != (b < 0), -size, size)
    return np.where(b == 0, ~np.zeros_like(a), signed)


def _remainder(a: Any, b: Any) -> Any:
    return (a - _quotient(a, b) * b).astype(np.asarray(a).dtype)


def _wide(a: Any, view: str) -> Any:
    return np.asarray(a).astype(DTYPES[view])


# ------------------------------------------------------------------------------------------------ one operand
def _unary(at: Statement, mods: list[str]) -> Elementwise:
    op, view = at.opcode.split(".")[0], _view(at, mods[-1])
    _need_known(at, mods[:-1], {"ftz"} if view == "f4" else set())
    functions = {"neg": np.negative, "abs": np.abs, "not": np.logical_not if view == "p" else np.invert}
    return Elementwise(at.opcode, view, (view,), _flushing(functions[op]) if "ftz" in mods else functions[op])


def _flushing(function: Callable[..., Any]) -> Callable[..., Any]:
    """With `.ftz`: subnormal operands and results become zeros."""
    return lambda *operands: numerics.flush(function(*map(numerics.flush, operands)))


_APPROXIMATE = {"ex2": numerics.ex2_ftz, "lg2": numerics.lg2_ftz, "rcp": numerics.rcp_ftz}


def _approximate(at: Statement, mods: list[str]) -> Elementwise:
    if mods != ["approx", "ftz", "f32"]:
        raise unsupported(at)
    return Elementwise(at.opcode, "f4", ("f4",), _APPROXIMATE[at.opcode.split(".")[0]])


# ------------------------------------------------------------------------------------------------ logic
def _shift(at: Statement, mods: list[str]) -> Elementwise:
    """Amounts past the width give 0, or copies of the sign."""
    view = _view(at, mods[-1])
    bits = 8 * int(view[1])
    left = at.opcode.startswith("shl")
    shift = np.left_shift if left else np.right_shift

    def shifted(a: Any, amount: Any) -> Any:
        if isinstance(amount, np.integer) and amount < bits:  # a literal, as almost always
            return shift(a, amount.astype(DTYPES[view]))
        within = np.minimum(amount, bits - 1).astype(np.asarray(a).dtype)
        result = shift(a, within)
        if np.all(amount < bits) or (not left and view[0] == "i"):
            return result
        return np.where(amount < bits, result, 0).astype(np.asarray(a).dtype)

    return Elementwise(at.opcode, view, (view, "u4"), shifted)


_COMPARE: dict[str, Callable[..., Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _setp(at: Statement, mods: list[str]) -> Elementwise:
    view = _view(at, mods[-1])
    if len(at.operands) > 3 + (len(mods) > 2) or "|" in at.operands[0]:
        raise unsupported(at)
    compare = _float_compare(mods[0], at) if view == "f4" else _COMPARE.get(mods[0])
    if compare is None:
        raise unsupported(at)
    _need_known(at, mods[1:-1], {"ftz", *_COMBINE} if view == "f4" else set(_COMBINE))
    if "ftz" in mods:
        whole, flush = compare, numerics.flush
        compare = lambda a, b: whole(flush(a), flush(b))  # noqa: E731
    if len(mods) == 2 or mods[1] == "ftz":
        return Elementwise(at.opcode, "p", (view, view), compare)
    combine = _COMBINE[mods[1]]
    return Elementwise(at.opcode, "p", (view, view, "p"), lambda a, b, p: combine(compare(a, b), p))


def _float_compare(name: str, at: Statement) -> Callable[..., Any]:
    """An ordered comparison is false where an operand is NaN; with a `u` behind its name it is true."""
    if name == "ne":
        return lambda a, b: (a < b) | (a > b)
    if name in ("num", "nan"):
        return lambda a, b: (np.isnan(a) | np.isnan(b)) == (name == "nan")
    if name in _COMPARE:
        return _COMPARE[name]
    if name.endswith("u") and name[:-1] in _COMPARE:
        ordered = _float_compare(name[:-1], at)
        return lambda a, b: ordered(a, b) | np.isnan(a) | np.isnan(b)
    raise unsupported(at)


def _selp(at: Statement, mods: list[str]) -> Elementwise:
    view = _view(at, mods[-1])
    return Elementwise(at.opcode, view, (view, view, "p"), lambda a, b, p: np.where(p, a, b))


def _prmt(at: Statement, mods: list[str]) -> Elementwise:
    if mods != ["b32"]:
        raise unsupported(at)
    return Elementwise(at.opcode, "u4", ("u4", "u4", "u4"), numerics.prmt)


# ------------------------------------------------------------------------------------------------ moves, conversions
def _mov(at: Statement, mods: list[str]) -> Elementwise | None:
    """Plain moves only; those that join or split registers are taken apart in `fa3.emulator.blocks`."""
    if any(operand.startswith("{") for operand in at.operands):
        return None
    view = _view(at, mods[-1])
    return Elementwise(f"mov.{view}", view, (view,), _same)


def _copy(at: Statement, mods: list[str]) -> Elementwise:
    """Addresses of all spaces are the same numbers here."""
    view = _view(at, mods[-1])
    return Elementwise(f"mov.{view}", view, (view,), _same)


def _same(a: Any) -> Any:
    return a


_NEAREST, _SATURATED = ["rn"], ["rn", "satfinite"]
_PACKED: dict[str, tuple[list[str], str, Callable[..., Any]]] = {
    "bf16x2": (_NEAREST, "u4", numerics.bf16x2), "f16x2": (_NEAREST, "u4", numerics.f16x2),
    "e4m3x2": (_SATURATED, "u2", numerics.e4m3x2), "e5m2x2": (_SATURATED, "u2", numerics.e5m2x2),
}  # fmt: skip
_SMALL_FLOATS: dict[tuple[str, str], tuple[list[str], str, str, Callable[..., Any]]] = {
    ("f32", "f16"): ([], "f4", "u2", numerics.widen_f16),
    ("f32", "bf16"): ([], "f4", "u2", numerics.widen_bf16),
    ("f16", "f32"): (_NEAREST, "u2", "f4", numerics.f16),
    ("bf16", "f32"): (_NEAREST, "u2", "f4", numerics.bf16),
}
INTEGERS = {f"{sign}{8 * size}": f"{'i' if sign == 's' else 'u'}{size}" for sign in "su" for size in (1, 2, 4, 8)}
"""Integer types of `cvt` -> numpy's code."""


def _cvt(at: Statement, mods: list[str]) -> Elementwise:
    target, source, how = mods[-2], mods[-1], mods[:-2]
    if source == "f32" and target in _PACKED and how == _PACKED[target][0]:
        _, view, function = _PACKED[target]
        return Elementwise(at.opcode, view, ("f4", "f4"), function)
    if (target, source) in _SMALL_FLOATS and how == _SMALL_FLOATS[target, source][0]:
        _, result, operand, function = _SMALL_FLOATS[target, source]
        return Elementwise(at.opcode, result, (operand,), function)
    if source in INTEGERS and target in INTEGERS and not how:
        return _between_integers(at, target, source)
    if source in INTEGERS and target == "f32" and how == _NEAREST:
        low = DTYPES[INTEGERS[source]]
        operand = _in_register(source)
        return Elementwise(at.opcode, "f4", (operand,), lambda a: np.asarray(a).astype(low).astype(np.float32))
    raise unsupported(at)


def _between_integers(at: Statement, target: str, source: str) -> Elementwise:
    """Reads the low bits of its operand, extends or cuts them."""
    result = _in_register(target)
    first, second, third = DTYPES[INTEGERS[source]], DTYPES[INTEGERS[target]], DTYPES[result]
    return Elementwise(
        at.opcode,
        result,
        (_in_register(source),),
        lambda a: np.asarray(a).astype(first).astype(second).astype(third),
    )


def _in_register(kind: str) -> str:
    """The view of the register of an integer; one of 8 bits lies in a 16-bit register."""
    view = INTEGERS[kind]
    return view if view[1] != "1" else f"{view[0]}2"


def _need_known(at: Statement, modifiers: list[str], known: Set[str]) -> None:
    """Unsupported for a modifier that would be passed over."""
    if set(modifiers) - known:
        raise unsupported(at)


def _view(at: Statement, kind: str) -> str:
    if kind not in VIEWS:
        raise unsupported(at)
    return VIEWS[kind]


_MAKERS: dict[str, Callable[[Statement, list[str]], Elementwise | None]] = {
    **dict.fromkeys(_ARITHMETIC, _arithmetic), **dict.fromkeys(_LARGEST, _largest),
    "mul": _mul, "mad": _mad, "fma": _fma, "div": _divide, "rem": _divide,
    "neg": _unary, "abs": _unary, "not": _unary, **dict.fromkeys(_APPROXIMATE, _approximate),
    "shl": _shift, "shr": _shift, "setp": _setp, "selp": _selp, "prmt": _prmt,
    "mov": _mov, "cvta": _copy, "cvt": _cvt,
}  # fmt: skip
