"""What a GPU of compute capability 9.0 refuses to launch.

The numbers are the technical specifications of compute capability 9.0 in the CUDA C++ Programming Guide. A GPU answers
all of this with one "invalid argument"; here the message says which.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

from fa3.errors import LaunchError
from fa3.layouts.smem import SHARED_MEMORY_PER_CTA

if TYPE_CHECKING:
    from fa3.emulator.host import Launch
    from fa3.emulator.program import Program

GRID = (2**31 - 1, 65535, 65535)
BLOCK = (1024, 1024, 64)
THREADS_PER_CTA = 1024
CTAS_PER_CLUSTER = 16
PARAMETER_BYTES = 32764


def check(launch: Launch, program: Program, allowed_smem: int) -> None:
    """LaunchError if a GPU would refuse this launch. `allowed_smem`: the dynamic shared memory, in bytes, that the host
    code has asked for beforehand (cudaFuncAttributeMaxDynamicSharedMemorySize)."""
    wrong = [*_sizes(launch), *_shared_memory(launch, allowed_smem), *_program(launch, program)]
    if wrong:
        raise LaunchError(f"a GPU would refuse to launch {launch.kernel}: {'; '.join(wrong)}")


def _sizes(launch: Launch) -> Iterator[str]:
    for name, sizes, limits in (("grid", launch.grid, GRID), ("block", launch.block, BLOCK)):
        if not all(1 <= size <= limit for size, limit in zip(sizes, limits, strict=True)):
            yield f"the {name} is {sizes}; each size must be at least 1 and at most {limits}"
    if prod(launch.block) > THREADS_PER_CTA:
        yield f"a block of {launch.block} has {prod(launch.block)} threads, more than {THREADS_PER_CTA}"
    if prod(launch.cluster) > CTAS_PER_CLUSTER:
        yield f"a cluster of {launch.cluster} has {prod(launch.cluster)} CTAs, more than {CTAS_PER_CLUSTER}"
    if 0 in launch.cluster or any(ctas % size for ctas, size in zip(launch.grid, launch.cluster, strict=True)):
        yield f"the grid {launch.grid} is not a multiple of the cluster {launch.cluster}"


def _shared_memory(launch: Launch, allowed_smem: int) -> Iterator[str]:
    if launch.smem_bytes > SHARED_MEMORY_PER_CTA:
        yield f"{launch.smem_bytes} bytes of dynamic shared memory, but a CTA can have {SHARED_MEMORY_PER_CTA}"
    elif launch.smem_bytes > allowed_smem:
        yield f"{launch.smem_bytes} bytes of dynamic shared memory, but the kernel is allowed {allowed_smem}"


def _program(launch: Launch, program: Program) -> Iterator[str]:
    if launch.kernel != program.name:
        yield f"the PTX defines the kernel {program.name}"
    if prod(launch.block) != program.threads:
        yield f"a block of {launch.block}, but the PTX was compiled for {program.threads} threads (.reqntid)"
    if program.cluster not in (None, launch.cluster):
        yield f"a cluster of {launch.cluster}, but the PTX was compiled for {program.cluster} (.reqnctapercluster)"
    size = sum(param.size for param in program.params)
    if size > PARAMETER_BYTES:
        yield f"{size} bytes of parameters, more than {PARAMETER_BYTES}"
