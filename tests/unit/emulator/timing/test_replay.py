"""The replay against arithmetic done by hand: peaks, contention, turns, producers, and properties of random traces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa3.emulator.timing import ReplayError, Timeline, Trace, replay
from fa3.emulator.timing.cost import Cost
from fa3.emulator.timing.events import Access, Arrive, Commit, Join, Load, Mma, Store, Wait, WaitGroup

from .lists import PLAIN, chain, gemm, loads, math, overlap, turn, warpgroups

FULL, EMPTY = 1024, 1032


# ---- issue slots and pipes
def test_exponentials_of_one_sub_partition_share_its_unit():
    def end(*warps: int) -> float:
        return replay(Trace([[math("mufu", 64)] if w in warps else [] for w in range(8)]), PLAIN).end

    alone = end(0)
    assert alone == pytest.approx(64 * 8, abs=20)
    assert end(0, 4) == pytest.approx(2 * alone, rel=0.05)
    assert end(0, 1, 2, 3) == pytest.approx(alone)


def test_chains_of_two_warps_fill_each_other():
    def end(warps: int) -> float:
        return replay(Trace([[chain("fma", 256)] if w % 4 == 0 else [] for w in range(4 * warps)]), PLAIN).end

    assert end(2) == pytest.approx(end(1), rel=0.02)
    assert end(16) > 3 * end(1)


def test_the_utilisation_of_exponentials_is_their_share():
    timeline = replay(Trace([[math("mufu", 100), chain("fma", 200)]]), PLAIN)
    assert timeline.busy("MUFU 0") == pytest.approx(800)
    assert timeline.utilisation("MUFU 0") == pytest.approx(800 / timeline.end)
    assert timeline.utilisation("MUFU 1") == 0


# ---- tensor cores
def test_a_loop_of_gemms_reaches_the_peak():
    timeline = replay(warpgroups(gemm(8) * 20, gemm(8) * 20), PLAIN)
    assert timeline.end == pytest.approx(2 * 20 * 8 * 64, rel=0.01)
    assert timeline.utilisation("tensor cores") > 0.99


@pytest.mark.parametrize(
    ("n", "k", "bits", "registers", "cycles"),
    [
        (128, 16, 16, True, 64),
        (128, 16, 16, False, 64),
        (256, 16, 16, True, 128),
        (64, 16, 16, False, 32),
        (32, 16, 16, False, 24),  # 64 x 16 of A and 32 x 16 of B: 3072 bytes at 128 a cycle
        (128, 32, 8, True, 64),
    ],
)
def test_cycles_of_one_wgmma(n, k, bits, registers, cycles):
    assert PLAIN.mma_cycles(n, k, bits, registers) == cycles


def test_a_wgmma_starts_when_its_last_warp_has_issued_it():
    late = [math("mufu", 100), *gemm(1)]
    timeline = replay(Trace([gemm(1), gemm(1), late, gemm(1)]), PLAIN)
    (product,) = timeline.units["tensor cores"]
    assert product.start == pytest.approx(100 * 8, abs=25)
    assert all(warp[-1].end >= product.end for warp in timeline.warps)


def test_one_wgmma_in_flight_leaves_gaps_that_another_warpgroup_fills():
    costs = PLAIN.with_constants(mma_queue=1, mma_issue=16.0)
    alone = replay(warpgroups(gemm(8) * 10), costs)
    assert alone.utilisation("tensor cores") == pytest.approx(64 / 80, rel=0.02)
    assert replay(warpgroups(gemm(8) * 10, gemm(8) * 10), costs).utilisation("tensor cores") > 0.98


def test_a_wait_for_all_but_the_youngest_group_does_not_wait_for_that():
    two = [*gemm(8)[:-1], *gemm(8)[:-1]]
    first = replay(warpgroups([*two, WaitGroup("wgmma", 1, False, None)]), PLAIN)
    both = replay(warpgroups([*two, WaitGroup("wgmma", 0, False, None)]), PLAIN)
    assert first.warps[4][-1].end == pytest.approx(8 * 64, abs=20)
    assert both.warps[4][-1].end == pytest.approx(16 * 64, abs=20)


# ---- ping-pong
def pingpong(turns: bool) -> Timeline:
    """Two warpgroups whose softmax takes as long as their GEMM: 8 x 64 and 64 x 8 cycles."""
    softmax = math("mufu", 64)
    lists = [([*turn(1 + i, 2 - i, gemm(8)), softmax] if turns else [*gemm(8), softmax]) * 8 for i in range(2)]
    lists[1] = [Join(1, 256, False, None), *lists[1]] if turns else lists[1]
    return replay(warpgroups(*lists), PLAIN)


def test_with_turns_the_softmax_of_one_runs_under_the_gemm_of_the_other():
    timeline = pingpong(True)
    first, second = timeline.warps[4], timeline.warps[8]
    softmax = sum(i.cycles for i in first if i.kind == "softmax")
    assert overlap(first, second, "softmax", "gemm") > 0.85 * softmax
    assert overlap(first, second, "softmax", "softmax") < 0.05 * softmax
    assert timeline.utilisation("tensor cores") > 0.9


def test_without_turns_they_do_the_same_at_the_same_time_for_a_while():
    timeline = pingpong(False)
    assert overlap(timeline.warps[4], timeline.warps[8], "softmax", "softmax") > 8 * 64


def test_a_barrier_joins_all_its_threads():
    lists = [[math("mufu", 10 * w), Join(3, 128, True, None)] for w in range(4)]
    timeline = replay(Trace(lists), PLAIN)
    assert {warp[-1].end for warp in timeline.warps[:3]} == {timeline.end}
    assert timeline.end == pytest.approx(30 * 8, abs=20)


# ---- copies
def test_a_loop_that_waits_for_its_loads_runs_at_their_bandwidth():
    nbytes, count = 32 * 1024, 20
    consumer = [event for i in range(count) for event in (Wait(FULL, i + 1, None), *gemm(1), Arrive(EMPTY, 1, 0, None))]
    timeline = replay(warpgroups(consumer, load=loads(FULL, EMPTY, count, nbytes), counts={FULL: 1, EMPTY: 4}), PLAIN)
    per_load = nbytes / PLAIN.load_bandwidth + PLAIN.load_latency
    assert timeline.end == pytest.approx(count * (per_load + 64), rel=0.02)
    waits = timeline.totals(4)["wait"]
    assert waits == pytest.approx(count * per_load, rel=0.02)
    assert timeline.busy("TMA load") == pytest.approx(count * nbytes / 64)


def test_with_a_free_ring_the_latency_is_hidden():
    nbytes, count = 32 * 1024, 20
    producer = [event for _ in range(count) for event in (Arrive(FULL, 1, nbytes, None), Load(FULL, nbytes, None))]
    timeline = replay(warpgroups([Wait(FULL, 1, None)], load=producer, counts={FULL: count}), PLAIN)
    assert timeline.end == pytest.approx(count * nbytes / 64 + PLAIN.load_latency, rel=0.01)


def test_a_phase_waits_for_bytes_and_arrivals():
    early = [Load(FULL, 640, None), math("mufu", 100), Arrive(FULL, 1, 640, None)]
    timeline = replay(Trace([early, [Wait(FULL, 1, None)]], {FULL: 1}), PLAIN)
    assert timeline.warps[1][-1].end == pytest.approx(100 * 8, abs=25)


def test_stores_are_read_before_they_are_done():
    store = [Store(3200, None), Commit("bulk", None)]
    costs = PLAIN.with_constants(store_bandwidth=32.0, store_read=5.0, store_latency=600.0)
    read = replay(Trace([[*store, WaitGroup("bulk", 0, True, None)]]), costs)
    done = replay(Trace([[*store, WaitGroup("bulk", 0, False, None)]]), costs)
    assert read.warps[0][-1].end == pytest.approx(105)
    assert done.warps[0][-1].end == pytest.approx(700)
    assert read.end == done.end == pytest.approx(700)  # the launch ends with its last store


def test_accesses_share_the_data_path():
    def end(wavefronts: int) -> float:
        return replay(Trace([[Access("shared", wavefronts, True, None)] * 10 for _ in range(4)]), PLAIN).end

    assert end(1) == pytest.approx(10 * (1 + PLAIN.shared_latency), abs=4)
    assert end(64) == pytest.approx(10 * 4 * 64, rel=0.05)


# ---- whole replays
def test_a_trace_that_cannot_end_is_an_error():
    with pytest.raises(ReplayError, match=r"1 warp.*warp 1 at Wait"):
        replay(Trace([[], [Wait(FULL, 1, None)]], {FULL: 1}), PLAIN)


def test_a_barrier_without_a_count_is_an_error():
    with pytest.raises(ReplayError, match="1024"):
        replay(Trace([[Wait(FULL, 1, None)]]), PLAIN)


def test_the_launch_is_added_once():
    trace = Trace([[math("fma", 10)]])
    assert replay(trace, PLAIN.with_constants(launch=1234.0)).cycles == pytest.approx(replay(trace, PLAIN).end + 1234)


def test_the_same_trace_gives_the_same_timeline():
    assert pingpong(True) == pingpong(True)


EVENTS = st.one_of(
    st.builds(math, st.sampled_from(["mufu", "fma", "alu", "shuffle"]), st.integers(1, 40)),
    st.builds(chain, st.sampled_from(["mufu", "fma"]), st.integers(1, 20)),
    st.just(Load(FULL, 4096, None)),
    st.just(Store(4096, None)),
    st.builds(Access, st.sampled_from(["shared", "global", "atomic"]), st.integers(1, 8), st.booleans(), st.none()),
)


@given(st.lists(st.lists(EVENTS, max_size=8), min_size=1, max_size=9), st.integers(1, 40))
def test_random_warps_neither_lose_nor_invent_work(lists, chunk):
    lists = [[Arrive(FULL, 1, 0, None)], *lists]
    timeline = replay(Trace(lists, {FULL: 1_000_000}), Cost(chunk=chunk))
    ops = [(w, op) for w, events in enumerate(lists) for e in events if hasattr(e, "code") for op in e.code.ops]
    for sub in range(4):
        exponentials = sum(op.kind == "mufu" and w % 4 == sub for w, op in ops)
        assert timeline.busy(f"MUFU {sub}") == pytest.approx(8 * exponentials)
        assert timeline.end >= sum(w % 4 == sub for w, _ in ops) - 1e-6
    for lane in (*timeline.warps, *timeline.units.values()):
        assert all(i.start < i.end for i in lane)
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(lane))
    for lane in timeline.warps:  # a load that nobody waits for may come later
        assert all(i.start >= 0 and i.end <= timeline.end for i in lane)


@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from([1, 2, 64]))
def test_gemms_of_warpgroups_run_in_order_and_one_at_a_time(first, second, queue):
    groups = [gemm(first), gemm(second, n=64)]
    timeline = replay(warpgroups(*groups), PLAIN.with_constants(mma_queue=queue))
    assert timeline.busy("tensor cores") == pytest.approx(64 * first + 32 * second)
    assert timeline.end <= 64 * first + 32 * second + 40


def test_a_slowdown_under_gemms_slows_only_what_runs_under_them():
    slow = PLAIN.with_constants(under_gemm=2.0)
    softmax = [math("mufu", 64)]
    assert replay(warpgroups(softmax), slow).end == replay(warpgroups(softmax), PLAIN).end
    timeline = replay(warpgroups(gemm(64), softmax), slow)
    assert timeline.warps[8][-1].end > 1.7 * 512
    assert timeline.busy("MUFU 0") == pytest.approx(512)  # slower, but not more work


def test_a_group_of_wgmmas_begins_with_its_start():
    timeline = replay(warpgroups(gemm(4) * 5), PLAIN.with_constants(mma_start=50.0))
    assert timeline.end == pytest.approx(5 * (4 * 64 + 50), rel=0.03)
    assert timeline.busy("tensor cores") == pytest.approx(5 * 4 * 64)


def test_mma_events_of_four_warps_are_one_product():
    timeline = replay(Trace([[Mma(128, 16, 16, True, None)]] * 4), PLAIN)
    assert len(timeline.units["tensor cores"]) == 1
