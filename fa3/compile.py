"""From a key to a compiled kernel, for sm_90a, on any machine. The only module that starts the DSL's compiler."""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from dataclasses import dataclass
from typing import Any

# The DSL reads this when it is imported; without a GPU it would assume another architecture.
os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from fa3.config.backward import AnyKey, BackwardKey
from fa3.config.types import KernelKey
from fa3.kernels.backward import Backward, InRegisters
from fa3.kernels.backward_finish import BackwardFinish
from fa3.kernels.backward_pair import InPairs
from fa3.kernels.backward_prepare import BackwardPrepare
from fa3.kernels.backward_wide import ThroughShared
from fa3.kernels.forward import DTYPES, Forward, PlainLoop
from fa3.kernels.forward_overlap import OverlapLoop

MAIN_LOOPS: dict[str, Any] = {"plain": PlainLoop, "overlap": OverlapLoop}
TARGET = "--gpu-arch sm_90a"
"""Said again at every compilation: the variable above comes too late if someone imported the DSL before us."""
ANSI = re.compile(r"\x1b\[\d+m")


@dataclass(frozen=True)
class Artefacts:
    """What the compiler made of a key: for looking at, not for running."""

    key: AnyKey
    ptx: str
    cubin: bytes
    remarks: str
    """ptxas' own words: registers, spills, warnings."""
    smem_bytes: int


def compile_kernel(key: AnyKey) -> Any:
    """A TVM-FFI function, callable with torch tensors and exportable with `export_to_c(path, function_name=...)`."""
    return cute.compile(_host(key), *_arguments(key), options=f"--enable-tvm-ffi {TARGET}")


def compile_with_ptx(key: AnyKey) -> tuple[Any, str]:
    """The function of `compile_kernel` and its PTX, with line information: for the emulator."""
    with tempfile.TemporaryDirectory() as folder:
        options = f"--enable-tvm-ffi {TARGET} --keep-ptx --generate-line-info --dump-dir {folder}"
        compiled = cute.compile(_host(key), *_arguments(key), options=options)
        return compiled, compiled.artifacts.PTX


def artefacts(key: AnyKey) -> Artefacts:
    """Compiles for inspection: PTX and cubin kept, line information on, ptxas' remarks captured."""
    host, remarks = _host(key), io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(remarks):
        options = f"{TARGET} --keep-ptx --keep-cubin --generate-line-info --dump-dir {folder} remarks{{ptx}}"
        compiled = cute.compile(host, *_arguments(key), options=options)
        ptx, cubin = compiled.artifacts.PTX, compiled.artifacts.CUBIN
    return Artefacts(key, ptx, cubin, ANSI.sub("", remarks.getvalue()), host.smem_bytes)


DESIGNS: dict[str, Any] = {"registers": InRegisters, "shared": ThroughShared, "pairs": InPairs}
BACKWARD_PARTS: dict[str, Any] = {
    "backward_prepare": BackwardPrepare,
    "backward": lambda key: Backward(key, DESIGNS[key.config.design]),
    "backward_finish": BackwardFinish,
}


def _host(key: AnyKey) -> Any:
    if isinstance(key, BackwardKey):
        return BACKWARD_PARTS[key.part](key)
    return Forward(key, MAIN_LOOPS[key.config.algorithm])


def _arguments(key: AnyKey) -> tuple[Any, ...]:
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    if isinstance(key, BackwardKey):
        return *_BACKWARD_ARGUMENTS[key.part](key), stream
    return *_forward_arguments(key), stream


def _forward_arguments(key: KernelKey) -> tuple[Any, ...]:
    """Stand-ins for a call: every length, head count and stride is a run-time value."""
    dtype, int32 = DTYPES[key.dtype], cute.sym_int32
    batch, seqlen_q, seqlen_k, heads, heads_kv = (int32() for _ in range(5))
    dim, dim_v = int32(divisibility=8), int32(divisibility=8)
    q = _strided(dtype, (batch, seqlen_q, heads, dim))
    k = _strided(dtype, (batch, seqlen_k, heads_kv, dim))
    v = _strided(dtype, (batch, seqlen_k, heads_kv, dim_v))
    o = _strided(dtype, (batch, seqlen_q, heads, dim_v))
    lse = make_fake_tensor(
        cutlass.Float32, (batch, heads, seqlen_q), (cute.sym_int64(), cute.sym_int64(), 1), assumed_align=4
    )
    counters = make_fake_tensor(cutlass.Int32, (int32(),), (1,), assumed_align=4)
    return q, k, v, o, lse, counters, cutlass.Int32(0), cutlass.Float32(1.0), cutlass.Int32(1)


