"""Structure is free: roles, rings and cursors compile to the instructions of the same program written out.

So a kernel here may be as well divided as its reader needs. If this fails after an upgrade, the DSL no longer sees
through one of them; `structure_probe.py` is small enough to find out which.
"""

import cutlass.cute as cute
import pytest

from fa3.sass.frozen import frozen_waits
from tests.compile import structure_probe as probe
from tests.compile.probes import compile_probe, floats, stream

pytestmark = pytest.mark.compile


@pytest.fixture(scope="module", name="both")
def _both():
    depth = cute.sym_int32(divisibility=8)
    operands = probe.matrix(cute.sym_int32(), depth), probe.matrix(cute.sym_int32(), depth)
    return [
        compile_probe(probe.host, *operands, floats(), body, stream()) for body in (probe.structured, probe.inlined)
    ]


def test_the_same_instructions(both):
    structured, inlined = both
    assert structured.stream == inlined.stream


def test_the_probe_is_a_real_kernel(both):
    for one in both:
        assert one.count("HGMMA") == probe.K // 16 and one.count("UTMALDG") == 2 and one.count("USETMAXREG") == 2
        assert one.codes == set() and one.remarks.spill_bytes == 0 and frozen_waits(one.ptx) == ()
