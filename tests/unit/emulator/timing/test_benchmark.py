"""The script that measures: its cases, and how cycles come out of the profiler's and of ncu's output."""

from __future__ import annotations

import json

import pytest

from benchmarks import emulator_timing
from benchmarks.kernel_cycles import METRIC, SPINS, Cycles, from_ncu, from_trace
from fa3.config.budget import check_forward
from fa3.config.table import FORWARD
from fa3.emulator.timing.calibrate import Measured
from fa3.emulator.timing.predict import tiles_of

KERNEL = "kernel_cutlass_kernel_fa3kernelsforwardForward_object_at__0"


def test_every_row_of_the_table_is_measured_with_one_tile_an_sm_and_with_several():
    cases = emulator_timing.cases(132)
    for row in FORWARD:
        own = [case for case in cases if case.key.config == row]
        rows = [Measured.of({**case.as_dict(), "cycles": 1}) for case in own]
        tiles = [len(tiles_of(row, measured.size)) for measured in rows]
        assert tiles.count(132) == 4
        assert max(tiles) > 2 * 132
        assert sum(measured.is_fitted(132) for measured in rows) == 3
    assert len({str(case) for case in cases}) == len(cases)


def test_all_cases_can_run():
    for case in emulator_timing.cases(132):
        check_forward(case.key.config)
        assert case.heads_q % case.heads_kv == 0
        assert case.seqlen_q <= case.seqlen_k or not case.key.config.causal


def test_a_gpu_whose_sms_do_not_divide_gets_one_head_of_keys():
    assert {case.heads_kv for case in emulator_timing.cases(114) if case.heads_q == 114} == {1}


def kernel(ts: float, dur: float, name: str = KERNEL) -> dict[str, object]:
    return {"cat": "kernel", "ts": ts, "dur": dur, "name": name}


def events(clocks: list[float], cycles: list[list[float]]) -> list[dict[str, object]]:
    """A trace of one warm-up, two spins and the kernels of each case; a spin takes 2 us more than its cycles."""
    found, now = [{"cat": "cpu_op", "ts": 0, "dur": 5, "name": KERNEL}], 0.0
    for clock, each in zip(clocks, cycles, strict=True):
        durations = [(KERNEL, 99.0), *(("spin_kernel(long)", 2.0 + spin / clock) for spin in SPINS)]
        for name, us in [*durations, *((KERNEL, c / clock) for c in each)]:
            found.append(kernel(now, us, name))
            now += us + 3.0
    return found[::-1]


def test_cycles_are_durations_at_the_clock_of_the_spins_before_them():
    found = from_trace(events([1980.0, 1500.0], [[20000.0, 21000.0], [30000.0, 30000.0]]), 2, 1, 2)
    assert found[0].clock_mhz == pytest.approx(1980)
    assert found[0].each == pytest.approx((20000, 21000))
    assert found[1].each == pytest.approx((30000, 30000))


def test_a_trace_that_lacks_a_kernel_is_an_error():
    trace = [event for event in events([1980.0], [[20000.0, 21000.0]]) if event["ts"] != 0.0]
    with pytest.raises(RuntimeError, match="2 of 3 kernels"):
        from_trace(trace, 1, 1, 2)


CSV = f'''==PROF== Connected to process 1
some words of the program
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","{KERNEL}","{METRIC}","cycle","99,999"
"1","{KERNEL}","{METRIC}","cycle","20,001"
"1","{KERNEL}","gpu__time_duration.sum","ns","1"
"2","void at::native::vectorized()","{METRIC}","cycle","7"
"10","{KERNEL}","{METRIC}","cycle","20,003"
==PROF== Disconnected
'''


def test_cycles_come_out_of_ncu():
    assert from_ncu(CSV, 1, 1, 2) == [Cycles((20001.0, 20003.0))]


def test_a_csv_of_another_run_is_an_error():
    with pytest.raises(ValueError, match="3 kernels; 4 are expected"):
        from_ncu(CSV, 1, 1, 3)
    with pytest.raises(ValueError, match='"ID"'):
        from_ncu("nothing", 1, 1, 3)


def test_parse_puts_cycles_to_the_cases(tmp_path):
    case = emulator_timing.cases(132)[0]
    values = ["99,999", "20,001", "20,003", "20,005"]
    rows = [f'"{i}","{KERNEL}","{METRIC}","cycle","{value}"' for i, value in enumerate(values)]
    header = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    (tmp_path / "ncu.csv").write_text("\n".join([header, *rows]))
    cases = {"env": {"multiprocessors": 132}, "source": "ncu", "rows": [case.as_dict()]}
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    files = [str(tmp_path / name) for name in ("ncu.csv", "cases.json", "out.json")]
    assert emulator_timing.main(["parse", *files[:2], "--out", files[2]]) == 0
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert row["cycles"] == 20003
    assert row["spread"] == pytest.approx(4 / 20003, abs=1e-4)
    assert Measured.of(row).cycles == 20003


def test_measuring_without_a_gpu_says_so(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert emulator_timing.main(["measure"]) == 2
    assert "GPU" in capsys.readouterr().err
