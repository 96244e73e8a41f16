"""The barriers of a compiled forward are those of its topology, and its loops turn their phases."""

import re
from collections import Counter

import pytest

from fa3.compile import artefacts
from fa3.config.types import ForwardConfig, KernelKey
from fa3.kernels import forward
from fa3.pipeline import Edge, Topology
from fa3.sass.frozen import frozen_waits

pytestmark = pytest.mark.compile

TILE_N, DIM = 64, 64


@pytest.fixture(name="compiled", params=(2, 3), ids="{}_warpgroups".format, scope="module")
def _compiled(request):
    """(math warpgroups, topology that the kernel was traced with, PTX) of a small forward."""
    config = ForwardConfig(DIM, DIM, causal=False, tile_m=64 * request.param, tile_n=TILE_N, algorithm="plain")
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        made = Topology.of

        def noting(schedule, *edges: Edge):
            seen.append(made(schedule, *edges))
            return seen[-1]

        patch.setattr(forward.Topology, "of", noting)
        ptx = artefacts(KernelKey(config, "bf16")).ptx
    assert seen and all(topology == seen[0] for topology in seen), "host and kernel agree on the topology"
    return request.param, seen[0], ptx


def literals(ptx):
    """Registers that hold a literal -> its value."""
    return {name: int(value) for name, value in re.findall(r"mov\.[bus]32\s+(%r\d+), (\d+);", ptx)}


def initialised(ptx):
    """Byte offset of every mbarrier from the first one -> the arrivals it waits for."""
    values, found = literals(ptx), {}
    for base, offset, count in re.findall(r"mbarrier\.init\.\S+\s+\[(%r\d+)\+?(\d*)\], (%?\w+);", ptx):
        place = (base, int(offset or 0))
        assert place not in found, "initialised twice"
        found[place] = values[count] if count.startswith("%") else int(count)
    assert len({base for base, _ in found}) == 1, "all barriers lie in one array"
    return {offset: count for (_, offset), count in found.items()}


def test_every_barrier_waits_for_what_the_topology_says(compiled):
    _, topology, ptx = compiled
    expected = {}
    for plan in topology.plans:
        for stage in range(plan.edge.stages):
            full = 8 * (plan.first_barrier + stage)
            expected |= {full: plan.full_arrivals, full + 8 * plan.edge.stages: plan.empty_arrivals}
    found = initialised(ptx)
    first = min(found)
    assert {offset - first: count for offset, count in found.items()} == expected


def test_the_counts_are_the_warps_that_read(compiled):
    """Without asking the topology: K, V and the tile numbers have two stages each, Q has one for each warpgroup."""
    groups, _, ptx = compiled
    shared, private = 3 * 2, groups
    counts = Counter(initialised(ptx).values())
    assert counts == Counter({1: shared + private, 4 * groups: shared}) + Counter({4: private})


def test_announced_bytes_are_the_tiles(compiled):
    """Every announcement of the producer is 64 rows of Q, or a tile of K or V, in 16-bit elements."""
    groups, topology, ptx = compiled
    assert {plan.edge.name: plan.edge.bytes for plan in topology.plans} == {
        "tile": 0,
        "q": 64 * DIM * 2,
        "k": TILE_N * DIM * 2,
        "v": TILE_N * DIM * 2,
    }
    values = literals(ptx)
    announced = re.findall(r"mbarrier\.arrive\.expect_tx\.\S+\s+\S+ \[[^\]]+\], (%?\w+);", ptx)
    assert len(announced) >= groups + 3
    assert {values[name] if name.startswith("%") else int(name) for name in announced} == {64 * DIM * 2}


def test_no_phase_is_frozen(compiled):
    """A cursor that stood still would wait for one parity for ever."""
    _, _, ptx = compiled
    assert "mbarrier.try_wait.parity" in ptx
    assert frozen_waits(ptx) == ()
