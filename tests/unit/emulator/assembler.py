"""Small PTX modules and their runs: a body, parameters from numpy values, buffers as global memory.

Names that every body may use: registers %p0.. (predicates), %h0.. (16 bits), %r0.. (32), %rd0.. (64), of each as many
as REGISTERS says, and `__dynamic_shmem__0` for shared memory. Argument i of a run is the parameter `k_param_i`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa3.emulator import machine
from fa3.emulator.blocks import Code
from fa3.emulator.machine import Machine
from fa3.emulator.observe import Observer
from fa3.emulator.program import Program

REGISTERS = {"pred": ("%p", 16), "b16": ("%h", 32), "b32": ("%r", 96), "b64": ("%rd", 32)}
LANES = 32
SHARED = 1024
"""Shared address of the first byte of dynamic shared memory."""
FILE = "kernel.py"

Triple = tuple[int, int, int]
Argument = Any
"""An array (its address is passed), bytes (an aligned struct), or a numpy scalar (passed by value)."""


@dataclass
class Allocation:
    """As `fa3.emulator.host.Allocation`, which needs the DSL."""

    name: str
    address: int
    nbytes: int
    writable: bool = True


@dataclass
class Launch:
    """As `fa3.emulator.host.Launch`."""

    kernel: str
    grid: Triple
    block: Triple
    smem_bytes: int
    cluster: Triple = (1, 1, 1)
    attributes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    params: list[bytes] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)


def module(body: str, params: Sequence[str] = (), threads: int | Triple = LANES) -> str:
    """A PTX module with one kernel `k`. `params` are declarations such as ".u64". A `ret` is added at the end."""
    block = threads if isinstance(threads, tuple) else (threads, 1, 1)
    declared = ",\n".join(_param(kind, i) for i, kind in enumerate(params))
    registers = "\n".join(f"  .reg .{kind} {name}<{count}>;" for kind, (name, count) in REGISTERS.items())
    return f"""
.version 8.3
.target sm_90a
.address_size 64
.file 1 "{FILE}"
.extern .shared .align 1024 .b8 __dynamic_shmem__0[];
.visible .entry k(
{declared}
)
.reqntid {block[0]}, {block[1]}, {block[2]}
{{
{registers}
{body}
  ret;
}}
"""


def _param(kind: str, number: int) -> str:
    kind, bracket, count = kind.partition("[")
    return f"  .param {kind} k_param_{number}{bracket}{count}"


def aligned(values: Any, alignment: int = 1024) -> NDArray[Any]:
    """A copy whose address is a multiple of `alignment`."""
    values = np.asarray(values)
    storage = np.zeros(values.nbytes + alignment, np.uint8)
    skip = -storage.ctypes.data % alignment
    copy = storage[skip : skip + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


_KINDS = {"u": "u", "i": "s", "f": "f"}


def _passed(argument: Argument) -> tuple[str, bytes]:
    """(declaration, value) of the parameter for an argument."""
    if isinstance(argument, bytes):
        return f".align 64 .b8[{len(argument)}]", argument
    if isinstance(argument, np.ndarray):
        return ".u64", argument.ctypes.data.to_bytes(8, "little")
    return f".{_KINDS[argument.dtype.kind]}{8 * argument.nbytes}", argument.tobytes()


def assemble(body: str, arguments: Sequence[Argument] = (), threads: int | Triple = LANES) -> Program:
    """The parsed module for a body and its arguments."""
    return Program.parse(module(body, [_passed(argument)[0] for argument in arguments], threads))


def launch_of(
    program: Program,
    arguments: Sequence[Argument] = (),
    grid: Triple = (1, 1, 1),
    smem: int = 4096,
    block: Triple | None = None,
    memory: Sequence[NDArray[Any]] = (),
    cluster: Triple = (1, 1, 1),
) -> Launch:
    """A launch of a program. `memory`: arrays that the kernel may touch though no argument points to them."""
    arrays = [*(a for a in arguments if isinstance(a, np.ndarray)), *memory]
    return Launch(
        "k",
        grid,
        block or (program.threads, 1, 1),
        smem,
        cluster,
        params=[_passed(argument)[1] for argument in arguments],
        allocations=[Allocation(f"a{i}", a.ctypes.data, a.nbytes, a.flags.writeable) for i, a in enumerate(arrays)],
    )


def run(
    body: str,
    *arguments: Argument,
    threads: int | Triple = LANES,
    grid: Triple = (1, 1, 1),
    smem: int = 4096,
    policy: str = "early",
    seed: int = 0,
    observers: Sequence[Observer] = (),
    resident: int = 4,
    memory: Sequence[NDArray[Any]] = (),
    cluster: Triple = (1, 1, 1),
) -> Machine:
    """Assembles a body and runs it. The arrays among the arguments are changed in place."""
    program = assemble(body, arguments, threads)
    block = threads if isinstance(threads, tuple) else (threads, 1, 1)
    launch: Any = launch_of(program, arguments, grid, smem, block, memory, cluster)
    return machine.run(program, launch, policy=policy, seed=seed, observers=observers, resident=resident)


# ------------------------------------------------------------------------------------------------ one value per thread
def pointer(number: int, register: str, size: int, index: str = "%tid.x") -> str:
    """`register` = address of element `index` of array argument `number`. Uses %r95, %rd30, %rd31."""
    return f"""
  mov.u32 %r95, {index};
  mul.wide.u32 %rd31, %r95, {size};
  ld.param.u64 %rd30, [k_param_{number}];
  add.s64 {register}, %rd30, %rd31;"""


def load(number: int, register: str, size: int) -> str:
    """Loads the thread's element of array argument `number`."""
    return f"{pointer(number, '%rd29', size)}\n  ld.global.b{8 * size} {register}, [%rd29];"


