"""The host code of the kernels, run on CPU tensors: what it launches, and what a GPU would refuse.

The first half runs the host code that the DSL generated for rows of the table; the second a few lines of C in its
place, which can do what no row does.
"""

from __future__ import annotations

import itertools
import math
import shutil
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa3 import cache
from fa3.config.budget import forward_smem
from fa3.config.table import forward_key
from fa3.emulator import artefacts, backend, cuda_abi, limits
from fa3.emulator.faults import Unsupported
from fa3.emulator.host import Allocation, HostCode, Launch
from fa3.emulator.program import Param, Program
from fa3.errors import LaunchError

C_COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
pytestmark = pytest.mark.skipif(C_COMPILER is None, reason="the emulator needs a C compiler")

# ------------------------------------------------------------------------------------------------ rows of the table
ROWS = {
    "d64 causal": (64, 64, True, torch.bfloat16),
    "narrow": (40, 24, False, torch.bfloat16),
    "d192v128": (192, 128, True, torch.bfloat16),
    "d256 direct": (256, 256, False, torch.float16),
}


def inputs(head_dim, head_dim_v, dtype, batch=2, seqlen_q=130, seqlen_k=70, heads=4, heads_kv=2):
    """Strided tensors: q is transposed, k and v are halves of one buffer."""
    q = torch.randn(batch, heads, seqlen_q, head_dim).to(dtype).transpose(1, 2)
    kv = torch.randn(batch, seqlen_k, heads_kv, head_dim + head_dim_v).to(dtype)
    return q, kv[..., :head_dim], kv[..., head_dim:]


@pytest.fixture(scope="module", params=ROWS)
def recorded(request):
    head_dim, head_dim_v, causal, dtype = ROWS[request.param]
    q, k, v = inputs(head_dim, head_dim_v, dtype)
    key = forward_key(head_dim, head_dim_v, causal, "bf16" if dtype == torch.bfloat16 else "fp16")
    return key, (q, k, v), backend.record(q, k, v, softmax_scale=0.25, causal=causal, sms=3)


def test_the_launch_is_that_of_the_row(recorded):
    key, (q, _, _), run = recorded
    tiles = q.shape[0] * q.shape[2] * math.ceil(q.shape[1] / key.config.tile_m)
    assert run.kernel == key.name and run.launch.kernel == run.program.name
    assert run.launch.grid == (min(3, tiles), 1, 1) and run.launch.cluster == (1, 1, 1)
    assert run.launch.block == (key.config.threads, 1, 1) == (run.program.threads, 1, 1)
    assert run.launch.smem_bytes == forward_smem(key.config).total_bytes
    assert run.launch.attributes == {cuda_abi.PROGRAMMATIC: (0,), cuda_abi.COOPERATIVE: (0,)}


def test_the_parameters_are_those_of_the_ptx(recorded):
    _, (q, k, _), run = recorded
    assert [len(value) for value in run.launch.params] == [param.size for param in run.program.params]
    words = [int.from_bytes(value, "little") for value in run.launch.params if len(value) == 4]
    assert words[-3:-1] == [q.shape[1], k.shape[1]]
    assert struct.unpack("f", run.launch.params[-1])[0] == pytest.approx(0.25 * math.log2(math.e))


def test_the_descriptors_describe_the_tensors(recorded):
    from fa3.emulator.tma import Descriptor

    key, (q, k, v), run = recorded
    config, o = key.config, run.launch.tensors["o"]
    found = [Descriptor.decode(value) for value in run.launch.params if len(value) == 128]
    rows = [64, config.tile_n, config.tile_n, 64]
    for descriptor, tensor, box_rows in zip(found, (q, k, v, o), rows, strict=True):
        order = [3, 1, 2, 0]  # head_dim, sequence, heads, batch
        assert descriptor.base == tensor.data_ptr() and descriptor.item == 2
        assert descriptor.dtype == {torch.bfloat16: "bf16", torch.float16: "f16"}[tensor.dtype]
        assert descriptor.dims == tuple(tensor.shape[dim] for dim in order)
        assert descriptor.strides == tuple(2 * tensor.stride(dim) for dim in order[1:])
        assert math.prod(descriptor.box[1:]) == box_rows and descriptor.problems() == []


