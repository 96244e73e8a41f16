"""Every row of the backward table, compiled for sm_90a: no spill, no warning, registers, GEMMs, no frozen wait."""

from collections import Counter

import pytest

from fa3.compile import artefacts
from fa3.config.backward import BackwardKey
from fa3.config.backward_budget import backward_registers, backward_smem
from fa3.config.backward_table import BACKWARD
from fa3.sass import of_artefacts

pytestmark = pytest.mark.compile

MAIN = [BackwardKey("backward", row, "bf16", deterministic=ordered) for row in BACKWARD for ordered in (False, True)]
MAIN += [BackwardKey("backward", row, "fp16") for row in BACKWARD if row.head_dim == 128]
AROUND = [BackwardKey(part, row, "bf16") for row in BACKWARD for part in ("backward_prepare", "backward_finish")]


@pytest.fixture(params=MAIN, ids=lambda key: key.name, scope="module", name="compiled")
def _compiled(request):
    """One compilation a key, shared by its tests."""
    return request.param, of_artefacts(artefacts(request.param))


def test_no_spill_and_no_warning(compiled):
    """C75xx: ignored register changes, injected waits, GEMMs run one after the other."""
    _, report = compiled
    assert (report.spill_bytes, report.stack_bytes, report.mix["LDL"], report.mix["STL"]) == (0, 0, 0, 0)
    assert report.warnings == ()


def test_registers(compiled):
    key, report = compiled
    budget = backward_registers(key.config)
    assert report.setmaxnreg == {"dec": (budget.load,), "inc": (budget.math,)}
    assert report.registers == budget.entry


def test_shared_memory(compiled):
    key, report = compiled
    assert report.smem_bytes == backward_smem(key.config).total_bytes


def test_gemms(compiled):
    """In design `registers` dV and dK take P and dS from registers, and nothing else does; in `shared` nothing does."""
    key, report = compiled
    c = key.config
    from_registers = Counter({form.shape: form.count for form in report.wgmma if form.operands == "RS"})
    if c.design == "shared":
        assert not from_registers
    else:
        steps = c.tile_m // 16
        assert set(from_registers) == {f"m64n{c.head_dim_v}k16", f"m64n{c.head_dim}k16"}
        assert sum(from_registers.values()) % (2 * steps) == 0
    for form in report.wgmma:
        assert report.mma[f"{form.shape} {form.operands}"] == form.count


def test_no_phase_is_frozen(compiled):
    _, report = compiled
    assert not report.frozen_waits, "\n".join(report.frozen_waits)


@pytest.mark.parametrize("key", AROUND, ids=lambda key: key.name)
def test_prepare_and_finish(key):
    report = of_artefacts(artefacts(key))
    assert (report.spill_bytes, report.stack_bytes, report.warnings) == (0, 0, ())