def store(number: int, register: str, size: int) -> str:
    """Stores the thread's element of array argument `number`."""
    return f"{pointer(number, '%rd29', size)}\n  st.global.b{8 * size} [%rd29], {register};"


class OnLanes:
    """A body with a value in each thread for some registers before it, and for others after it.

    `inputs` and `outputs`: register -> numpy type, bool for a predicate. Registers from %r94 and %rd29 on are used for
    loading and storing.
    """

    def __init__(self, body: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any], threads: int = LANES) -> None:
        self.inputs, self.outputs = dict(inputs), dict(outputs)
        self.threads = threads
        before = "".join(self._load(i, *item) for i, item in enumerate(self.inputs.items()))
        after = "".join(self._store(i, *item) for i, item in enumerate(self.outputs.items(), len(self.inputs)))
        self.arrays = [aligned(np.zeros(threads, _stored(kind)), 16) for kind in (*inputs.values(), *outputs.values())]
        self.program = assemble(f"{before}\n{body}\n{after}", self.arrays, threads)
        self.code = Code(self.program)

    @staticmethod
    def _load(number: int, register: str, kind: Any) -> str:
        if np.dtype(kind) == np.bool_:
            return load(number, "%r94", 4) + f"\n  setp.ne.b32 {register}, %r94, 0;"
        return load(number, register, np.dtype(kind).itemsize)

    @staticmethod
    def _store(number: int, register: str, kind: Any) -> str:
        if np.dtype(kind) == np.bool_:
            return f"\n  selp.b32 %r94, 1, 0, {register};" + store(number, "%r94", 4)
        return store(number, register, np.dtype(kind).itemsize)

    def __call__(self, values: Mapping[str, Any], **options: Any) -> dict[str, NDArray[Any]]:
        """`values`: register -> array over the threads. What the output registers hold at the end."""
        for array, register in zip(self.arrays, self.inputs, strict=False):
            array[...] = values[register]
        smem = options.pop("smem", 4096)
        launch: Any = launch_of(self.program, self.arrays, smem=smem)
        machine.run(self.code, launch, **{"policy": "early", **options})
        results = zip(self.outputs.items(), self.arrays[len(self.inputs) :], strict=True)
        return {register: array.astype(kind) for (register, kind), array in results}


def _stored(kind: Any) -> Any:
    return np.uint32 if np.dtype(kind) == np.bool_ else kind


def on_lanes(
    body: str, values: Mapping[str, Any], outputs: Mapping[str, Any], threads: int = LANES, **options: Any
) -> dict[str, NDArray[Any]]:
    """`OnLanes` for one run."""
    arrays = {register: np.asarray(array) for register, array in values.items()}
    kernel = OnLanes(body, {register: array.dtype for register, array in arrays.items()}, outputs, threads)
    return kernel(arrays, **options)


# ------------------------------------------------------------------------------------------------ descriptors
_TENSOR_TYPES = {"uint8": 0, "uint32": 2, "int32": 3, "uint64": 4, "float16": 6, "float32": 7}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}


def tensor_map(array: NDArray[Any], box: Sequence[int], swizzle: int = 0) -> bytes:
    """The 128 bytes of a TMA descriptor for an array, whose last axis is dimension 0, and boxes of a shape in the order
    of the array's axes. The second half is garbage, as it is where generated host code assembles one."""
    dims, sizes = array.shape[::-1], tuple(box)[::-1]
    strides = [stride // 16 for stride in array.strides[::-1][1:]]
    words = [0] * 8
    words[0] = array.ctypes.data
    words[1] = 2 | (array.ndim - 1) << 4 | _TENSOR_TYPES[str(array.dtype)] << 7 | _SWIZZLES[swizzle] << 13 | 2 << 17
    for i, stride in enumerate(strides):
        place = 32 + 32 * i
        words[1 + place // 64] |= (stride & 0xFFFFFFFF) << place % 64
        words[3] |= stride >> 32 << 32 + 4 * i
    for i, dim in enumerate(dims):
        words[4 + i // 2] |= (dim - 1) << 32 * (i % 2)
    words[6] |= (sizes[0] - 1) << 56
    for i, size in enumerate(sizes[1:]):
        words[7] |= (size - 1) << 8 * i
    return b"".join(word.to_bytes(8, "little") for word in words) + b"\xcc" * 64