def _main_arguments(key: BackwardKey) -> tuple[Any, ...]:
    dtype, int32 = DTYPES[key.dtype], cute.sym_int32
    batch, seqlen_q, seqlen_k, heads, heads_kv, m_blocks = (int32() for _ in range(6))
    dim, dim_v = int32(divisibility=8), int32(divisibility=8)
    q = _strided(dtype, (batch, seqlen_q, heads, dim))
    do = _strided(dtype, (batch, seqlen_q, heads, dim_v))
    k, dk = (_strided(dtype, (batch, seqlen_k, heads_kv, dim)) for _ in range(2))
    v, dv = (_strided(dtype, (batch, seqlen_k, heads_kv, dim_v)) for _ in range(2))
    lse_log2, delta = (_rows(batch, heads, int32(divisibility=16)) for _ in range(2))
    sums, turns = _for_dq(key, batch, heads, m_blocks)
    dk, dv = (result if name in key.wanted else None for name, result in (("k", dk), ("v", dv)))
    return q, k, v, do, lse_log2, delta, sums, turns, dk, dv, *_scales(2)


def _prepare_arguments(key: BackwardKey) -> tuple[Any, ...]:
    dtype, int32 = DTYPES[key.dtype], cute.sym_int32
    batch, seqlen_q, heads, rows, m_blocks = (int32() for _ in range(5))
    dim_v = int32(divisibility=8)
    o, do = (_strided(dtype, (batch, seqlen_q, heads, dim_v)) for _ in range(2))
    lse, dlse = (_any_rows(batch, heads, seqlen_q) for _ in range(2))
    lse_log2, delta = (_rows(batch, heads, rows) for _ in range(2))
    sums, turns = _for_dq(key, batch, heads, m_blocks)
    return o, do, lse, dlse, lse_log2, delta, sums, turns


def _finish_arguments(key: BackwardKey) -> tuple[Any, ...]:
    batch, seqlen_q, heads, m_blocks, dim = (cute.sym_int32() for _ in range(5))
    dim = cute.sym_int32(divisibility=8)
    dq = _strided(DTYPES[key.dtype], (batch, seqlen_q, heads, dim))
    return _dq_accum(key.config, batch, heads, m_blocks), dq, *_scales(1), cutlass.Int32(0), cutlass.Int32(0)


_BACKWARD_ARGUMENTS = {
    "backward_prepare": _prepare_arguments,
    "backward": _main_arguments,
    "backward_finish": _finish_arguments,
}


def _any_rows(batch: Any, heads: Any, rows: Any) -> Any:
    """float32 numbers of query rows, of any strides."""
    strides = tuple(cute.sym_int64() for _ in range(3))
    return make_fake_tensor(cutlass.Float32, (batch, heads, rows), strides, assumed_align=4)


def _rows(batch: Any, heads: Any, rows: Any) -> Any:
    """float32 numbers of padded query rows, contiguous."""
    strides = (cute.sym_int64(divisibility=16), cute.sym_int64(divisibility=16), 1)
    return make_fake_tensor(cutlass.Float32, (batch, heads, rows), strides, assumed_align=16)


def _for_dq(key: BackwardKey, batch: Any, heads: Any, m_blocks: Any) -> tuple[Any, Any]:
    """The sums and the counters; None where dQ is not wanted."""
    if "q" not in key.wanted:
        return None, None
    return _dq_accum(key.config, batch, heads, m_blocks), _turns(batch, heads, m_blocks)


def _dq_accum(config: Any, batch: Any, heads: Any, m_blocks: Any) -> Any:
    shape = (batch, heads, m_blocks, config.dq_slices, config.dq_slice)
    block = config.dq_slice * config.dq_slices
    strides = (cute.sym_int64(divisibility=block), cute.sym_int64(divisibility=block), block, config.dq_slice, 1)
    return make_fake_tensor(cutlass.Float32, shape, strides, assumed_align=16)


def _turns(batch: Any, heads: Any, m_blocks: Any) -> Any:
    strides = (cute.sym_int64(), cute.sym_int64(), 1)
    return make_fake_tensor(cutlass.Int32, (batch, heads, m_blocks), strides, assumed_align=4)


def _scales(count: int) -> tuple[Any, ...]:
    return tuple(cutlass.Float32(1.0) for _ in range(count))


def _strided(dtype: Any, shape: tuple[Any, ...]) -> Any:
    """Any strides that TMA can take: multiples of 16 bytes, the last dimension contiguous."""
    strides = [cute.sym_int64(divisibility=128 // dtype.width) for _ in shape[:-1]]
    return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=16)
