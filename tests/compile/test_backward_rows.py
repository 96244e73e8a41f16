"""Every row of the backward tables, compiled for sm_90a: no spill, no warning, registers, the five GEMMs, barriers, and
the way that dQ takes.

`overlap.json` holds how many exponentials each row issues under a GEMM, as for the forward (`test_rows.py`).
"""

from collections import Counter

import pytest

from fa3.compile import artefacts
from fa3.config.backward import BackwardConfig, BackwardKey
from fa3.config.backward_budget import backward_registers, backward_smem
from fa3.config.backward_table import BACKWARD
from fa3.config.types import ROWS_OF_WARPGROUP as ROWS
from fa3.kernels.backward_wide import Share
from fa3.sass import of_artefacts
from fa3.sass.record import backward_keys, overlap
from fa3.sass.regions import split
from fa3.sass.report import listing_of
from tests.compile.test_rows import RECORD, RECORDED, WGMMA_TYPES

pytestmark = pytest.mark.compile

MAIN = backward_keys()
AROUND = [BackwardKey(part, row, "bf16") for row in BACKWARD for part in ("backward_prepare", "backward_finish")]
AROUND += [BackwardKey("backward_prepare", row, "bf16", dlse=True) for row in BACKWARD if row.head_dim == 128]
K = 16
"""Of one matrix instruction, in 16-bit elements."""


@pytest.fixture(params=MAIN, ids=lambda key: key.name, scope="module", name="compiled")
def _compiled(request):
    """One compilation a key, shared by its tests."""
    found = artefacts(request.param)
    return request.param, of_artefacts(found), listing_of(found)


def test_no_spill_and_no_warning(compiled):
    """C75xx: ignored register changes, injected waits, GEMMs run one after the other."""
    _, report, _ = compiled
    assert (report.spill_bytes, report.stack_bytes, report.mix["LDL"], report.mix["STL"]) == (0, 0, 0, 0)
    assert report.warnings == ()


def test_registers(compiled):
    key, report, _ = compiled
    budget = backward_registers(key.config)
    assert report.setmaxnreg == {"dec": (budget.load,), "inc": (budget.math,)}
    assert report.registers == budget.entry


def test_shared_memory(compiled):
    key, report, _ = compiled
    assert report.smem_bytes == backward_smem(key.config).total_bytes


# ------------------------------------------------------------------------------------------------ the five GEMMs
def mma(columns: int, operands: str, count: int) -> Counter[str]:
    return Counter({f"m64n{columns}k{K} {operands}": count})


