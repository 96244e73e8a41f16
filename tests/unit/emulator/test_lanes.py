"""Instructions between the lanes of a warp, and between lanes and memory, against models that go lane by lane."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa3.emulator.blocks import Code
from fa3.emulator.faults import Fault, Unsupported
from fa3.emulator.observe import Observer
from fa3.emulator.warp import UNWRITTEN
from fa3.sass.listing import Source

from .assembler import LANES, SHARED, OnLanes, aligned, assemble, load, on_lanes, pointer, run, store
from .scalar import number, pattern

LANE = np.arange(LANES, dtype=np.uint32)
EVEN = LANE % 2 == 0


def masked(body: str) -> str:
    """The body for lanes in which %p15 is true."""
    return f"@!%p15 bra $SKIP;\n{body}\n$SKIP:"


# ------------------------------------------------------------------------------------------------ shuffles
def shuffled(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """(lane that the value comes from, predicate): the text of the PTX ISA for shfl.sync."""
    b, clamp, segment = b & 31, c & 31, c >> 8 & 31
    last, first = (lane & segment) | (clamp & ~segment & 31), lane & segment
    if mode == "up":
        source = lane - b
        inside = source >= last
    elif mode == "idx":
        source = first | (b & ~segment & 31)
        inside = source <= last
    else:
        source = lane + b if mode == "down" else lane ^ b
        inside = source <= last
    return (source if inside else lane), inside


@cache
def shuffle(mode: str) -> OnLanes:
    body = f"shfl.sync.{mode}.b32 %r3|%p0, %r0, %r1, %r2, -1; shfl.sync.{mode}.b32 %r4, %r0, %r1, %r2, -1;"
    inputs = {"%r0": np.uint32, "%r1": np.uint32, "%r2": np.uint32}
    return OnLanes(body, inputs, {"%r3": np.uint32, "%r4": np.uint32, "%p0": bool})


def segmented(mode: str, width: int) -> int:
    """The last operand of a shuffle in segments of `width` lanes, as compilers write it."""
    return (32 - width) << 8 | (0 if mode == "up" else 31)


uniform_b = st.integers(0, 40).map(lambda b: [b] * LANES)
any_b = uniform_b | st.lists(st.integers(0, 63), min_size=LANES, max_size=LANES)


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@given(b=any_b, width=st.sampled_from([1, 2, 4, 8, 16, 32]), c=st.none() | st.integers(0, 0x1F1F))
@settings(max_examples=30)
def test_shuffles(mode: str, b: list[int], width: int, c: int | None) -> None:
    c = segmented(mode, width) if c is None else c
    values = LANE * 1000 + 7
    got = shuffle(mode)({"%r0": values, "%r1": np.array(b), "%r2": np.full(LANES, c)})
    for lane in range(LANES):
        source, inside = shuffled(mode, lane, b[lane], c)
        assert got["%r3"][lane] == got["%r4"][lane] == values[source]
        assert got["%p0"][lane] == inside


def test_a_butterfly_of_literals_sums_four_lanes() -> None:
    body = """
      shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1; add.f32 %r0, %r0, %r1;
      shfl.sync.bfly.b32 %r1, %r0, 2, 31, -1; add.f32 %r0, %r0, %r1;"""
    got = on_lanes(body, {"%r0": LANE.astype(np.float32)}, {"%r0": np.float32})
    assert got["%r0"].tolist() == [float(sum(range(lane // 4 * 4, lane // 4 * 4 + 4))) for lane in range(LANES)]


# ------------------------------------------------------------------------------------------------ votes, elections
@cache
def votes() -> OnLanes:
    body = """
      vote.sync.any.pred %p1, %p0, -1; vote.sync.all.pred %p2, %p0, -1; vote.sync.uni.pred %p3, %p0, -1;
      vote.sync.ballot.b32 %r0, %p0, -1; vote.sync.ballot.b32 %r1, !%p0, -1;"""
    outputs = {"%p1": bool, "%p2": bool, "%p3": bool, "%r0": np.uint32, "%r1": np.uint32}
    return OnLanes(body, {"%p0": bool}, outputs)


@given(st.integers(0, (1 << LANES) - 1) | st.sampled_from([0, (1 << LANES) - 1, 1, 1 << 31]))
@settings(max_examples=25)
def test_votes(bits: int) -> None:
    got = votes()({"%p0": [bits >> lane & 1 for lane in range(LANES)]})
    assert set(got["%p1"]) == {bits != 0}
    assert set(got["%p2"]) == {bits == (1 << LANES) - 1}
    assert set(got["%p3"]) == {bits in (0, (1 << LANES) - 1)}
    assert set(got["%r0"].tolist()) == {bits}
    assert set(got["%r1"].tolist()) == {bits ^ ((1 << LANES) - 1)}


@cache
def election() -> OnLanes:
    body = masked("elect.sync %r0|%p0, -1; elect.sync _|%p1, -1;")
    return OnLanes(body, {"%p15": bool, "%p0": bool, "%p1": bool}, {"%r0": np.uint32, "%p0": bool, "%p1": bool})


@given(st.lists(st.booleans(), min_size=LANES, max_size=LANES))
@settings(max_examples=15)
def test_the_lowest_lane_that_is_here_is_elected(here: list[bool]) -> None:
    got = election()({"%p15": here, "%p0": [True] * LANES, "%p1": [False] * LANES})
    lowest = here.index(True) if any(here) else None
    assert got["%r0"].tolist() == [lowest if present else UNWRITTEN for present in here]
    assert got["%p0"].tolist() == [lane == lowest or not here[lane] for lane in range(LANES)]
    assert got["%p1"].tolist() == [lane == lowest for lane in range(LANES)]


@pytest.mark.parametrize(
    "statement",
    [
        "shfl.sync.idx.b32 %r1, %r0, 0, 31, -1", "vote.sync.any.pred %p0, %p1, -1",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r0]",
        "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r0], {%r1}", "setmaxnreg.inc.sync.aligned.u32 200",
    ],
)  # fmt: skip
def test_what_needs_the_whole_warp_is_a_fault_in_a_part_of_it(statement: str) -> None:
    with pytest.raises(Fault, match="16 of the warp's 32 lanes") as caught:
        on_lanes(masked(f".loc 1 33 1\n{statement};"), {"%p15": EVEN, "%r0": LANE * 16 + SHARED}, {})
    assert caught.value.kind == "divergence"
    assert caught.value.at is not None and caught.value.at.source == Source("kernel.py", 33)


# ------------------------------------------------------------------------------------------------ loads and stores
REGISTER_OF = {8: "%h", 16: "%h", 32: "%r", 64: "%rd"}


def copied(space: str, bits: int, vector: int, wide: bool) -> str:
    """Each lane reads at %rd28 and writes at %rd27 a vector of registers."""
    bank = "%r" if wide and bits < 32 else REGISTER_OF[bits]
    names = [f"{bank}{i}" for i in range(vector)]
    value, suffix = (names[0], "") if vector == 1 else (f"{{{', '.join(names)}}}", f".v{vector}")
    return f"ld.{space}{suffix}.b{bits} {value}, [%rd28]; st.{space}{suffix}.b{bits} [%rd27], {value};"


FORMS = [(bits, vector) for bits in (8, 16, 32, 64) for vector in (1, 2, 4) if bits * vector <= 128]


def after(space: str, data: Any, body: str, *arrays: Any) -> Any:
    """Runs a body on bytes in global or shared memory, whose address is in %rd24; what they are afterwards. `arrays`
    are the arguments from 1 on."""
    buffer = aligned(data, 16)
    if space == "global":
        run("ld.param.u64 %rd24, [k_param_0];" + body, buffer, *arrays)
        return buffer
    buffer = aligned(np.concatenate([buffer, np.zeros(-len(buffer) % 128, np.uint8)]), 16)
    loop = """
      mov.u32 %r80, %tid.x; ld.param.u64 %rd22, [k_param_{3}];
    $LOOP_{0}:
      mul.wide.u32 %rd20, %r80, 4; add.u64 %rd21, %rd22, %rd20; add.u64 %rd23, %rd24, %rd20;
      {1}
      add.u32 %r80, %r80, 32; setp.lt.u32 %p14, %r80, {2}; @%p14 bra $LOOP_{0};"""
    words = len(buffer) // 4
    put = loop.format("A", "ld.global.b32 %r81, [%rd21]; st.shared.b32 [%rd23], %r81;", words, 0)
    get = loop.format("B", "ld.shared.b32 %r81, [%rd23]; st.global.b32 [%rd21], %r81;", words, 1 + len(arrays))
    result = aligned(np.zeros_like(buffer), 16)
    run(f"cvta.shared.u64 %rd24, __dynamic_shmem__0; {put} {body} {get}", buffer, *arrays, result)
    return result[: len(data)]


@pytest.mark.parametrize("active", [None, EVEN, LANE == 5], ids=["all", "half", "one"])
@pytest.mark.parametrize("space", ["global", "shared", "shared::cta"])
@pytest.mark.parametrize(("bits", "vector"), FORMS)
def test_loads_and_stores(space: str, bits: int, vector: int, active: Any) -> None:
    """Every lane moves its piece from one place of a buffer to another; who is not active moves nothing."""
    size = bits * vector // 8
    rng = np.random.default_rng(bits + vector)
    source, target = rng.permutation(64)[:LANES] * size, 64 * size + rng.permutation(64)[:LANES] * size
    data = rng.integers(0, 256, 128 * size, np.uint8)
    expected = data.copy()
    active = np.ones(LANES, bool) if active is None else active
    for lane in np.flatnonzero(active):
        expected[target[lane] : target[lane] + size] = data[source[lane] : source[lane] + size]
    body = load(1, "%rd25", 8) + load(2, "%rd26", 8) + "setp.ne.u64 %p15, %rd25, -1;"
    body += "add.u64 %rd28, %rd25, %rd24; add.u64 %rd27, %rd26, %rd24;"
    copies = "\n".join(copied(space, bits, vector, wide) for wide in (False, True))
    got = after(space, data, body + masked(copies), np.where(active, source, -1), target)
    assert (got == expected).all()


@pytest.mark.parametrize(("bits", "bank"), [(8, "%h"), (8, "%r"), (16, "%h"), (16, "%r"), (32, "%rd"), (8, "%rd")])
@pytest.mark.parametrize("kind", ["s", "u"])
def test_loads_extend_to_the_register(bits: int, bank: str, kind: str) -> None:
    width = {"%h": 16, "%r": 32, "%rd": 64}[bank]
    values = np.random.default_rng(bits).integers(0, 1 << bits, LANES).astype(f"u{bits // 8}")
    out = np.zeros(LANES, f"u{width // 8}")
    body = pointer(0, "%rd0", bits // 8) + f"ld.global.{kind}{bits} {bank}1, [%rd0];" + store(1, f"{bank}1", width // 8)
    run(body, values, out)
    extended = [pattern(number(int(value), f"{kind}{bits}"), f"u{width}") for value in values]
    assert out.tolist() == extended


def test_stores_of_literals_and_wider_registers() -> None:
    out = aligned(np.zeros((LANES, 16), np.uint8))
    body = """
      st.global.b8 [%rd0], %r0; st.global.b16 [%rd0+2], %r0; st.global.b32 [%rd0+4], -2;
      st.global.v2.b32 [%rd0+8], {0f3F800000, %r0};"""
    run(pointer(0, "%rd0", 16) + "mov.u32 %r0, %tid.x; or.b32 %r0, %r0, 0x12345600;" + body, out)
    for lane in range(LANES):
        row = out[lane].tobytes()
        value = 0x12345600 | lane
        assert row == bytes([lane, 0, lane, 0x56]) + b"\xfe\xff\xff\xff" + (0x3F800000 | value << 32).to_bytes(
            8, "little"
        )


@pytest.mark.parametrize("modifiers", ["volatile.global", "global.nc", "relaxed.gpu.global", "global.L1::no_allocate"])
def test_cache_and_order_modifiers_of_loads(modifiers: str) -> None:
    out = np.zeros(LANES, np.uint32)
    run(pointer(0, "%rd0", 4) + f"ld.{modifiers}.u32 %r0, [%rd0];" + store(1, "%r0", 4), LANE.copy(), out)
    assert (out == LANE).all()


def test_shared_memory_is_poisoned_and_has_negative_offsets() -> None:
    body = """
      mov.u32 %r0, __dynamic_shmem__0; add.u32 %r0, %r0, 64;
      ld.shared.b32 %r1, [%r0+-64]; ld.shared.b32 %r2, [1028];"""
    got = on_lanes(body, {}, {"%r1": np.uint32, "%r2": np.uint32})
    assert {*got["%r1"].tolist(), *got["%r2"].tolist()} == {0xABABABAB}


@pytest.mark.parametrize(
    ("statement", "kind", "words"),
    [
        ("ld.shared.b32 %r0, [%r1]", "out of bounds", "lane 0"),
        ("st.shared.b32 [5120], %r0", "out of bounds", "past"),
        ("ld.shared.v2.b32 {%r0, %r2}, [1028]", "misaligned", "no multiple of 8"),
        ("ld.global.b32 %r0, [%rd0+128]", "out of bounds", "past 'a0'"),
        ("ld.global.b32 %r0, [%rd0+-4]", "out of bounds", "4 bytes before 'a0'"),
        ("ld.global.b32 %r0, [%rd0+2]", "misaligned", "no multiple of 4"),
        ("st.global.b32 [%rd1], %r0", "read only", "'a1'"),
        ("ld.global.b32 %r0, [0]", "out of bounds", "before"),
    ],
)
def test_bad_accesses_are_faults_with_their_line(statement: str, kind: str, words: str) -> None:
    constant = aligned(LANE)
    constant.flags.writeable = False
    body = "mov.u32 %r1, 0; ld.param.u64 %rd0, [k_param_0]; ld.param.u64 %rd1, [k_param_1];"
    with pytest.raises(Fault, match=words) as caught:
        run(f"{body}\n.loc 1 21 1\n{statement};", aligned(LANE), constant)
    fault = caught.value
    assert fault.kind == kind
    assert fault.at is not None and fault.at.source == Source("kernel.py", 21)
    assert fault.warp is not None and fault.warp.index == 0


class Accesses(Observer):
    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def shared(self, warp: Any, at: Any, addresses: Any, nbytes: int, write: bool) -> None:
        self.seen.append(("shared", at.name, [int(a) for a in addresses], nbytes, write))

    def memory(self, warp: Any, at: Any, addresses: Any, nbytes: int, write: bool) -> None:
        self.seen.append(("global", at.name, [int(a) for a in addresses], nbytes, write))


def test_observers_see_the_addresses_of_active_lanes() -> None:
    watcher, buffer = Accesses(), aligned(np.zeros(64, np.uint32))
    body = """
      ld.param.u64 %rd0, [k_param_0]; mov.u32 %r0, %tid.x; shl.b32 %r1, %r0, 4; add.u32 %r1, %r1, 1024;
      setp.lt.u32 %p15, %r0, 3;""" + masked("""
      st.shared.v2.b64 [%r1], {%rd0, %rd0}; ld.shared.b16 %h0, [%r1+2]; st.global.b32 [%rd0+8], %r0;
      atom.global.add.u32 %r2, [%rd0], 1;""")  # fmt: skip
    run(body + "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r3, %r4}, [%r1];", buffer, observers=[watcher])
    base = buffer.ctypes.data
    assert watcher.seen == [
        ("shared", "st", [1024, 1040, 1056], 16, True),
        ("shared", "ld", [1026, 1042, 1058], 2, False),
        ("global", "st", [base + 8] * 3, 4, True),
        *[("global", "atom", [base], 4, write) for _ in range(3) for write in (False, True)],
        ("shared", "ldmatrix", [1024 + 16 * row for row in range(16)], 16, False),
    ]


# ------------------------------------------------------------------------------------------------ atomics
ATOMICS: dict[str, Callable[..., Any]] = {
    "add": lambda old, b: old + b, "min": min, "max": max, "exch": lambda old, b: b, "and": lambda old, b: old & b,
    "or": lambda old, b: old | b, "xor": lambda old, b: old ^ b, "inc": lambda old, b: 0 if old >= b else old + 1,
    "dec": lambda old, b: b if old == 0 or old > b else old - 1, "cas": lambda old, b, c: c if old == b else old,
}  # fmt: skip
ATOMIC_FORMS = [
    *[("add", kind) for kind in ("u32", "s32", "u64", "f32")],
    *[(name, kind) for name in ("min", "max") for kind in ("u32", "s32", "u64", "s64")],
    *[(name, kind) for name in ("and", "or", "xor", "exch", "cas") for kind in ("b32", "b64")],
    ("inc", "u32"), ("dec", "u32"),
]  # fmt: skip


def atomic_body(name: str, kind: str, space: str, result: bool) -> str:
    bank = "%rd" if kind.endswith("64") else "%r"
    values = f"{bank}1" + (f", {bank}3" if name == "cas" else "")
    target = f"{bank}2, " if result else ""
    return f"{'atom' if result else 'red'}.relaxed.gpu.{space}.{name}.{kind} {target}[%rd28], {values};"


@pytest.mark.parametrize("space", ["global", "shared::cta"])
@pytest.mark.parametrize(("name", "kind"), ATOMIC_FORMS)
@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=3)
def test_atomics(space: str, name: str, kind: str, seed: int) -> None:
    """Lane after lane, several of them on one word; the result is what was there before."""
    rng = np.random.default_rng(seed)
    width = int(kind[1:])
    top = 4 if name in ("inc", "dec", "cas") else 1 << width
    bank = "%rd" if width == 64 else "%r"

    def draw(count: int) -> list[int]:
        if kind == "f32":
            return [pattern(float(x), "f32") for x in rng.normal(size=count).astype(np.float32)]
        return [int(x) % top for x in rng.integers(0, 1 << 63, count)]

    memory, b, c = draw(4), draw(LANES), draw(LANES)
    place, active = rng.integers(0, 4, LANES), rng.random(LANES) < 0.7
    dtype = f"u{width // 8}"
    old = np.zeros(LANES, dtype)
    arrays = [place * width // 8, np.array(b, dtype), np.array(c, dtype), old, active.astype(np.uint32)]
    body = load(1, "%rd28", 8) + load(2, f"{bank}1", width // 8) + load(3, f"{bank}3", width // 8)
    body += load(5, "%r90", 4) + f"setp.ne.u32 %p15, %r90, 0; mov.b{width} {bank}2, 77; add.u64 %rd28, %rd28, %rd24;"
    body += masked(atomic_body(name, kind, space, True)) + store(4, f"{bank}2", width // 8)
    got = after(space, np.array(memory, dtype).view(np.uint8), body, *arrays).view(dtype)
    for lane in range(LANES):
        if not active[lane]:
            assert old[lane] == 77
            continue
        before = memory[place[lane]]
        operands = [number(x, kind) for x in (before, b[lane], c[lane])][: 3 if name == "cas" else 2]
        assert old[lane] == before
        memory[place[lane]] = pattern(ATOMICS[name](*operands), kind)
    assert got.tolist() == memory


@pytest.mark.parametrize("space", ["global", "shared"])
def test_reductions_have_no_result(space: str) -> None:
    total = aligned(np.zeros(1, np.uint32))
    start = "ld.param.u64 %rd27, [k_param_0];" + (
        "mov.u64 %rd28, %rd27;" if space == "global" else f"mov.u64 %rd28, {SHARED};"
    )
    body = start + f"st.{space}.b32 [%rd28], 5; mov.u32 %r1, %tid.x; {atomic_body('add', 'u32', space, False)}"
    run(f"{body} ld.{space}.b32 %r0, [%rd28]; st.global.b32 [%rd27], %r0;", total)
    assert total[0] == 5 + sum(range(LANES))


@pytest.mark.parametrize(
    "statement",
    [
        "atom.global.add.f16x2 %r0, [%rd0], %r1", "atom.global.add.v2.f32 {%r0, %r1}, [%rd0], {%r2, %r3}",
        "ld.local.b32 %r0, [%r1]", "ld.b32 %r0, [%rd0]", "ld.global.v2.b32 %r0, [%rd0]",
        "st.shared.v2.b32 [%r0], {%r1}", "vote.sync.none.pred %p0, %p1, -1", "shfl.sync.left.b32 %r0, %r1, 1, 31, -1",
        "ldmatrix.sync.aligned.m8n8.x3.shared.b16 {%r0, %r1, %r2}, [%r3]",
        "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r0, %r1}, [%r3]", "ld.shared.b32 %r0, %r1",
        "activemask.b32 %r0", "shfl.sync.idx.b32 %h0, %r1, 1, 31, -1", "st.global.b32 [%h0], %r0",
    ],
)  # fmt: skip
def test_what_is_not_modelled_is_refused(statement: str) -> None:
    with pytest.raises(Unsupported, match=r"PTX line \d+"):
        Code(assemble(f"{statement};")).check()


# ------------------------------------------------------------------------------------------------ matrices
@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices(count: int, trans: str) -> None:
    """ldmatrix against the definition of its fragments; stmatrix puts the same matrices 512 bytes further."""
    rng = np.random.default_rng(count)
    halves = rng.integers(0, 1 << 16, (64, 8), np.uint16)
    rows = rng.permutation(32)  # lane -> the row of shared memory that it points to
    names = ", ".join(f"%r{i}" for i in range(count))
    form = f"sync.aligned.m8n8.x{count}{trans}.shared.b16"
    body = load(1, "%rd28", 8) + f"add.u64 %rd28, %rd28, %rd24; ldmatrix.{form} {{{names}}}, [%rd28];"
    body += "".join(store(2 + i, f"%r{i}", 4) for i in range(count))
    body += f"stmatrix.{form} [%rd28+512], {{{names}}};"
    registers = [np.zeros(LANES, np.uint32) for _ in range(count)]
    got = after("shared", halves.reshape(-1).view(np.uint8), body, rows * 16, *registers).view(np.uint16).reshape(64, 8)
    for i, register in enumerate(registers):
        mine = rows[8 * i : 8 * i + 8]
        matrix = halves[mine].T if trans else halves[mine]
        for lane in range(LANES):
            low, high = (int(x) for x in matrix[lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2])
            assert register[lane] == low | high << 16
        assert (got[32 + mine] == halves[mine]).all()
    others = [row for row in range(64) if row - 32 not in rows[: 8 * count]]
    assert (got[others] == halves[others]).all()
