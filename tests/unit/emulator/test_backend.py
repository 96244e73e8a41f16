"""`fa3.emulate()`: which calls it serves, what they return, and what reaches the machine.

A stand-in for the machine computes by the reference, so that nothing here depends on instructions; the last test runs
the real one.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fa3
import fa3.emulator
from fa3 import backends, cache, launch, reference
from fa3.config.table import forward_key
from fa3.emulator import artefacts, backend, limits
from fa3.emulator.blocks import Code
from fa3.emulator.faults import Fault
from fa3.emulator.host import HostCode
from fa3.emulator.machine import Deadlock
from fa3.errors import LaunchError

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="the emulator needs a C compiler"
)
BF = torch.bfloat16
ROOT = Path(__file__).resolve().parents[3]
KEY = forward_key(64, 64, True, "bf16")


def qkv(sq=5, sk=7, batch=2, requires_grad=False):
    g = torch.Generator().manual_seed(0)
    shapes = (batch, sq, 4, 64), (batch, sk, 2, 64), (batch, sk, 2, 64)
    return tuple(torch.randn(shape, generator=g).to(BF).requires_grad_(requires_grad) for shape in shapes)


class Machine:
    """Computes by the reference; keeps what it was asked."""

    def __init__(self):
        self.asked = []
        self.failure = None
        self.writes = True

    def run(self, program, launch, **options):
        self.asked.append((program, launch, options))
        tensors = launch.tensors
        assert tensors["o"].isnan().all() and tensors["lse"].isnan().all() and not tensors["counters"].any()
        if self.failure is not None:
            raise self.failure
        if self.writes:
            q, k, v = (tensors[name].detach() for name in "qkv")
            o, lse = reference.attention(q, k, v, causal=True)
            tensors["o"].copy_(o), tensors["lse"].copy_(lse)
        return self


@pytest.fixture
def machine(monkeypatch):
    made = Machine()
    module = types.ModuleType("fa3.emulator.machine")
    module.run = made.run
    monkeypatch.setitem(sys.modules, "fa3.emulator.machine", module)
    monkeypatch.setattr(fa3.emulator, "machine", module, raising=False)
    monkeypatch.setattr(HostCode, "code", property(lambda host: host.program))
    monkeypatch.setattr(launch, "_plans", {})
    monkeypatch.delenv(backends.VARIABLE, raising=False)
    return made


def close(o, lse, q, k, v):
    want, want_lse = reference.attention(q, k, v, causal=True)
    torch.testing.assert_close(o.double(), want, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------ the calls
def test_a_call_on_cpu_tensors_gives_results(machine):
    tensors = qkv()
    with fa3.emulate(policy="late", seed=7, sms=3) as emulation:
        o, lse = fa3.flash_attn_func(*tensors, causal=True, return_lse=True)
        alone = fa3.flash_attn_func(*tensors, causal=True)
    close(o, lse, *tensors)
    assert torch.equal(o, alone) and o.is_contiguous() and o.dtype == BF
    (program, _, options), _ = machine.asked
    assert options == dict(policy="late", seed=7, observers=(), resident=3)
    assert [run.kernel for run in emulation.runs] == [KEY.name] * 2 and emulation.findings == []
    assert all(run.result is machine and run.launch.grid == (3, 1, 1) for run in emulation.runs)
    assert program is emulation.runs[0].program is emulation.runs[1].program


def test_the_op_and_autograd_and_compile_are_served(machine):
    torch._dynamo.reset()
    q, k, v = tensors = qkv(requires_grad=True)
    with fa3.emulate() as emulation:
        with torch.no_grad():
            close(*torch.ops.fa3.forward(q, k, v, 0.125, True), *tensors)
        o, lse = fa3.flash_attn_func(q, k, v, causal=True, return_lse=True)
        assert o.requires_grad and o.grad_fn is not None
        close(o.detach(), lse.detach(), *tensors)
        compiled = torch.compile(lambda *t: fa3.flash_attn_func(*t, causal=True), fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*tensors), o)
    assert len(emulation.runs) == 3


def test_empty_problems_launch_nothing(machine):
    q, k, v = qkv(sk=0)
    with fa3.emulate() as emulation:
        o, lse = fa3.flash_attn_func(q, k, v, return_lse=True)
    assert (o == 0).all() and (lse == -math.inf).all() and emulation.runs == []
    with pytest.raises(ValueError, match="q is on device cpu"):
        fa3.flash_attn_func(q, k, v)


def test_what_is_not_written_is_nan(machine):
    machine.writes = False
    with fa3.emulate():
        o, lse = fa3.flash_attn_func(*qkv(), causal=True, return_lse=True)
    assert o.isnan().all() and lse.isnan().all()


def test_arguments_are_checked_as_ever(machine):
    q, k, v = qkv()
    shifted = torch.empty(k.numel() + 8, dtype=BF)[3:][: k.numel()].view(k.shape)
    with fa3.emulate():
        with pytest.raises(TypeError, match="float16"):
            fa3.flash_attn_func(q.float(), k, v)
        with pytest.raises(ValueError, match="k starts 6 bytes after a 16-byte boundary"):
            fa3.flash_attn_func(q, shifted, v, causal=True)
    assert not machine.asked


# ------------------------------------------------------------------------------------------------ where it is on
def test_outside_cpu_tensors_are_refused_before_and_after(machine):
    tensors = qkv()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"q is on device cpu; .*Hopper.*with fa3\.emulate\(\):"):
            fa3.flash_attn_func(*tensors, causal=True)
        with fa3.emulate():
            fa3.flash_attn_func(*tensors, causal=True)
        with pytest.raises(ValueError, match="q is on device cpu"):
            torch.ops.fa3.forward(*tensors, 0.125, True)
    assert launch._plans == {}


def test_an_exception_ends_it_too(machine):
    with pytest.raises(ZeroDivisionError), fa3.emulate():
        raise ZeroDivisionError
    assert backends.emulation_for(*qkv()) is None


def test_the_innermost_serves(machine):
    tensors = qkv()
    with fa3.emulate() as outer:
        with fa3.emulate() as inner:
            fa3.flash_attn_func(*tensors, causal=True)
        assert (len(outer.runs), len(inner.runs)) == (0, 1)
        fa3.flash_attn_func(*tensors, causal=True)
    assert (len(outer.runs), len(inner.runs)) == (1, 1)


def test_other_threads_are_outside(machine):
    seen = []
    with fa3.emulate():
        thread = threading.Thread(target=lambda: seen.append(backends.emulation_for(*qkv())))
        thread.start()
        thread.join()
        assert backends.emulation_for(*qkv()) is not None
    assert seen == [None]


def test_tensors_on_a_gpu_go_to_the_gpu(machine):
    with FakeTensorMode():
        on_gpu = torch.empty(1, 5, 2, 64, dtype=BF, device="cuda")
    with fa3.emulate():
        assert backends.emulation_for(on_gpu, on_gpu, on_gpu) is None
        assert backends.emulation_for(qkv()[0], on_gpu, on_gpu) is None
        assert backends.emulation_for([1.0], None, 3) is None


def test_the_environment_switches_it_on(machine, monkeypatch):
    monkeypatch.setenv("FA3_BACKEND", "emulator")
    tensors = qkv()
    close(*fa3.flash_attn_func(*tensors, causal=True, return_lse=True), *tensors)
    assert backend.of_environment().runs == [] and len(machine.asked) == 1
    with fa3.emulate() as emulation:
        fa3.flash_attn_func(*tensors, causal=True)
    assert len(emulation.runs) == 1
    monkeypatch.setenv("FA3_BACKEND", "gpu")
    with pytest.raises(ValueError, match="q is on device cpu"):
        fa3.flash_attn_func(*tensors, causal=True)
    monkeypatch.setenv("FA3_BACKEND", "tpu")
    with pytest.raises(ValueError, match="FA3_BACKEND is 'tpu'; 'gpu' or 'emulator' is allowed"):
        fa3.flash_attn_func(*tensors, causal=True)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("sms is 0", dict(sms=0)),
        ("sms is True", dict(sms=True)),
        ("sms is 1.5", dict(sms=1.5)),
        ("policy 'fast' is unknown", dict(policy="fast")),
    ],
)
def test_bad_options_are_refused(words, options):
    with pytest.raises(ValueError, match=words), fa3.emulate(**options):
        raise AssertionError("not refused")


# ------------------------------------------------------------------------------------------------ what goes wrong
def test_a_fault_reaches_the_caller_and_is_recorded(machine):
    machine.failure = Fault("tma", "a box lies nowhere")
    with fa3.emulate() as emulation, pytest.raises(Fault) as caught:
        fa3.flash_attn_func(*qkv(), causal=True)
    assert caught.value is machine.failure
    assert len(emulation.runs) == 1 and emulation.runs[0].result is None


def test_a_refused_launch_names_kernel_and_arguments(machine, monkeypatch):
    monkeypatch.setattr(limits, "SHARED_MEMORY_PER_CTA", 1000)
    with fa3.emulate() as emulation, pytest.raises(LaunchError) as caught:
        fa3.flash_attn_func(*qkv(), causal=True)
    for words in (KEY.name, "ForwardConfig(", "(2, 5, 4, 64)", "a CTA can have 1000", "on cpu"):
        assert words in str(caught.value)
    assert emulation.runs == []


def test_a_counter_left_behind_is_a_fault(machine):
    compute = machine.run

    def run(program, launch, **options):
        compute(program, launch, **options)
        launch.tensors["counters"][0] = 4

    sys.modules["fa3.emulator.machine"].run = run
    with fa3.emulate(), pytest.raises(Fault, match=r"tile counter at \[4\]"):
        fa3.flash_attn_func(*qkv(), causal=True)


# ------------------------------------------------------------------------------------------------ replay
def test_a_recorded_launch_is_replayed_on_its_own_tensors(machine):
    run = backend.record(*qkv(), causal=True, sms=4)
    assert not machine.asked and run.result is None
    for seed in (0, 1):  # the outputs of the first replay are gone before the second
        assert run.replay(policy="early", seed=seed, observers=["a checker"]) is machine
        close(*(run.launch.tensors[name] for name in ("o", "lse", "q", "k", "v")))
    other = object()
    run.replay(other)
    assert [asked[0] for asked in machine.asked] == [run.program, run.program, other]
    assert machine.asked[0][2] == dict(policy="early", seed=0, observers=("a checker",), resident=4)


def test_another_row_than_the_tables_can_be_recorded(monkeypatch):
    monkeypatch.setattr(backend, "host_code", lambda key: types.SimpleNamespace(key=key, capture=lambda *_: ["launch"]))
    config = replace(KEY.config, algorithm="plain", tile_m=128)
    assert backend.record(*qkv(), causal=True, config=config).key == replace(KEY, config=config)
    assert backend.record(*qkv(), causal=True).key == KEY


# ------------------------------------------------------------------------------------------------ the disk
COMPILED = "int __tvm_ffi_%s(void *self, const void *args, int n, void *result) { return 0; }"
PTX = ".visible .entry kernel()\n.reqntid 32, 1, 1\n{\n    ret;\n}\n"


class Compiled:
    """What the DSL exports, in milliseconds."""

    def export_to_c(self, path, function_name):
        command = ["cc", "-c", "-fPIC", "-x", "c", "-", "-o", path]
        subprocess.run(command, input=COMPILED % function_name, text=True, check=True)


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """A compiler that counts, and an empty cache in memory and on disk."""
    made = []

    def compile_with_ptx(key):
        made.append(key)
        return Compiled(), PTX

    module = types.ModuleType("fa3.compile")
    module.compile_with_ptx = compile_with_ptx
    monkeypatch.setitem(sys.modules, "fa3.compile", module)
    monkeypatch.setattr(artefacts, "_loaded", {})
    monkeypatch.setenv("FA3_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FA3_DISK_CACHE", raising=False)
    return made


def forget():
    artefacts._loaded.clear()


def the_file():
    (file,) = cache.folder().rglob("*.so")
    return file


def test_memory_then_disk_then_compile(compiler):
    first = artefacts.host_code(KEY)
    assert artefacts.host_code(KEY) is first and first.ptx == PTX and compiler == [KEY]
    forget()
    assert artefacts.host_code(KEY).ptx == PTX and compiler == [KEY]
    assert the_file().parts[-3].startswith("emulator-") and the_file().parts[-2:] == (
        cache.validity(),
        f"{KEY.name}.so",
    )
    assert {f.suffix for f in the_file().parent.iterdir()} == {".so", ".lock"}


def test_a_damaged_file_is_compiled_again(compiler, caplog):
    artefacts.host_code(KEY)
    forget()
    file, whole = the_file(), the_file().read_bytes()
    file.unlink()  # this process has the old one mapped
    file.write_bytes(whole[:-1])
    assert artefacts.host_code(KEY).ptx == PTX and compiler == [KEY, KEY]
    assert "is damaged" in caplog.text


def test_another_shim_is_another_folder(compiler, monkeypatch):
    artefacts.host_code(KEY)
    forget()
    monkeypatch.setattr(artefacts, "FLAGS", (*artefacts.FLAGS, "-g"))
    artefacts.host_code(KEY)
    assert len(list(cache.folder().glob("emulator-*"))) == 2 and len(compiler) == 2


def test_without_the_disk_each_process_compiles(compiler, monkeypatch):
    monkeypatch.setenv("FA3_DISK_CACHE", "0")
    assert artefacts.host_code(KEY).ptx == PTX
    forget()
    assert artefacts.host_code(KEY).ptx == PTX and compiler == [KEY, KEY]
    assert not Path(os.environ["FA3_CACHE_DIR"]).exists()


def test_an_unwritable_folder_costs_the_storing_only(compiler, monkeypatch, tmp_path, caplog):
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("FA3_CACHE_DIR", str(tmp_path / "a file"))
    assert artefacts.host_code(KEY).ptx == PTX and "does without the disk cache" in caplog.text


def test_threads_compile_once(compiler):
    made = []
    threads = [threading.Thread(target=lambda: made.append(artefacts.host_code(KEY))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiler == [KEY] and len(set(map(id, made))) == 1


SECOND = """
    import sys
    import torch
    import fa3
    fa3.flash_attn_func
    assert not any(name.startswith("fa3.emulator") for name in sys.modules)
    from fa3.emulator import backend
    q, k, v = (torch.randn(1, n, 2, 64).bfloat16() for n in (9, 5, 5))
    run = backend.record(q, k, v, causal=True)
    assert run.launch.smem_bytes > 100_000 and run.program.statements
    print(sorted({"cutlass", "fa3.compile", "fa3.emulator.machine"} & set(sys.modules)))
