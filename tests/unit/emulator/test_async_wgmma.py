"""WGMMA in kernels: fragments, groups and waits under every policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fa3.emulator.blocks import Code
from fa3.emulator.faults import Fault, Unsupported
from fa3.emulator.observe import Observer
from fa3.sass.listing import Source

from .assembler import SHARED, Machine, aligned, assemble, run, store

RUNS = [("early", 0), ("late", 0), ("random", 1), ("random", 2), ("random", 3), ("starve:1-2", 1)]
M, N, K = 64, 16, 16
A, B = SHARED + 1024, SHARED + 4096
"""Shared addresses of the operands."""
LEADING, STRIDE = 128, 256
"""Bytes between 8x8 matrices along k, and along the rows, where nothing is swizzled."""
THREADS = 128
D = [f"%r{i}" for i in range(N // 2)]
MMA = "wgmma.mma_async.sync.aligned.m64n16k16.f32"
COMMIT = "wgmma.commit_group.sync.aligned;"


def wait(groups: int) -> str:
    return f"wgmma.wait_group.sync.aligned {groups};"


def descriptor(address: int, leading: int = LEADING, stride: int = STRIDE) -> int:
    return address >> 4 | leading >> 4 << 16 | stride >> 4 << 32


def image(matrix: Any, transposed: bool = False) -> Any:
    """The bytes of a (rows, 16) matrix of 16-bit numbers as they lie in shared memory, k-major or mn-major."""
    rows = len(matrix)
    codes = codes_of(matrix)
    result = np.zeros(rows * K, np.uint16)
    for row in range(rows):
        for k in range(K):
            if transposed:
                at = row // 8 * STRIDE + row % 8 * 2 + k // 8 * LEADING + k % 8 * 16
            else:
                at = row // 8 * STRIDE + row % 8 * 16 + k // 8 * LEADING + k % 8 * 2
            result[at // 2] = codes[row, k]
    return aligned(result)


def codes_of(matrix: Any) -> Any:
    """bf16 codes of small whole numbers."""
    return (np.asarray(matrix, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def place_of(thread: int, i: int) -> tuple[int, int]:
    """(row, column) of register i of a thread's accumulators."""
    warp, lane = divmod(thread, 32)
    return 16 * warp + lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + lane % 4 * 2 + i % 2


def place_of_a(thread: int, i: int, half: int) -> tuple[int, int]:
    """(row, k) of one half of register i of a thread's A."""
    warp, lane = divmod(thread, 32)
    return 16 * warp + lane // 4 + 8 * (i % 2), lane % 4 * 2 + half + 8 * (i // 2)


rng = np.random.default_rng(0)
MATRIX_A = rng.integers(-8, 8, (M, K)).astype(np.float32)
MATRIX_B = rng.integers(-8, 8, (N, K)).astype(np.float32)
PRODUCT = MATRIX_A @ MATRIX_B.T


def mma(
    a: str = "%rd1", b: str = "%rd2", accumulate: int = 1, negate: tuple[int, int] = (1, 1), flags: str = ""
) -> str:
    """One instruction, in a scope of its own as inline assembly has it. `flags`: of the transposes."""
    flags = flags or ("0" if a.startswith("{") else "0, 0")
    return f"""
      {{ .reg .pred p; setp.ne.b32 p, {accumulate}, 0;
      {MMA}.bf16.bf16 {{{", ".join(D)}}}, {a}, {b}, p, {negate[0]}, {negate[1]}, {flags}; }}"""


A_REGISTERS = "{%r40, %r41, %r42, %r43}"


