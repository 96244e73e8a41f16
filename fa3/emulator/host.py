"""Runs the host code that the DSL generated for a kernel, on CPU tensors, and catches what it launches.

The host code checks its arguments, assembles the TMA descriptors and fills the launch configuration; none of that is
written a second time here. It is linked with `shim.c` in place of the CUDA runtime (`fa3.emulator.artefacts`), and the
tensors pose as CUDA memory.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tvm_ffi
from torch import Tensor

from fa3.emulator import cuda_abi, limits
from fa3.emulator.faults import Unsupported
from fa3.emulator.program import Program
from fa3.errors import LaunchError

if TYPE_CHECKING:
    from fa3.emulator.blocks import Code


@dataclass(frozen=True)
class Allocation:
    """Memory that the kernel may touch: the bytes from the first to the last element of a tensor."""

    name: str
    address: int
    nbytes: int
    writable: bool = True

    @classmethod
    def of(cls, name: str, tensor: Tensor, writable: bool) -> Allocation:
        """Of a tensor with at least one element; strides are not negative in PyTorch."""
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return cls(name, tensor.data_ptr(), (last + 1) * tensor.element_size(), writable)


@dataclass
class Launch:
    """One kernel launch, as the host code asked for it."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int
    """Dynamic shared memory of a CTA."""
    cluster: tuple[int, int, int] = (1, 1, 1)
    attributes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """cudaLaunchAttributeID -> value, such as `cuda_abi.PROGRAMMATIC`: (1,)."""
    params: list[bytes] = field(default_factory=list)
    """The kernel's parameters, one for each .param of the PTX and as long as that. Of a TMA descriptor (128 bytes) only
    the first 64 mean anything."""
    allocations: list[Allocation] = field(default_factory=list)
    """The tensors of the call, by the names of its arguments."""
    tensors: dict[str, Tensor] = field(default_factory=dict, repr=False)
    """The same tensors, so that their memory lives as long as the launch."""


_STATIC_SHARED = re.compile(r"^\s*\.shared\b.*$", re.MULTILINE)


class HostCode:
    """The host code of one kernel, and the kernel's PTX. Calls from several threads take turns."""

    def __init__(self, file: Path, name: str) -> None:
        """Loads a shared object made by `fa3.emulator.artefacts`; `name` is that of the exported function. OSError if
        it cannot be loaded, ParseError or Unsupported if the emulator cannot read its PTX."""
        self.name = name
        self._library = ctypes.CDLL(str(file.absolute()))
        self._function = tvm_ffi.load_module(str(file.absolute()))[name]
        first = ctypes.c_char.in_dll(self._library, "fa3_emulator_ptx")
        self.ptx = ctypes.string_at(ctypes.addressof(first)).decode()
        self.program = _parse(self.ptx)
        self._lock = threading.Lock()

    @cached_property
    def code(self) -> Code:
        """The program, ready to be executed."""
        from fa3.emulator.blocks import Code  # the instructions: much to import, and nothing to do with a launch

        return Code(self.program)

    def capture(self, arguments: Mapping[str, Any], written: Collection[str]) -> list[Launch]:
        """Calls the host code and returns its launches in order. Nothing is executed.

        Args:
            arguments: the function's arguments in order, by name: CPU tensors and numbers.
            written: the names of those tensors that the kernel may write.

        Raises:
            LaunchError: the host code refused its arguments, or a GPU would refuse the launch.
        """
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        catcher = _Catcher(self.program, tensors, frozenset(written))
        posing = {name: cuda_abi.PosesAsCuda(tensor) for name, tensor in tensors.items()}
        values = [posing[name].argument if name in posing else value for name, value in arguments.items()]
        callback = cuda_abi.OnLaunch(catcher)
        with self._lock:
            self._library.fa3_emulator_on_launch(callback)
            try:
                self._function(*values)
            except Exception as error:
                if catcher.failure is None:
                    raise LaunchError(f"the host code of {self.name} failed: {error}") from error
            finally:
                self._library.fa3_emulator_on_launch(None)
        if catcher.failure is not None:
            raise catcher.failure
        return catcher.launches


class _Catcher:
    """The callback of one call. C cannot pass an exception on, so that it is kept, and raised after the call."""

    def __init__(self, program: Program, tensors: dict[str, Tensor], written: frozenset[str]) -> None:
        self.program, self.tensors = program, tensors
        self.allocations = [Allocation.of(name, tensor, name in written) for name, tensor in tensors.items()]
        self.launches: list[Launch] = []
        self.failure: BaseException | None = None

    def __call__(self, config: Any, kernel: bytes, allowed_smem: int, params: Any) -> int:
        try:
            launch = self._launch(config.contents, kernel.decode(), params)
            limits.check(launch, self.program, allowed_smem)
            self.launches.append(launch)
            return 0
        except BaseException as error:
            self.failure = self.failure or error
            return 1

    def _launch(self, config: cuda_abi.Config, kernel: str, params: Any) -> Launch:
        attributes = cuda_abi.attributes(config)
        return Launch(
            kernel,
            grid=_three(config.grid),
            block=_three(config.block),
            smem_bytes=config.dynamic_smem,
            cluster=_three(attributes.get(cuda_abi.CLUSTER) or self.program.cluster or (1, 1, 1)),
            attributes=attributes,
            params=[_parameter(params, number, param.size) for number, param in enumerate(self.program.params)],
            allocations=self.allocations,
            tensors=self.tensors,
        )


def _three(sizes: Any) -> tuple[int, int, int]:
    x, y, z = sizes
    return x, y, z


def _parameter(params: Any, number: int, size: int) -> bytes:
    address = params[number]
    if not address:
        raise LaunchError(f"the launch has no parameter {number}, of {size} bytes")
    return ctypes.string_at(address, size)


def _parse(ptx: str) -> Program:
    static = _STATIC_SHARED.search(ptx)
    if static:
        raise Unsupported(f"static shared memory: {static[0].strip()}")
    return Program.parse(ptx)
