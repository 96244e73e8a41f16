"""The arithmetic and the order of the benchmarks, on the CPU, with fake clocks and fake providers."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend

from benchmarks import environment, host_time, kernel_times, peers, results, run
from benchmarks.problems import SUITES, Problem, paper_problem, suite
from fa3 import _providers, _timing
from fa3._accuracy import Errors, float64_gradients, float64_slice
from fa3._providers import OURS, Provider, sdpa
from fa3._timing import Sample

SMALL = Problem("fwd", "bf16", 32, 32, True, 96, 96, 2, 4, 2)
BACKWARD = replace(SMALL, mode="bwd")
EXACT = Errors(relative=2e-3, worst_row=4e-3, lse=1e-6)


# ---- problems


def test_flops_count_both_gemms_and_halve_under_a_causal_mask():
    full = Problem("fwd", "bf16", 128, 128, False, 4096, 4096, 4, 16, 16)
    assert full.flops == 4 * 4 * 16 * 4096 * 4096 * 128
    causal = Problem("fwd", "bf16", 192, 128, True, 4096, 2048, 4, 16, 4)
    assert causal.flops == 2 * 4 * 16 * 4096 * 2048 * (192 + 128) / 2


def test_the_backward_has_two_and_a_half_times_the_flops():
    assert replace(SMALL, mode="bwd").flops == 2.5 * SMALL.flops


@given(st.sampled_from([32, 64, 128, 256]), st.sampled_from([512, 1024, 4096, 16384]), st.booleans())
def test_a_paper_problem_always_holds_16k_tokens_of_hidden_size_2048(head_dim, seqlen, causal):
    p = paper_problem("fwd", "bf16", head_dim, causal, seqlen)
    assert p.batch * p.seqlen_q == 16384
    assert p.heads_q * p.head_dim == 2048


def test_the_forward_suite_is_the_18_cells_of_the_table():
    problems = suite("forward")
    assert len(set(problems)) == len(problems) == 18
    assert {p.seqlen_k for p in problems} == {1024, 4096, 16384}
    assert {p.head_dim for p in problems} == {64, 128, 256}


def test_the_backward_suite_has_the_18_cells_and_one_deterministic_row():
    problems = suite("backward")
    assert {p.mode for p in problems} == {"bwd"}
    cells = [p for p in problems if p.head_dim in (64, 128, 256) and p.seqlen_k in (1024, 4096, 16384)]
    assert cells == [replace(p, mode="bwd") for p in suite("forward")]
    assert [(p.head_dim, p.causal) for p in problems if p.also_deterministic] == [(128, True)]
    assert {(p.head_dim, p.head_dim_v) for p in problems} > {(96, 96), (192, 192), (192, 128)}
    assert any((p.heads_q, p.heads_kv) == (32, 8) for p in problems)


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_has_distinct_problems(name):
    problems = suite(name)
    assert problems
    assert len(set(problems)) == len(problems)


def test_an_unknown_suite_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match="forward"):
        suite("backwards")


def test_inputs_are_random_and_repeatable():
    q, k, v = SMALL.inputs(seed=3, device="cpu")
    again = SMALL.inputs(seed=3, device="cpu")
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), again, strict=True))
    assert abs(float(q.float().std()) - 1) < 0.1
    assert not torch.equal(k, v)
    assert sum(x.numel() * x.element_size() for x in (q, k, v)) == SMALL.input_bytes


# ---- timing


def test_rounds_are_interleaved_and_the_median_counts():
    order = []
    ticks = {"A": iter([1.0, 5.0, 2.0]), "B": iter([10.0, 30.0, 20.0])}

    def measure(call):
        order.append(call(0))
        return next(ticks[order[-1]])

    samples = _timing.interleaved({"a": lambda _: "A", "b": lambda _: "B"}, 3, measure)
    assert [sorted(order[i : i + 2]) for i in (0, 2, 4)] == [["A", "B"]] * 3
    assert samples["a"].rounds == (1.0, 5.0, 2.0)
    assert samples["a"].median == 2.0
    assert samples["b"].median == 20.0
    assert samples["b"].spread == pytest.approx(1.0)


def test_no_candidate_always_follows_the_same_other_one():
    order = []

    def measure(call):
        order.append(call(0))
        return 1.0

    rounds = 12
    _timing.interleaved({name: lambda _, name=name: name for name in "abc"}, rounds, measure)
    first = {tuple(order[3 * i : 3 * i + 3]) for i in range(rounds)}
    assert len(first) > 3
    assert {before for before, after in itertools.pairwise(order) if after == "a"} >= {"b", "c"}


def test_no_rounds_are_refused():
    with pytest.raises(ValueError, match="rounds"):
        _timing.interleaved({}, 0, lambda call: 1.0)


def test_the_number_of_calls_follows_the_target_within_bounds():
    assert _timing.calls_in(40, 0.4) == 100
    assert _timing.calls_in(40, 100.0) == _timing.FEWEST_CALLS
    assert _timing.calls_in(40, 0.0) == _timing.MOST_CALLS


def test_a_slow_host_gets_a_head_start_and_a_fast_one_almost_none():
    assert _timing.head_start_ms(100, host_ms=0.01, device_ms=0.2) == 0.5
    assert _timing.head_start_ms(100, host_ms=0.11, device_ms=0.1) == pytest.approx(1.5)
    assert _timing.head_start_ms(200, host_ms=10.0, device_ms=0.1) == _timing.LONGEST_HEAD_START_MS


@given(st.integers(1, 1 << 31))
def test_the_input_sets_never_fit_in_the_cache(nbytes):
    sets = _timing.input_sets(nbytes)
    assert 1 <= sets <= 64
    assert sets == 64 or sets * nbytes > _timing.L2_BYTES


def test_rotating_takes_the_sets_in_turn():
    seen = []
    call = _timing.rotating(seen.append, [("a",), ("b",), ("c",)])
    for i in range(4):
        call(i)
    assert seen == ["a", "b", "c", "a"]


# ---- accuracy


def test_the_slice_agrees_with_torch_and_passes_its_own_check():
    q, k, v = SMALL.inputs(device="cpu")
    out = sdpa("math", "math", SDPBackend.MATH).forward(q, k, v, True)
    errors = float64_slice(q, k, v, True).errors(out)
    assert errors.relative < 4e-3
    assert errors.refusal(torch.bfloat16) is None


def test_rows_without_a_key_are_zero_and_minus_infinity():
    p = Problem("fwd", "fp16", 16, 16, True, 9, 4, 1, 2, 2)
    expected = float64_slice(*p.inputs(device="cpu"), True)
    assert (expected.out[:5] == 0).all()
    assert torch.isneginf(expected.lse[:, :5]).all()
    right = expected.errors(expected.out[None].half(), expected.lse[None].float())
    assert right.refusal(torch.float16) is None


@pytest.mark.parametrize("spoil", ["nan", "shift", "one_row", "lse"])
def test_wrong_results_are_refused_in_words(spoil):
    q, k, v = SMALL.inputs(device="cpu")
    reference = float64_slice(q, k, v, True)
    out = sdpa("math", "math", SDPBackend.MATH).forward(q, k, v, True).clone()
    lse = torch.zeros(SMALL.batch, SMALL.heads_q, SMALL.seqlen_q)
    lse[-1, list(reference.heads)] = reference.lse.float()
    assert reference.errors(out, lse).refusal(torch.bfloat16) is None
    if spoil == "nan":
        out[-1, 5, 0, 0] = math.nan
    elif spoil == "shift":
        out = out.roll(1, dims=1)
    elif spoil == "one_row":
        out[-1, 50, 0] *= 1.1
    else:
        lse = lse / math.log(2)
    assert reference.errors(out, lse).refusal(torch.bfloat16)


def _gradients(problem: Problem):
    """(inputs with dO, gradients of torch's attention) on the CPU."""
    inputs = [x.requires_grad_() for x in problem.inputs(device="cpu")]
    do = problem.output_gradient(device="cpu")
    out = sdpa("math", "math", SDPBackend.MATH).forward(*inputs, problem.causal)
    return (*inputs, do), torch.autograd.grad(out, inputs, do)


def test_the_gradient_slice_agrees_with_torch():
    inputs, found = _gradients(BACKWARD)
    errors = float64_gradients(*inputs, BACKWARD.causal).errors(*found)
    assert max(errors.dq, errors.dk, errors.dv) == errors.relative < 8e-3
    assert errors.refusal(torch.bfloat16) is None


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("spoil", ["nan", "shift", "one_row"])
def test_wrong_gradients_are_refused_in_words(spoil, which):
    inputs, found = _gradients(BACKWARD)
    wrong = [x.clone() for x in found]
    if spoil == "nan":
        wrong[which][-1, 5, 0, 0] = math.nan
    elif spoil == "shift":
        wrong[which] = wrong[which].roll(1, dims=1)
    else:
        wrong[which][-1, 50, -1] *= 1.2
    assert float64_gradients(*inputs, BACKWARD.causal).errors(*wrong).refusal(torch.bfloat16)


# ---- providers


def test_an_unknown_provider_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match="cudnn"):
        _providers.find(["fa5"])


