"""A launch that can be run again and again, and the outputs that it should have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fa3.emulator.backend import KernelRun

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SEED = 7


class Shape(Protocol):
    """The size of a problem."""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class Output:
    """What a tensor should hold after a run."""

    name: str
    right: Tensor
    """float64."""
    tolerance: float
    """Absolute."""
    read: Callable[[Tensor], Tensor] = lambda found: found
    """Brings the kernel's tensor into the form of `right`."""
    exact: Tensor | None = None
    """Where nothing but the right value will do."""


@dataclass(frozen=True)
class Case:
    shape: Any
    run: KernelRun
    outputs: tuple[Output, ...]

    def wrong(self, results: Mapping[str, Tensor]) -> Iterator[str]:
        """A sentence for each output that differs from the reference by more than rounding explains."""
        for output in self.outputs:
            found, right = output.read(results[output.name]).double(), output.right
            bad = ~torch.isclose(found, right, rtol=0, atol=output.tolerance, equal_nan=False) & (found != right)
            if output.exact is not None:
                bad |= output.exact & (found != right)
            if bad.any():
                first = torch.nonzero(bad)[0].tolist()
                what = f"elements of {output.name} are wrong, the first of them {first}"
                yield f"{int(bad.sum())} of {bad.numel()} {what}."
