"""Matrix descriptors: the bytes that they mean are those of `fa3.layouts`, and what is a fault."""

from __future__ import annotations

import numpy as np
import pytest

from fa3.emulator import wgmma
from fa3.emulator.faults import Fault
from fa3.emulator.memory import SHARED_BASE, Shared
from fa3.emulator.wgmma import Issue, Mma, operand_addresses
from fa3.layouts.smem import k_major, mn_major
from tests.unit.emulator.wgmma_cases import addresses_of, descriptor

LAYOUTS = [
    *((k_major, rows, columns, 16) for rows in (8, 64, 80, 128) for columns in (16, 32, 64, 80, 96, 112, 128, 256)),
    *((k_major, rows, columns, 8) for rows in (64, 128) for columns in (32, 64, 96, 128)),
    *((mn_major, rows, columns, 16) for rows in (8, 16, 32, 64, 96, 192, 128) for columns in (16, 80, 128)),
    (k_major, 64, 24, 16),  # 48 contiguous bytes: nothing is swizzled
    (mn_major, 24, 32, 16),
    (mn_major, 72, 16, 16),
]


@pytest.mark.parametrize(("make", "rows", "columns", "bits"), LAYOUTS)
def test_addresses_are_those_of_the_layouts(make, rows, columns, bits):
    layout, item, base = make(rows, columns, bits), bits // 8, SHARED_BASE + 5 * 1024
    for k0 in range(0, columns - 32 // item + 1, 32 // item):
        bits64 = descriptor(layout, base, k0, make is mn_major)
        got = operand_addresses(bits64, rows, 32 // item, item, make is mn_major)
        assert np.array_equal(got, base + addresses_of(layout)[:, k0 : k0 + 32 // item])


def test_the_layouts_have_every_swizzle_in_both_majors():
    lines = {(make, make(rows, columns, bits).line) for make, rows, columns, bits in LAYOUTS}
    assert lines == {(make, line) for make in (k_major, mn_major) for line in (16, 32, 64, 128)}


@pytest.mark.parametrize("in_registers", [False, True])
def test_the_words_that_a_warp_reads(in_registers):
    a_layout, b_layout, base = k_major(64, 64, 16), mn_major(96, 32, 16), SHARED_BASE + 8192
    mma = Mma(96, 16, "bf16", "bf16", tuple(range(48)), (48, 49, 50, 51) if in_registers else None, False, True)
    a_bits = None if in_registers else descriptor(a_layout, SHARED_BASE, 32, False)
    issue = Issue(mma, a_bits, descriptor(b_layout, base, 16, True), True)
    for quarter in range(4):
        expected = {int(x) // 4 for x in (base + addresses_of(b_layout)[:, 16:32]).reshape(-1)}
        if not in_registers:
            rows = SHARED_BASE + addresses_of(a_layout)[16 * quarter : 16 * quarter + 16, 32:48]
            expected |= {int(x) // 4 for x in rows.reshape(-1)}
        assert wgmma.shared_words(issue, quarter).tolist() == sorted(expected)


GOOD = descriptor(k_major(64, 64, 16), SHARED_BASE, 0, False)


@pytest.mark.parametrize(
    ("bits", "message"),
    [
        (GOOD | 1 << 49, "base offset"),
        (GOOD | 1 << 14, "bits outside its fields"),
        (GOOD | 1 << 46, "bits outside its fields"),
        (GOOD | 1 << 52, "bits outside its fields"),
        (GOOD | 1 << 61, "bits outside its fields"),
    ],
)
def test_malformed_descriptors(bits, message):
    mma = Mma(64, 16, "bf16", "bf16", tuple(range(32)), (32, 33, 34, 35))
    for call in (
        lambda: operand_addresses(bits, 64, 16, 2, False),
        lambda: wgmma.execute([Issue(mma, None, bits, True)], Shared(16384), np.zeros((36, 32), np.uint32), 0),
    ):
        with pytest.raises(Fault, match=message) as caught:
            call()
        assert caught.value.kind == "wgmma"


@pytest.mark.parametrize("base", [0, SHARED_BASE + 16384 - 4096, 0x3FC00])
def test_operands_outside_shared_memory(base):
    mma = Mma(64, 16, "bf16", "bf16", tuple(range(32)), (32, 33, 34, 35))
    bits = descriptor(k_major(64, 64, 16), base, 0, False)
    registers = np.zeros((36, 32), np.uint32)
    with pytest.raises(Fault, match="read of a wgmma operand") as caught:
        wgmma.execute([Issue(mma, None, bits, True)], Shared(16384), registers, 0)
    assert caught.value.kind == "out of bounds" and not registers.any()


def test_mn_major_operands_have_16_bits():
    mma = Mma(64, 32, "e4m3", "e4m3", tuple(range(32)), (32, 33, 34, 35), b_mn_major=True)
    with pytest.raises(Fault, match="only 16-bit ones can be"):
        wgmma.execute([Issue(mma, None, GOOD, True)], Shared(16384), np.zeros((36, 32), np.uint32), 0)
    with pytest.raises(ValueError, match="a warpgroup has 4 warps, got number 4"):
        wgmma.execute([], Shared(16384), np.zeros((36, 32), np.uint32), 4)