def test_a_provider_that_does_not_import_is_named_with_its_reason(monkeypatch):
    def broken():
        raise ImportError("no such library\nand a long story")

    monkeypatch.setitem(_providers._FACTORIES, "fa4", broken)
    found, missing = _providers.find(["fa4", "cudnn"])
    assert [p.name for p in found] == ["cudnn"]
    assert missing == {"fa4": "ImportError: no such library"}


def test_the_cpp_build_is_found_under_either_name(monkeypatch):
    class Module:
        @staticmethod
        def flash_attn_func(q, k, v, causal, return_attn_probs=False):
            return (q, "lse") if return_attn_probs else q

    def import_module(name):
        if name != "fa3_fwd_interface":
            raise ImportError(f"no {name}")
        return Module

    monkeypatch.setattr(_providers.importlib, "import_module", import_module)
    provider = _providers._fa3_cpp()
    assert provider.forward("q", "k", "v", False) == "q"
    assert provider.forward_lse is not None
    assert provider.forward_lse("q", "k", "v", False) == ("q", "lse")


def test_torch_attention_refuses_a_causal_mask_it_would_align_otherwise():
    q, k = torch.zeros(1, 3, 1, 8), torch.zeros(1, 5, 1, 8)
    with pytest.raises(NotImplementedError, match="top left"):
        sdpa("math", "math", SDPBackend.MATH).forward(q, k, k, True)


