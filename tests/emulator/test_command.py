"""`python -m fa3.emulator`: exit status, report, JSON, files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fa3.config.table import forward_key
from fa3.emulator import __main__ as command
from fa3.emulator.check import Finding, Place, Report
from fa3.emulator.mutate import problems
from fa3.emulator.program import Program

SMALL = ["--head-dim", "64", "--seeds", "1"]
KEY = forward_key(64, 64, False, "bf16")


def test_a_kernel_that_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["check", "forward", *SMALL]) == 0
    printed = capsys.readouterr().out
    runs = 3 * len(problems.shapes(KEY))  # late, early, random
    assert f"no findings in {runs} runs of {KEY.name}" in printed


def test_a_row_that_the_table_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--policy", "late", "--set", "tile_n=64", "--set", "stages=1", "--set", "algorithm=plain"]
    assert command.main(["check", "forward", *SMALL, *options]) == 0
    assert "m192n64s1_plain" in capsys.readouterr().out


def test_a_fault_is_reported_once_and_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the wait for K of the prologue gone, all problems show the same fault."""
    case = problems.case

    def broken(key, shape):  # type: ignore[no-untyped-def]
        made = case(key, shape)
        host = made.run.host
        monkeypatch.setattr(type(host), "code", property(lambda self: without_wait_for_k(self.program)))
        return made

    monkeypatch.setattr(problems, "case", broken)
    assert command.main(["check", "forward", *SMALL, "--policy", "late", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    (finding,) = [f for f in report["findings"] if f["kind"] == "read before it arrived" and f["subject"] == "k"]
    assert "forward_overlap.py" in finding["at"]["file"]
    assert {s.split("'")[1] for s in finding["schedules"]} == {shape.name for shape in problems.shapes(KEY)}
    assert report["runs"] == len(problems.shapes(KEY))


def without_wait_for_k(program: Program):  # type: ignore[no-untyped-def]
    from fa3.emulator.blocks import Code

    for index, at in enumerate(program.statements):
        if at.opcode.startswith("mbarrier.try_wait") and at.source is not None:
            line = Path(at.source.file).read_text().splitlines()[at.source.line - 1]
            if 'self.rings["k"].wait(k)' in line:
                return Code(program.without(index).replaced(index + 1, jump(program, index + 1)))
    raise AssertionError("the kernel does not wait for K")


def jump(program: Program, index: int):  # type: ignore[no-untyped-def]
    """The branch behind a wait, taken always."""
    from dataclasses import replace

    return replace(program.statements[index], predicate="")


@pytest.mark.parametrize("options", [["--head-dim", "63"], ["--set", "tile_n=100"], ["--set", "colour=red"]])
def test_what_makes_no_sense_is_said(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["check", "forward", *options]) == 2
    assert "ValueError" in capsys.readouterr().err


def test_an_unknown_policy_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["check", "forward", *SMALL, "--policy", "sometimes"]) == 2
    assert "sometimes" in capsys.readouterr().err


def test_the_timeline_and_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, trace = tmp_path / "t.png", tmp_path / "t.json"
    options = ["--head-dim", "64", "--causal", "--keys", "512", "--out", str(picture), "--trace", str(trace)]
    assert command.main(["timeline", "forward", *options]) == 0
    assert "tensor cores" in capsys.readouterr().out
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert len(json.loads(trace.read_text())["traceEvents"]) > 100


@pytest.mark.parametrize("kernel", ["backward", "backward_prepare", "backward_finish"])
def test_the_kernels_of_the_backward(kernel: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["check", kernel, *SMALL, "--policy", "late"]) == 0
    assert f"of {kernel}_bf16_d64_full" in capsys.readouterr().out


def test_only_some_gradients_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--policy", "late", "--wanted", "q", "--deterministic", "--causal"]
    assert command.main(["check", "backward", *SMALL, *options]) == 0
    assert "_ordered_only_q" in capsys.readouterr().out
    assert command.main(["check", "backward_finish", *SMALL, "--wanted", "kv"]) == 2


def test_the_timeline_of_a_backward_shows_the_writer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "t.png"
    options = ["--head-dim", "64", "--queries", "512", "--out", str(picture)]
    assert command.main(["timeline", "backward", *options]) == 0
    printed = capsys.readouterr().out
    assert "(load)" in printed and "(dq_writer)" in printed and "softmax" in printed and "gradient" in printed
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_equal_findings_of_several_problems_are_one() -> None:
    place = Place.of("load", 0, None)
    report = Report([Finding("deadlock", "k", place, "x", "y", schedules=[name]) for name in ("a", "b")])
    assert len(report) == 1 and report.findings[0].schedules == ["a", "b"]
