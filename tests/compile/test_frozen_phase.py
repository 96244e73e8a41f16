"""The guard against frozen phases: it fires on rings that stand still, and on none that turn.

Rule 1 of docs/dsl_rules.md. `ring_probe.py` has one ring for each way to keep a cursor; which of them the DSL carries,
freezes or refuses is its own affair, and an upgrade may change it: then these tests say which.
"""

import pytest
from cutlass import Int32

from fa3.sass.frozen import frozen_waits
from tests.compile.probes import compile_probe, floats, stream
from tests.compile.ring_probe import FROZEN, RIGHT, field_of_a_plain_object, host

pytestmark = pytest.mark.compile


def frozen(consume) -> tuple:
    return frozen_waits(compile_probe(host, floats(), Int32(4), consume, stream()).ptx)


@pytest.mark.parametrize("consume", RIGHT, ids=lambda consume: consume.__name__)
def test_a_ring_that_turns_passes(consume):
    assert frozen(consume) == ()


@pytest.mark.parametrize("consume", FROZEN, ids=lambda consume: consume.__name__)
def test_a_ring_that_stands_still_is_found(consume):
    (wait,) = frozen(consume)  # the consumer's; the producer's turns
    assert wait.parity == "0" or wait.parity.startswith("%")


def test_a_field_of_a_plain_object_is_refused():
    with pytest.raises(Exception, match="TYPE_DYNAMIC_EXPR_UNSUPPORTED"):
        frozen(field_of_a_plain_object)