def in_registers(c: BackwardConfig) -> tuple[Counter[str], Counter[str]]:
    """Matrix instructions of one step: S, dP, dV, dK, where only dV and dK take A from registers; and of dQ."""
    scores = mma(c.tile_m, "SS", (c.head_dim + c.head_dim_v) // K)
    values, keys = mma(c.head_dim_v, "RS", c.tile_m // K), mma(c.head_dim, "RS", c.tile_m // K)
    columns = c.tile_m if c.dq_gemm == "transposed" else c.head_dim
    return scores + values + keys, mma(columns, "SS", c.tile_n // K)


def through_shared(c: BackwardConfig) -> tuple[Counter[str], Counter[str]]:
    """Likewise, all from shared memory: dV, dK and dQ in slabs of 64 dimensions."""
    found = mma(c.tile_n // c.math_warpgroups, "SS", (c.head_dim + c.head_dim_v) // K)
    for share in (Share.of(c.head_dim_v, c), Share.of(c.head_dim, c)):
        found += mma(share.keys, "SS", share.slabs * c.tile_m // K)
    slabs, keys = c.dims_of_dq // ROWS // c.math_warpgroups, c.tile_n * c.cluster
    return found, mma(c.tile_m, "SS", slabs * keys // K)


def test_the_main_loops_hold_the_five_gemms_and_no_more(compiled):
    key, report, _ = compiled
    c = key.config
    gemms, dq = (in_registers if c.design == "registers" else through_shared)(c)
    wanted = [gemms + dq, gemms] if c.dq_gemm == "lone" else [gemms + dq]
    asked = {f"{form.shape} {form.operands}" for form in report.wgmma}  # ptxas may add an m64n8k16 of its own
    loops = [Counter({form: n for form, n in loop.mma.items() if form in asked}) for loop in report.main_loops]
    assert all(loop in wanted for loop in loops) and all(each in loops for each in wanted)
    assert {form.types for form in report.wgmma} == {WGMMA_TYPES[key.dtype]}
    for form in report.wgmma:
        assert report.mma[f"{form.shape} {form.operands}"] == form.count, "ptxas keeps every one of them"


def test_every_score_has_one_exponential(compiled):
    key, report, _ = compiled
    c = key.config
    keys = ROWS if c.design == "registers" else c.tile_n // c.math_warpgroups
    assert {loop.ex2_total for loop in report.main_loops} == {c.tile_m * keys // 128}


def test_no_phase_is_frozen(compiled):
    _, report, _ = compiled
    assert not report.frozen_waits, "\n".join(report.frozen_waits)


def test_overlap_is_as_recorded(compiled):
    key, report, _ = compiled
    assert key.name in RECORDED, f"{key.name} is a new row: {RECORD}"
    recorded = RECORDED[key.name]
    share, least = (each["ex2_in_flight"] / each["ex2_total"] for each in (overlap(report), recorded))
    assert share >= least, (
        f"{key.name}: {report.ex2_in_flight} of {report.ex2_total} exponentials under a GEMM, "
        f"recorded {recorded['ex2_in_flight']} of {recorded['ex2_total']}; if the change is meant: {RECORD}"
    )


# ------------------------------------------------------------------------------------------------ barriers, dQ
def main_loops(listing):
    return [Counter(listing.instructions[i].opcode for i in loop.indices) for loop in split(listing) if loop.main]


def named(opcodes: Counter[str], opening: str) -> int:
    return sum(count for opcode, count in opcodes.items() if f"{opcode}.".startswith(f"{opening}."))


def test_warpgroups_meet_only_over_ds_and_turns(compiled):
    """Once a step, and once more where P and dS have no second stage; in `direct` the turnstile joins each warpgroup
    before its sums and behind them."""
    key, _, listing = compiled
    c = key.config
    meetings = 1 if c.stages_ds > 1 else 2
    if key.deterministic and c.dq_store == "direct":
        meetings += 2
    assert {named(loop, "BAR") for loop in main_loops(listing)} == {meetings}


def test_dq_leaves_by_the_writer_or_in_vectors(compiled):
    key, report, listing = compiled
    c, loops = key.config, main_loops(listing)
    vectors = [named(loop, "REDG.E.ADD.F32x4") for loop in loops]
    if c.dq_store == "staged":
        assert report.mix["UBLKRED"] == c.dq_parts * c.dq_rounds, "one bulk operation for each piece, of the dQ writer"
        assert not any(named(loop, "UBLKRED") + named(loop, "REDG") for loop in loops), "no math warpgroup adds"
    else:
        of_thread = c.tile_m * c.dims_of_dq // c.math_warpgroups // 128 // 4
        assert report.mix["UBLKRED"] == 0 and set(vectors) == {of_thread}


def test_who_looks_at_counters(compiled):
    """Whoever takes turns, or must learn who is first."""
    key, _, listing = compiled
    opcodes = Counter(instruction.opcode for instruction in listing.instructions)
    counted = opcodes["REDG.E.ADD.STRONG.GPU"], named(opcodes, "LDG.E.STRONG.GPU")
    assert all(counted) if key.deterministic or key.config.dq_start == "stored" else not any(counted)


def test_the_chain_waits_and_lets_go(compiled):
    """griddepcontrol: somebody waits for backward_prepare, and backward_finish may be launched early."""
    _, _, listing = compiled
    opcodes = Counter(instruction.opcode for instruction in listing.instructions)
    assert named(opcodes, "ACQBULK") and named(opcodes, "PREEXIT")


# ------------------------------------------------------------------------------------------------ before and after
@pytest.mark.parametrize("key", AROUND, ids=lambda key: key.name)
def test_prepare_and_finish(key):
    found = artefacts(key)
    report = of_artefacts(found)
    opcodes = Counter(instruction.opcode for instruction in listing_of(found).instructions)
    assert (report.spill_bytes, report.stack_bytes, report.warnings) == (0, 0, ())
    assert not report.mma
    assert named(opcodes, "PREEXIT" if key.part == "backward_prepare" else "ACQBULK")
