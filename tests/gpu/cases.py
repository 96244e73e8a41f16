"""A random attention problem as a plain value: it can be drawn, printed in one line, and built again from that line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    seqlen_q: int
    seqlen_k: int
    head_dim: int = 64
    head_dim_v: int = 64
    batch: int = 1
    heads_kv: int = 1
    group: int = 1
    """Query heads for each key and value head."""
    causal: bool = False
    dtype: str = "bf16"
    scale: float | None = None
    amplitude: float = 1.0
    """Standard deviation of q: a large one makes the softmax sharp."""
    layouts: tuple[str, str, str] = ("contiguous", "contiguous", "contiguous")
    """How q, k and v lie in memory; the names of `LAYOUTS`."""
    seed: int = 0

    @property
    def heads_q(self) -> int:
        return self.heads_kv * self.group

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Of q, k and v."""
        return (
            (self.batch, self.seqlen_q, self.heads_q, self.head_dim),
            (self.batch, self.seqlen_k, self.heads_kv, self.head_dim),
            (self.batch, self.seqlen_k, self.heads_kv, self.head_dim_v),
        )

    def inputs(self, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v from N(0, 1), each a view into a buffer that is NaN wherever the view is not."""
        generator = torch.Generator(device=device).manual_seed(self.seed)
        q, k, v = (torch.randn(shape, generator=generator, device=device) for shape in self.shapes)
        q = q * self.amplitude
        placed = [LAYOUTS[name](x.to(DTYPES[self.dtype])) for name, x in zip(self.layouts, (q, k, v), strict=True)]
        return placed[0], placed[1], placed[2]

    @property
    def reproducer(self) -> str:
        """A command that runs this case alone."""
        return f".venv/bin/python -m tests.gpu.reproduce '{json.dumps(asdict(self))}'"

    @staticmethod
    def from_json(text: str) -> Case:
        fields = json.loads(text)
        return Case(**{**fields, "layouts": tuple(fields["layouts"])})


def _nan_buffer(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.full(shape, NAN, dtype=like.dtype, device=like.device)


def contiguous(x: Tensor) -> Tensor:
    return x.contiguous()


def heads_first(x: Tensor) -> Tensor:
    """(B, H, S, D) in memory, as most models hold it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def sequence_first(x: Tensor) -> Tensor:
    """(S, B, H, D) in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def cut(x: Tensor) -> Tensor:
    """Rows 5 to 5 + S of a longer cache, whose other rows are NaN."""
    b, s, h, d = x.shape
    buffer = _nan_buffer(x, (b, s + 300, h, d))
    buffer[:, 5 : 5 + s] = x
    return buffer[:, 5 : 5 + s]


def packed(x: Tensor) -> Tensor:
    """Some heads of a buffer with more of them, as q, k and v are in one packed projection."""
    b, s, h, d = x.shape
    buffer = _nan_buffer(x, (b, s, h + 3, d))
    buffer[:, :, 2 : 2 + h] = x
    return buffer[:, :, 2 : 2 + h]


def narrow(x: Tensor) -> Tensor:
    """The middle columns of wider rows: a tile that is read too wide meets a NaN."""
    b, s, h, d = x.shape
    buffer = _nan_buffer(x, (b, s, h, d + 24))
    buffer[..., 16 : 16 + d] = x
    return buffer[..., 16 : 16 + d]


def every_other_row(x: Tensor) -> Tensor:
    b, s, h, d = x.shape
    buffer = _nan_buffer(x, (b, 2 * s, h, d))
    buffer[:, ::2] = x
    return buffer[:, ::2]


def odd_unit_strides(x: Tensor) -> Tensor:
    """A dimension of one element may have any stride at all; nothing may look at it."""
    x = x.contiguous()
    return x.as_strided(x.shape, [3 if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True)])


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    f.__name__: f
    for f in (contiguous, heads_first, sequence_first, cut, packed, narrow, every_other_row, odd_unit_strides)
}
