"""Memory, disk, compile: in this order, once each, whatever files and processes do.

Most tests "compile" a few lines of C with TVM-FFI's calling convention: objects as real as the DSL's, in milliseconds.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path

import pytest

from fa3 import cache, launch
from fa3.config.table import forward_key

KEY = forward_key(64, 64, True, "bf16")
OTHER = forward_key(64, 64, False, "bf16")
ROOT = Path(__file__).resolve().parents[2]

C_COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
needs_c = pytest.mark.skipif(C_COMPILER is None, reason="needs a C compiler to stand in for the DSL's")

STAND_IN = """
struct Any { int type; int pad; long long value; };
int __tvm_ffi_%s(void *self, const struct Any *args, int n, struct Any *result) {
    result->type = 1; result->pad = 0; result->value = %d; return 0;
}
"""


class Compiled:
    """What `fa3.compile.compile_kernel` returns, but answering with a number."""

    def __init__(self, key, answer):
        self.key, self.answer = key, answer

    def __call__(self):
        return self.answer

    def export_to_c(self, path, function_name):
        source = STAND_IN % (function_name, self.answer)
        subprocess.run([C_COMPILER, "-c", "-fPIC", "-x", "c", "-", "-o", path], input=source, text=True, check=True)


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """A compiler that counts: the n-th kernel it makes answers n. And an empty cache, in memory and on disk."""
    made = []

    def compile_kernel(key):
        made.append(key)
        return Compiled(key, len(made))

    module = types.ModuleType("fa3.compile")
    module.compile_kernel = compile_kernel
    monkeypatch.setitem(sys.modules, "fa3.compile", module)
    monkeypatch.setattr(launch, "_kernels", {})
    monkeypatch.setenv("FA3_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FA3_PREBUILT_DIR", raising=False)
    monkeypatch.delenv("FA3_DISK_CACHE", raising=False)
    return made


def forget():
    """What a new process starts with."""
    launch._kernels.clear()


def the_file(key=KEY):
    (file,) = cache.folder().glob(f"*/{key.name}.*[!k]")
    return file


# ------------------------------------------------------------------------------------------------ the order
@needs_c
def test_memory_then_disk_then_compile(compiler, caplog):
    caplog.set_level(logging.INFO, "fa3")
    assert launch.where(KEY) == ("to be compiled", None)
    first = launch.kernel(KEY)
    assert first() == 1 and compiler == [KEY]
    assert launch.where(KEY)[0] == "loaded" and launch.kernel(KEY) is first
    forget()
    assert launch.where(KEY) == ("on disk", the_file())
    assert launch.kernel(KEY)() == 1 and compiler == [KEY]
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 1 and all(w in lines[0] for w in (KEY.name, " s (", "not found in", str(the_file())))


@needs_c
def test_each_key_has_its_own_kernel(compiler):
    assert [launch.kernel(k)() for k in (KEY, OTHER, KEY)] == [1, 2, 1]


@needs_c
def test_off_switch(compiler, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "fa3")
    monkeypatch.setenv("FA3_DISK_CACHE", "0")
    assert launch.kernel(KEY)() == 1
    forget()
    assert launch.kernel(KEY)() == 2
    assert cache.folder() is None and not Path(os.environ["FA3_CACHE_DIR"]).exists()
    assert "FA3_DISK_CACHE is off" in caplog.text


def test_places(monkeypatch):
    for name in ("FA3_CACHE_DIR", "FA3_DISK_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/reader")
    assert cache.folder() == Path("/home/reader/.cache/fa3")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.folder() == Path("/xdg/fa3")
    monkeypatch.setenv("FA3_CACHE_DIR", "~/kernels")
    assert cache.folder() == Path("/home/reader/kernels")


@needs_c
def test_prebuilt_comes_first_and_is_never_written(compiler, monkeypatch, tmp_path):
    launch.kernel(KEY)
    prebuilt = cache.folder().rename(tmp_path / "prebuilt")
    monkeypatch.setenv("FA3_PREBUILT_DIR", str(prebuilt))
    before = sorted(prebuilt.rglob("*"))
    forget()
    assert launch.where(KEY)[0] == "prebuilt"
    assert launch.kernel(KEY)() == 1 and launch.kernel(OTHER)() == 2
    assert sorted(prebuilt.rglob("*")) == before and the_file(OTHER).is_file()


# ------------------------------------------------------------------------------------------------ damage
DAMAGE = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "all but one byte": lambda data: data[:-1],
    "one bit": lambda data: data[:1000] + bytes([data[1000] ^ 1]) + data[1001:],
    "more": lambda data: data + b"\0",
    "no seal": lambda data: data[: -len(cache._seal(b"", KEY))],
    "another kernel": lambda data: data.replace(b'"head_dim": 64', b'"head_dim": 72'),
}


@needs_c
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_compiled_again(name, compiler, caplog):
    file = cache.store(Compiled(KEY, 41), KEY, cache.folder())
    intact = file.read_bytes()
    file.write_bytes(DAMAGE[name](intact))
    assert file.read_bytes() != intact
    assert launch.kernel(KEY)() == 1 and compiler == [KEY]
    assert "is damaged" in caplog.text
    forget()
    assert launch.kernel(KEY)() == 1 and compiler == [KEY]


@needs_c
def test_an_intact_file_that_does_not_load_is_replaced_by_compiling(compiler, monkeypatch):
    launch.kernel(KEY)
    forget()

    def load(file, key):
        raise RuntimeError("no such runtime")

    monkeypatch.setattr(cache, "load", load)
    with pytest.raises(RuntimeError, match="no such runtime"):
        launch.kernel(KEY)
    assert compiler == [KEY, KEY]


@needs_c
def test_an_unwritable_folder_costs_the_storing_only(compiler, monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.INFO, "fa3")
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("FA3_CACHE_DIR", str(tmp_path / "a file"))
    assert launch.kernel(KEY)() == 1
    assert "disk cache cannot be used" in caplog.text and "not stored" in caplog.text


@needs_c
def test_no_leftovers(compiler):
    launch.kernel(KEY)
    home = cache.folder() / cache.validity()
    assert {f.name for f in home.iterdir()} <= {f"{KEY.name}.so", f"{KEY.name}.lock"}


# ------------------------------------------------------------------------------------------------ validity
def test_validity_names_arch_cpu_dsl_and_sources(monkeypatch):
    name = cache.validity()
    monkeypatch.setattr("importlib.metadata.version", lambda package: "4.8.2")
    assert name.startswith("sm_90a-") and cache.validity() != name and "dsl4.8.2" in cache.validity()
    assert sys.version.split()[0] not in name


def test_without_a_tested_dsl_nothing_is_looked_up(monkeypatch, compiler):
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.0.1")
    with pytest.raises(ImportError, match="nvidia-cutlass-dsl"):
        launch.kernel(KEY)
    monkeypatch.setenv("FA3_DISK_CACHE", "0")
    with pytest.raises(ImportError, match="nvidia-cutlass-dsl"):
        launch.kernel(KEY)


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("kernels/forward.py", True),
        ("kernels/parts/new.py", True),
        ("pipeline/ring.py", True),
        ("layouts/algebra.py", True),
        ("config/types.py", True),
        ("compile.py", True),
        ("config/table.py", False),
        ("api.py", False),
        ("sass/anything.py", False),
        ("emulator/machine.py", False),
    ],
)
def test_an_edit_counts_if_kernels_are_made_of_it(file, counts, tmp_path):
    package = tmp_path / "fa3"
    shutil.copytree(cache.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    before = cache.sources_digest(package)
    assert before == cache.sources_digest(package)
    (package / file).parent.mkdir(exist_ok=True, parents=True)
    with open(package / file, "a") as text:
        text.write("\n# edited\n")
    assert (cache.sources_digest(package) != before) == counts


@needs_c
def test_code_older_than_the_sources_is_not_stored(compiler, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "fa3")
    monkeypatch.setattr(cache, "sources_digest", lambda package: "0123456789abcdef")
    assert launch.kernel(KEY)() == 2  # compiled for the disk, which refused it; then for this process
    assert "edited since" in caplog.text and not list(cache.folder().rglob("*.so"))


# ------------------------------------------------------------------------------------------------ many at once
@needs_c
def test_threads_compile_once(compiler):
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(launch.kernel(KEY)())) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert answers == [1] * 8 and compiler == [KEY]


RACE = """
import sys, time, types
sys.path[:0] = {paths!r}
from test_launch_cache import Compiled, KEY
from fa3 import launch