def test_the_allocations_are_the_tensors(recorded):
    _, (q, k, v), run = recorded
    named = {allocation.name: allocation for allocation in run.launch.allocations}
    assert list(named) == ["q", "k", "v", "o", "lse", "counters"]
    assert [named[name].writable for name in named] == [False, False, False, True, True, True]
    for name, tensor in (("q", q), ("k", k), ("v", v), *list(run.launch.tensors.items())[3:]):
        assert named[name].address == tensor.data_ptr()
    assert named["k"].address + named["k"].nbytes == named["v"].address + named["v"].nbytes - 2 * v.shape[3]
    assert run.launch.tensors["o"].isnan().all() and run.launch.tensors["lse"].isnan().all()


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 40)), min_size=1, max_size=4), st.integers(0, 7))
def test_an_allocation_spans_its_elements_exactly(dims, offset):
    shape, strides = zip(*dims, strict=True)
    tensor = torch.zeros(1024, dtype=torch.bfloat16).as_strided(shape, strides, offset)
    places = [
        tensor.data_ptr() + 2 * sum(i * s for i, s in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, shape))
    ]
    found = Allocation.of("x", tensor, writable=False)
    assert (found.address, found.address + found.nbytes) == (min(places), max(places) + 2)


def test_strides_of_size_one_dimensions_reach_the_host_code():
    """It refuses strides that TMA cannot take, also those that PyTorch's DLPack would replace by 1."""
    q, k, v = (torch.randn(1, 70, 1, 64).to(torch.bfloat16).as_strided((1, 70, 1, 64), (7, 64, 3, 1)) for _ in range(3))
    run = backend.record(q, k, v, causal=True)
    assert run.launch.tensors["q"].stride() == (64, 64, 64, 1)


def test_what_the_host_code_refuses_is_a_launch_error():
    host = artefacts.host_code(forward_key(64, 64, True, "bf16"))
    named = dict(backend.record(*inputs(64, 64, torch.bfloat16), causal=True).launch.tensors)
    options = dict(slot=0, scale_log2=1.0, sm_count=2)
    with pytest.raises(LaunchError, match="host code of forward_bf16_d64_causal"):
        host.capture({**named, "q": named["q"].half(), **options}, ())
    assert len(host.capture({**named, **options}, ())) == 1


@pytest.mark.parametrize("error", [KeyError("in the callback"), KeyboardInterrupt()])
def test_an_exception_in_the_callback_reaches_the_caller(error, monkeypatch):
    tensors = inputs(64, 64, torch.bfloat16)

    def fail(*_):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(limits, "check", fail)
        with pytest.raises(type(error)) as caught:
            backend.record(*tensors, causal=True)
    assert caught.value is error
    backend.record(*tensors, causal=True)


# ------------------------------------------------------------------------------------------------ limits
PROGRAM = Program("kernel", (Param("a", 4, 4), Param("b", 16, 8)), 128, None)  # type: ignore[arg-type]


def launch(**changes):
    return Launch(**{"kernel": "kernel", "grid": (4, 2, 1), "block": (128, 1, 1), "smem_bytes": 50_000, **changes})


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("the grid is", dict(grid=(0, 1, 1))),
        ("the grid is", dict(grid=(1, 65536, 1))),
        ("the grid is", dict(grid=(2**31, 1, 1))),
        ("the block is", dict(block=(1, 1, 128))),
        ("2048 threads, more than 1024", dict(block=(1024, 2, 1))),
        ("compiled for 128 threads", dict(block=(256, 1, 1))),
        ("32 CTAs, more than 16", dict(grid=(32, 1, 1), cluster=(32, 1, 1))),
        ("not a multiple of the cluster", dict(cluster=(3, 1, 1))),
        ("not a multiple of the cluster", dict(cluster=(0, 1, 1))),
        ("232456 bytes of dynamic shared memory, but a CTA can have 232448", dict(smem_bytes=232456)),
        ("100008 bytes of dynamic shared memory, but the kernel is allowed 100000", dict(smem_bytes=100_008)),
        ("PTX defines the kernel kernel", dict(kernel="other")),
    ],
)
def test_what_a_gpu_refuses(words, changes):
    limits.check(launch(), PROGRAM, 100_000)
    with pytest.raises(LaunchError, match=words):
        limits.check(launch(**changes), PROGRAM, 100_000)


