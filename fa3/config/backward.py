"""What the backward's kernels are compiled for: a row of their table, and the key that names one compiled kernel."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from .types import ROWS_OF_WARPGROUP, DType, KernelKey

Design = Literal["registers", "shared", "pairs"]
DQGemm = Literal["transposed", "rows", "lone"]
DQStore = Literal["staged", "direct"]
DQStart = Literal["cleared", "stored"]
KeyOrder = Literal["heads", "sections"]
Part = Literal["backward_prepare", "backward", "backward_finish"]
Wanted = Literal["q", "k", "v", "qk", "qv", "kv", "qkv"]
"""Which of dQ, dK and dV are computed."""
BACKWARD_STRATEGY_FIELDS = {
    "design": Design,
    "dq_gemm": DQGemm,
    "dq_store": DQStore,
    "dq_start": DQStart,
    "order": KeyOrder,
}
PARTS: tuple[Part, ...] = ("backward_prepare", "backward", "backward_finish")
ALL: Wanted = "qkv"


@dataclass(frozen=True)
class BackwardConfig:
    """One row of the backward table. A CTA owns `tile_n` keys and walks over the queries in steps of `tile_m`.

    `head_dim` and `head_dim_v` are the widths that tiles are padded to, as in `ForwardConfig`.
    """

    head_dim: int
    head_dim_v: int
    causal: bool
    tile_m: int
    """Query rows of one main loop iteration."""
    tile_n: int
    """Keys of a CTA. In design `registers` 64 for each math warpgroup."""
    math_warpgroups: int = 2
    design: Design = "registers"
    """Where the GEMMs of dV and dK find P and dS. `registers`: each warpgroup owns 64 keys (`kernels/backward.py`).
    `shared`: the warpgroups share dK and dV out by dimensions, where those of 64 keys are too many registers
    (`kernels/backward_wide.py`). `pairs`: as `shared`, and two CTAs exchange dS, so that each adds half of dQ
    (`kernels/backward_pair.py`)."""
    stages_q: int = 2
    stages_do: int = 2
    stages_ds: int = 2
    """With one, the warpgroups meet twice in every step: before dS is overwritten, and when it is complete."""
    overlap_dq: bool = True
    """Whether dQ is started while dV is under way; not where registers are too few to keep both."""
    scores_ahead: bool = False
    """Whether S of the next query block is started before the last dQ of this one leaves; not in design `registers`."""
    dq_gemm: DQGemm = "transposed"
    """Who computes what of dQ. `transposed`: dQ^T = K^T dS^T, each warpgroup 64 of the dimensions. `rows`: dQ = dS K,
    each warpgroup 64 of the rows. `lone`: dQ = dS K by the first warpgroup."""
    dq_store: DQStore = "staged"
    """`staged`: through shared memory, added by the dQ writer. `direct`: 16-byte reductions from registers."""
    dq_start: DQStart = "cleared"
    """What the sum of dQ starts from. `cleared`: zeros of `backward_prepare`. `stored`: the part of the CTA that comes
    first, which spares the zeros; the others must wait for it."""
    order: KeyOrder = "heads"
    """Of the CTAs. `heads`: all key blocks of a head, then those of the next. `sections`: of some heads at a time all
    first key blocks, then all second ones; under a causal mask these are the longest. Deterministic sums have orders of
    their own."""
    dq_pieces: int = 1
    """Pieces in which a slice of dQ goes through shared memory."""
    stages_dq: int = 1
    """Pieces of each warpgroup that shared memory holds."""

    @property
    def cluster(self) -> int:
        """CTAs that compute dQ together."""
        return 2 if self.design == "pairs" else 1

    @property
    def dims_of_dq(self) -> int:
        """Dimensions of dQ that a CTA computes."""
        return self.head_dim // self.cluster

    @property
    def key_rows(self) -> int:
        """Keys of one slab of K and V in shared memory."""
        return ROWS_OF_WARPGROUP if self.design == "registers" else self.tile_n

    @property
    def key_slabs(self) -> int:
        return self.tile_n // self.key_rows

    @property
    def dq_slices(self) -> int:
        """Parts of dQ, of 64 dimensions or 64 rows each, that a warpgroup computes at a time."""
        rows = {"transposed": self.head_dim, "rows": self.tile_m, "lone": ROWS_OF_WARPGROUP}[self.dq_gemm]
        return rows // ROWS_OF_WARPGROUP

    @property
    def dq_slice(self) -> int:
        """fp32 elements of such a part."""
        return self.tile_m * self.head_dim // self.dq_slices

    @property
    def dq_parts(self) -> int:
        """Warpgroups that have a part in dQ."""
        return 1 if self.dq_gemm == "lone" else self.math_warpgroups

    @property
    def dq_piece(self) -> int:
        """fp32 elements of what goes through shared memory at a time."""
        return self.dq_slice // self.dq_pieces

    @property
    def dq_rounds(self) -> int:
        """Pieces of a warpgroup for one query block."""
        return self.dq_slices // self.dq_parts * self.dq_pieces

    @property
    def threads(self) -> int:
        return 128 * (1 + self.math_warpgroups)


@dataclass(frozen=True)
class BackwardKey:
    """Everything that one of the three kernels depends on. Two equal keys mean one compiled kernel."""

    part: Part
    config: BackwardConfig
    dtype: DType
    dlse: bool = False
    """Whether there is a gradient of LSE; only `backward_prepare` looks at it."""
    deterministic: bool = False
    """Whether dQ is added in the order of the key blocks."""
    wanted: Wanted = ALL
    """The gradients that are computed. `backward_prepare` asks only for dQ."""

    @property
    def name(self) -> str:
        """A readable, unique name that is safe in a file name."""
        c = self.config
        dims = f"d{c.head_dim}" if c.head_dim == c.head_dim_v else f"d{c.head_dim}v{c.head_dim_v}"
        mask = "causal" if c.causal else "full"
        only = "" if self.wanted == ALL else f"_only_{self.wanted}"
        steps = "o" * c.overlap_dq + "a" * c.scores_ahead
        flags = "_dlse" * self.dlse + "_ordered" * self.deterministic + only
        return (
            f"{self.part}_{self.dtype}_{dims}_{mask}_m{c.tile_m}n{c.tile_n}"
            f"_q{c.stages_q}do{c.stages_do}ds{c.stages_ds}{steps}"
            f"_w{c.math_warpgroups}_{c.design}_{c.dq_gemm}_{c.dq_store}_{c.dq_start}"
            f"_{c.order}_p{c.dq_pieces}s{c.stages_dq}{flags}"
        )

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def backward_keys(
    config: BackwardConfig, dtype: DType, wanted: Wanted = ALL, dlse: bool = False, deterministic: bool = False
) -> tuple[BackwardKey, ...]:
    """The kernels of one backward in the order in which they run; without dQ there is nothing to finish.

    What a kernel does not look at is not in its key, so that one kernel serves as many backwards as it can.
    """
    with_dq = "q" in wanted
    prepare = BackwardKey("backward_prepare", config, dtype, dlse=dlse, wanted=ALL if with_dq else "kv")
    main = BackwardKey("backward", config, dtype, deterministic=deterministic and with_dq, wanted=wanted)
    return (prepare, main, BackwardKey("backward_finish", config, dtype)) if with_dq else (prepare, main)


AnyKey = KernelKey | BackwardKey
"""What names a compiled kernel, whichever it is."""
