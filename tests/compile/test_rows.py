"""Every row of the forward table, compiled for sm_90a: no spill, no warning, its registers, its GEMMs, its overlap.

`overlap.json` holds how many exponentials each row issues under a GEMM. A change that improves on it, or a new row,
is recorded with `.venv/bin/python -m fa3.sass --record tests/compile/overlap.json`; one that falls behind fails here.
"""

import json
from pathlib import Path

import pytest

from fa3.compile import artefacts
from fa3.config.budget import forward_registers, forward_smem
from fa3.sass import of_artefacts, tools
from fa3.sass.record import keys_of, overlap, table_keys
from fa3.sass.remarks import parse_resources

pytestmark = pytest.mark.compile

RECORDED = json.loads(Path(__file__).with_name("overlap.json").read_text())
RECORD = ".venv/bin/python -m fa3.sass --record tests/compile/overlap.json"
KEYS = table_keys()
WGMMA_TYPES = {"bf16": "f32.bf16.bf16", "fp16": "f32.f16.f16"}


@pytest.fixture(params=KEYS, ids=lambda key: key.name, scope="module", name="compiled")
def _compiled(request):
    """One compilation a row, shared by its tests."""
    found = artefacts(request.param)
    return request.param, found, of_artefacts(found)


def test_no_spill(compiled):
    _, _, report = compiled
    assert (report.spill_bytes, report.stack_bytes) == (0, 0)
    assert (report.mix["LDL"], report.mix["STL"]) == (0, 0)


def test_no_warning(compiled):
    """C75xx: ignored register changes, injected waits, GEMMs run one after the other."""
    _, _, report = compiled
    assert report.warnings == ()


def test_registers(compiled):
    key, found, report = compiled
    budget = forward_registers(key.config)
    assert report.setmaxnreg == {"dec": (budget.load,), "inc": (budget.math,)}
    assert report.registers == budget.entry
    assert parse_resources(tools.resource_usage(found.cubin))["REG"] == report.registers


def test_shared_memory(compiled):
    """What the kernel reserves is what the budget, which knows no compiler, adds up to."""
    key, _, report = compiled
    assert report.smem_bytes == forward_smem(key.config).total_bytes


def test_gemms(compiled):
    """Q K^T reads both operands from shared memory, P V takes P from registers; ptxas keeps every one of them."""
    key, _, report = compiled
    c = key.config
    expected = {(f"m64n{c.tile_n}k16", "SS", c.head_dim // 16), (f"m64n{c.head_dim_v}k16", "RS", c.tile_n // 16)}
    assert {(form.shape, form.operands) for form in report.wgmma} == {form[:2] for form in expected}
    assert {form.types for form in report.wgmma} == {WGMMA_TYPES[key.dtype]}
    for shape, operands, batch in expected:
        (count,) = (form.count for form in report.wgmma if (form.shape, form.operands) == (shape, operands))
        assert count % batch == 0, "whole batches"
        assert report.mma[f"{shape} {operands}"] == count


def test_main_loops(compiled):
    """A causal row has a loop with the mask and one without; a full row has one. Each holds both GEMMs."""
    key, _, report = compiled
    assert len(report.main_loops) == (2 if key.config.causal else 1)
    for loop in report.main_loops:
        assert {form.rsplit(" ", 1)[1] for form in loop.mma} == {"SS", "RS"}


def test_no_phase_is_frozen(compiled):
    _, _, report = compiled
    places = "\n".join(report.frozen_waits)
    assert not places, f"A cursor does not advance in this loop: rule 1 of docs/dsl_rules.md\n{places}"


def test_overlap_is_as_recorded(compiled):
    key, _, report = compiled
    assert key.name in RECORDED, f"{key.name} is a new row: {RECORD}"
    recorded = RECORDED[key.name]
    share, least = (each["ex2_in_flight"] / each["ex2_total"] for each in (overlap(report), recorded))
    assert share >= least, (
        f"{key.name}: {report.ex2_in_flight} of {report.ex2_total} exponentials under a GEMM, "
        f"recorded {recorded['ex2_in_flight']} of {recorded['ex2_total']}; if the change is meant: {RECORD}"
    )


def test_every_record_belongs_to_a_row():
    assert set(RECORDED) == {key.name for key in keys_of(None)}
