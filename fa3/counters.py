"""Zeroed counters for the kernels' tile schedulers, and what else a launch must know about a device.

A kernel draws its tiles from an int32 counter in global memory and leaves it 0 again. Two launches that may run at the
same time need different counters.
"""

from __future__ import annotations

import itertools
import threading

import torch
from torch import Tensor

STREAMS = 1 << 10
"""Counters of eager launches, one for each stream: launches on one stream run one after the other and can share it."""

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
        self._of_stream: dict[int, tuple[Tensor, int]] = {}
        # next() on itertools.count is one step of the interpreter: threads never draw the same number.
        self._captured = itertools.count()

    def take(self) -> tuple[Tensor, int]:
        """(counters, slot) for one launch on the current stream, eager or being captured into a CUDA graph.

        An eager launch takes the counter of its stream. A captured launch may be replayed at any time, next to eager
        launches and to other graphs, so that its slot must be its own for good: it comes from the reserve and never
        goes back. (Two replays of one graph never overlap, because CUDA runs an executable graph one at a time; PyTorch
        instantiates a graph once.) The counters live as long as the process, so that a graph can be replayed, or
        destroyed, whenever.

        Without a reserve, because it is used up or because the first launch of all is a captured one, the capture
        allocates a counter of its own: the memory belongs to the graph's pool, and filling it with 0 becomes a node of
        the graph, which costs a microsecond at each replay and is as safe.
        """
        if torch.cuda.is_current_stream_capturing():
            return self._take_captured()
        stream = self._stream()
        taken = self._of_stream.get(stream)
        return taken if taken is not None else self._take_first(stream)

    def _take_captured(self) -> tuple[Tensor, int]:
        slot = STREAMS + next(self._captured)
        if self._counters is None or slot >= STREAMS + RESERVE:
            return torch.zeros(1, dtype=torch.int32, device=self._device()), 0
        return self._counters, slot

    def _take_first(self, stream: int) -> tuple[Tensor, int]:
        """The counter of a stream that launches for the first time. Streams past the first 1024 allocate their own."""
        with _lock:
            used = len(self._of_stream)
            if self._counters is None:
                self._counters = self._zeros(STREAMS + RESERVE)
            fresh = (self._counters, used) if used < STREAMS else (self._zeros(1), 0)
            return self._of_stream.setdefault(stream, fresh)

    def _zeros(self, count: int) -> Tensor:
        counters = torch.zeros(count, dtype=torch.int32, device=self._device())
        self._wait()  # other streams may use them next, and nothing else orders those after the zeros
        return counters

    def _stream(self) -> int:
        """The handle of the current stream: the innermost of what torch.cuda.current_stream does, 1 us cheaper."""
        return torch._C._cuda_getCurrentRawStream(self.index)

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
