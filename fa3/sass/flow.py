"""Control flow of a straight listing: basic blocks, dominators and natural loops.

Knows neither SASS nor PTX. A listing is a sequence of `Step`s; both parsers produce them, so that the overlap report
(SASS) and the guard against frozen phases (PTX) stand on the same few functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Step:
    """Where control may go after one instruction: to the next one if `falls`, and to each index in `targets`."""

    falls: bool = True
    targets: tuple[int, ...] = ()


@dataclass(frozen=True)
class Block:
    """Instructions `start .. end - 1`, entered only at the top and left only at the bottom."""

    start: int
    end: int
    successors: tuple[int, ...]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))


@dataclass(frozen=True)
class Loop:
    """A natural loop: its header block and every block that can reach the header again without leaving the loop."""

    header: int
    blocks: frozenset[int]


@dataclass(frozen=True)
class Graph:
    """The flow graph of one listing; block 0 is the entry."""

    blocks: tuple[Block, ...]

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        into: list[list[int]] = [[] for _ in self.blocks]
        for index, block in enumerate(self.blocks):
            for successor in block.successors:
                into[successor].append(index)
        return tuple(tuple(sources) for sources in into)

    @cached_property
    def block_of(self) -> tuple[int, ...]:
        """Instruction index -> block index."""
        return tuple(index for index, block in enumerate(self.blocks) for _ in block)

    @cached_property
    def reachable(self) -> frozenset[int]:
        seen: set[int] = set()
        stack = [0] if self.blocks else []
        while stack:
            index = stack.pop()
            if index not in seen:
                seen.add(index)
                stack.extend(self.blocks[index].successors)
        return frozenset(seen)

    @cached_property
    def dominators(self) -> tuple[frozenset[int], ...]:
        """For each block the blocks that every path from the entry to it goes through; empty for unreachable ones."""
        everything = self.reachable
        found = [everything if index in everything else frozenset() for index in range(len(self.blocks))]
        if not self.blocks:
            return ()
        found[0] = frozenset({0})
        changed = True
        while changed:
            changed = False
            for index in sorted(everything - {0}):
                sources = [found[source] for source in self.predecessors[index] if source in everything]
                new = frozenset.intersection(*sources) | {index}
                if new != found[index]:
                    found[index], changed = new, True
        return tuple(found)

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """Natural loops, outermost first. Back edges with one header make one loop, as a `continue` does."""
        bodies: dict[int, set[int]] = {}
        for index in self.reachable:
            for header in self.blocks[index].successors:
                if header in self.dominators[index]:
                    bodies.setdefault(header, {header}).update(self._body(header, index))
        loops = [Loop(header, frozenset(body)) for header, body in bodies.items()]
        return tuple(sorted(loops, key=lambda loop: (-len(loop.blocks), loop.header)))

    def _body(self, header: int, tail: int) -> set[int]:
        body, stack = {header}, [tail]
        while stack:
            index = stack.pop()
            if index not in body:
                body.add(index)
                stack.extend(source for source in self.predecessors[index] if source in self.reachable)
        return body


def build(steps: Sequence[Step]) -> Graph:
    """Cuts a listing into basic blocks. A step past the end of the listing leaves the graph."""
    if not steps:
        return Graph(())
    count, leaders = len(steps), {0}
    for index, step in enumerate(steps):
        leaders.update(target for target in step.targets if target < count)
        if (step.targets or not step.falls) and index + 1 < count:
            leaders.add(index + 1)
    starts = sorted(leaders)
    number = {start: index for index, start in enumerate(starts)}
    blocks = []
    for start, end in zip(starts, [*starts[1:], count], strict=True):
        last = steps[end - 1]
        after = [*last.targets, *([end] if last.falls else [])]
        blocks.append(Block(start, end, tuple(dict.fromkeys(number[target] for target in after if target < count))))
    return Graph(tuple(blocks))