# ---- a whole row


def _fake(name: str, factor: float = 1.0, failure: str | None = None) -> Provider:
    """torch's attention, scaled by a factor, under the name of a provider."""
    math_attention = sdpa(name, name, SDPBackend.MATH)

    def forward(q, k, v, causal):
        if failure is not None:
            raise RuntimeError(failure)
        return math_attention.forward(q, k, v, causal) * factor

    return Provider(name, name, "1", forward)


def _fixed_times(**milliseconds: float):
    return lambda calls: {name: Sample((milliseconds[name],)) for name in calls}


def test_a_row_holds_speeds_ratio_and_share():
    matmul = 1000.0
    sampler = _fixed_times(ours=1.0, fa4=2.0, cudnn=4.0)
    row = run.measure(SMALL, [_fake("ours"), _fake("fa4"), _fake("cudnn")], sampler, matmul, "cpu")
    assert row["best_peer"] == "fa4"
    assert row["ratio"] == 2.0
    assert row["error"].keys() == {"ours", "fa4", "cudnn"}
    assert row["failures"] == {}
    assert {name: row[name] for name in ("mode", "causal", "heads_kv")} == {
        "mode": "fwd",
        "causal": True,
        "heads_kv": 2,
    }
    json.dumps(row)


def test_a_wrong_peer_is_not_timed_and_its_error_is_recorded(capsys):
    row = run.measure(SMALL, [_fake("ours"), _fake("fa4", 1.05)], _fixed_times(ours=1.0), None, "cpu")
    assert row["tflops"].keys() == {"ours"}
    assert row["error"]["fa4"] == pytest.approx(0.05, rel=0.1)
    assert "wrong numerics" in row["failures"]["fa4"]
    assert row["ratio"] is None


