"""Arrive counts and barrier places follow from the edges; wrong edges are refused with their name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa3.pipeline import Edge, Topology, load_and_math
from fa3.pipeline.topology import MAX_TRANSACTION_BYTES
from tests.unit.pipeline.rings import cast

SCHEDULE = load_and_math(2)
BOTH = ("math0", "math1")


@pytest.mark.parametrize(("groups", "empty"), [(1, 4), (2, 8), (3, 12)])
def test_counts_of_the_usual_edges(groups, empty):
    """One lane fills a stage; a shared stage is freed by all reading warps, a private one by its reader's four."""
    math = tuple(f"math{i}" for i in range(groups))
    topology = Topology.of(
        load_and_math(groups),
        Edge("k", "load", math, stages=2, bytes=32_768),
        Edge("q", "load", math, stages=groups, bytes=16_384, private=True),
        Edge("tile", "load", math, stages=2),
        Edge("partial", "math0", ("load",), stages=1),
    )
    assert [(plan.full_arrivals, plan.empty_arrivals) for plan in topology.plans] == [
        (1, empty),
        (1, 4),
        (1, empty),
        (4, 1),
    ]


@given(st.data())
def test_counts_are_the_warps_at_the_ends(data):
    consumers, warps, producing = (data.draw(st.integers(1, 4)) for _ in range(3))
    schedule = cast(min(consumers, 3), warps, producing)
    names = tuple(f"math{i}" for i in range(min(consumers, 3)))
    shared = Topology.of(schedule, Edge("k", "load", names, stages=data.draw(st.integers(1, 4))))["k"]
    private = Topology.of(schedule, Edge("q", "load", names, stages=len(names), private=True))["q"]
    assert (shared.full_arrivals, shared.empty_arrivals) == (producing, warps * len(names))
    assert (private.full_arrivals, private.empty_arrivals) == (producing, warps)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_barriers_lie_one_behind_the_other(depths):
    edges = [Edge(f"edge{i}", "load", BOTH, stages=stages) for i, stages in enumerate(depths)]
    topology = Topology.of(SCHEDULE, *edges)
    taken = [plan.first_barrier + i for plan in topology.plans for i in range(plan.barriers)]
    assert taken == list(range(topology.barriers)), "no gap, no overlap"
    assert topology.barriers == 2 * sum(depths)
    assert topology.bytes == 8 * topology.barriers


def test_edges_are_found_by_name():
    topology = Topology.of(SCHEDULE, Edge("k", "load", BOTH, 2), Edge("v", "load", BOTH, 3))
    assert topology["v"].edge.stages == 3
    with pytest.raises(KeyError, match=r"no edge 'o'; edges: \['k', 'v'\]"):
        topology["o"]


@pytest.mark.parametrize(
    ("edge", "words"),
    [
        (Edge("k", "load", BOTH, stages=0), "edge 'k' has 0 stages; it needs at least one"),
        (Edge("k", "load", (), stages=2), "edge 'k' has no consumer"),
        (Edge("k", "math0", BOTH, stages=2), "edge 'k': role 'math0' would wait for itself"),
        (Edge("k", "load", ("math0", "math0"), stages=2), "edge 'k' has a consumer twice: \\('math0', 'math0'\\)"),
        (Edge("q", "load", BOTH, stages=3, private=True), "edge 'q' is private: 3 stages for 2 consumers"),
        (Edge("k", "load", BOTH, stages=2, bytes=24), "edge 'k' brings 24 bytes; TMA moves multiples of 16"),
        (Edge("k", "load", BOTH, stages=2, bytes=-16), "edge 'k' brings -16 bytes"),
        (
            Edge("k", "load", BOTH, stages=2, bytes=1 << 20),
            f"edge 'k' brings 1048576 bytes; .* counts to {MAX_TRANSACTION_BYTES}",
        ),
        (
            Edge("dq", "math0", ("load",), stages=2, bytes=16),
            "edge 'dq' is filled by TMA: 'math0' must issue from one warp, not 4",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_edges_are_refused(edge, words):
    with pytest.raises(ValueError, match=words):
        Topology.of(SCHEDULE, edge)


def test_the_largest_transaction_is_accepted():
    assert Topology.of(SCHEDULE, Edge("k", "load", BOTH, 2, bytes=(1 << 20) - 16)).plans


def test_a_private_edge_needs_equal_consumers():
    edge = Edge("q", "math0", ("load", "math1"), stages=2, private=True)
    with pytest.raises(ValueError, match="edge 'q' is private: its consumers must have equally many warps"):
        Topology.of(SCHEDULE, edge)


def test_two_edges_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"edge names must differ: \['k', 'k'\]"):
        Topology.of(SCHEDULE, Edge("k", "load", BOTH, 2), Edge("k", "load", BOTH, 1))


@pytest.mark.parametrize("edge", [Edge("k", "laod", BOTH, 2), Edge("k", "load", ("math0", "math2"), 2)])
def test_unknown_roles_are_refused(edge):
    with pytest.raises(KeyError, match=r"no role '(laod|math2)'; roles: \['load', 'math0', 'math1'\]"):
        Topology.of(SCHEDULE, edge)