def prologue(first: float = 100.0) -> str:
    """A and B of arrays 0 and 1 to shared memory, A of array 3 to registers; the accumulators start at `first`."""
    body = f"""
      mov.u64 %rd1, {descriptor(A)}; mov.u64 %rd2, {descriptor(B)};
      setp.ne.u32 %p0, %tid.x, 0; @%p0 bra $FILLED;
      mbarrier.init.shared.b64 [{SHARED}], 1; mbarrier.arrive.expect_tx.shared.b64 _, [{SHARED}], {2 * K * (M + N)};"""
    for i, (address, rows) in enumerate(((A, M), (B, N))):
        opcode = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes"
        body += f"ld.param.u64 %rd10, [k_param_{i}]; {opcode} [{address}], [%rd10], {2 * K * rows}, [{SHARED}];"
    body += f"\n$FILLED: bar.sync 0;\n$WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [{SHARED}], 0; @!%p1 bra $WAIT;\n"
    body += "ld.param.u64 %rd10, [k_param_3]; mul.wide.u32 %rd11, %tid.x, 16; add.u64 %rd10, %rd10, %rd11;"
    body += f"ld.global.v4.b32 {A_REGISTERS}, [%rd10];"
    bits = np.float32(first).view(np.uint32)
    return body + "".join(f"mov.b32 {name}, {bits};" for name in D) + "wgmma.fence.sync.aligned;\n"


def execute(
    body: str, policy: str = "early", seed: int = 0, observers: tuple[Observer, ...] = (), b: Any = None
) -> tuple[Any, Machine]:
    """Runs prologue and body, then stores the accumulators: the (64, 16) matrix that they are."""
    in_registers = np.zeros((THREADS, 4, 2), np.uint16)
    for thread, i, half in np.ndindex(THREADS, 4, 2):
        in_registers[thread, i, half] = codes_of(MATRIX_A)[place_of_a(thread, i, half)]
    out = np.zeros((len(D), THREADS), np.float32)
    # array 2 + 2 i is what register i is stored to: parameters 0, 1, 3 are the operands
    arrays = [image(MATRIX_A), image(MATRIX_B) if b is None else b, out[0], aligned(in_registers), *out[1:]]
    numbers = [2, *range(4, 3 + len(D))]
    stores = "".join(store(number, name, 4) for number, name in zip(numbers, D, strict=True))
    done = run(
        prologue() + body + stores, *arrays, threads=THREADS, smem=8192, policy=policy, seed=seed, observers=observers
    )
    found = np.zeros((M, N), np.float32)
    for thread, i in np.ndindex(THREADS, len(D)):
        found[place_of(thread, i)] = out[i, thread]
    return found, done


# ------------------------------------------------------------------------------------------------ products
@pytest.mark.parametrize(("policy", "seed"), RUNS)
@pytest.mark.parametrize("a", ["%rd1", A_REGISTERS], ids=["shared", "registers"])
@pytest.mark.parametrize("accumulate", [0, 1])
def test_a_product_that_is_waited_for(policy: str, seed: int, a: str, accumulate: int) -> None:
    found, _ = execute(mma(a, accumulate=accumulate) + COMMIT + wait(0), policy, seed)
    assert (found == PRODUCT + 100 * accumulate).all()


@pytest.mark.parametrize(("policy", "seed"), [*RUNS, *(("random", seed) for seed in range(4, 10))])
def test_instructions_of_a_group_and_groups_of_a_warp_come_in_order(policy: str, seed: int) -> None:
    """Every other one starts anew; out of order, the last would not be the second that adds to a product."""
    groups = [mma() + mma(accumulate=0), mma(), mma(accumulate=0), mma(A_REGISTERS)]
    body = (COMMIT + "bar.sync 1, 128;").join(groups) + COMMIT + "bar.sync 1, 128;" * 3 + wait(0)
    found, _ = execute(body, policy, seed)
    assert (found == 2 * PRODUCT).all()


@pytest.mark.parametrize("negate", [(1, 1), (-1, 1), (1, -1), (-1, -1)])
@pytest.mark.parametrize("a", ["%rd1", A_REGISTERS], ids=["shared", "registers"])
def test_negated_operands(negate: tuple[int, int], a: str) -> None:
    found, _ = execute(mma(a, negate=negate) + COMMIT + wait(0), "late")
    assert (found == 100 + negate[0] * negate[1] * PRODUCT).all()


