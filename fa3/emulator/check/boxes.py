"""The tensor that a TMA copy was started with: its descriptor, its coordinates, and the addresses of its elements."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fa3.emulator.tma_descriptor import Descriptor

if TYPE_CHECKING:
    from fa3.emulator.operations import Operation

_TENSOR = re.compile(r"\[\s*(\S+?)\s*,\s*\{([^}]*)\}\s*\]$")
_ADDRESS_SPACE = 1 << 64


def box_of(operation: Operation, lanes: int) -> tuple[Descriptor, tuple[int, ...]] | None:
    """(descriptor, coordinates) of a copy that the first of `lanes` is just starting; None if it is no tensor copy."""
    at, warp = operation.at, operation.warp
    found = next(filter(None, map(_TENSOR.match, at.operands)), None)
    if found is None:
        return None
    machine, lane = warp.cta.machine, (lanes & -lanes).bit_length() - 1
    sources = machine.code.operands

    def value(text: str, view: str) -> int:
        array: Any = np.asarray(sources.source(text.strip(), view, at)(warp))
        return int(array if array.ndim == 0 else array[lane])

    coordinates = tuple(value(text, "i4") for text in found[2].split(","))
    return machine.descriptor(value(found[1], "u8")), coordinates


def element_addresses(d: Descriptor, coordinates: tuple[int, ...]) -> NDArray[np.uint64]:
    """Global addresses of the elements of a box that are in bounds."""
    addresses = np.array([d.base % _ADDRESS_SPACE], np.uint64)
    for coordinate, dim, size, stride in zip(coordinates, d.dims, d.box, (d.item, *d.strides), strict=True):
        inside = np.arange(max(0, coordinate), min(dim, coordinate + size)).astype(np.uint64)
        addresses = (addresses[:, None] + inside * np.uint64(stride)).reshape(-1)
    return addresses