def test_our_own_wrong_numerics_give_a_row_without_a_ratio():
    row = run.measure(SMALL, [_fake("ours", 0.9), _fake("fa4")], _fixed_times(fa4=1.0), 1000.0, "cpu")
    assert row["ratio"] is None
    assert row["percent_of_matmul"] is None
    assert "wrong numerics" in row["failures"]["ours"]
    assert "ours not timed" in run.line(SMALL, row)


def test_a_peer_that_raises_is_skipped_with_the_first_line_of_its_reason():
    broken = _fake("fa4", failure="head dim 32 unsupported\nsee the manual")
    row = run.measure(SMALL, [_fake("ours"), broken, _fake("fa2")], _fixed_times(ours=2.0, fa2=1.0), None, "cpu")
    assert row["failures"] == {"fa4": "RuntimeError: head dim 32 unsupported"}
    assert row["ratio"] == 0.5


def test_a_backward_row_has_the_errors_of_each_gradient():
    sampler = _fixed_times(ours=1.0, fa4=2.0)
    forward_only = replace(_fake("fa3_cpp"), differentiable=False)
    row = run.measure(BACKWARD, [_fake("ours"), _fake("fa4"), forward_only], sampler, None, "cpu")
    assert row["tflops"].keys() == row["error"].keys() == {"ours", "fa4"}
    assert row["ratio"] == 2.0
    assert row["failures"] == row["lse_error"] == {}
    assert row["error"]["ours"] == max(row["gradient_errors"]["ours"].values())
    assert "deterministic" not in row
    assert "error/peer's dq 1.00 dk 1.00 dv 1.00" in run.table([row])


def test_a_wrong_backward_is_not_timed():
    row = run.measure(BACKWARD, [_fake("ours"), _fake("fa4", 1.05)], _fixed_times(ours=1.0), None, "cpu")
    assert row["tflops"].keys() == {"ours"}
    assert "wrong numerics" in row["failures"]["fa4"]
    assert "fa4 not timed" in run.line(BACKWARD, row)


def test_a_call_of_the_backward_can_be_repeated():
    candidates = peers.candidates(BACKWARD, [_fake("ours")], "cpu")
    first, again = (candidates.calls["ours"](i) for i in range(2))
    assert [x.shape for x in first] == [x.shape for x in BACKWARD.inputs(device="cpu")]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_deterministic_modes_are_compared_with_their_own_defaults(monkeypatch):
    monkeypatch.setattr(Problem, "also_deterministic", True)
    both = replace(_fake("ours"), deterministic=_fake("ours").forward)
    times = {"ours": 1.0, "fa4": 2.0, "ours deterministic": 1.25}
    row = run.measure(BACKWARD, [both, _fake("fa4")], _fixed_times(**times), None, "cpu")
    assert row["tflops"].keys() == {"ours", "fa4"}
    assert row["ratio"] == 2.0
    assert row["deterministic"]["of_default"] == {"ours": 0.8}
    assert "ours deterministic/default 0.800" in run.table([row])


def test_a_row_that_fails_as_a_whole_says_why(monkeypatch):
    def lost(*arguments):
        raise torch.cuda.OutOfMemoryError("no memory")

    monkeypatch.setattr(run, "measure", lost)
    row = run.measure_or_say(BACKWARD, [], _fixed_times(), None)
    assert row["failures"] == {"all": "OutOfMemoryError: no memory"}
    assert str(BACKWARD) in run.table([row])


