"""Blocks, dominators and loops against definitions that are too slow to use."""

from hypothesis import given

from fa3.sass.flow import Graph, Step, build
from tests.unit.sass.graphs import listings


def reaches(steps: list[Step], start: int, avoiding: int = -1) -> set[int]:
    """Instructions that control can get to from `start` without passing through `avoiding`."""
    seen, stack = set(), [start]
    while stack:
        index = stack.pop()
        if index in seen or index >= len(steps) or index == avoiding:
            continue
        seen.add(index)
        stack += [*steps[index].targets, *([index + 1] if steps[index].falls else [])]
    return seen


def test_an_empty_listing_has_no_blocks():
    graph = build([])
    assert graph.blocks == () and graph.loops == () and graph.dominators == ()


def test_a_diamond():
    #  0 -> 1 | 2;  1 -> 3;  2 -> 3
    graph = build([Step(targets=(2,)), Step(falls=False, targets=(3,)), Step(), Step(falls=False)])
    assert [(block.start, block.end, block.successors) for block in graph.blocks] == [
        (0, 1, (2, 1)),
        (1, 2, (3,)),
        (2, 3, (3,)),
        (3, 4, ()),
    ]
    assert graph.dominators == ({0}, {0, 1}, {0, 2}, {0, 3})
    assert graph.loops == ()


def test_nested_loops_come_outermost_first():
    #  0: outer header, 1: inner header and tail, 2: back to 0
    graph = build([Step(), Step(targets=(1,)), Step(targets=(0,)), Step(falls=False)])
    outer, inner = graph.loops
    assert outer.header == 0 and inner.blocks < outer.blocks
    assert [list(graph.blocks[block]) for block in inner.blocks] == [[1]]


def test_two_ways_back_to_one_header_are_one_loop():
    graph = build([Step(targets=(2,)), Step(targets=(0,)), Step(targets=(0,)), Step(falls=False)])
    (loop,) = graph.loops
    assert loop.header == 0 and len(loop.blocks) == 3


def test_unreachable_code_makes_no_loop():
    graph = build([Step(falls=False), Step(falls=False, targets=(1,))])
    assert graph.loops == () and graph.dominators[1] == frozenset()


@given(listings())
def test_blocks_tile_the_listing_and_keep_its_edges(steps):
    graph = build(steps)
    assert [index for block in graph.blocks for index in block] == list(range(len(steps)))
    for block in graph.blocks:
        for index in block:
            following = {*steps[index].targets, *({index + 1} if steps[index].falls else set())} - {len(steps)}
            if index < block.end - 1:
                assert following == {index + 1}
            else:
                assert following == {graph.blocks[successor].start for successor in block.successors}


@given(listings())
def test_a_dominator_is_on_every_path(steps):
    graph = build(steps)
    reachable = reaches(steps, 0)
    for block, found in zip(graph.blocks, graph.dominators, strict=True):
        if block.start not in reachable:
            assert not found
            continue
        expected = {
            index
            for index, other in enumerate(graph.blocks)
            if other.start == block.start or block.start not in reaches(steps, 0, avoiding=other.start)
        }
        assert found == expected


@given(listings())
def test_every_block_of_a_loop_reaches_its_header_inside_the_loop(steps):
    graph = build(steps)
    for loop in graph.loops:
        for block in loop.blocks:
            assert loop.header in graph.dominators[block]
            assert _inside(graph, block, loop.header, loop.blocks)


def _inside(graph: Graph, start: int, goal: int, allowed: frozenset[int]) -> bool:
    seen, stack = set(), list(graph.blocks[start].successors)
    while stack:
        block = stack.pop()
        if block == goal:
            return True
        if block in allowed and block not in seen:
            seen.add(block)
            stack += graph.blocks[block].successors
    return False
