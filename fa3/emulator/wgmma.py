"""`wgmma.mma_async`: D = A B + D for the rows that one warp holds.

Of the 64 rows of D and A, warp w of a warpgroup has rows 16 w to 16 w + 15 in its registers, and nothing of them
anywhere else. So each warp computes its 16 rows by itself, and no warps have to meet.

Fragments, with lane = 4 g + q: register v0 + 2 v1 + 4 j of D holds row g + 8 v1, column 8 j + 2 q + v0; register
r + 2 h of A in registers holds row g + 8 r, elements q t to q t + t - 1 of half h of the k, where t elements fill a
register. `fa3.layouts.fragments` has the same as layouts. Source: PTX ISA, "Register Fragments for wgmma.mma_async".
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fa3.emulator.faults import Fault
from fa3.emulator.memory import Shared
from fa3.emulator.tensor_core import fused_dot_add
from fa3.emulator.wgmma_operands import ELEMENTS, fetch, operand_addresses

__all__ = ["ALL_TYPES", "EIGHT_BIT", "Issue", "Mma", "execute", "operand_addresses", "shared_words"]

Matrix = NDArray[np.float32]

ROWS = 64
"""Rows of A and D."""
WARP_ROWS = 16
"""Those of one warp."""
K_BYTES = 32
"""Bytes of A and B that one instruction sums over, whatever their type."""
EIGHT_BIT = frozenset({"e4m3", "e5m2"})
ALL_TYPES = frozenset(ELEMENTS)


@dataclass(frozen=True, eq=False)
class Mma:
    """One `wgmma.mma_async` instruction of a program, m64n<n>k<k> with an fp32 D. It is compared by identity.

    Fault("wgmma") or Fault("unsupported") if there is no such instruction.
    """

    n: int
    k: int
    a_type: str
    """"bf16", "f16", "e4m3", "e5m2" or "tf32"; `b_type` likewise."""
    b_type: str
    accumulators: tuple[int, ...]
    """Rows of the register matrix that hold D: n / 2."""
    a_registers: tuple[int, ...] | None
    """The four rows that hold A, or None if A is in shared memory."""
    a_mn_major: bool = False
    b_mn_major: bool = False
    negate_a: bool = False
    negate_b: bool = False

    def __post_init__(self) -> None:
        for kind in (self.a_type, self.b_type):
            if kind not in ELEMENTS:
                raise Fault("unsupported", f"a wgmma operand of type .{kind}")
        if self.n % 8 or not 8 <= self.n <= 256 or self.k * self.item_bytes != K_BYTES:
            raise Fault("wgmma", f"there is no shape m64n{self.n}k{self.k} for .{self.a_type}")
        if ELEMENTS[self.b_type].bytes != self.item_bytes:
            raise Fault("wgmma", f"operands of different sizes: .{self.a_type} and .{self.b_type}")
        if len(self.accumulators) != self.n // 2 or (self.a_registers is not None and len(self.a_registers) != 4):
            raise Fault("wgmma", f"m64n{self.n} has {self.n // 2} accumulators, and A in registers has 4")

    @property
    def item_bytes(self) -> int:
        """Bytes of an element of A and B."""
        return ELEMENTS[self.a_type].bytes

    @cached_property
    def accumulator_rows(self) -> Any:
        """An index for the accumulators: a slice where they follow each other, which is much faster."""
        first, last = self.accumulators[0], self.accumulators[-1]
        if self.accumulators == tuple(range(first, last + 1)):
            return slice(first, last + 1)
        return np.array(self.accumulators)

    @cached_property
    def _form(self) -> tuple[Any, ...]:
        """What instructions must share to be parts of one matrix product."""
        negated = self.negate_a != self.negate_b
        kinds = (self.a_type, self.b_type, self.a_registers is None, self.a_mn_major, self.b_mn_major)
        return (*kinds, negated, self.n, self.accumulators)


class Issue(NamedTuple):
    """One execution of an instruction: its operands as they are now."""

    mma: Mma
    a: int | None
    """The 64-bit descriptor of A; None if A is in registers."""
    b: int
    """The 64-bit descriptor of B."""
    accumulate: bool
    """False: D starts at zero (`scale-d` of the PTX ISA)."""


def execute(
    issues: Sequence[Issue],
    shared: Shared,
    registers: NDArray[np.uint32],
    quarter: int,
    truncated: Collection[str] = EIGHT_BIT,
) -> None:
    """Carries out instructions in order for warp `quarter` of its warpgroup, in its registers (count, 32).

    Products of the types in `truncated` are summed as the tensor cores do (`fa3.emulator.tensor_core`), which takes
    tens of times longer; pass ALL_TYPES to do so for 16-bit operands too, and () for plain fp32 throughout. All others
    are one fp32 matrix product where several instructions continue one sum.

    Fault("out of bounds") if an operand is not in shared memory, Fault("wgmma") on a malformed descriptor.
    """
    if not 0 <= quarter < ROWS // WARP_ROWS:
        raise ValueError(f"a warpgroup has {ROWS // WARP_ROWS} warps, got number {quarter}")
    values = registers.view(np.float32)
    for sum_ in _sums(tuple([(issue.mma, issue.accumulate) for issue in issues])):
        part, mma = issues[sum_.first : sum_.last], sum_.mma
        b = fetch(shared, tuple([issue.b for issue in part]), mma.n, mma.k, mma.b_type, mma.b_mn_major, k_first=True)
        if sum_.a_rows is not None:
            a = _from_registers(registers[sum_.a_rows], mma)
        else:
            descriptors: Any = tuple([issue.a for issue in part])
            a = fetch(shared, descriptors, ROWS, mma.k, mma.a_type, mma.a_mn_major, k_first=False)
            a = a[WARP_ROWS * quarter : WARP_ROWS * (quarter + 1)]
        if mma.a_type in truncated:
            _add_truncated(values, sum_, a, b)
        else:
            _add(values, sum_, a, b)


class _Sum(NamedTuple):
    """Instructions [first, last) of a group that are one matrix product."""

    first: int
    last: int
    mma: Mma
    accumulate: bool
    negated: bool
    a_rows: NDArray[np.int64] | None
    """Registers of A, four for each instruction."""


@lru_cache(maxsize=1024)
def _sums(group: tuple[tuple[Mma, bool], ...]) -> tuple[_Sum, ...]:
    """The group in parts that are one sum each: a part goes on while instructions add to the same accumulators."""
    found = []
    first = 0
    for i in range(1, len(group) + 1):
        if i < len(group) and group[i][1] and group[i][0]._form == group[first][0]._form:
            continue
        mma, accumulate = group[first]
        rows = None
        if mma.a_registers is not None:
            rows = np.array([row for part, _ in group[first:i] for row in part.a_registers or ()])
        found.append(_Sum(first, i, mma, accumulate, mma.negate_a != mma.negate_b, rows))
        first = i
    return tuple(found)


# ------------------------------------------------------------------------------------------------ fragments
def _from_registers(words: NDArray[np.uint32], mma: Mma) -> Matrix:
    """(4 instructions, 32) registers of A -> (16, k instructions)."""
    by_row = words.reshape(-1, 2, 2, 8, 4).transpose(2, 3, 0, 1, 4)  # instruction, half, row / 8, g, q
    element = ELEMENTS[mma.a_type]
    return element.widen(np.ascontiguousarray(by_row).view(element.code).reshape(WARP_ROWS, -1))


@lru_cache(maxsize=32)
def _positions(n: int) -> NDArray[np.int64]:
    """(n / 2, 32): which element of a (16, n) matrix each register and lane holds, in row-major order."""
    elements = np.arange(WARP_ROWS * n).reshape(2, 8, n // 8, 4, 2)  # row / 8, g, column / 8, q, v0
    return np.ascontiguousarray(elements.transpose(2, 0, 4, 1, 3)).reshape(n // 2, 32)


def _add(values: Matrix, sum_: _Sum, a: Matrix, b: Matrix) -> None:
    product = (a @ b).take(_positions(sum_.mma.n))
    rows = sum_.mma.accumulator_rows
    if not sum_.accumulate:
        values[rows] = 0 - product if sum_.negated else product
    elif sum_.negated:
        values[rows] -= product
    else:
        values[rows] += product


def _add_truncated(values: Matrix, sum_: _Sum, a: Matrix, b: Matrix) -> None:
    """One instruction after the other, since each of them rounds."""
    mma, rows = sum_.mma, sum_.mma.accumulator_rows
    d = np.zeros((WARP_ROWS, mma.n), np.float32)
    if sum_.accumulate:
        d.put(_positions(mma.n), values[rows])
    a = -a if sum_.negated else a
    for k in range(0, a.shape[1], mma.k):
        d = fused_dot_add(a[:, k : k + mma.k], b[k : k + mma.k], d, mma.a_type, mma.b_type)
    values[rows] = d.take(_positions(mma.n))


# ------------------------------------------------------------------------------------------------ for observers
@lru_cache(maxsize=1024)
def shared_words(issue: Issue, quarter: int) -> NDArray[np.int64]:
    """The 4-byte words (address // 4) of shared memory that warp `quarter` reads for an instruction, in order: its
    rows of A, if A is there, and all of B."""
    mma = issue.mma
    read = [operand_addresses(issue.b, mma.n, mma.k, mma.item_bytes, mma.b_mn_major)]
    if issue.a is not None:
        a = operand_addresses(issue.a, ROWS, mma.k, mma.item_bytes, mma.a_mn_major)
        read.append(a[WARP_ROWS * quarter : WARP_ROWS * (quarter + 1)])
    return np.unique(np.concatenate([addresses.reshape(-1) for addresses in read]) // 4)
