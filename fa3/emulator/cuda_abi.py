"""The shapes of C that the host code of a kernel speaks: a CUDA launch, and tensors that pose as CUDA memory."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import tvm_ffi
from torch import Tensor
from torch.utils.dlpack import to_dlpack

from fa3.errors import LaunchError

COOPERATIVE, CLUSTER, PROGRAMMATIC = 2, 4, 6
"""Attributes of a launch (cudaLaunchAttributeID): cooperative, cluster dimensions, programmatic stream serialization
(PDL)."""
ATTRIBUTE_WORDS = {COOPERATIVE: 1, CLUSTER: 3, 5: 1, PROGRAMMATIC: 1, 8: 1, 14: 1}
"""Attribute -> how many 32-bit words of its value mean anything; the host code leaves the rest as it was. 5, 8 and 14
(how clusters are spread, priority, carveout) are hints."""


class _Attribute(ctypes.Structure):
    """cudaLaunchAttribute."""

    _fields_: ClassVar[Any] = [("id", ctypes.c_int32), ("pad", ctypes.c_int32), ("value", ctypes.c_uint32 * 16)]


class Config(ctypes.Structure):
    """cudaLaunchConfig_t."""

    _fields_: ClassVar[Any] = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_smem", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint32),
    ]


OnLaunch = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(Config), ctypes.c_char_p, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p)
)
"""(configuration, kernel, most dynamic shared memory in bytes, parameters) -> cudaError_t."""


def attributes(config: Config) -> dict[int, tuple[int, ...]]:
    """The launch's attributes: id -> the words of its value. LaunchError for one that the emulator does not know."""
    found = {}
    for attribute in config.attributes[: config.attribute_count]:
        words = ATTRIBUTE_WORDS.get(attribute.id)
        if words is None:
            raise LaunchError(f"the emulator does not know the launch attribute {attribute.id} (cudaLaunchAttributeID)")
        found[attribute.id] = tuple(attribute.value[:words])
    return found


class _DLTensor(ctypes.Structure):
    """DLTensor of DLPack, which a capsule named "dltensor" begins with."""

    _fields_: ClassVar[Any] = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("dims", ctypes.c_int32),
        ("dtype", ctypes.c_uint32),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    ]


CUDA = 2
"""kDLCUDA."""
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


class PosesAsCuda:
    """A CPU tensor that tells a DLPack consumer that it lies on a GPU. It must outlive the consumer's tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._capsule = to_dlpack(tensor.detach())
        described = _DLTensor.from_address(_capsule_pointer(self._capsule, b"dltensor"))
        described.device_type = CUDA
        # torch may describe dimensions of size 1 with strides of its own; the host code checks those that it was given
        self._strides = (ctypes.c_int64 * tensor.dim())(*tensor.stride())
        described.strides = self._strides

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0

    @property
    def argument(self) -> Any:
        """The tensor as an argument of a TVM-FFI function."""
        return tvm_ffi.from_dlpack(self)
