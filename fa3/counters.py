"""Zeroed counters for the kernels' tile schedulers, and what else a launch must know about a device.

A kernel draws its tiles from an int32 counter in global memory and leaves it 0 again. Two launches that may run at the
same time need different counters.
"""

from __future__ import annotations

import itertools
import threading

import torch
from torch import Tensor

RING = 1 << 14
"""Counters of eager launches, used in turn. Two launches share one only if 16383 lie between them; CUDA does not let
that many launches be in flight."""

RESERVE = 1 << 16
"""Counters for launches recorded in CUDA graphs, each handed out once (256 KiB)."""


class Device:
    """The counters and the size of one GPU. Made once for each GPU that is used; see `device`."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.sm_count: int = torch.cuda.get_device_properties(index).multi_processor_count
        self.alone: bool = torch.cuda.device_count() == 1
        """With one GPU the tensors' device is the current one, and need not be compared with it."""
        self._counters: Tensor | None = None
        # next() on itertools.count is one step of the interpreter: threads never draw the same number.
        self._eager = itertools.count()
        self._captured = itertools.count()

    def take(self) -> tuple[Tensor, int]:
        """(counters, slot) for one launch on the current stream, eager or being captured into a CUDA graph.

        An eager launch takes the next slot of the ring. A captured launch may be replayed at any time, next to eager
        launches and to other graphs, so that its slot must be its own for good: it comes from the reserve and never
        goes back. (Two replays of one graph never overlap: CUDA runs an executable graph one at a time.) The counters
        live as long as the process, so that a graph can be replayed, or destroyed, whenever.

        Without a reserve, because it is used up or because the first launch of all is a captured one, the capture
        allocates a counter of its own: the memory belongs to the graph's pool, and filling it with 0 becomes a node of
        the graph, which costs a microsecond at each replay and is as safe.
        """
        counters = self._counters
        if torch.cuda.is_current_stream_capturing():
            slot = RING + next(self._captured) if counters is not None else RING + RESERVE
            if counters is None or slot >= RING + RESERVE:
                return torch.zeros(1, dtype=torch.int32, device=self._device()), 0
            return counters, slot
        if counters is None:
            counters = self._make()
        return counters, next(self._eager) % RING

    def _make(self) -> Tensor:
        with _lock:
            if self._counters is None:
                counters = torch.zeros(RING + RESERVE, dtype=torch.int32, device=self._device())
                self._wait()  # other streams use them next, and nothing else orders those after the zeros
                self._counters = counters
            return self._counters

    def _device(self) -> torch.device:
        return torch.device("cuda", self.index)

    def _wait(self) -> None:
        torch.cuda.current_stream(self.index).synchronize()


_devices: dict[int, Device] = {}
_lock = threading.Lock()


def device(index: int) -> Device:
    """The one `Device` of a GPU."""
    if index not in _devices:
        made = Device(index)
        with _lock:
            _devices.setdefault(index, made)
    return _devices[index]
