"""Every rule of docs/dsl_rules.md that a compilation can show, with a reproducer that breaks it.

An upgrade of the DSL may lift a rule: then its test fails, and says which. Rule 1 has `test_frozen_phase.py` to itself;
`test_rows.py` holds the kernels to rules 7, 8 and 11.
"""

from dataclasses import replace

import pytest
from cutlass import Int32

from fa3.compile import artefacts
from fa3.config.table import forward_config
from fa3.config.types import KernelKey
from fa3.kernels import forward
from fa3.sass.overlap import gemms_in_flight
from fa3.sass.remarks import parse_remarks
from tests.compile import element_probe as element
from tests.compile import gemm_probe as gemm
from tests.compile.probes import Probe, compile_probe, floats, stream

pytestmark = pytest.mark.compile


def applied(apply, width: int = 2) -> Probe:
    return compile_probe(element.host, floats(), Int32(4), apply, width, stream())


def multiplied(step, uniform: bool = True, twice: bool = False) -> Probe:
    return compile_probe(gemm.host, floats(), Int32(4), step, uniform, twice, stream())


# --- tracing ---------------------------------------------------------------------------------------------------------


def test_rule_2_only_decorated_functions_are_rewritten():
    applied(element.branches_in_a_traced_function)
    with pytest.raises(Exception, match="PHASE_DYNAMIC_TO_STATIC_BOOL"):
        applied(element.branches_in_a_plain_function)


@pytest.mark.parametrize("leaves", [element.returns_early, element.breaks_out], ids=lambda leaves: leaves.__name__)
def test_rule_3_no_early_way_out(leaves):
    with pytest.raises(Exception, match="UNSUP_EARLY_EXIT"):
        applied(leaves)


def test_rule_3_a_name_keeps_its_type():
    with pytest.raises(Exception, match="TYPE_UNSTABLE_JOIN"):
        applied(element.changes_a_type)


def test_rule_5_setting_a_tiled_mma_leaks_a_value_of_the_loop():
    multiplied(gemm.waits, twice=True)
    with pytest.raises(Exception, match="dominate"):
        multiplied(gemm.multiplies_with_a_shared_atom, twice=True)


# --- what the compiler makes of it -----------------------------------------------------------------------------------


def test_rule_6_arch_exp2_is_volatile_and_math_exp2_is_not():
    assert "ex2" not in applied(element.exp2_and_forget).ptx  # unused, so removed
    assert "ex2" in applied(element.volatile_exp2_and_forget).ptx  # volatile, so kept


def test_rule_6_without_fastmath_exp2_costs_a_range_check():
    fast, careful = applied(element.fast_exp2), applied(element.careful_exp2)
    assert fast.count("MUFU.EX2") == careful.count("MUFU.EX2") == 1
    assert (fast.count("FSETP"), fast.count("FMUL")) == (0, 0)
    assert careful.count("FSETP") >= 1 and careful.count("FMUL") >= 2


def test_rule_7_setmaxnreg_is_ignored_without_a_register_cap_at_entry():
    capped = compile_probe(element.register_host, floats(), 1, stream())
    assert capped.count("USETMAXREG") == 2 and "C7508" not in capped.codes
    loose = compile_probe(element.register_host, floats(), 0, stream())
    assert loose.count("USETMAXREG") == 0 and "C7508" in loose.codes


def by_to(source, target):
    target.store(source.load().to(target.element_type))


def test_rule_8_conversion_by_to_spills(monkeypatch):
    """The forward with 64 x 160 scores, which are 80 values a thread and no power of two."""
    key = KernelKey(replace(forward_config(128, 128, causal=False), tile_n=160), "bf16")
    assert parse_remarks(artefacts(key).remarks).spill_bytes == 0
    monkeypatch.setattr(forward, "convert_16", by_to)
    assert parse_remarks(artefacts(key).remarks).spill_bytes > 0


def test_rule_9_fmax_is_one_instruction():
    fast, slow = applied(element.fast_maximum), applied(element.slow_maximum)
    assert (fast.count("FMNMX"), fast.count("FSETP")) == (1, 0)
    assert slow.count("FSETP") >= 1 and len(slow.stream) > len(fast.stream)


def test_rule_10_descriptors_leave_the_uniform_registers_with_a_thread_index():
    uniform, by_thread = multiplied(gemm.waits), multiplied(gemm.waits, uniform=False)
    assert uniform.count("R2UR") < by_thread.count("R2UR")


def test_rule_11_an_accumulator_in_flight_must_not_be_touched():
    assert multiplied(gemm.waits).codes == set()
    touched = multiplied(gemm.touches_an_accumulator_in_flight)
    assert any(code.startswith("C75") for code in touched.codes)


def in_flight(probe: Probe) -> int:
    flights = gemms_in_flight(probe.listing)
    instructions = probe.listing.instructions
    return sum(flights[i] > 0 for i, one in enumerate(instructions) if one.opcode.startswith("MUFU.EX2"))


def test_ptxas_may_wait_early_and_a_fence_keeps_it_from_that():
    """The wait for a GEMM has no operands, so ptxas moves it over arithmetic of the same block; not over a fence."""
    free, fenced = multiplied(gemm.softmax_under_a_gemm), multiplied(gemm.softmax_before_a_fence)
    assert in_flight(free) < in_flight(fenced)
    assert in_flight(fenced) >= 0.75 * gemm.VALUES


# --- what nobody checks ----------------------------------------------------------------------------------------------


def test_rule_13_too_much_shared_memory_compiles():
    assert applied(element.takes_too_much_shared_memory).codes == set()
