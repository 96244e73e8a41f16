"""Random problems, errors beside peers and the training check, on the CPU: their arithmetic, and that they can fail."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend

from benchmarks import backward_errors, training
from benchmarks.problems import Problem
from fa3._providers import sdpa
from fa3.config.backward import PARTS
from fa3.config.backward_table import BACKWARD
from tests.gpu import compile as compile_ahead
from tests.gpu import random_problems, reproduce
from tests.unit.test_gpu_gradient_oracle import emulated

# ---- random problems


def test_a_seed_is_a_problem():
    assert random_problems.draw(7) == random_problems.draw(7)
    assert random_problems.draw(7) != random_problems.draw(8)
    assert reproduce.read(random_problems.draw(7).reproducer.split("reproduce ")[1].strip("'")) == random_problems.draw(
        7
    )


def test_a_thousand_problems_reach_every_kernel_of_the_backward():
    keys = random_problems.kernels(random_problems.draw(seed) for seed in range(1000))
    mains = {(key.config, key.dtype, key.deterministic) for key in keys if getattr(key, "part", "") == PARTS[1]}
    assert len(mains) == len(BACKWARD) * 2 * 2
    assert len(keys) == len(set(keys))


def test_failures_of_random_problems_are_recorded_with_their_seed(capsys):
    """One problem is right, one wrong, and one cannot be launched."""
    problems = [random_problems.draw(seed) for seed in (3, 4, 5)]

    def attention(q, k, v, scale, causal, deterministic):
        if q.shape[1] == problems[1].case.seqlen_q:
            raise RuntimeError("refused")
        wrong = q.shape[1] == problems[2].case.seqlen_q
        spoil = (lambda dq, dk, dv: dk.add_(1.0)) if wrong else (lambda dq, dk, dv: None)
        return emulated(q, k, v, scale, causal, deterministic, spoil)

    failures, errors = random_problems.run(problems, "cpu", attention)
    assert [each["seed"] for each in failures] == [4, 5]
    assert failures[0]["why"] == "RuntimeError: refused"
    assert str(failures[1]["why"]).startswith("dK")
    assert capsys.readouterr().out.count("again: ") == 2
    assert errors


def test_errors_of_random_problems_are_near_the_unavoidable_ones():
    failures, errors = random_problems.run([random_problems.draw(seed) for seed in range(6)], "cpu", emulated)
    assert not failures
    for of in errors.values():
        assert all(0.5 < x["max"] < 1.3 for x in of.values())


# ---- errors beside peers


MATH = sdpa("ours", "ours", SDPBackend.MATH)


def test_errors_of_gradients_are_those_of_the_slice():
    problem = Problem("bwd", "bf16", 32, 32, True, 96, 96, 2, 4, 2)
    wrong = replace(MATH, name="fa4", forward=lambda q, k, v, causal: MATH.forward(q, k, v * 1.1, causal) / 1.1)
    broken = replace(MATH, name="cudnn", forward=lambda *_: (_ for _ in ()).throw(RuntimeError("no")))
    row = backward_errors.measure(problem, [MATH, wrong, broken], "cpu")
    assert row["failures"] == {"cudnn": "RuntimeError: no"}
    assert all(0 < row["error"]["ours"][name] < 6e-3 for name in backward_errors.NAMES)
    assert row["error"]["fa4"]["dv"] < 6e-3 and row["error"]["fa4"]["dq"] > row["error"]["ours"]["dq"]
    assert row["ratio"]["dq"] < 1
    assert "ratios" in backward_errors.line(row)


def test_ratios_are_to_the_best_peer():
    one = {"dq": 2.0, "dk": 3.0, "dv": 4.0}
    errors = {"ours": one, "a": {"dq": 1.0, "dk": 6.0, "dv": 4.0}, "b": {"dq": 4.0, "dk": 2.0, "dv": 8.0}}
    assert backward_errors.ratios(errors) == {"dq": 2.0, "dk": 1.5, "dv": 1.0}
    assert backward_errors.ratios({"ours": one}) is None


# ---- training

TINY = training.Setting(16, heads=2, layers=1, seqlen=32, batch=2, steps=21, warmup=5)


def _curves(**changed):
    curves = {name: [5.0 - 3.0 * step / 100 for step in range(100)] for name in training.RUNS}
    curves["math, nudged weights"] = [x + 0.01 for x in curves["math"]]
    return curves | changed


def test_curves_that_are_as_near_as_rounding_agree():
    near = [x + 0.015 for x in _curves()["math"]]
    verdict = training.judge(_curves(fa3=near))
    assert verdict.complaint is None
    assert math.isclose(verdict.distance, 0.015, rel_tol=1e-6)
    assert math.isclose(verdict.noise, 0.01, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("fa3", "word"),
    [
        ([5.0 - 3.0 * step / 100 + 0.03 for step in range(100)], "from math"),
        ([5.0] * 100, "nothing was learned"),
        ([5.0] * 99 + [math.nan], "nothing was learned"),
    ],
)
def test_curves_that_differ_do_not(fa3, word):
    complaint = training.judge(_curves(fa3=fa3)).complaint
    assert complaint is not None
    assert word in complaint


def test_the_same_run_twice_is_the_same_and_another_text_is_not():
    text = training.corpus()
    run = training.Run(training.with_math)
    losses = training.train(TINY, run, text, "cpu")
    assert losses == training.train(TINY, run, text, "cpu")
    assert losses[-1] < losses[0]
    assert losses != training.train(TINY, run, text.flip(0), "cpu")


def test_both_formulas_of_the_math_runs_are_attention():
    q, k, v = (torch.randn(2, 40, 3, 16, dtype=torch.bfloat16) for _ in range(3))
    exact, _ = training.fa3.reference.attention(q, k, v, causal=True)
    for attention in (training.with_math, training.with_rounded_math):
        torch.testing.assert_close(attention(q, k, v).double(), exact, rtol=2e-2, atol=2e-2)


def test_the_training_check_writes_its_curves_and_their_picture(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(training.RUNS, "fa3", training.Run(training.with_rounded_math))
    monkeypatch.setattr(training, "LEARNED", 1.0)
    monkeypatch.setattr(training, "WORST_RATIO", 1e9)
    out = tmp_path / "training.json"
    assert training.compare([TINY], "cpu", out) == 0
    (row,) = json.loads(out.read_text())["runs"]
    assert row["agree"] and row["head_dim"] == 16
    assert set(row["loss"]) == set(training.RUNS) and len(row["loss"]["fa3"]) == TINY.steps
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(training, "LEARNED", 0.1)
    assert training.compare([TINY], "cpu") == 1
    assert "nothing was learned" in capsys.readouterr().out


@pytest.mark.parametrize("command", [training.main, backward_errors.main, partial(random_problems.main)])
def test_without_a_gpu_the_commands_say_so(command, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert command([]) == 2
    assert "GPU" in capsys.readouterr().err


def test_what_the_gpu_tests_launch_is_compiled_ahead():
    """Random problems need no kernel that `tests.gpu.compile` leaves out."""
    ahead = set(compile_ahead.keys())
    assert set(random_problems.kernels(random_problems.draw(seed) for seed in range(300))) <= ahead
