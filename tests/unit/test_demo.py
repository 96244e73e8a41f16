"""The demo on the CPU: the inspection of stand-in reports, the comparison of stand-in providers, and the exit codes."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend

import fa3
from fa3 import demo
from fa3._providers import Provider, sdpa
from fa3._timing import Sample
from fa3.emulator import demo as demo_emulator

SMALL = demo.Shape(head_dim=32, causal=True, batch=2, seqlen=96, hidden=64)


def _report(**changes):
    kept = {
        "name": "forward_bf16",
        "registers": 168,
        "setmaxnreg": {"dec": (24,), "inc": (240,)},
        "spill_bytes": 0,
        "smem_bytes": 197632,
        "mma": {"m64n128k16 SS": 24},
        "ex2_in_flight": 36,
        "ex2_total": 198,
        "warnings": (),
    }
    return SimpleNamespace(**{**kept, **changes})


def _fake(name: str, factor: float = 1.0, failure: str | None = None) -> Provider:
    attention = sdpa(name, f"the {name}", SDPBackend.MATH)

    def forward(q, k, v, causal):
        if failure is not None:
            raise RuntimeError(failure)
        return attention.forward(q, k, v, causal) * factor

    return Provider(name, f"the {name}", "1", forward)


def _one_ms(calls):
    return {name: Sample((1.0,)) for name in calls}


def test_a_sound_report_breaks_no_promise():
    assert demo.broken_promises(_report()) == []


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"spill_bytes": 8}, "spilled"),
        ({"setmaxnreg": {"dec": (24,), "inc": ()}}, "setmaxnreg"),
        ({"warnings": ("C7510: serialized",)}, "C7510"),
    ],
)
def test_a_broken_promise_is_named(changes, word):
    assert [line for line in demo.broken_promises(_report(**changes)) if word in line]


def test_every_figure_is_printed_and_explained(capsys):
    demo.print_figures([_report(), _report(name="another")])
    printed = capsys.readouterr().out
    for figure in demo.FIGURES:
        assert printed.count(figure.name) >= 3
    assert "24 / 240" in printed
    assert "36 of 198" in printed


@pytest.mark.parametrize(("spill", "emulated", "code"), [(0, 0, 0), (16, 0, 1), (0, 1, 1)])
def test_without_a_gpu_the_kernels_are_emulated_and_inspected(monkeypatch, capsys, tmp_path, spill, emulated, code):
    monkeypatch.setattr(demo, "emulate_without_gpu", lambda folder: emulated)
    sass = SimpleNamespace(ToolError=RuntimeError, inspect=lambda key: _report(name=key.name, spill_bytes=spill))
    monkeypatch.setitem(sys.modules, "fa3.sass", sass)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert demo.main(["--out", str(tmp_path)]) == code
    printed = capsys.readouterr().out
    assert "no CUDA device" in printed
    assert "d128_causal" in printed
    assert f"{demo.interpreter()} -m fa3.sass" in printed
    assert f"{demo.interpreter()} -m fa3.emulator check" in printed


def test_the_emulation_shows_numbers_verdict_and_files(capsys, tmp_path):
    assert demo.emulate_without_gpu(tmp_path) == 0
    printed = capsys.readouterr().out.replace("\n", " ")
    assert "Error against float64" in printed
    assert "no findings in 6 runs" in printed
    assert "findings: none" in printed
    for file in (demo_emulator.PICTURE, demo_emulator.TRACE):
        assert str(tmp_path / file) in printed
        assert (tmp_path / file).stat().st_size > 10_000


def test_an_emulation_that_is_wrong_or_cannot_run_is_a_failure(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(demo_emulator, "show", lambda folder, say: False)
    assert demo.emulate_without_gpu(tmp_path) == 1

    def no_compiler(folder, say):
        raise RuntimeError("no C compiler found")

    monkeypatch.setattr(demo_emulator, "show", no_compiler)
    assert demo.emulate_without_gpu(tmp_path) == 1
    assert "no C compiler found" in capsys.readouterr().out


def test_wrong_numbers_on_the_emulator_are_said(monkeypatch):
    said = []
    attention = fa3.flash_attn_func

    def wrong(*arguments, return_lse=False, **options):
        out, lse = attention(*arguments, return_lse=True, **options)
        return (out * 1.1, lse) if return_lse else out * 1.1

    monkeypatch.setattr(fa3, "flash_attn_func", wrong)
    inputs = [torch.randn(1, 64, 1, 64).bfloat16() for _ in range(3)]
    assert not demo_emulator._run(*inputs, said.append)
    assert "That is wrong" in said[-1]


def test_the_interpreter_is_named_as_seen_from_here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    assert demo.interpreter() == ".venv/bin/python"
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    assert demo.interpreter() == "/usr/bin/python3"


def test_a_missing_disassembler_is_said_in_words(monkeypatch, capsys):
    class ToolError(Exception):
        pass

    def inspect(key):
        raise ToolError("install nvidia-cuda-nvdisasm")

    monkeypatch.setitem(sys.modules, "fa3.sass", SimpleNamespace(ToolError=ToolError, inspect=inspect))
    assert demo.inspect_without_gpu() == 1
    assert "nvidia-cuda-nvdisasm" in capsys.readouterr().out


def test_providers_are_compared_in_a_table(capsys):
    providers = [_fake("ours"), _fake("cudnn"), _fake("fa4", failure="no such head dim\nmore")]
    assert demo.compare(SMALL, providers, 700.0, "cpu", _one_ms)
    printed = capsys.readouterr().out
    assert "1.00x" in printed
    assert "not timed: RuntimeError: no such head dim" in printed


@pytest.mark.parametrize(
    "ours", [_fake("ours", 1.1), _fake("ours", float("nan")), _fake("ours", failure="launch failed")]
)
def test_our_own_wrong_numbers_are_reported(capsys, ours):
    assert not demo.compare(SMALL, [ours, _fake("cudnn")], 700.0, "cpu", _one_ms)
    assert "not timed" in capsys.readouterr().out


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (0.9, 1)])
def test_the_exit_code_on_a_gpu_follows_our_numbers(monkeypatch, capsys, factor, code):
    monkeypatch.setattr(demo, "why_no_hopper", lambda: None)
    monkeypatch.setattr(demo, "find", lambda: ([_fake("ours", factor), _fake("cudnn")], {"fa4": "ImportError: none"}))
    monkeypatch.setattr(demo, "matmul_tflops", lambda **_: 700.0)
    monkeypatch.setattr(demo, "SHAPES", (SMALL,))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    on_cpu = demo.compare
    monkeypatch.setattr(
        demo, "compare", lambda shape, providers, matmul: on_cpu(shape, providers, matmul, "cpu", _one_ms)
    )
    assert demo.main([]) == code
    assert "fa4 is not installed" in capsys.readouterr().out


def test_gradients_are_compared_too(capsys):
    shape = replace(SMALL, backward=True)
    forward_only = replace(_fake("fa3_cpp"), differentiable=False)
    assert demo.compare(shape, [_fake("ours"), _fake("cudnn"), forward_only], 700.0, "cpu", _one_ms)
    printed = capsys.readouterr().out
    assert printed.startswith("backward, bf16")
    assert "1.00x" in printed and "not timed: NotImplementedError: forward only" in printed
    assert not demo.compare(shape, [_fake("ours", 1.1)], 700.0, "cpu", _one_ms)
    assert shape.flops == 2.5 * SMALL.flops


def test_wrong_gradients_on_the_emulator_are_said(monkeypatch):
    said = []
    attention = fa3.flash_attn_func
    monkeypatch.setattr(fa3, "flash_attn_func", lambda *arguments, **options: attention(*arguments, **options) * 1.1)
    inputs = [torch.randn(1, 64, 1, 64).bfloat16() for _ in range(3)]
    assert not demo_emulator._run_backward(*inputs, said.append)
    assert "That is wrong" in said[-1]


def test_flops_of_a_shape():
    assert demo.Shape(128, False).flops == 4 * 4 * 16 * 4096 * 4096 * 128
    assert demo.Shape(128, True).flops == demo.Shape(128, False).flops / 2