def test_limits_are_inclusive():
    limits.check(launch(grid=(2**31 - 1, 65535, 65535), smem_bytes=232448), PROGRAM, 232448)
    limits.check(launch(block=(2, 1, 64)), PROGRAM, 232448)
    with pytest.raises(LaunchError, match="32768 bytes of parameters"):
        limits.check(launch(), Program("kernel", (Param("a", 32768, 4),), 128, None), 232448)  # type: ignore[arg-type]


def test_a_cluster_is_that_of_the_ptx():
    program = replace(PROGRAM, cluster=(2, 1, 1))
    limits.check(launch(cluster=(2, 1, 1)), program, 100_000)
    with pytest.raises(LaunchError, match=r"compiled for \(2, 1, 1\) \(.reqnctapercluster\)"):
        limits.check(launch(cluster=(4, 1, 1)), program, 100_000)


# ------------------------------------------------------------------------------------------------ host code in C
PTX = """
.version 9.0
.target sm_90a
.address_size 64
.visible .entry kernel(
    .param .u32 kernel_param_0,
    .param .align 8 .b8 kernel_param_1[16]
)
.reqntid 128, 1, 1
{
    ret;
}
"""

HOST = r"""
#include <stdint.h>
#include <string.h>
struct any { int32_t type, pad; int64_t value; };
struct attribute { int32_t id, pad; uint32_t value[16]; };
struct config {
    uint32_t grid[3], block[3]; uint64_t smem; void *stream; struct attribute *attributes; uint32_t count;
};
int _cudaLibraryGetKernel(void **, void *, const char *), _cudaFuncSetAttribute(void *, int, int);
int _cudaDeviceGetAttribute(int *, int, int), _cudaLaunchKernelEx(struct config *, void *, void **);
void CuteDSLRT_TVMFFISetRaisedCudaError(void *, int), TVMFFIErrorSetRaisedFromCStrParts(void);
%(declared)s
static int call(const struct any *args) {
    void *kernel; int answer, error, a = (int)args[0].value; long b[2] = {1, -1}; void *params[2] = {&a, b};
    struct attribute attributes[2]; memset(attributes, 0xEE, sizeof attributes);
    struct config config = {{1, 1, 1}, {128, 1, 1}, 0, 0, attributes, 0};
    if ((error = _cudaLibraryGetKernel(&kernel, 0, "kernel"))) return error;
    %(body)s
    return 0;
}
int __tvm_ffi_host(void *self, const struct any *args, int n, struct any *result) {
    int error = call(args);
    result->type = result->pad = 0; result->value = 0;
    if (error) CuteDSLRT_TVMFFISetRaisedCudaError((void *)TVMFFIErrorSetRaisedFromCStrParts, error);
    return error ? -1 : 0;
}
"""
LAUNCH = "if ((error = _cudaLaunchKernelEx(&config, kernel, params))) return error;"


@pytest.fixture
def host(tmp_path):
    """C in the place of generated host code -> `HostCode`."""

    def make(body: str, declared: str = "", ptx: str = PTX) -> HostCode:
        obj, shared = tmp_path / "host.o", tmp_path / "host.so"
        source = HOST % dict(body=body, declared=declared)
        subprocess.run([C_COMPILER, "-c", "-fPIC", "-x", "c", "-", "-o", obj], input=source, text=True, check=True)
        artefacts._link(obj, shared, ptx)
        return HostCode(shared, "host")

    return make


def test_several_launches_are_caught_in_order(host):
    made = host(f"for (int i = 1; i <= 3; i++) {{ config.grid[1] = i; a += i; {LAUNCH} }}")
    for _ in range(2):  # the second call finds nothing of the first
        found = made.capture({"a": 10}, ())
        assert [launch.grid for launch in found] == [(1, 1, 1), (1, 2, 1), (1, 3, 1)]
        assert [int.from_bytes(launch.params[0], "little") for launch in found] == [11, 13, 16]
        assert all(launch.params[1] == bytes([1]) + bytes(7) + b"\xff" * 8 for launch in found)