"""


def test_a_second_process_does_not_import_the_dsl():
    artefacts.host_code(KEY)
    if artefacts.root() is None:
        pytest.skip("FA3_DISK_CACHE is off")
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(SECOND)], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr


# ------------------------------------------------------------------------------------------------ the real machine
def test_the_kernel_itself():
    tensors = qkv(sq=130, sk=70, batch=1)
    with fa3.emulate(seed=1) as emulation:
        o, lse = fa3.flash_attn_func(*tensors, causal=True, return_lse=True)
    close(o, lse, *tensors)
    assert emulation.runs[0].result is not None and emulation.findings == []
    with pytest.raises(ValueError, match="q is on device cpu"):
        fa3.flash_attn_func(*tensors, causal=True)


def test_the_checkers_watch_and_find(monkeypatch):
    """Nothing in the kernel as it is; without its waits for the first product, a fault with its Python line."""
    tensors = qkv(sq=130, sk=70, batch=1)
    with fa3.emulate(check=True) as emulation:
        close(*fa3.flash_attn_func(*tensors, causal=True, return_lse=True), *tensors)
    assert [str(finding) for finding in emulation.findings] == []
    program = artefacts.host_code(KEY).program
    wait = next(i for i, s in enumerate(program.statements) if s.opcode.startswith("wgmma.wait_group"))
    monkeypatch.setattr(HostCode, "code", property(lambda host: Code(program.without(wait))))
    with fa3.emulate(check=True, policy="late") as emulation, contextlib.suppress(Fault):
        fa3.flash_attn_func(*tensors, causal=True)
    assert emulation.findings == emulation.runs[0].findings != []
    assert any("fa3/" in str(finding.at) for finding in emulation.findings)


def test_a_fault_becomes_a_finding(monkeypatch):
    program = artefacts.host_code(KEY).program
    arrive = next(i for i, s in enumerate(program.statements) if "arrive.expect_tx" in s.opcode)
    monkeypatch.setattr(HostCode, "code", property(lambda host: Code(program.without(arrive))))
    with fa3.emulate(check=True) as emulation, pytest.raises(Deadlock):
        fa3.flash_attn_func(*qkv(), causal=True)
    assert emulation.runs[0].result is None
    assert "deadlock" in {finding.kind for finding in emulation.findings}
