"""What things cost on an SM of sm_90a, in cycles of its clock.

Every figure says where it comes from:

* [guide]   CUDA C++ programming guide, "Throughput of Native Arithmetic Instructions", compute capability 9.0: results
            per clock and SM. N results a clock keep a pipe of one of the four sub-partitions busy for 4 * 32 / N cycles
            a warp.
* [paper]   H100 architecture white paper and FlashAttention-3 (arXiv 2407.08608): 989 TFLOP/s of dense 16-bit work at
            132 SMs and 1.83 GHz are 4096 FLOPs, or 2048 multiply-adds, per clock and SM; twice that in 8 bit.
* [H200]    measured on an H200 with micro-benchmarks of single instructions, or of copies (clock64 in the kernel).
* [assumed] a plausible figure of the right size that nobody here has measured. It matters little, or it is in `FREE`.
* [fitted]  chosen by `fa3.emulator.timing.calibrate` against whole kernels on an H200.

What is left out: contention for shared memory between WGMMA, TMA and threads; register bank conflicts; the instruction
cache; the card's power limit (it changes the clock, not the cycles); other CTAs on the same SM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

SUB_PARTITIONS = 4
WARPS_OF_WARPGROUP = 4
PIPES = ("issue", "alu", "fma", "mufu", "lsu")
"""What the warps of a sub-partition share."""


class Unit(NamedTuple):
    """Where an instruction goes: for how many `cycles` a warp occupies the pipe, and the `latency` of its result."""

    pipe: str
    cycles: float
    latency: float


UNITS: dict[str, Unit] = {
    # [guide] 128 results a clock, [H200] 120; latency [assumed], as in every generation since Volta
    "fma": Unit("fma", 32 / 30, 4),
    # [guide] 64
    "imad": Unit("fma", 2, 5),
    # [guide] 64 for max, comparison, selection, logic, integers; [H200] 63
    "alu": Unit("alu", 32 / 15.75, 4.5),
    # two of those
    "wide": Unit("alu", 64 / 15.75, 9),
    # [guide] 64 from 32 bits to packed 16; [H200] 63 instructions
    "convert": Unit("alu", 32 / 15.75, 5),
    # [guide] 16, [H200] 16.0; latency [assumed]
    "mufu": Unit("mufu", 8, 20),
    # [guide] 32, [H200] 32; latency [assumed], near that of shared memory
    "shuffle": Unit("lsu", 4, 24),
    "vote": Unit("alu", 2, 12),
    "free": Unit("issue", 0, 0),
}
"""Kind of an instruction -> its unit. All of them also take one issue slot, but `free`."""


@dataclass(frozen=True)
class Cost:
    """The model. Cycles, unless it says otherwise."""

    units: Mapping[str, Unit] = field(default_factory=lambda: UNITS, hash=False)
    chunk: int = 16
    """Instructions that a warp issues before others get their chance: the grain of the replay, not a property of the
    hardware. Warpgroups fall into step in one way or another depending on such small things, on a GPU as well, so that
    `predict` takes the mean over several grains."""
    issue: float = 1.0
    """[paper] A sub-partition issues one warp instruction a cycle. More than 1 stands for what keeps slots empty."""
    early_wait: float = 0.4
    """Where ptxas puts a `wgmma.wait_group` that the PTX has behind exponentials: behind this share of them. In the
    SASS of the table's rows 0.32 to 0.45 (`python -m fa3.sass`: exponentials of a main loop that run under a GEMM)."""

    # ---- tensor cores
    mma_rate_16: float = 2048.0
    """[paper] Multiply-adds per cycle and SM for 16-bit inputs: m64n128k16 takes 64 cycles."""
    mma_shared_bandwidth: float = 128.0
    """[guide] Bytes per cycle at which a WGMMA reads operands in shared memory."""
    mma_start: float = 15.0
    """[fitted] For which the tensor cores stand still before the first WGMMA behind a `wgmma.fence`. The rows that they
    bind run at 96 to 98 % of their peak in the main loop (H200)."""
    under_gemm: float = 1.9
    """[fitted] By how much other instructions slow down while the tensor cores work, as if they had half of the issue
    slots; accumulators go through the same register file. At head dims 64 and 128 this decides: with 1.0 their blocks
    would come out 10 to 30 % too fast."""
    mma_issue: float = 4.0
    """[assumed] Issue slots of one WGMMA: itself and the uniform instructions that build its descriptors (SASS: 3)."""
    mma_latency: float = 60.0
    """[fitted] From the last WGMMA leaving the tensor cores to the first instruction behind the wait."""
    mma_queue: int = 64
    """[fitted] WGMMAs that a warpgroup may have in flight before issuing another one makes it wait. With 1 or 2, head
    dims 192 and 256 would come out 8 to 15 % too slow; 64 stands for as many as there are."""

    # ---- waiting and waking
    wait_hit: float = 20.0
    """[assumed] `mbarrier.try_wait` on a phase that is complete, with its branch."""
    wake: float = 30.0
    """[assumed] From the completion of a phase to the first instruction of a warp that slept on it."""
    arrive: float = 10.0
    """[assumed] From an arrival to the barrier's having counted it."""
    join: float = 25.0
    """[assumed] From the last arrival at a named barrier to the first instruction behind bar.sync."""
    branch: float = 8.0
    """[assumed] A branch that the compiler cannot turn into predicates."""
    fence: float = 20.0
    """[assumed] fence.proxy.async, membar, setmaxnreg, griddepcontrol."""

    # ---- copies
    copy_issue: float = 10.0
    """[assumed] Issuing one bulk copy, and the least time between two that the copy engine starts."""
    load_latency: float = 300.0
    """[H200] Until the first byte: one 16 KB tile took 540 to 565 from issue to barrier, 256 of them for its bytes."""
    load_bandwidth: float = 64.0
    """[H200] Bytes per cycle from L2 to one SM, all SMs loading: 37-43 of its own, 55-100 where CTAs share K and V."""
    store_bandwidth: float = 32.0
    """[assumed] Bytes per cycle from shared memory to L2."""
    reduce_bandwidth: float = 15.0
    """[H200] Bytes per cycle and SM that the L2 adds to float32 numbers, by bulk reductions or by threads."""
    store_latency: float = 600.0
    """[assumed] Until a bulk store is complete; that its source has been read is known `store_read` after that has."""
    store_read: float = 40.0

    # ---- accesses by threads
    shared_latency: float = 30.0
    """[assumed] A load from shared memory; each further wavefront takes a cycle more ([guide], 128 B a cycle)."""
    global_latency: float = 500.0
    """[assumed] A load from global memory that hits the L2."""
    atomic_latency: float = 700.0
    """[assumed] An atomic operation on global memory, with its result."""
    global_wavefront: float = 2.0
    """[H200] Cycles per 128 bytes stored by threads, about 64 B a cycle into the L2."""

    # ---- what whole kernels take longer than their timelines; `predict` adds it
    tile: float = 1000.0
    """[fitted] Each tile. Perhaps code that runs once a tile and is not in the instruction cache."""
    cut: float = 2000.0
    """[fitted] Each tile whose last key block reaches past the last key. It is not the mask, which is emulated, and
    causal tiles that end before the last key do not have it; what remains is that TMA fills in zeros."""
    launch: float = 4250.0
    """[fitted] A whole launch, as `sm__cycles_elapsed.max` of Nsight Compute counts it: before the first instruction of
    a CTA and after its last."""

    def mma_cycles(self, n: int, k: int, bits: int, registers: bool) -> float:
        """m64 n k on the tensor cores: arithmetic, or its operands' way out of shared memory."""
        arithmetic = 64 * n * k / (self.mma_rate_16 * 16 / bits)
        operands = (n + (0 if registers else 64)) * k * bits / 8
        return max(arithmetic, operands / self.mma_shared_bandwidth)

    def with_constants(self, **constants: Any) -> Cost:
        """A copy with other constants. TypeError for one that does not exist."""
        return replace(self, **constants)


FREE: dict[str, tuple[float, ...]] = {
    "mma_queue": (1, 2, 8, 64),
    "under_gemm": (1.0, 1.3, 1.6, 1.8, 1.9, 2.0, 2.2),
    "mma_start": (0.0, 15.0, 30.0, 50.0),
    "tile": (0.0, 500.0, 1000.0, 1500.0, 2000.0),
    "cut": (0.0, 1000.0, 2000.0, 3000.0),
}
"""The constants that are fitted, and the values that are tried. Besides them only `launch` is, to what remains. All
others stand as they are."""
