"""What a forward kernel is compiled for: a tuned row, and the key that names one compiled kernel.

Both are frozen, hold only plain values (never a tensor, a length or a scale) and can be built, compared and printed on
a machine without a GPU and without the DSL.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Algorithm = Literal["plain", "overlap"]
Turns = Literal["pingpong", "free"]
Rescale = Literal["always", "rising", "lazy"]
Store = Literal["staged", "direct"]
DType = Literal["bf16", "fp16"]
STRATEGY_FIELDS = {"algorithm": Algorithm, "turns": Turns, "rescale": Rescale, "store": Store}
"""The fields of a row that name a strategy, for those who check what a row says."""

ROWS_OF_WARPGROUP = 64
"""Query rows of a math warpgroup: the M of one WGMMA."""


@dataclass(frozen=True)
class ForwardConfig:
    """One row of the forward table: the shape of a tile and the strategies that its kernel is built from.

    `head_dim` and `head_dim_v` are the widths the tile is padded to; a problem may be narrower (multiples of 8), and
    TMA fills the missing columns with zeros on the way in and drops them on the way out.
    """

    head_dim: int
    head_dim_v: int
    causal: bool
    tile_m: int
    """Query rows of a CTA; 64 for each math warpgroup."""
    tile_n: int
    """Keys of one main loop iteration."""
    stages: int = 2
    """Depth of the K and of the V ring."""
    algorithm: Algorithm = "overlap"
    """`plain` is Algorithm 1 of the paper, `overlap` is Algorithm 2."""
    turns: Turns = "pingpong"
    """Whether the math warpgroups take turns on the tensor cores."""
    rescale: Rescale = "rising"
    """When O is scaled: `always`, or only where a row maximum is `rising` (the same bits). `lazy` also keeps the old
    maximum while the new one lies at most 8 above it, in log2: a little faster, 2-4 % more error."""
    store: Store = "staged"
    """`staged`: O through shared memory and TMA. `direct`: 16-byte stores from registers, where O does not fit."""

    @property
    def math_warpgroups(self) -> int:
        return self.tile_m // ROWS_OF_WARPGROUP

    @property
    def threads(self) -> int:
        return 128 * (1 + self.math_warpgroups)


@dataclass(frozen=True)
class KernelKey:
    """Everything a compiled forward kernel depends on. Two equal keys mean one compiled kernel."""

    config: ForwardConfig
    dtype: DType
    negative_scale: bool = False
    """A negative softmax scale turns the row maximum into a row minimum, so it is compiled in; the value is not."""

    @property
    def name(self) -> str:
        """A readable, unique name that is safe in a file name.

        For example `forward_bf16_d128_causal_m128n128s2_overlap_pingpong_rising_staged`.
        """
        c = self.config
        dims = f"d{c.head_dim}" if c.head_dim == c.head_dim_v else f"d{c.head_dim}v{c.head_dim_v}"
        mask = "causal" if c.causal else "full"
        sign = "_negative" if self.negative_scale else ""
        return (
            f"forward_{self.dtype}_{dims}_{mask}_m{c.tile_m}n{c.tile_n}s{c.stages}"
            f"_{c.algorithm}_{c.turns}_{c.rescale}_{c.store}{sign}"
        )

    def as_dict(self) -> dict[str, object]:
        return asdict(self)
