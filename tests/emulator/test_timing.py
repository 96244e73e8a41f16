"""Timelines and predictions of compiled kernels. `tests/unit/emulator/timing` has the same on hand-made lists."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fa3.config.table import forward_config
from fa3.config.types import KernelKey
from fa3.emulator.backend import record
from fa3.emulator.timing import Cost, replay
from fa3.emulator.timing.calibrate import Measured
from fa3.emulator.timing.predict import Size, predict
from fa3.emulator.timing.recorder import Recorder

ROW = forward_config(64, 64, True)
MEASURED = Path(__file__).resolve().parents[2] / "benchmarks/results/h200-emulator-timing.json"


def test_the_timeline_does_not_depend_on_the_policy():
    """Two tiles of two heads, one with a cut block: the functional run may take any order, its timeline is one."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, length, 2, 64).to(torch.bfloat16) for length in (ROW.tile_m, 500, 500))
    run = record(q, k, v, causal=True, sms=1)
    timelines = []
    for policy, seed in (("early", 0), ("late", 0), ("random", 1), ("starve:0-0", 0), ("starve:4-7", 0)):
        recorder = Recorder()
        run.replay(policy=policy, seed=seed, observers=[recorder])
        timelines.append(replay(recorder.traces[0]))
    assert all(timeline == timelines[0] for timeline in timelines)


def test_what_the_warps_do_has_the_name_of_its_part():
    timeline = predict(ROW, Size(1, 132, 192, 1024)).timeline
    for warp in timeline.math_warps:
        assert {"softmax", "rescale", "convert", "mask", "epilogue", "gemm", "barrier"} <= set(timeline.totals(warp))
    lines = {interval.at.file.rsplit("/", 1)[-1] for interval in timeline.warps[4] if interval.at}
    assert {"softmax.py", "forward_overlap.py"} <= lines


def test_tensor_cores_and_exponentials_are_as_busy_as_their_work_demands():
    p = predict(KernelKey(ROW, "bf16"), Size(1, 132, 192, 12 * 128))
    blocks = 11 + 12 + 12  # of three warpgroups; the first sees nothing of the last block
    assert p.timeline.busy("tensor cores") == pytest.approx(blocks * (4 * 64 + 8 * 32))  # S in 4 WGMMAs, O in 8
    assert p.timeline.busy("MUFU 0") == pytest.approx(blocks * 66 * 8, rel=0.02)


def test_predictions_are_near_to_what_an_h200_measured():
    """Two launches of the result file, with the constants as they stand: within 10 %."""
    result = json.loads(MEASURED.read_text())
    name = KernelKey(ROW, "bf16").name
    rows = [row for row in result["rows"] if row["kernel"] == name and row["seqlen_k"] in (1024, 4096)]
    assert len(rows) >= 2
    for row in rows:
        size = Size(row["batch"], row["heads"], row["seqlen_q"], row["seqlen_k"])
        measured = Measured(KernelKey(ROW, "bf16"), size, row["measured"])
        assert predict(measured.key, size).cycles == pytest.approx(measured.cycles, rel=0.1)


def test_one_stage_waits_for_its_loads():
    two, one = (predict(replace(ROW, stages=stages), Size(1, 132, 192, 2048)) for stages in (2, 1))
    assert one.cycles > 1.05 * two.cycles


def test_the_constants_are_those_of_the_result_file():
    constants = json.loads(MEASURED.read_text())["constants"]
    assert {name: getattr(Cost(), name) for name in constants} == constants