def compile_kernel(key):
    with open({log!r}, "a") as log:
        log.write("compiled\\n")
    time.sleep(0.5)
    return Compiled(key, 7)

module = sys.modules["fa3.compile"] = types.ModuleType("fa3.compile")
module.compile_kernel = compile_kernel
print("ready", flush=True)
sys.stdin.readline()
assert launch.kernel(KEY)() == 7
assert "cutlass" not in sys.modules
"""


@needs_c
def test_four_processes_compile_once(tmp_path):
    log = tmp_path / "log"
    code = RACE.format(paths=[str(Path(__file__).parent), str(ROOT)], log=str(log))
    env = dict(os.environ, FA3_CACHE_DIR=str(tmp_path / "cache"))
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    running = [subprocess.Popen([sys.executable, "-c", code], env=env, **pipes) for _ in range(4)]
    for process in running:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
    for process in running:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert log.read_text() == "compiled\n"


@needs_c
def test_a_lock_left_by_a_dead_process_is_no_lock(compiler, tmp_path):
    home = cache.folder() / cache.validity()
    code = f"""
        import filelock, os
        filelock.FileLock({str(home / (KEY.name + ".lock"))!r}).acquire()
        os._exit(1)
    """
    home.mkdir(parents=True)
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)])
    assert launch.kernel(KEY)() == 1


@needs_c
def test_a_lock_held_too_long_is_given_up(compiler, monkeypatch, caplog):
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.2)
    with cache.lock(KEY, cache.folder()):
        assert launch.kernel(KEY)() == 1
    assert "going ahead without a lock" in caplog.text


# ------------------------------------------------------------------------------------------------ linking and loading
@needs_c
def test_without_a_c_compiler_the_object_is_kept(compiler, monkeypatch, caplog):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(cache, "_which", lambda name: None)
    monkeypatch.setattr(cache, "load", lambda file, key: lambda: file)
    assert launch.kernel(KEY)().suffix == ".o"
    assert "no C compiler" in caplog.text
    forget()
    assert launch.where(KEY) == ("on disk", the_file())


@needs_c
def test_a_linker_that_fails_is_quoted(tmp_path):
    (tmp_path / "x.o").write_text("no object")
    assert "failed" in cache.link(tmp_path / "x.o", tmp_path / "x.so")


def test_the_runtime_is_found_without_the_dsl():
    code = "import sys; from fa3 import cache; print(cache.runtime_library()); assert 'cutlass' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert Path(done.stdout.strip()).is_file(), done.stderr


def test_the_runtime_fits_the_driver(monkeypatch):
    monkeypatch.delenv("CUTE_DSL_LIBS", raising=False)
    newest = cache.runtime_library()
    monkeypatch.setattr(cache, "_driver_major", lambda: int(newest.parts[-3][2:]) - 1)
    assert cache.runtime_library().is_file()
    monkeypatch.setenv("CUTE_DSL_LIBS", "/a/libother.so:/b/libcute_dsl_runtime.so")
    assert cache.runtime_library() == Path("/b/libcute_dsl_runtime.so")


# ------------------------------------------------------------------------------------------------ import
def test_import_touches_neither_cuda_nor_the_dsl():
    code = """
        import sys
        import fa3
        fa3.flash_attn_func, fa3.explain, fa3.warmup
        import torch
        assert not torch.cuda.is_initialized()
        assert not {"cutlass", "tvm_ffi", "fa3.compile"} & set(sys.modules)
    """
    env = dict(os.environ, CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