def test_attributes_are_decoded_without_what_lies_behind_them(host):
    made = host(
        f"""attributes[0].id = 4; attributes[0].value[0] = 2; attributes[0].value[1] = attributes[0].value[2] = 1;
        attributes[1].id = 6; attributes[1].value[0] = 1; config.count = 2; config.grid[0] = 4; {LAUNCH}"""
    )
    (found,) = made.capture({"a": 0}, ())
    assert found.attributes == {cuda_abi.CLUSTER: (2, 1, 1), cuda_abi.PROGRAMMATIC: (1,)}
    assert found.cluster == (2, 1, 1)


@pytest.mark.parametrize(
    ("words", "body"),
    [
        ("launch attribute 3 ", f"attributes[0].id = 3; config.count = 1; {LAUNCH}"),
        ("kernel is allowed 49152", f"config.smem = 49153; {LAUNCH}"),
        ("kernel is allowed 90000", f"_cudaFuncSetAttribute(kernel, 8, 90000); config.smem = 90001; {LAUNCH}"),
        ("no parameter 1, of 16 bytes", f"params[1] = 0; {LAUNCH}"),
        ("the grid is", f"config.grid[2] = 0; {LAUNCH}"),
        ("232449 bytes of dynamic", "if ((error = _cudaFuncSetAttribute(kernel, 8, 232449))) return error;"),
        ("function attribute 5 ", "if ((error = _cudaFuncSetAttribute(kernel, 5, 1))) return error;"),
        ("device attribute 16 ", "if ((error = _cudaDeviceGetAttribute(&answer, 16, 0))) return error;"),
        ("PTX defines the kernel kernel", f'_cudaLibraryGetKernel(&kernel, 0, "other"); {LAUNCH}'),
    ],
)
def test_what_host_code_may_not_do(words, body, host):
    made = host(body)
    for _ in range(2):
        with pytest.raises(LaunchError, match=words):
            made.capture({"a": 0}, ())


def test_a_refused_launch_is_an_error_even_if_the_host_code_goes_on(host):
    with pytest.raises(LaunchError, match="the grid is"):
        host("config.grid[0] = 0; _cudaLaunchKernelEx(&config, kernel, params);").capture({"a": 0}, ())


def test_what_host_code_may_ask_for(host):
    made = host(
        f"""if (_cudaDeviceGetAttribute(&answer, 97, 0) || answer != 232448) return 7;
        if (_cudaFuncSetAttribute(kernel, 8, answer) || _cudaFuncSetAttribute(kernel, 14, 1)) return 8;
        config.smem = answer; {LAUNCH}"""
    )
    assert made.capture({"a": 0}, ())[0].smem_bytes == 232448


def test_a_runtime_function_without_an_answer_is_named(host):
    with pytest.raises(RuntimeError, match=r"host code calls _cudaMemsetAsync, which shim\.c does not answer"):
        host("return _cudaMemsetAsync(0, 0, 0, 0);", declared="int _cudaMemsetAsync(void *, int, long, void *);")


def test_the_shim_answers_even_where_the_real_runtime_is_loaded(host):
    cache._load_runtime()  # defines the same functions, for all to see
    assert len(host(LAUNCH).capture({"a": 0}, ())) == 1


def test_static_shared_memory_is_refused(host):
    with pytest.raises(Unsupported, match="static shared memory"):
        host("", ptx=PTX.replace("{\n", "{\n    .shared .align 4 .b8 buffer[64];\n"))


def test_the_ptx_comes_back_as_it_was(host):
    assert host("").ptx == PTX


# ------------------------------------------------------------------------------------------------ without a compiler
def test_without_a_c_compiler_the_message_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("fa3.cache._which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"no C compiler found \(\$CC, cc, gcc, clang\)"):
        artefacts._link(tmp_path / "host.o", tmp_path / "host.so", PTX)
    assert list(Path(tmp_path).iterdir()) == []
