"""PTX's matrix instructions and register changes, ptxas' remarks, cuobjdump's resources."""

import pytest

from fa3.sass.errors import ParseError
from fa3.sass.ptx import Wgmma, requested_registers, wgmma_forms
from fa3.sass.remarks import Diagnostic, parse_remarks, parse_resources

PTX = """
 setmaxnreg.dec.sync.aligned.u32  24;
 setmaxnreg.inc.sync.aligned.u32  240;
 { .reg .pred p; setp.ne.b32 p, 1, 0;
 wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%r1, %r2, %r3}, %rd13, %rd14, p, 1,  1, 0, 0; }
 wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%r1, %r2, %r3}, %rd29, %rd15, p, 1,  1, 0, 0;
 wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16
   {%r1, %r2,
    %r3}, {%r4, %r5, %r6, %r7}, %rd43, p, 1,  1, 1;
 wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {%r1}, {%r4}, %rd43, p, 1, 1;
 wgmma.wait_group.sync.aligned  0;
"""

REMARKS = """remark[ptxas info]: ptxas output: ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'forward' for 'sm_90a'
ptxas info    : Function properties for forward
ptxas         .     16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
ptxas info    : (C7508) 'setmaxnreg' ignored; unable to determine register count at entry
ptxas info    : (C7508) 'setmaxnreg' ignored; unable to determine register count at entry
ptxas info    : (C7517) Potential Performance Loss: wgmma.wait_group is injected in function 'forward'
"""


def test_wgmma_forms():
    assert wgmma_forms(PTX) == (
        Wgmma("m64n128k16", "f32.bf16.bf16", "SS", 2),
        Wgmma("m64n64k16", "f32.bf16.bf16", "RS", 1),
        Wgmma("m64n64k32", "f32.e4m3.e4m3", "RS", 1),
    )
    assert str(wgmma_forms(PTX)[0]) == "m64n128k16 SS f32.bf16.bf16 x2"
    assert wgmma_forms("ret;") == ()


def test_requested_registers():
    assert requested_registers(PTX) == {"dec": (24,), "inc": (240,)}
    assert requested_registers("ret;") == {"dec": (), "inc": ()}


def test_remarks():
    remarks = parse_remarks(REMARKS)
    assert (remarks.registers, remarks.stack_bytes, remarks.spill_bytes) == (168, 16, 20)
    assert [warning.code for warning in remarks.warnings] == ["C7508", "C7517"]
    assert remarks.warnings[0] == Diagnostic(
        "C7508", "'setmaxnreg' ignored; unable to determine register count at entry"
    )


WRAPPED = """remark[ptxas]: ptxas detected register spills
  remark: Spilled values are placed in local memory and can add memory traffic and latency. ptxas
          reports spill usage at kernel granularity
          ptxas output:
          ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are
          serialized due to insufficient register resources for the function
          'kernel_cutlass_kernel_fa3kernelsforwardForward_object_at__OperandsqTmaOperandatom_0'
          ptxas info    : 0 bytes gmem
          ptxas         .     512 bytes stack frame, 1024 bytes spill stores, 1000
          bytes spill loads
          ptxas info    : Used 168 registers, used 16 barriers, 512 bytes cumulative stack size
  suggestion: reduce live ranges in the reported kernel
"""


def test_remarks_that_the_dsl_has_wrapped():
    remarks = parse_remarks(WRAPPED)
    assert (remarks.registers, remarks.stack_bytes, remarks.spill_bytes) == (168, 512, 2024)
    (warning,) = remarks.warnings
    assert str(warning) == (
        "C7512: Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient register "
        "resources for the function 'kernel'"
    )


def test_a_clean_kernel_has_no_warnings():
    clean = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nUsed 64 registers"
    assert parse_remarks(clean).warnings == () and parse_remarks(clean).spill_bytes == 0


def test_missing_remarks_are_an_error_and_not_zero():
    with pytest.raises(ParseError, match="remarks"):
        parse_remarks("")


def test_resources():
    assert parse_resources("  REG:168 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:1160")["REG"] == 168
    with pytest.raises(ParseError):
        parse_resources("Resource usage:\n Common:\n  GLOBAL:0\n")
