"""Backward kernels that compute only some of dQ, dK and dV: as sound as the whole ones, without the others' GEMMs."""

from functools import cache

import pytest

from fa3.compile import artefacts
from fa3.config.backward import ALL, BackwardConfig, BackwardKey, backward_keys
from fa3.config.backward_budget import backward_registers, backward_smem
from fa3.config.backward_table import backward_config
from fa3.sass import Report, of_artefacts

pytestmark = pytest.mark.compile

CASES = [
    *((backward_config(128, 128, causal=True), wanted) for wanted in ("q", "k", "v", "qk", "qv", "kv")),
    (backward_config(64, 64, causal=False), "qv"),
    *((backward_config(192, 128, causal=True), wanted) for wanted in ("k", "qv")),
    *((backward_config(256, 256, causal=False), wanted) for wanted in ("q", "v", "kv")),
]
LOOPS = 2
"""The main loop's text appears for the blocks that the mask cuts, and for the others."""
SUMS = ("cp.reduce.async.bulk.global", "red.relaxed.gpu.global.add.v4")
"""How dQ is added up: in bulk, or from registers."""


@cache
def compiled(config: BackwardConfig, wanted: str) -> tuple[str, Report]:
    """(PTX, report) of the main kernel."""
    made = artefacts(BackwardKey("backward", config, "bf16", wanted=wanted))
    return made.ptx, of_artefacts(made)


case = pytest.mark.parametrize(
    ("config", "wanted"), CASES, ids=lambda x: x if isinstance(x, str) else f"d{x.head_dim}v{x.head_dim_v}"
)


@case
def test_as_sound_as_the_whole(config, wanted):
    _, report = compiled(config, wanted)
    assert (report.spill_bytes, report.stack_bytes, report.warnings) == (0, 0, ())
    budget = backward_registers(config, wanted)
    assert report.setmaxnreg == {"dec": (budget.load,), "inc": (budget.math,)}
    assert report.smem_bytes == backward_smem(config, wanted).total_bytes <= backward_smem(config).total_bytes


@case
def test_no_gemm_of_what_is_not_wanted(config, wanted):
    absent = [name for name in ALL if name not in wanted] + ["dp"] * (wanted == "v")
    spared = LOOPS * sum(gemm_steps(config)[name] for name in absent)
    _, whole = compiled(config, ALL)
    _, some = compiled(config, wanted)
    assert instructions(whole) - instructions(some) == spared


@case
def test_nothing_of_it_is_stored(config, wanted):
    ptx, report = compiled(config, wanted)
    assert bool(report.mix["UTMASTG"]) == (wanted != "q")
    assert any(instruction in ptx for instruction in SUMS) == ("q" in wanted)


def instructions(report: Report) -> int:
    return sum(form.count for form in report.wgmma)


def gemm_steps(c: BackwardConfig) -> dict[str, int]:
    """WGMMA instructions of a warpgroup for one query block: of dQ, dK, dV, and of dP."""
    dq_slabs = c.dq_slices // c.dq_parts
    steps = {"q": dq_slabs * c.tile_n // 16, "k": c.tile_m // 16, "v": c.tile_m // 16, "dp": c.head_dim_v // 16}
    if c.design != "registers":
        for name, dim in (("k", c.head_dim), ("v", c.head_dim_v)):
            slabs = dim // 64
            steps[name] *= slabs if slabs % c.math_warpgroups else slabs // c.math_warpgroups
    return steps


@pytest.mark.parametrize("clears", [True, False])
def test_prepare_clears_only_for_dq(clears):
    """There is 16 bytes wide storing of zeros, and a counter, or neither."""
    key = backward_keys(backward_config(128, 128, causal=True), "bf16", "qkv" if clears else "kv")[0]
    made = artefacts(key)
    report = of_artefacts(made)
    assert ("st.global.v4" in made.ptx) == clears
    assert (report.spill_bytes, report.warnings) == (0, ())


def test_without_dq_nothing_is_finished():
    config = backward_config(64, 64, causal=False)
    assert [key.part for key in backward_keys(config, "bf16", "kv")] == ["backward_prepare", "backward"]
    assert len(backward_keys(config, "bf16", "q")) == 3
