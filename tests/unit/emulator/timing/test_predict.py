"""Launches from tiles, and the fit of the free constants, on hand-made CTAs instead of compiled kernels."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa3.config.table import FORWARD, forward_config
from fa3.config.types import KernelKey
from fa3.emulator.timing import calibrate, predict
from fa3.emulator.timing.calibrate import Measured
from fa3.emulator.timing.cost import FREE, Cost
from fa3.emulator.timing.events import Event, Trace
from fa3.emulator.timing.predict import FEW, MANY, Size, Tile, TileTimes, tiles_of

from .lists import gemm, math, warpgroups

FULL, CAUSAL = (KernelKey(forward_config(128, 128, causal), "bf16") for causal in (False, True))


def tile(blocks: int) -> list[Event]:
    """Some 500 cycles that do not depend on the blocks, and a GEMM and a softmax for each."""
    return [math("mufu", 60), *([*gemm(4, n=256), math("mufu", 48)] * blocks)]


@pytest.fixture
def hand_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def traces(key: KernelKey, cut: int = 0) -> tuple[Trace, Trace, Trace]:
        return tuple(warpgroups(events, events) for events in (tile(FEW), tile(MANY), tile(FEW) * 2))  # type: ignore[return-value]

    monkeypatch.setattr(predict, "traces", traces)
    monkeypatch.setattr(predict, "GRAINS", (14, 16))
    predict.tile_times.cache_clear()
    yield  # type: ignore[misc]
    predict.tile_times.cache_clear()


# ---- tiles
@given(st.sampled_from(FORWARD), st.integers(1, 700), st.integers(1, 700))
def test_a_tile_has_the_blocks_that_its_rows_see(row, seqlen_q, seqlen_k):
    def blocks(first: int, rows: int) -> int:
        last = min(first + rows, seqlen_q) - 1
        keys = range(seqlen_k) if not row.causal else range(min(seqlen_k, max(0, last + 1 + seqlen_k - seqlen_q)))
        return len({j // row.tile_n for j in keys}) if first <= last else 0

    expected = []
    for first in range(0, seqlen_q, row.tile_m):
        own = [blocks(group, 64) for group in range(first, first + row.tile_m, 64)]
        tile = blocks(first, row.tile_m)
        cut = tile * row.tile_n > seqlen_k
        expected.append(Tile(tile, max(sum(own) / len(own), tile / 2), cut))
    found = tiles_of(row, Size(1, 2, seqlen_q, seqlen_k))
    assert found == sorted(expected * 2, reverse=True)


def test_a_size_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        Size(1, 0, 128, 128)


TIMES = TileTimes(first=1000.0, next=300.0, block=200.0, cut=50.0)


def whole(blocks: int) -> Tile:
    return Tile(blocks, float(blocks), False)


def test_cycles_of_a_cta():
    assert TIMES.cycles([whole(4)]) == 1800
    assert TIMES.cycles([whole(4), Tile(2, 1.5, True), whole(2)]) == 1000 + 600 + 7.5 * 200 + 50


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 12))
def test_equal_tiles_come_in_waves(tiles, sms, blocks):
    waves = -(-tiles // sms)
    assert predict._play(TIMES, [whole(blocks)] * tiles, sms) == pytest.approx(TIMES.cycles([whole(blocks)] * waves))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=60), st.integers(1, 8))
def test_a_launch_lies_between_perfect_balance_and_one_sm(blocks, sms):
    tiles = [whole(each) for each in sorted(blocks, reverse=True)]
    end = predict._play(TIMES, tiles, sms)
    assert end <= TIMES.cycles(tiles) + 1e-6
    assert end >= TIMES.cycles(tiles[:1]) - 1e-6
    assert end * sms >= sum(TIMES.next + TIMES.of(tile) for tile in tiles) - 1e-6


# ---- predictions
STEADY = Cost(mma_queue=1)
"""Whatever constants are fitted: with one WGMMA in flight the little hand-made kernel settles into a steady rhythm."""


@pytest.mark.usefixtures("hand_made")
class TestPredict:
    def test_it_is_linear_in_blocks_and_near_to_the_emulated_one(self):
        def cycles(blocks: int) -> float:
            return predict.predict(FULL, Size(1, 132, 128, 128 * blocks), STEADY).cycles

        assert cycles(30) - cycles(20) == pytest.approx(cycles(20) - cycles(10))
        few = predict.predict(FULL, Size(1, 132, 128, 128 * MANY), STEADY)
        assert few.cycles - STEADY.tile == pytest.approx(few.timeline.cycles, rel=0.05)

    def test_tiles_beyond_the_sms_take_another_wave(self):
        one, two = (predict.predict(FULL, Size(1, heads, 128, 1024)) for heads in (132, 133))
        assert two.cycles - one.cycles == pytest.approx(one.times.next + 8 * one.times.block)
        assert (one.ctas, two.ctas, two.tiles, two.blocks) == (132, 132, 133, 133 * 8)

    def test_a_causal_launch_computes_about_half_of_the_blocks(self):
        full, causal = (predict.predict(key, Size(1, 132, 2048, 2048)) for key in (FULL, CAUSAL))
        assert causal.blocks == full.blocks * 17 / 32
        assert causal.cycles < 0.6 * full.cycles

    def test_utilisation_is_the_share_of_the_peak(self):
        p = predict.predict(FULL, Size(1, 132, 128, 128 * MANY))
        flops = MANY * 4 * 128 * 128 * 128
        assert p.tensor_utilisation == pytest.approx(flops / (4096 * p.cycles))
        assert p.microseconds(1000.0) == pytest.approx(p.cycles / 1000)

    def test_the_spread_is_that_of_the_grains(self, monkeypatch):
        one = [predict.predict(FULL, Size(1, 1, 128, 1024), replace(STEADY, mma_latency=i)).spread for i in (1.0, 2.0)]
        monkeypatch.setattr(predict, "GRAINS", (16,))
        alone = predict.predict(FULL, Size(1, 1, 128, 1024), replace(STEADY, mma_latency=3.0))
        assert min(one) >= 0.0 < max(one) < 0.1
        assert alone.spread == 0.0

    def test_a_gpu_without_an_sm_is_refused(self):
        with pytest.raises(ValueError, match="sms"):
            predict.predict(FULL, Size(1, 1, 128, 128), sms=0)


# ---- calibration
def measurements(cost: Cost, noise: Callable[[], float] = lambda: 1.0) -> list[Measured]:
    """What a GPU would measure that is `cost`, but for the noise."""
    sizes = [Size(1, 132, 128, keys) for keys in (512, 1024, 2048, 4096)] + [Size(4, 132, 1024, 1024)]
    return [Measured(FULL, size, predict.predict(FULL, size, cost).cycles * noise()) for size in sizes]


@pytest.mark.usefixtures("hand_made")
class TestCalibrate:
    def test_a_fit_finds_the_constants_that_the_measurements_came_from(self, monkeypatch):
        monkeypatch.setattr(calibrate, "FREE", {name: FREE[name] for name in ("mma_start", "tile")})
        rows = measurements(Cost(mma_start=50.0, tile=2000.0, launch=4321.0))
        found = calibrate.fit(rows)
        assert (found.mma_start, found.tile) == (50.0, 2000.0)
        assert found.launch == pytest.approx(4321)
        assert calibrate.mean_error(calibrate.compare(rows, Cost())) > 0.02

    def test_a_fit_is_never_worse_than_where_it_began(self):
        rows = measurements(Cost(mma_queue=2, under_gemm=1.3, launch=0.0))
        seen = [row for row in rows if row.is_fitted(132)]
        before, after = (calibrate.compare(seen, cost) for cost in (Cost(), calibrate.fit(rows)))
        assert calibrate.mean_error(after) < 0.5 * calibrate.mean_error(before)

    def test_a_fit_sees_only_its_share(self):
        rows = measurements(Cost())
        seen = [(row.size.batch, row.size.seqlen_k) for row in rows if row.is_fitted(132)]
        assert seen == [(1, 1024), (1, 4096), (4, 1024)]
        spoilt = [row if row.is_fitted(132) else Measured(row.key, row.size, 1.0) for row in rows]
        assert calibrate.fit(spoilt) == calibrate.fit(rows)

    def test_nothing_to_fit_is_an_error(self):
        with pytest.raises(ValueError, match="nothing to fit"):
            calibrate.fit([Measured(FULL, Size(1, 132, 128, 512), 1.0)])

    def test_the_report_states_errors_by_kernel(self):
        generator = random.Random(0)
        rows = measurements(Cost(launch=2000.0), lambda: 1.0 + 0.1 * generator.random())
        compared = calibrate.compare(rows, Cost(launch=2000.0))
        report = calibrate.report(compared, Cost(launch=2000.0))
        kernel = report["kernels"][FULL.name]
        assert 0 < kernel["mean_error"] < 0.1
        assert -0.1 < kernel["worst_error"] < 0
        assert abs(kernel["block_cycles"]["measured"] - kernel["block_cycles"]["predicted"]) < 200
        assert report["constants"]["launch"] == 2000.0
        assert len(report["rows"]) == len(rows)
        assert {row["fitted"] for row in report["rows"]} == {True, False}

    def test_a_row_of_a_file_is_read_back(self):
        row = {
            "config": asdict(FULL.config), "dtype": "bf16", "batch": 1, "heads_q": 132, "heads_kv": 4,
            "seqlen_q": 128, "seqlen_k": 1024, "cycles": 20000,
        }  # fmt: skip
        assert Measured.of(row) == Measured(FULL, Size(1, 132, 128, 1024), 20000.0)
