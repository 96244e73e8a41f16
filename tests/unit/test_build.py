"""`python -m fa3.build`: real kernels, compiled here, loaded by a process that cannot compile."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fa3 import api, build, cache, launch
from fa3.config.backward import BackwardKey
from fa3.config.backward_table import BACKWARD
from fa3.config.table import FORWARD
from fa3.config.types import KernelKey

BF, HF = torch.bfloat16, torch.float16
ROOT = Path(__file__).resolve().parents[2]
ROW = ("--head-dim", "64", "--dtype", "bf16", "--only", "forward")
SUFFIX = ".so" if any(cache._which(name) for name in (os.environ.get("CC"), "cc", "gcc", "clang")) else ".o"
"""What a machine makes of an object: without a C compiler it stays one."""


def test_default_keys_are_the_tables_in_both_dtypes():
    found = build.keys(passes=["forward"])
    assert len(found) == len(set(found)) == 2 * len(FORWARD)
    assert {k.config for k in found} == set(FORWARD) and not any(k.negative_scale for k in found)
    rest = build.keys()[len(found) :]
    assert len(rest) == len(set(rest)) == 2 * 3 * len(BACKWARD)
    assert {k.config for k in rest} == set(BACKWARD) and not any(k.deterministic for k in rest)


def test_key_selection():
    assert {k.config.head_dim for k in build.keys(head_dims=[64, 256])} == {64, 256}
    assert {k.dtype for k in build.keys(dtypes=["fp16"])} == {"fp16"}
    of_64 = build.keys(head_dims=[64])
    assert {type(k) for k in of_64} == {KernelKey, BackwardKey}
    signs = build.keys(head_dims=[64], negative_scale=True)
    assert sum(isinstance(k, KernelKey) and k.negative_scale for k in signs) == len(signs) - len(of_64) == 4
    ordered = build.keys(head_dims=[64], deterministic=True)
    assert {k.part for k in ordered if k not in of_64} == {"backward"} and len(ordered) == len(of_64) + 4


def test_what_is_built_is_what_is_launched():
    """`fa3.build` and `fa3.warmup` go different ways to the same keys."""
    forward, backward = (set(build.keys(passes=[which])) for which in build.PASSES)
    names = set(api_names(backward=True))
    assert names == {k.name for k in forward | backward}
    assert set(api_names(backward=True, deterministic=True)) <= {k.name for k in build.keys(deterministic=True)}


def api_names(**options: bool) -> list[str]:
    """Of every row and dtype, without compiling."""
    dims = {(row.head_dim, row.head_dim_v) for row in FORWARD}
    flags = [options.get(name, False) for name in ("backward", "deterministic")]
    choices = [(*dim, dtype, mask) for dim in dims for dtype in (BF, HF) for mask in (False, True)]
    return [key.name for choice in choices for key in api._keys(*choice, *flags)]


def test_unknown_row_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"--head-dim \[72\]; there are 64, 96"):
        build.main(["--out", str(tmp_path), "--head-dim", "72"])


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the rows of ROW."""
    folder = tmp_path_factory.mktemp("built")
    assert build.main(["--out", str(folder), "--jobs", "2", *ROW]) == 0
    return folder


@pytest.mark.compile
def test_build_is_complete_and_idempotent(built, capsys):
    names = {k.name for k in build.keys([64], ["bf16"], passes=["forward"])}
    files = {f.stem: f for f in built.glob("*/*" + SUFFIX)}
    assert set(files) == names and {f.parent.name for f in files.values()} == {cache.validity()}
    before = {f: f.stat().st_mtime_ns for f in files.values()}
    assert build.main(["--out", str(built), "--jobs", "1", *ROW]) == 0
    assert capsys.readouterr().out.count("up to date") == len(names)
    assert before == {f: f.stat().st_mtime_ns for f in files.values()}


USER = """
import sys, time, types
poisoned = sys.modules["fa3.compile"] = types.ModuleType("fa3.compile")
def compile_kernel(key): raise AssertionError("compiled " + key.name)
poisoned.compile_kernel = compile_kernel
import torch
from fa3 import api, launch
q = torch.zeros(1, 16, 2, 64, dtype=torch.bfloat16)
start = time.perf_counter()
for causal in (False, True):
    problem = launch.Problem.of(q, q, q, None, causal, (-1, -1), 0.0)
    kernel = launch.kernel(problem.key)
seconds = time.perf_counter() - start
print("cutlass" in sys.modules)
o, lse, counters = torch.empty_like(q), torch.empty(1, 2, 16), torch.zeros(1, dtype=torch.int32)
try:
    kernel(q, q, q, o, lse, counters, 0, 0.1, 1)
except (TypeError, ValueError, RuntimeError) as error:
    print(type(error).__name__, error)             # a compiled kernel wants CUDA tensors
print(seconds)
"""


@pytest.mark.compile
@pytest.mark.parametrize("variable", ["FA3_CACHE_DIR", "FA3_PREBUILT_DIR"])
def test_a_machine_with_the_folder_compiles_nothing(built, variable, tmp_path):
    env = {k: v for k, v in os.environ.items() if not k.startswith("FA3_")}
    env |= {"FA3_CACHE_DIR": str(tmp_path), variable: str(built)}
    done = subprocess.run([sys.executable, "-c", USER], env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    dsl_imported, refusal, *_, seconds = done.stdout.strip().splitlines()
    assert dsl_imported == str(SUFFIX == ".o")  # only where there was no C compiler to link with
    assert "Tensor" in refusal and "argument #0" in refusal
    assert float(seconds) < 10.0  # 0.1 to 0.3 s for an idle machine; this one may be busy
    assert not list(tmp_path.rglob("*" + SUFFIX))


@pytest.mark.compile
def test_an_object_file_loads_through_the_dsl(tmp_path, monkeypatch):
    """Where there is no C compiler: the real object, sealed, loaded by the DSL's own loader."""
    monkeypatch.setattr(cache, "_which", lambda name: None)
    key = build.keys([64], ["bf16"])[0]
    file = launch.compile_to_disk(key, tmp_path)
    assert file.suffix == ".o" and cache.find(key, tmp_path) == file
    kernel = cache.load(file, key)
    q = torch.zeros(1, 16, 2, 64, dtype=torch.bfloat16)
    with pytest.raises((TypeError, ValueError), match="argument #0"):
        kernel(q, q, q, q, torch.empty(1, 2, 16), torch.zeros(1, dtype=torch.int32), 0, 0.1, 1)


def test_a_failing_row_is_named_and_costs_only_itself(tmp_path, monkeypatch, capsys):
    class Pool:
        """Runs the jobs here, so that the failure can be planted."""

        def __init__(self, *_, **__): ...
        def __enter__(self):
            return self

        def __exit__(self, *_): ...
        def submit(self, job, key, root):
            from concurrent.futures import Future

            future = Future()
            try:
                future.set_result(job(key, root))
            except Exception as error:
                future.set_exception(error)
            return future

    def compile_to_disk(key, root):
        if key.config.causal:
            raise RuntimeError("ptxas said no")
        file = root / "k.so"
        file.write_bytes(b"x" * 2048)
        time.sleep(0.01)
        return file

    monkeypatch.setattr(build, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(launch, "compile_to_disk", compile_to_disk)
    assert build.main(["--out", str(tmp_path), *ROW]) == 1
    out = capsys.readouterr().out
    assert "FAILED: ptxas said no" in out and "1 of 2 kernels" in out and "2 KiB" in out
