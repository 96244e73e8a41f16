"""Many elementwise instructions in one numpy call.

A call of numpy costs about as much for one register of 32 lanes as for sixty. So a run of elementwise instructions is
taken apart by its dependences, and instructions that are equal but for their registers and do not depend on each other
become one call on a stack of registers. Sums and maxima over a row, each step of which needs the one before, become one
`accumulate`, which adds in the same order. The results are those of one instruction after the other, to the bit.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fa3.emulator.isa import Elementwise
from fa3.emulator.operands import Source
from fa3.emulator.program import Register

if TYPE_CHECKING:
    from fa3.emulator.warp import Warp

Call = Callable[["Warp", Any], None]
"""A packed instruction: executes itself for a warp, in the lanes of a mask (None: all)."""
MIN_CHAIN = 4
"""Steps from which a chain is worth its own call."""


@dataclass(frozen=True)
class Instruction:
    """One elementwise instruction. An operand is a register, or a source that reads none."""

    what: Elementwise
    result: Register
    operands: tuple[Register | Source, ...]

    @property
    def reads(self) -> list[Register]:
        return [operand for operand in self.operands if isinstance(operand, Register)]

    @property
    def form(self) -> tuple[Any, ...]:
        """What two instructions must share to run in one call: the function, and which operands are registers."""
        fixed = tuple(None if isinstance(operand, Register) else id(operand) for operand in self.operands)
        return self.what.name, self.result.bank, fixed


def pack(run: Sequence[Instruction]) -> list[Call]:
    """The calls that do what the instructions do, in a possible order."""
    nodes = _chains(run)
    calls: list[Call] = []
    for level in _levels(run, nodes):
        together: dict[Any, list[int]] = defaultdict(list)
        for node in level:
            if len(node) > 1:
                calls.append(_chain_call([run[i] for i in node]))
            else:
                together[run[node[0]].form].append(node[0])
        calls += [_call([run[i] for i in group]) for group in together.values()]
    return calls


# ------------------------------------------------------------------------------------------------ dependences
def _dependences(run: Sequence[Instruction]) -> list[set[int]]:
    """For each instruction, the earlier ones that must come before it: it reads what they write, writes what they read,
    or writes what they write."""
    writer: dict[Register, int] = {}
    readers: dict[Register, list[int]] = defaultdict(list)
    needs: list[set[int]] = []
    for i, instruction in enumerate(run):
        before = {writer[register] for register in instruction.reads if register in writer}
        before.update(readers[instruction.result])
        if instruction.result in writer:
            before.add(writer[instruction.result])
        before.discard(i)
        needs.append(before)
        for register in instruction.reads:
            readers[register].append(i)
        writer[instruction.result] = i
        readers[instruction.result] = []
    return needs


def _chains(run: Sequence[Instruction]) -> list[list[int]]:
    """Partition of the instructions into chains (each step adds to the result of the one before) and single ones."""
    needs = _dependences(run)
    follower = _followers(run)
    begun = set(follower.values())
    nodes: list[list[int]] = []
    for first in range(len(run)):
        if first in begun:
            continue
        chain = [first]
        while chain[-1] in follower:
            chain.append(follower[chain[-1]])
        if len(chain) >= MIN_CHAIN and _is_plain([run[i] for i in chain]) and _is_independent(chain, needs):
            nodes.append(chain)
        else:
            nodes += [[i] for i in chain]
    return nodes


def _followers(run: Sequence[Instruction]) -> dict[int, int]:
    """Instruction -> the next of its chain: the same function, and one of its operands is this one's result (the first,
    or in a sum either)."""
    found: dict[int, int] = {}
    writer: dict[Register, int] = {}
    for i, instruction in enumerate(run):
        if instruction.what.chain is not None and len(instruction.reads) == 2:
            made = [writer.get(register, -1) for register in instruction.reads]
            either = instruction.what.name.startswith("add.")
            before = next((m for m in made[: 1 + either] if m >= 0 and run[m].form == instruction.form), None)
            if before is not None and made[0] != made[1] and before not in found:
                found[before] = i
        writer[instruction.result] = i
    return found


def _is_plain(chain: Sequence[Instruction]) -> bool:
    """Whether the results are one register or all different ones, and no step adds what an earlier one has made: what
    is added is looked up before the first step."""
    results = [instruction.result for instruction in chain]
    if len(set(results)) not in (1, len(chain)):
        return False
    return not any(register in results[:i] for i, register in enumerate(_added(chain)))


def _is_independent(chain: list[int], needs: list[set[int]]) -> bool:
    """Whether nothing between two steps of the chain depends on a step and is needed by a later one, so that all steps
    can be done at once."""
    members = set(chain)
    tainted: set[int] = set()
    for i in range(chain[0] + 1, chain[-1] + 1):
        if i in members:
            if needs[i] & tainted:
                return False
        elif needs[i] & (tainted | members):
            tainted.add(i)
    return True


def _levels(run: Sequence[Instruction], nodes: list[list[int]]) -> list[list[list[int]]]:
    """The nodes by the length of the longest path that leads to them."""
    needs = _dependences(run)
    node_of = {i: number for number, node in enumerate(nodes) for i in node}
    before = [{node_of[j] for i in node for j in needs[i]} - {number} for number, node in enumerate(nodes)]
    after: list[list[int]] = [[] for _ in nodes]
    missing = [len(b) for b in before]
    for number, earlier in enumerate(before):
        for b in earlier:
            after[b].append(number)
    levels: list[list[list[int]]] = []
    ready = [number for number, count in enumerate(missing) if count == 0]
    while ready:
        levels.append([nodes[number] for number in ready])
        following = []
        for number in ready:
            for a in after[number]:
                missing[a] -= 1
                if missing[a] == 0:
                    following.append(a)
        ready = sorted(following)
    if sum(len(node) for level in levels for node in level) != len(run):  # two chains that need each other
        return _levels(run, [[i] for i in range(len(run))])
    return levels


# ------------------------------------------------------------------------------------------------ calls
def _rows(registers: Sequence[Register]) -> Any:
    """An index for these rows: one number, a slice if they are evenly spaced, else an array."""
    rows = [register.row for register in registers]
    if len(rows) == 1:
        return rows[0]
    step = rows[1] - rows[0]
    if step > 0 and rows == list(range(rows[0], rows[-1] + 1, step)):
        return slice(rows[0], rows[-1] + 1, step)
    return np.array(rows)


def _fetch(group: Sequence[Instruction], position: int) -> Source:
    """The operand at a position, stacked over the instructions of a group."""
    first = group[0].operands[position]
    if not isinstance(first, Register):
        return first
    view = group[0].what.operands[position]
    rows = _rows([instruction.operands[position] for instruction in group])  # type: ignore[misc]
    return lambda warp: warp.views[view][rows]


def _call(group: Sequence[Instruction]) -> Call:
    """One call for instructions of one form that do not depend on each other."""
    what = group[0].what
    function, view = what.function, what.result
    rows = _rows([instruction.result for instruction in group])
    sources = [_fetch(group, position) for position in range(len(what.operands))]
    if len(sources) == 2:
        first, second = sources

        def two(warp: Warp, mask: Any) -> None:
            _put(warp.views[view], rows, function(first(warp), second(warp)), mask)

        return two

    def call(warp: Warp, mask: Any) -> None:
        _put(warp.views[view], rows, function(*[source(warp) for source in sources]), mask)

    return call


def _chain_call(chain: Sequence[Instruction]) -> Call:
    """The steps of a chain in one `accumulate`: row 0 is where it starts, row i + 1 the result of step i."""
    what = chain[0].what
    accumulate, view = what.chain, what.result
    assert accumulate is not None
    inputs = np.array(_chain_inputs(chain))
    rows = _rows([instruction.result for instruction in chain])
    if isinstance(rows, slice) or len({instruction.result for instruction in chain}) == len(chain):

        def call(warp: Warp, mask: Any) -> None:
            bank = warp.views[view]
            _put(bank, rows, accumulate(bank[inputs], axis=0)[1:], mask)

        return call
    last = chain[-1].result.row  # one register over and over: only its last value is left

    def last_only(warp: Warp, mask: Any) -> None:
        bank = warp.views[view]
        _put(bank, last, accumulate(bank[inputs], axis=0)[-1], mask)

    return last_only


def _chain_inputs(chain: Sequence[Instruction]) -> list[int]:
    """Rows of what the chain starts with and of what each step adds to it."""
    return [chain[0].reads[0].row, *(register.row for register in _added(chain))]


def _added(chain: Sequence[Instruction]) -> list[Register]:
    """What each step adds to the result of the one before."""
    return [chain[0].reads[1], *(b.reads[b.reads[0] == a.result] for a, b in itertools.pairwise(chain))]


def _put(bank: Any, rows: Any, value: Any, mask: Any) -> None:
    if mask is None:
        bank[rows] = value
    elif isinstance(rows, np.ndarray):
        bank[rows] = np.where(mask, value, bank[rows])
    else:
        np.copyto(bank[rows], value, where=mask)
