"""The guard against a frozen phase: an mbarrier wait in a loop that asks for the same phase in every iteration.

A ring's cursor that a loop does not carry (advanced in a helper that does not return it, say) compiles without a word.
Its wait then asks for parity 0 in every iteration, and the kernel reads stage 0 over and over, or hangs. In the PTX
this shows as an `mbarrier.try_wait.parity` inside a loop whose parity is a literal, or a register that is the same
in every iteration of the innermost loop around it. A ring of any depth flips its phase, so that a right kernel has one
only where an iteration goes around a ring twice: it then waits as often for one parity as for the other.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fa3.sass.flow import Loop
from fa3.sass.listing import Source
from fa3.sass.ptx_code import Body, Statement, parse_body


@dataclass(frozen=True)
class FrozenWait:
    """A wait whose parity does not change in the loop that it stands in."""

    source: Source | None
    address: str
    parity: str

    def __str__(self) -> str:
        return f"{self.source or 'unknown line'}: waits at {self.address} for parity {self.parity} in every iteration"


def frozen_waits(ptx: str) -> tuple[FrozenWait, ...]:
    """All such waits of a kernel; empty for one whose cursors move."""
    body = parse_body(ptx)
    loops = [loop for loop in body.graph.loops if not _only_waits(body, loop)]  # outermost first
    found: list[tuple[Loop, FrozenWait]] = []
    for index, statement in enumerate(body.statements):
        if not _is_wait(statement):
            continue
        around = [loop for loop in loops if body.graph.block_of[index] in loop.blocks]
        if around and not set(statement.operands[2:3]) & _changing(body, around[-1]):
            found.append((around[-1], FrozenWait(statement.source, statement.operands[1], statement.operands[2])))
    counts = Counter((id(loop), wait.address, wait.parity) for loop, wait in found)

    def goes_around(loop: Loop, wait: FrozenWait) -> bool:
        zeros, ones = (counts[id(loop), wait.address, parity] for parity in ("0", "1"))
        return wait.parity in ("0", "1") and zeros == ones

    return tuple(wait for loop, wait in found if not goes_around(loop, wait))


def _is_wait(statement: Statement) -> bool:
    return statement.opcode.startswith(("mbarrier.try_wait.parity", "mbarrier.test_wait.parity"))


# The statements of a wait that tries again until it succeeds; such a loop turns with one and the same phase, rightly.
_RETRY = frozenset(("bra", "setp", "selp", "nanosleep", "mbarrier", "mov", "not"))


def _only_waits(body: Body, loop: Loop) -> bool:
    statements = [body.statements[i] for block in loop.blocks for i in body.graph.blocks[block]]
    return all(s.name in _RETRY and (s.name != "mbarrier" or _is_wait(s)) for s in statements)


# Instructions whose result is the same whenever their operands are.
_PURE = frozenset(
    "mov add sub mul mad and or xor not shl shr shf selp setp cvt cvta min max neg abs bfe bfi prmt lop3 rem div slct "
    "popc clz shfl".split()
)


def _changing(body: Body, loop: Loop) -> frozenset[str]:
    """Registers whose value may differ from one iteration of the loop to the next.

    A register is unchanging if the loop does not write it, or writes it in one place, by a pure instruction on
    unchanging operands. A counter reads itself, so it never becomes unchanging; the answer is the least one.
    """
    writers: dict[str, list[Statement]] = {}
    for block in loop.blocks:
        for index in body.graph.blocks[block]:
            for register in body.statements[index].writes:
                writers.setdefault(register, []).append(body.statements[index])
    changing = set(writers)
    settled = False
    while not settled:
        calm = {r for r in changing if len(writers[r]) == 1 and _is_calm(writers[r][0], changing)}
        changing -= calm
        settled = not calm
    return frozenset(changing)


def _is_calm(statement: Statement, changing: set[str]) -> bool:
    return statement.name in _PURE and not statement.predicate and changing.isdisjoint(statement.reads)
