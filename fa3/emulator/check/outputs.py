"""Outputs: every element is written exactly once in a launch. TMA descriptors: they keep the rules.

A tile that is computed twice leaves right numbers behind, and one that is computed by nobody may lie where no test
looks; both show in the count of writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from fa3.emulator.check.boxes import box_of, element_addresses
from fa3.emulator.check.checker import Checker, Site, site_of
from fa3.emulator.check.names import Names
from fa3.emulator.check.ordering import Order
from fa3.emulator.check.places import short

if TYPE_CHECKING:
    from fa3.emulator.machine import Machine
    from fa3.emulator.observe import Addresses
    from fa3.emulator.operations import Operation
    from fa3.emulator.warp import Warp
    from fa3.sass.ptx_code import Statement

NOBODY = -1


@dataclass
class Output:
    """A tensor that the kernel writes."""

    name: str
    address: int
    item: int
    tensor: torch.Tensor
    writers: NDArray[np.int32]
    """Element of the allocation -> number of who wrote it."""
    elements: NDArray[np.bool_]
    """Which of them belong to the tensor: all, if it is dense."""
    sites: list[Site] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, address: int, nbytes: int, tensor: torch.Tensor) -> Output:
        item = tensor.element_size()
        elements = torch.zeros(nbytes // item, dtype=torch.bool)
        elements.as_strided(tensor.shape, tensor.stride()).fill_(True)
        writers = np.full(nbytes // item, NOBODY, np.int32)
        return cls(name, address, item, tensor, writers, elements.numpy())

    def index_of(self, element: int) -> str:
        """Where an element of the allocation is in the tensor: "[0, 17, 2, 0]"."""
        sizes, strides = tuple(self.tensor.shape), tuple(self.tensor.stride())
        index = [0] * len(sizes)
        for dim in sorted(range(len(sizes)), key=lambda dim: -strides[dim]):
            if sizes[dim] > 1 and strides[dim]:
                index[dim], element = divmod(element, strides[dim])
        return str(index)


class Outputs(Checker):
    """Watches the tensors that `Names.written_once` says. What is added to (reductions, atomics) may be so often."""

    def __init__(self, names: Names, order: Order) -> None:
        super().__init__(names)
        self.order = order
        self._outputs: list[Output] = []
        self._seen: set[int] = set()
        """PTX lines of copies whose descriptor was looked at."""

    def started(self, machine: Machine) -> None:
        launch = machine.launch
        tensors = getattr(launch, "tensors", {})
        for allocation in launch.allocations:
            tensor = tensors.get(allocation.name)
            if allocation.writable and tensor is not None and allocation.name in self.names.written_once:
                self._outputs.append(Output.of(allocation.name, allocation.address, allocation.nbytes, tensor))

    def memory(self, warp: Warp, at: Statement, addresses: Addresses, nbytes: int, write: bool) -> None:
        if write and len(addresses):
            adds = at.name in ("atom", "red")
            self._write(site_of(warp, at), addresses.astype(np.uint64), nbytes, adds)

    def issued(self, warp: Warp, operation: Operation) -> None:
        site, adds = site_of(warp, operation.at), operation.kind.endswith("reduce")
        if operation.kind.startswith("tma"):
            self._tensor(site, operation, adds)
        elif operation.kind in ("bulk.store", "bulk.reduce"):
            first, last = operation.global_range
            self._write(site, np.array([first], np.uint64), last - first, adds)

    def _tensor(self, site: Site, operation: Operation, adds: bool) -> None:
        known = operation.at.line in self._seen
        if known and operation.kind == "tma.load":
            return
        box = box_of(operation, self.order.lanes(operation.warp))
        if box is None:
            return
        if not known:
            self._seen.add(operation.at.line)
            for problem in box[0].problems():
                self.find("descriptor", site, f"{problem} ({box[0]}).")
        if operation.kind != "tma.load":
            self._write(site, element_addresses(*box), box[0].item, adds)

    def _write(self, site: Site, addresses: NDArray[np.uint64], nbytes: int, adds: bool) -> None:
        """`nbytes` from each address on."""
        for output in self._outputs if len(addresses) else ():
            first = int(addresses[0]) - output.address
            if 0 <= first < output.item * len(output.writers):
                offsets = (addresses - np.uint64(output.address)).astype(np.int64)[:, None]
                elements = ((offsets + np.arange(0, nbytes, output.item)) // output.item).reshape(-1)
                self._count(output, site, elements[(elements >= 0) & (elements < len(output.writers))], adds)
                return

    def _count(self, output: Output, site: Site, elements: NDArray[np.int64], adds: bool) -> None:
        writers = output.writers[elements]
        again = np.flatnonzero(writers != NOBODY)
        if len(again) and not adds:
            element, other = int(elements[again[0]]), output.sites[int(writers[again[0]])]
            happened = (
                f"{self.who(site)} writes {len(again)} elements of {output.name} again, from "
                f"{output.index_of(element)} on, which {self.who(other)} has written at {short(other.at)}."
            )
            self.find("written twice", site, happened, other, output.name)
        if not output.sites or output.sites[-1] != site:
            output.sites.append(site)
        output.writers[elements] = len(output.sites) - 1

    def ended(self, machine: Machine) -> None:
        for output in self._outputs:
            missing = np.flatnonzero((output.writers == NOBODY) & output.elements)
            if len(missing):
                happened = (
                    f"{len(missing)} of {int(output.elements.sum())} elements of {output.name} are never written, the "
                    f"first of them {output.index_of(int(missing[0]))}."
                )
                site = output.sites[-1] if output.sites else Site(-1, None)
                self.find("never written", site, happened, subject=output.name)
