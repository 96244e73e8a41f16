"""Descriptors of tensor copies against bits put together by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa3.emulator.faults import Fault
from fa3.emulator.tma import Descriptor

CODES = {
    "u8": 0,
    "u16": 1,
    "u32": 2,
    "s32": 3,
    "u64": 4,
    "s64": 5,
    "f16": 6,
    "f32": 7,
    "f64": 8,
    "bf16": 10,
    "tf32": 11,
}
WIDTH = {"u8": 1, "u16": 2, "f16": 2, "bf16": 2, "u32": 4, "s32": 4, "f32": 4, "tf32": 4, "u64": 8, "s64": 8, "f64": 8}


def assemble(d, hints=0x2 << 17, tail=b"\xcd" * 64):
    """The 128 bytes of a descriptor, field by field."""
    strides = [stride // 16 for stride in d.strides] + [0] * (5 - d.rank)
    dims = [size - 1 for size in d.dims] + [0] * (5 - d.rank)
    box = [size - 1 for size in d.box] + [0] * (5 - d.rank)
    low, high = [s & 0xFFFFFFFF for s in strides], [s >> 32 for s in strides]
    swizzle = {0: 0, 32: 1, 64: 2, 128: 3}[d.swizzle]
    words = [
        d.base,
        2 | d.rank - 1 << 4 | CODES[d.dtype] << 7 | swizzle << 13 | hints | low[0] << 32,
        low[1] | low[2] << 32,
        low[3] | high[0] << 32 | high[1] << 36 | high[2] << 40 | high[3] << 44,
        dims[0] | dims[1] << 32,
        dims[2] | dims[3] << 32,
        dims[4] | box[0] << 56,
        box[1] | box[2] << 8 | box[3] << 16 | box[4] << 24,
    ]
    return b"".join(word.to_bytes(8, "little") for word in words) + tail


@given(st.data(), st.binary(min_size=64, max_size=64), st.booleans())
def test_descriptors_are_read_from_their_bits(data, tail, large):
    rank, dtype = data.draw(st.integers(1, 5)), data.draw(st.sampled_from(sorted(CODES)))
    sizes = st.one_of(st.integers(1, 2**32), st.sampled_from([1, 2**30, 2**31 - 1, 2**32]))
    d = Descriptor(
        data.draw(st.integers(0, 2**53)) * 16,
        dtype,
        WIDTH[dtype],
        data.draw(st.sampled_from([0, 32, 64, 128])),
        tuple(data.draw(sizes) for _ in range(rank)),
        tuple(16 * data.draw(st.integers(0, 2**36 - 1)) for _ in range(rank - 1)),
        tuple(data.draw(st.integers(1, 256)) for _ in range(rank)),
    )
    raw = assemble(d, hints=0x2 << 17 | (1 << 21 if large else 0), tail=tail)
    assert Descriptor.decode(raw) == d
    assert Descriptor.decode(raw[:64]) == d, "the tail means nothing"
    assert str(d).startswith(f"{dtype} box ")


def test_a_descriptor_reads_well():
    d = Descriptor(
        0x7F0000001000, "bf16", 2, 128, (128, 2**30, 4, 2**31 - 1), (1024, 256, 2**35 - 1024), (64, 128, 1, 1)
    )
    assert str(d) == (
        "bf16 box 64 x 128 x 1 x 1 of 128 x 2^30 x 4 x 2^31-1 at 0x7f0000001000, "
        "strides (1024, 256, 34359737344) bytes, swizzle 128 B"
    )
    assert (d.rank, d.rows, d.row_bytes, d.bytes) == (4, 128, 128, 16384)


@pytest.mark.parametrize(
    ("byte", "bits", "kind"),
    [
        (8, 0x01, "tma"),  # version 3
        (8, 0x50, "tma"),  # six or more dimensions
        (9, 0x07, "tma"),  # type 15 (with the low bit in byte 8)
        (9, 0x08, "unsupported"),  # interleave
        (9, 0x80, "unsupported"),  # filled with NaN
        (52, 0x01, "unsupported"),  # every other element
    ],
)
def test_descriptors_that_cannot_be_read(byte, bits, kind):
    raw = bytearray(assemble(Descriptor(4096, "u8", 1, 128, (128, 8), (128,), (128, 4))))
    raw[byte] |= bits
    with pytest.raises(Fault) as caught:
        Descriptor.decode(bytes(raw))
    assert caught.value.kind == kind
    with pytest.raises(ValueError, match="128 bytes"):
        Descriptor.decode(bytes(raw[:63]))


GOOD = Descriptor(4096, "bf16", 2, 128, (64, 8), (128,), (64, 4))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"base": 4104}, "the base address 0x1008 is not a multiple of 16"),
        ({"strides": (136,)}, "the stride of dimension 1, 136 bytes, is not a multiple of 16"),
        ({"strides": (1 << 40,)}, "is not below 2^40"),
        ({"box": (64, 257)}, "the box has 257 elements along dimension 1"),
        ({"box": (64, 0)}, "the box has 0 elements along dimension 1"),
        ({"dims": (64, 2**32 + 1)}, "dimension 1 has 4294967297 elements"),
        ({"box": (12, 4)}, "24 contiguous bytes are not a multiple of 16"),
        ({"box": (128, 4)}, "256 contiguous bytes exceed the 128-byte swizzle"),
        ({"swizzle": 64}, "128 contiguous bytes exceed the 64-byte swizzle"),
    ],
)
def test_problems(changes, problem):
    assert GOOD.problems() == []
    problems = replace(GOOD, **changes).problems()
    assert any(problem in found for found in problems), problems
