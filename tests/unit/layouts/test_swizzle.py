"""Swizzles: permutations that are their own inverse, and the hardware's rule stated independently."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa3.layouts.algebra import Layout, LayoutError
from fa3.layouts.swizzle import ComposedLayout, Swizzle


@st.composite
def swizzles(draw):
    bits = draw(st.integers(0, 3))
    return Swizzle(bits, draw(st.integers(0, 4)), draw(st.integers(bits, 4)))


@given(swizzles(), st.integers(0, 1 << 40))
def test_a_swizzle_is_its_own_inverse(swizzle, address):
    assert swizzle(swizzle(address)) == address


@given(swizzles(), st.integers(0, 1 << 20))
def test_a_swizzle_permutes_each_period(swizzle, block):
    start = block * swizzle.period
    addresses = range(start, start + swizzle.period)
    assert sorted(map(swizzle, addresses)) == list(addresses)
    offsets = [swizzle(address) - start for address in addresses]
    assert offsets == [swizzle(offset) for offset in range(swizzle.period)]


@given(swizzles(), st.integers(0, 1 << 20))
def test_a_swizzle_as_bits(swizzle, address):
    """Bit base + i of the result is the exclusive or of bits base + i and base + i + shift; the others stay."""
    result = swizzle(address)
    for position in range(24):
        bit = address >> position & 1
        if swizzle.base <= position < swizzle.base + swizzle.bits:
            bit ^= address >> (position + swizzle.shift) & 1
        assert result >> position & 1 == bit


@pytest.mark.parametrize(("bits", "line"), [(3, 128), (2, 64), (1, 32), (0, 16)])
def test_the_hardware_swizzles(bits, line):
    """A pattern repeats every 8 lines of `line` bytes: piece p of a line goes to p xor (128-byte row mod line / 16)."""
    swizzle = Swizzle(bits, 4, 3)
    for address in range(0, 2048, 16):
        row_128, within = divmod(address, 128)
        piece, pieces = within % line // 16, line // 16
        expected = row_128 * 128 + within // line * line + (piece ^ (row_128 % pieces)) * 16
        assert swizzle(address) == expected


@given(swizzles(), st.integers(0, 64))
def test_a_composed_layout_is_pointwise(swizzle, offset):
    layout = Layout((8, 6), (6, 1))
    composed = ComposedLayout(swizzle, offset, layout)
    assert composed.indices() == [swizzle(offset + index) for index in layout.indices()]
    assert composed(3, 2) == swizzle(offset + layout(3, 2))
    tile = composed.compose((4, 3))
    assert [tile(i, j) for j in range(3) for i in range(4)] == [composed(i, j) for j in range(3) for i in range(4)]
    assert (composed.size, composed.shape) == (48, (8, 6))


@pytest.mark.parametrize("fields", [(-1, 0, 3), (3, -1, 3), (3, 0, 2)])
def test_impossible_swizzles(fields):
    with pytest.raises(LayoutError):
        Swizzle(*fields)


def test_text():
    assert str(ComposedLayout(Swizzle(3, 4, 3), 0, Layout((8, 64), (64, 1)))) == "S<3,4,3> o 0 o (8,64):(64,1)"