@pytest.mark.parametrize("a", ["%rd1", A_REGISTERS], ids=["shared", "registers"])
def test_b_may_be_transposed(a: str) -> None:
    flags = "0, 1" if a == "%rd1" else "1"
    found, _ = execute(mma(a, flags=flags) + COMMIT + wait(0), b=image(MATRIX_B, transposed=True))
    assert (found == 100 + PRODUCT).all()


def test_a_may_be_transposed_in_shared_memory() -> None:
    """The image of a k-major A read as mn-major is another matrix, made of the same 8x8 matrices transposed."""
    found, _ = execute(mma(flags="1, 0") + COMMIT + wait(0))
    transposed = MATRIX_A.reshape(M // 8, 8, K // 8, 8).transpose(0, 3, 2, 1).reshape(M, K)
    assert (found == 100 + transposed @ MATRIX_B.T).all()


# ------------------------------------------------------------------------------------------------ waits
def by_policy(body: str) -> dict[str, Any]:
    return {policy: execute(body, policy)[0] for policy in ("early", "late")}


SNAPSHOT = "".join(f"mov.b32 %r{60 + i}, {name};" for i, name in enumerate(D))
RESTORE = "".join(f"mov.b32 {name}, %r{60 + i};" for i, name in enumerate(D))


def test_accumulators_that_are_read_before_the_wait() -> None:
    found = by_policy(mma() + COMMIT + SNAPSHOT + wait(0) + RESTORE)
    assert (found["early"] == 100 + PRODUCT).all() and (found["late"] == 100).all()


def test_a_wait_leaves_the_youngest_groups_under_way() -> None:
    found = by_policy(mma() + COMMIT + mma() + COMMIT + wait(1) + SNAPSHOT + wait(0) + RESTORE)
    assert (found["early"] == 100 + 2 * PRODUCT).all() and (found["late"] == 100 + PRODUCT).all()


def test_a_wait_does_not_cover_what_was_not_committed() -> None:
    found = by_policy(mma() + COMMIT + mma() + wait(0) + SNAPSHOT + COMMIT + wait(0) + RESTORE)
    assert (found["early"] == 100 + 2 * PRODUCT).all() and (found["late"] == 100 + PRODUCT).all()


@pytest.mark.parametrize("changed", [False, True])
def test_a_in_registers_that_is_changed_before_the_wait(changed: bool) -> None:
    zero = "".join(f"mov.b32 %r4{i}, 0;" for i in range(4)) if changed else ""
    found = by_policy(mma(A_REGISTERS) + COMMIT + zero + wait(0))
    assert (found["early"] == 100 + PRODUCT).all()
    assert (found["late"] == (100 if changed else 100 + PRODUCT)).all()


def test_an_operand_in_shared_memory_that_is_changed_before_the_wait() -> None:
    zero = f"mad.lo.u32 %r50, %tid.x, 4, {B}; bar.sync 1, 128; st.shared.b32 [%r50], 0; bar.sync 1, 128;"
    found = by_policy(mma() + COMMIT + zero + wait(0) + "bar.sync 1, 128;")
    assert (found["early"] == 100 + PRODUCT).all() and (found["late"] == 100).all()


def test_random_schedules_differ_where_a_wait_is_missing() -> None:
    body = mma() + COMMIT + mma() + COMMIT + wait(1) + "bar.sync 1, 128;" * 3 + SNAPSHOT + wait(0) + RESTORE
    seen = set()
    for seed in range(12):
        found, _ = execute(body, "random", seed)
        for warp in range(4):  # a warp's rows are all in one state
            rows = found[16 * warp : 16 * warp + 16] - 100
            times = [t for t in (1, 2) if (rows == t * PRODUCT[16 * warp : 16 * warp + 16]).all()]
            assert len(times) == 1
            seen.add(times[0])
    assert seen == {1, 2}


# ------------------------------------------------------------------------------------------------ observers, faults
class Watcher(Observer):
    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.issues: list[Any] = []

    def issued(self, warp: Any, operation: Any) -> None:
        if operation.kind == "wgmma" and warp.index == 2:
            self.log.append(("issued",))
            self.issues.append(operation)

    def executed(self, operation: Any) -> None:
        if operation.kind == "wgmma" and operation.warp.index == 2:
            self.log.append(("executed", self.issues.index(operation)))

    def committed(self, warp: Any, at: Any, group: Any) -> None:
        if warp.index == 2:
            self.log.append(("committed", group.number, len(group.operations)))

    def joined(self, warp: Any, at: Any, groups: Any, read: bool) -> None:
        if warp.index == 2:
            self.log.append(("joined", [group.number for group in groups], read))


def test_what_observers_are_told() -> None:
    watcher = Watcher()
    body = mma() + mma(A_REGISTERS) + COMMIT + mma() + COMMIT + wait(1) + wait(1) + wait(0)
    _, done = execute(body, "late", observers=(watcher,))
    assert watcher.log == [
        ("issued",), ("issued",), ("committed", 0, 2), ("issued",), ("committed", 1, 1),
        ("executed", 0), ("executed", 1), ("joined", [0], False), ("joined", [], False),
        ("executed", 2), ("joined", [1], False),
    ]  # fmt: skip
    numbers = {name: 1 << number for number, name in enumerate(done.program.registers)}
    from_shared, from_registers, _ = watcher.issues
    assert from_shared.registers_written == from_registers.registers_written == sum(numbers[name] for name in D)
    assert from_shared.registers_read == 0
    assert from_registers.registers_read == sum(numbers[f"%r4{i}"] for i in range(4))
    b = set(range(B // 4, B // 4 + N * K // 2))
    rows_of_warp_2 = {
        (A + row // 8 * STRIDE + row % 8 * 16 + k // 8 * LEADING + k % 8 * 2) // 4
        for row in range(32, 48)
        for k in range(K)
    }
    assert set(from_registers.reads.tolist()) == b
    assert set(from_shared.reads.tolist()) == b | rows_of_warp_2
    assert from_shared.flops == 2 * M * N * K


LINE_70 = "\n.loc 1 70 1\n"
LINE_71 = f"\n.loc 1 71 1\n{mma()} {COMMIT} {wait(0)}"


@pytest.mark.parametrize("policy", ["early", "late", "random"])
@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (f"setp.lt.u32 %p5, %tid.x, 3; @%p5 bra $OUT; {LINE_70} {mma()}\n$OUT:", "divergence"),
        (f"cvt.u64.u32 %rd1, %laneid; {LINE_70} {mma()}", "divergence"),
        (f"mov.u64 %rd3, {descriptor(SHARED + 8192)}; {mma()} {LINE_70} {mma(b='%rd3')} {LINE_71}", "out of bounds"),
        (f"mov.u64 %rd3, {descriptor(B) | 1 << 15}; {mma()} {LINE_70} {mma(b='%rd3')} {LINE_71}", "wgmma"),
    ],
    ids=["part of a warp", "several descriptors", "outside", "malformed"],
)  # fmt: skip
def test_misuse_is_a_fault_where_the_instruction_is(body: str, kind: str, policy: str) -> None:
    with pytest.raises(Fault) as caught:
        execute(body, policy)
    assert caught.value.kind == kind
    assert caught.value.at is not None and caught.value.at.source == Source("kernel.py", 70)
    assert caught.value.warp is not None


@pytest.mark.parametrize(
    "statement",
    [
        "wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16 {%r0, %r1}, %rd0, %rd1, %p0, 1, 1, 0, 0",
        "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {%r0, %r1, %r2, %r3}, %rd0, %rd1, %r9, 0, %p0, 1, 1",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r0, %r1, %r2, %r3}, %rd0, %rd1, %p0, %r5, 1, 0, 0",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r0, %r1, %r2, %h3}, %rd0, %rd1, %p0, 1, 1, 0, 0",
        "wgmma.mma_async.sync.aligned.m64n8k256.s32.b1.b1.and.popc {%r0, %r1, %r2, %r3}, %rd0, %rd1, %p0",
        "wgmma.wait_group.sync.aligned %r0",
    ],
)
def test_what_is_not_modelled_is_refused(statement: str) -> None:
    with pytest.raises(Unsupported, match=r"PTX line \d+"):
        Code(assemble(f"{statement};")).check()
