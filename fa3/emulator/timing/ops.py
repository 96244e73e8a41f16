"""From PTX statements to the machine instructions that ptxas makes of them, as far as a cost model must know.

PTX counts are not SASS counts. What is modelled of the difference:

* `mul.f32` whose result has one reader, an `add` or `sub` of the same run, becomes part of that one's FFMA.
* Moves, parameter loads, address conversions and joining two 32-bit registers cost nothing: they become operands. (A
  real CS2R fills two accumulators where PTX has two moves; that is left out, some tens of cycles per tile.)
* 64-bit integer additions and multiplications take two instructions.

Not modelled: uniform registers (the same issue slot either way), spills, and instructions that ptxas adds or drops
otherwise. `python -m fa3.sass` shows the real thing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fa3.emulator.timing.labels import label
from fa3.sass.listing import Source
from fa3.sass.ptx_code import Statement


class Op(NamedTuple):
    """One machine instruction of a warp. `kind` names a row of `fa3.emulator.timing.cost.Cost.units`."""

    kind: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    label: str = ""
    at: Source | None = None


FREE = "free"
"""The kind of what costs nothing; it passes dependencies on."""
_MUFU = frozenset("ex2 lg2 rcp rsqrt sqrt sin cos tanh".split())
_LANES = {"shfl": "shuffle", "vote": "vote", "elect": "vote", "activemask": "vote", "match": "vote", "redux": "vote"}
_FREE = frozenset("mov cvta nop prefetch bar griddepcontrol".split())


def kind_of(at: Statement) -> str:
    """The kind of machine instruction that an instruction without a memory access becomes."""
    name, *mods = at.opcode.split(".")
    last = mods[-1] if mods else ""
    if name in _FREE or at.opcode.startswith("ld.param"):
        return FREE
    if name in _MUFU:
        return "mufu"
    if name in _LANES:
        return _LANES[name]
    if name in ("add", "sub"):
        return "fma" if last in ("f32", "f16x2", "bf16x2") else "wide" if last.endswith("64") else "alu"
    if name in ("mul", "mad", "fma"):
        return "fma" if last in ("f32", "f16x2", "bf16x2") else "imad"
    if name == "cvt":
        return "convert" if "f32" in mods or "f16x2" in mods else "alu"
    return "alu"


def read_counts(statements: Iterable[Statement]) -> Counter[str]:
    """How many statements of the program read each register."""
    return Counter(name for at in statements for name in set(at.reads))


def lower(statements: Sequence[Statement], readers: Counter[str]) -> tuple[Op, ...]:
    """The machine instructions of a run of statements. `readers`: `read_counts` of the whole program."""
    reads = [at.reads for at in statements]
    sum_of = {
        name: index
        for index, (at, names) in enumerate(zip(statements, reads, strict=True))
        if at.opcode in _SUMS
        for name in names
        if readers[name] == 1
    }
    products: dict[int, tuple[str, tuple[str, ...]]] = {}
    """Sums -> the product that becomes part of them: its register, and what it reads."""
    ops: list[Op] = []
    for index, (at, names) in enumerate(zip(statements, reads, strict=True)):
        if at.opcode == "mul.f32":
            its_sum = sum_of.get(at.operands[0], -1)
            if its_sum > index and its_sum not in products:
                products[its_sum] = at.operands[0], names
                continue
        if index in products:
            product, factors = products[index]
            names = (*(name for name in names if name != product), *factors)
        ops.append(Op(kind_of(at), names, at.writes, label(at.source), at.source))
    return tuple(ops)


_SUMS = ("add.f32", "sub.f32")