def test_after_a_broken_context_a_new_process_goes_on(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(run.os, "execv", lambda path, arguments: calls.append(arguments))
    run.start_again(tmp_path / "r.json", 3)
    words = calls[0][calls[0].index("--out") :]
    args = run.parser().parse_args(["--suite", "backward", *words])
    assert (args.out, args.merge, args.skip) == (tmp_path / "r.json", True, 3)
    assert run.start_again(None, 3) == 1
    assert len(calls) == 1


def test_kernel_times_are_summed_by_part():
    events = [
        ("kernel_x_fa3kernelsbackward_prepareBackwardPrepare_y", 3.0),
        ("kernel_x_fa3kernelsbackwardBackward_y", 50.0),
        ("kernel_x_fa3kernelsbackwardBackward_z", 50.5),
        ("at::native::copy", 9.0),
    ]
    assert kernel_times.by_part(events) == {"backward_prepare": 3.0, "backward": 100.5}


def test_nan_is_refused_and_written_as_null(tmp_path):
    row = run.measure(SMALL, [_fake("ours", math.nan)], _fixed_times(), None, "cpu")
    assert "wrong numerics" in row["failures"]["ours"]
    results.write(tmp_path / "r.json", {"env": {}, "rows": [row]})
    assert results.read(tmp_path / "r.json")["rows"][0]["error"]["ours"] is None


def test_the_ratio_is_formed_before_rounding():
    samples = {OURS: Sample((1.0,)), "fa4": Sample((1.04,))}
    row = results.row(SMALL, samples, {OURS: EXACT, "fa4": EXACT}, {}, 100.0)
    assert row["ratio"] == 1.04


def test_the_summary_counts_the_steps():
    rows = [{"ratio": r} for r in (0.94, 0.99, 1.0, 1.06, None)]
    assert run.summary(rows) == (
        "# 4 ratios to the best peer: least 0.940, middle 1.000; 3 at least 0.95, 2 at least 1.00, 1 at least 1.05"
    )
    assert "no ratios" in run.summary([{"ratio": None}])


# ---- files


def _result(commit: str, *rows: results.Row, date: str = "d") -> results.Result:
    return {"env": {"commit": commit, "date": date, "matmul_tflops": 700}, "rows": list(rows)}


def _row(seqlen: int, ratio: float) -> results.Row:
    problem = paper_problem("fwd", "bf16", 128, False, seqlen)
    samples = {OURS: Sample((1.0,)), "fa4": Sample((ratio,))}
    return results.row(problem, samples, {OURS: EXACT, "fa4": EXACT}, {}, 700.0)


def test_merging_replaces_what_was_measured_again_and_keeps_the_order():
    old = _result("one", _row(1024, 0.9), _row(4096, 0.9))
    new = _result("one", _row(16384, 1.1), _row(1024, 1.1), date="later")
    merged = results.merged(old, new)
    assert [(row["seqlen_k"], row["ratio"]) for row in merged["rows"]] == [(1024, 1.1), (4096, 0.9), (16384, 1.1)]
    assert all("env" not in row for row in merged["rows"])
    assert merged["env"]["date"] == "later"


def test_rows_of_another_revision_keep_their_own_env():
    merged = results.merged(_result("one", _row(1024, 0.9)), _result("two", _row(4096, 1.1)))
    assert [row.get("env", {}).get("commit") for row in merged["rows"]] == ["one", None]
    again = results.merged(merged, _result("three", _row(16384, 1.0)))
    assert [row.get("env", {}).get("commit") for row in again["rows"]] == ["one", "two", None]


def test_a_result_survives_writing_and_reading(tmp_path):
    result = _result("one", _row(1024, 0.9), _row(4096, 1.0))
    path = tmp_path / "deep" / "r.json"
    results.write(path, result)
    assert results.read(path) == result
    assert len(path.read_text().splitlines()) < 20


def test_a_file_of_another_form_is_refused(tmp_path):
    path = tmp_path / "r.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match="env and rows"):
        results.read(path)


def test_the_env_names_the_given_commit(monkeypatch):
    monkeypatch.setenv("FA3_COMMIT", "abc123")
    env = environment.describe({"fa4": "4"}, 712.34)
    assert env["commit"] == "abc123"
    assert env["matmul_tflops"] == 712.3
    assert env["peers"] == {"fa4": "4"}
    assert {"gpu", "driver", "torch", "cuda", "cudnn", "dsl", "python", "date"} <= env.keys()


def test_every_committed_result_has_the_form():
    """Those of the emulator have forms of their own: tests/unit/emulator/test_results.py."""
    for path in sorted((environment.ROOT / "benchmarks" / "results").glob("*.json")):
        if "emulator" in path.name:
            continue
        result = json.loads(path.read_text())
        assert "env" in result, path
        for row in result.get("rows", []):
            assert set(results.CASE_FIELDS) | {"tflops", "ratio", "error"} <= row.keys(), path
            others = [x for name, x in row["tflops"].items() if name != OURS]
            if OURS in row["tflops"] and others:
                assert row["ratio"] == pytest.approx(row["tflops"][OURS] / max(others), abs=2e-3), path


# ---- the command


def test_without_a_gpu_the_command_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.main(["--suite", "quick"]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err
    assert host_time.main([]) == 2


@pytest.mark.parametrize(("failing", "code"), [(False, 0), (True, 1)])
def test_the_command_from_providers_to_file_and_chart(monkeypatch, tmp_path, capsys, failing, code):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run, "matmul_tflops", lambda: 700.0)
    monkeypatch.setattr(environment, "describe", lambda peers, matmul: {"peers": peers, "matmul_tflops": matmul})
    ours = _fake("ours", failure="no kernel" if failing else None)
    monkeypatch.setattr(_providers, "find", lambda only: ([ours, _fake("fa4")], {"fa2": "ImportError: none"}))
    monkeypatch.setattr(run, "mean_call_ms", lambda call, target_ms: 1.0)
    monkeypatch.setattr(run, "chosen_problems", lambda args: [SMALL])
    monkeypatch.setattr(run, "context_is_broken", lambda: False)
    on_cpu = run.measure
    monkeypatch.setattr(run, "measure", lambda *arguments: on_cpu(*arguments, device="cpu"))
    out = tmp_path / "r.json"
    assert run.main(["--out", str(out), "--merge"]) == code
    assert out.exists()
    assert Path(tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "fa2 is not here" in printed
    assert str(SMALL) in printed


@pytest.mark.parametrize(
    ("gpu", "words", "name"),
    [
        ("NVIDIA H200", [], "h200-fwd-bf16-2026-11-30.json"),
        ("NVIDIA H100 80GB HBM3", ["--suite", "quick"], "h100-80gb-hbm3-quick-bf16-2026-11-30.json"),
        ("NVIDIA GH200 480GB", ["--dtype", "fp16"], "gh200-480gb-fwd-fp16-2026-11-30.json"),
    ],
)
def test_a_result_without_a_name_gets_one(gpu, words, name):
    args = run.parser().parse_args(["--out", *words])
    assert args.out == run.BY_NAME
    path = run.default_path(args, {"gpu": gpu, "date": "2026-11-30T22:37:27Z"})
    assert path == environment.ROOT / "benchmarks" / "results" / name


def test_without_out_nothing_is_written_and_a_later_out_wins():
    assert run.parser().parse_args([]).out is None
    assert run.parser().parse_args(["--out", "--suite", "quick", "--out", "a.json"]).out == Path("a.json")


def test_make_bench_writes_a_result():
    (recipe,) = re.findall(r"^bench:.*\n\t(.*)$", (environment.ROOT / "Makefile").read_text(), re.M)
    words = recipe.replace("$(BENCH)", "--suite quick").split()
    assert words[:3] == ["$(PY)", "-m", "benchmarks.run"]
    assert run.parser().parse_args(words[3:]).out == run.BY_NAME


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (["--head-dim", "128", "--causal", "1", "--seqlen", "1024,4096"], 2),
        (["--suite", "forward", "--dtype", "fp16"], 18),
        ([], 18),
    ],
)
def test_the_arguments_choose_the_problems(text, expected):
    problems = run.chosen_problems(run.parser().parse_args(text))
    assert len(problems) == expected


def test_an_unknown_name_after_only_is_refused(capsys):
    with pytest.raises(SystemExit):
        run.parser().parse_args(["--only", "ours,fa9"])
    assert "fa9" in capsys.readouterr().err


@pytest.mark.parametrize("kind", host_time.KINDS)
def test_host_time_counts_every_provider_and_names_failures(kind):
    failures: dict[str, str] = {}
    providers = [_fake("ours"), _fake("fa4", failure="no")]
    got = host_time.host_times(providers, 1, kind=kind, failures=failures, device="cpu", wait=lambda: None)
    assert got.keys() == {"ours"}
    assert got["ours"] > 0
    assert failures == {f"fa4 {kind}": "RuntimeError: no"}


def test_select_prints_who_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(_providers, "find", lambda only: ([], {"fa4": "ImportError: none"}))
    assert peers.select(None) == []
    assert "fa4 is not here: ImportError: none" in capsys.readouterr().out
