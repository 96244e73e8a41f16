"""Clusters: special registers, addresses in other CTAs, the cluster's barrier, stores and copies to other CTAs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fa3.emulator.blocks import Code
from fa3.emulator.faults import Fault, Unsupported
from fa3.emulator.machine import Deadlock
from fa3.emulator.observe import Observer
from fa3.emulator.operations import Operation
from fa3.emulator.program import Program

from .assembler import LANES, SHARED, Triple, aligned, assemble, module, run, store, tensor_map
from .test_sync import BARRIER, POLICIES, by_thread, initialised, located, wait

PAIR: Triple = (2, 1, 1)
DATA = SHARED + 1024
"""Shared address of data that CTAs exchange."""
RANK, PEER = "%r40", "%r41"
RANKS = f"mov.u32 {RANK}, %cluster_ctarank; xor.b32 {PEER}, {RANK}, 1; mov.u32 %r42, %ctaid.x;\n"
"""Rank, the rank of the other CTA of a pair, and in %r42 the CTA's number."""
MEET = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;\n"
THREAD = "mad.lo.u32 %r43, %r42, %ntid.x, %tid.x;\n"
"""The thread's number in the grid."""


def far(address: int | str, register: str, rank: str = PEER) -> str:
    """`register` = an address in the CTA of a rank."""
    return f"mapa.shared::cluster.u32 {register}, {address}, {rank};\n"


def out(register: str) -> str:
    """Stores a register to argument 0, one element for each thread of the grid."""
    return THREAD + store(0, register, 4).replace("%tid.x", "%r43")


def run_pair(body: str, *arguments: Any, threads: int = LANES, ctas: int = 2, cluster: Triple = PAIR, **options: Any):
    """A body behind `RANKS`, with an output of one number for each thread of the grid. -> (machine, (CTA, thread))"""
    result = np.zeros((ctas, threads), np.uint32)
    body = RANKS + body
    done = run(body, result, *arguments, threads=threads, grid=(ctas, 1, 1), cluster=cluster, **options)
    return done, result


# ------------------------------------------------------------------------------------------------ geometry
NAMES = ("cluster_ctaid", "cluster_nctaid", "clusterid", "nclusterid", "ctaid")


@pytest.mark.parametrize(("grid", "cluster"), [((8, 1, 1), (4, 1, 1)), ((4, 6, 2), (2, 3, 1)), ((4, 2, 4), (1, 2, 2))])
def test_special_registers(grid: Triple, cluster: Triple) -> None:
    ctas = int(np.prod(grid))
    registers = ["%cluster_ctarank", "%cluster_nctarank", *(f"%{name}.{axis}" for name in NAMES for axis in "xyz")]
    result = np.zeros((ctas, len(registers)), np.uint32)
    body = f"""
      mov.u32 %r0, %ctaid.z; mad.lo.u32 %r0, %r0, {grid[1]}, %ctaid.y; mad.lo.u32 %r0, %r0, {grid[0]}, %ctaid.x;
      mul.wide.u32 %rd0, %r0, {4 * len(registers)}; ld.param.u64 %rd1, [k_param_0]; add.s64 %rd0, %rd0, %rd1;"""
    for i, name in enumerate(registers):
        body += f"mov.u32 %r1, {name}; st.global.b32 [%rd0+{4 * i}], %r1;"
    run(body, result, grid=grid, cluster=cluster)
    for number, (rank, count, *rest) in enumerate(result.tolist()):
        inside, sizes, place, clusters, at = (tuple(rest[3 * i : 3 * i + 3]) for i in range(5))
        assert at == (number % grid[0], number // grid[0] % grid[1], number // (grid[0] * grid[1]))
        assert sizes == cluster and count == np.prod(cluster)
        assert clusters == tuple(n // c for n, c in zip(grid, cluster, strict=True))
        assert rank == inside[0] + cluster[0] * (inside[1] + cluster[1] * inside[2])
        assert at == tuple(k * c + i for k, c, i in zip(place, cluster, inside, strict=True))


@pytest.mark.parametrize("cluster", [(1, 1, 1), PAIR])
def test_whether_the_cluster_is_explicit(cluster: Triple) -> None:
    body = "mov.pred %p0, %is_explicit_cluster; selp.b32 %r0, 1, 0, %p0;" + out("%r0")
    _, result = run_pair(body, cluster=cluster)
    assert set(result.reshape(-1).tolist()) == {int(cluster != (1, 1, 1))}


def test_the_ptx_may_say_the_size_of_a_cluster() -> None:
    text = module("nop;").replace(".reqntid", ".reqnctapercluster 2, 1, 1\n.explicitcluster\n.reqntid")
    assert Program.parse(text.replace("nop;", "")).cluster == (2, 1, 1)
    assert Program.parse(module("")).cluster is None


@pytest.mark.parametrize(("sms", "most"), [(1, 2), (3, 2), (4, 4), (7, 6)])
def test_whole_clusters_run_at_the_same_time(sms: int, most: int) -> None:
    class Live(Observer):
        def __init__(self) -> None:
            self.begun: set[int] = set()
            self.over: set[int] = set()
            self.most = 0

        def stepping(self, warp: Any, step: Any, mask: Any) -> None:
            self.begun.add(warp.cta.number)
            self.most = max(self.most, len(self.begun - self.over))

        def finished(self, cta: Any) -> None:
            self.over.add(cta.number)

    live = Live()
    run(MEET * 3, grid=(8, 1, 1), cluster=PAIR, resident=sms, observers=[live], policy="random")
    assert live.over == set(range(8)) and live.most == most


# ------------------------------------------------------------------------------------------------ addresses
def test_mapa_of_ones_own_rank_is_the_own_address() -> None:
    body = far(DATA, "%r0", RANK) + f"st.shared.b32 [%r0], %r42; ld.shared.b32 %r1, [{DATA}];" + out("%r1")
    _, result = run_pair(body)
    assert [set(row.tolist()) for row in result] == [{0}, {1}]


@pytest.mark.parametrize("wide", [False, True])
def test_an_address_tells_its_rank(wide: bool) -> None:
    """`mapa` and `getctarank` in both widths; a mapped address may be mapped again."""
    address, kind = ("%rd0", "u64") if wide else ("%r0", "u32")
    body = f"mov.u{64 if wide else 32} {address}, {DATA};"
    for rank in ("3", "%r44"):
        body += f"mapa.shared::cluster.{kind} {address}, {address}, {rank};"
    body = "mov.u32 %r44, %laneid; and.b32 %r44, %r44, 3;" + body
    body += f"getctarank.shared::cluster.{kind} %r1, {address};" + out("%r1")
    _, result = run_pair(body, ctas=4, cluster=(4, 1, 1))
    assert (result == np.arange(LANES) % 4).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_loads_and_stores_of_another_cta(policy: str) -> None:
    """Each lane writes to one CTA of four, which depends on the lane, and reads from another."""
    body = f"""
      mov.u32 %r0, %laneid; add.u32 %r1, %r0, {RANK}; and.b32 %r1, %r1, 3;
      shl.b32 %r2, %r0, 2; add.u32 %r2, %r2, {DATA};
      mad.lo.u32 %r3, {RANK}, 100, %r0;
      {MEET} {far("%r2", "%r4", "%r1")} st.shared::cluster.b32 [%r4], %r3; {MEET}
      add.u32 %r5, %r1, 1; and.b32 %r5, %r5, 3; {far("%r2", "%r6", "%r5")} ld.shared::cluster.b32 %r7, [%r6]; {MEET}"""
    _, result = run_pair(body + out("%r7"), ctas=4, cluster=(4, 1, 1), policy=policy, seed=1)
    for rank in range(4):
        for lane in range(LANES):
            asked = (lane + rank + 1) % 4  # into which the CTA wrote whose rank + lane is that
            assert result[rank, lane] == (asked - lane) % 4 * 100 + lane


def test_atomics_and_vectors_of_another_cta() -> None:
    body = f"""
      {by_thread(0, f"st.shared.b32 [{DATA}], 0;")} {MEET} {far(DATA, "%r0", "0")}
      red.shared::cluster.add.u32 [%r0], 1; atom.shared::cluster.max.u32 %r1, [%r0], 5;
      add.u32 %r2, %r0, 16; mov.b32 %r3, 7; setp.ne.u32 %p0, {RANK}, 1; @%p0 bra $NOT;
      st.shared::cluster.v4.b32 [%r2], {{%r3, %r3, %r42, %r3}};
    $NOT: {MEET} ld.shared::cluster.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r2]; ld.shared::cluster.b32 %r8, [%r0];
      mad.lo.u32 %r8, %r6, 1000, %r8; {MEET}"""
    _, result = run_pair(body + out("%r8"))
    assert set(result.reshape(-1).tolist()) == {1064}


@pytest.mark.parametrize(
    ("statement", "kind", "words"),
    [
        (far(DATA, "%r0", "2"), "out of bounds", "CTA rank 2 of a cluster of 2"),
        ("mov.b32 %r0, 0x7000400; ld.shared::cluster.b32 %r1, [%r0]", "out of bounds", "CTA rank 6"),
        (f"{far(DATA, '%r0')} ld.shared.b32 %r1, [%r0]", "out of bounds", "past the CTA's"),
        (f"{far(DATA, '%r0')} ld.shared::cluster.b32 %r1, [%r0+8192]", "out of bounds", "past the CTA's"),
        (f"{far(DATA, '%r0')} st.shared::cluster.b32 [%r0+2], %r1", "misaligned", "multiple of 4"),
        (f"{far(DATA, '%r0')} mbarrier.arrive.shared::cluster.b64 _, [%r0]", "mbarrier", "no initialised"),
        (f"{far(BARRIER, '%r0')} mbarrier.try_wait.parity.shared.b64 %p0, [%r0], 0", "mbarrier", "no initialised"),
    ],
)
def test_wrong_addresses_are_faults(statement: str, kind: str, words: str) -> None:
    with pytest.raises(Fault, match=words) as caught:
        run_pair(f"{initialised(1)} {MEET} .loc 1 77 1\n{statement};")
    assert (caught.value.kind, located(caught.value)) == (kind, 77)


@pytest.mark.parametrize("policy", ["early", "late"])
def test_the_shared_memory_of_a_cta_that_has_exited(policy: str) -> None:
    body = f"{MEET} setp.eq.u32 %p0, {RANK}, 1; @%p0 ret; nanosleep.u32 9; {far(DATA, '%r0')}"
    body += "mov.u32 %r1, 0;\n$SPIN: add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 999; @%p1 bra $SPIN;\n"
    with pytest.raises(Fault, match="CTA rank 1 is gone") as caught:
        run_pair(body + ".loc 1 88 1\nst.shared::cluster.b32 [%r0], %r1;", policy=policy)
    assert caught.value.kind == "exited CTA" and located(caught.value) == 88


# ------------------------------------------------------------------------------------------------ the cluster's barrier
class Turns(Observer):
    def __init__(self) -> None:
        self.arrived_warps: list[tuple[int, int]] = []
        self.passed_warps: list[tuple[int, int]] = []

    def cluster_arrived(self, warp: Any, at: Any, barrier: Any) -> None:
        self.arrived_warps.append((warp.cta.rank, warp.index))

    def cluster_passed(self, warp: Any, at: Any, barrier: Any) -> None:
        self.passed_warps.append((warp.cta.rank, warp.index))
        behind = min(self.arrived_warps.count((rank, index)) for rank in range(2) for index in range(3))
        assert self.passed_warps.count((warp.cta.rank, warp.index)) <= behind


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_the_barrier_joins_all_warps_again_and_again(policy: str, seed: int) -> None:
    watcher = Turns()
    done, _ = run_pair(MEET * 4, threads=96, policy=policy, seed=seed, observers=[watcher])
    assert done.clusters[0].barrier.generation == 4 and len(watcher.passed_warps) == 24


def test_lanes_may_arrive_one_by_one() -> None:
    """Without `.aligned`: half of each warp arrives in a branch of its own."""
    body = """
      setp.lt.u32 %p0, %tid.x, 16; @%p0 bra $LOW; barrier.cluster.arrive.relaxed; nanosleep.u32 3; bra $ON;
    $LOW: barrier.cluster.arrive;
    $ON: barrier.cluster.wait;"""
    assert run_pair(body)[0].clusters[0].barrier.generation == 1


def test_who_has_exited_is_not_waited_for() -> None:
    body = f"setp.ge.u32 %p0, %tid.x, 40; @%p0 ret; {MEET.replace('.aligned', '')}"
    assert run_pair(body, threads=96, policy="late")[0].clusters[0].barrier.generation == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("barrier.cluster.wait;", "without having arrived"),
        ("barrier.cluster.arrive; barrier.cluster.arrive;", "again before it has waited"),
    ],
)
def test_misuse_of_the_barrier_is_a_fault(body: str, words: str) -> None:
    with pytest.raises(Fault, match=words) as caught:
        run_pair(f".loc 1 5 1\n{body}")
    assert caught.value.kind == "cluster barrier" and located(caught.value) == 5


def test_aligned_needs_the_whole_warp() -> None:
    with pytest.raises(Fault, match="1 of the warp's 32 lanes"):
        run_pair(by_thread(0, "barrier.cluster.arrive.aligned;"))


def test_a_warp_that_never_arrives_is_named() -> None:
    body = f"""
      setp.lt.u32 %p0, %tid.x, 32; setp.eq.u32 %p1, {RANK}, 0; @%p1 bra $MEET; @!%p0 bra $MEET;
      bar.sync 3, 64;
    $MEET: {MEET}"""
    with pytest.raises(Deadlock, match=r"are missing: warp 0 of CTA rank 1") as caught:
        run_pair(body, threads=64)
    assert len(caught.value.warps) == 4


# ------------------------------------------------------------------------------------------------ mbarriers
ARRIVALS = [
    "mbarrier.arrive.shared::cluster.b64 _, [%r0]",
    "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r0], 1",
    "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r0], 0",
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("arrival", ARRIVALS)
def test_arrivals_at_the_barrier_of_another_cta(arrival: str, policy: str) -> None:
    """Both CTAs arrive at both barriers, which wait for two."""
    body = f"""
      {initialised(2)} {MEET} {far(BARRIER, "%r0")}
      {by_thread(0, f"{arrival}; mbarrier.arrive.shared.b64 _, [{BARRIER}];")}
      {wait(BARRIER, 0, "A").replace("shared.b64", "acquire.cluster.shared::cta.b64")} {MEET}"""
    done, _ = run_pair(body, policy=policy, threads=64)
    assert [cta.mbarriers[BARRIER].phases for cta in done.ctas] == [1, 1]


# ------------------------------------------------------------------------------------------------ copies
SEND = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(2))
def test_a_copy_from_one_cta_to_another(policy: str, seed: int) -> None:
    """Each CTA fills 128 bytes and sends them to the other one, which has announced them."""
    send = f"{far(DATA + 512, '%r2')} {far(BARRIER, '%r3')} {SEND} [%r2], [{DATA}], 128, [%r3];"
    body = f"""
      {initialised(1)} {by_thread(0, f"mbarrier.arrive.expect_tx.shared.b64 _, [{BARRIER}], 128;")} {MEET}
      shl.b32 %r0, %tid.x, 2; add.u32 %r0, %r0, {DATA}; mad.lo.u32 %r1, {RANK}, 1000, %tid.x; st.shared.b32 [%r0], %r1;
      fence.proxy.async.shared::cta; bar.sync 0; {by_thread(0, send)}
      {wait(BARRIER, 0, "A")} ld.shared.b32 %r4, [%r0+512]; {MEET}"""
    _, result = run_pair(body + out("%r4"), policy=policy, seed=seed)
    assert (result == np.arange(LANES) + np.array([[1000], [0]])).all()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("kind", "values"), [("b32", "%r1"), ("v2.b32", "{%r1, %r5}"), ("v4.f32", "{%r1, %r5, 0, %r5}")]
)
def test_asynchronous_stores(kind: str, values: str, policy: str) -> None:
    """Every thread stores one or several words into the other CTA; the barrier there counts all bytes."""
    count = int(kind[1]) if kind[0] == "v" else 1
    body = f"""
      {initialised(1)} {by_thread(0, f"mbarrier.arrive.expect_tx.shared.b64 _, [{BARRIER}], {64 * 4 * count};")} {MEET}
      mul.lo.u32 %r0, %tid.x, {4 * count}; add.u32 %r0, %r0, {DATA}; mad.lo.u32 %r1, {RANK}, 1000, %tid.x;
      add.u32 %r5, %r1, 7; {far("%r0", "%r2")} {far(BARRIER, "%r3")}
      st.async.shared::cluster.mbarrier::complete_tx::bytes.{kind} [%r2], {values}, [%r3];
      {wait(BARRIER, 0, "A")} ld.shared.b32 %r4, [%r0+{4 * (count - 1)}]; {MEET}"""
    _, result = run_pair(body + out("%r4"), policy=policy, threads=64)
    assert (result == np.arange(64) + np.array([[1000], [0]]) + 7 * (count > 1)).all()


def test_asynchronous_stores_of_64_bits_count_their_bytes() -> None:
    class Sizes(Observer):
        def __init__(self) -> None:
            self.found: list[int] = []

        def transferred(self, operation: Operation, barrier: Any, nbytes: int) -> None:
            self.found.append(nbytes)

    sizes = Sizes()
    store_two = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [%r2], {%rd0, 5}, [%r3]"
    body = f"""
      {initialised(1)} {MEET} mov.b64 %rd0, 3; {far(DATA, "%r2")} {far(BARRIER, "%r3")} {by_thread(0, store_two + ";")}
      {MEET} ld.shared.b64 %rd1, [{DATA + 8}]; cvt.u32.u64 %r4, %rd1;"""
    _, result = run_pair(body + out("%r4"), observers=[sizes])
    assert set(result.reshape(-1).tolist()) == {5} and sizes.found == [16, 16]


@pytest.mark.parametrize("policy", ["early", "late", "random"])
def test_a_multicast_load_goes_to_every_cta_of_its_mask(policy: str) -> None:
    """CTA rank 1 of four loads a box, and a range of bytes, for the ranks 0, 1 and 3."""
    data = aligned(np.arange(64, dtype=np.uint32).reshape(4, 16))
    multicast = "shared::cluster.global.{}mbarrier::complete_tx::bytes.multicast::cluster"
    load = f"cp.async.bulk.tensor.2d.{multicast.format('tile.')} [{DATA}], [%rd0, {{0, 0}}], [{BARRIER}], %h0;"
    load += f"cp.async.bulk.{multicast.format('')} [{DATA + 256}], [%rd1], 64, [{BARRIER}], 11;"
    announce = f"mbarrier.arrive.expect_tx.shared.b64 _, [{BARRIER}], {256 + 64};"
    body = f"""
      mov.b64 %rd0, k_param_1; ld.param.u64 %rd1, [k_param_2]; mov.b16 %h0, 11; {initialised(1)}
      setp.eq.u32 %p0, {RANK}, 2; @%p0 bra $MEET; {by_thread(0, announce)}
    $MEET: {MEET} mov.u32 %r0, 99; setp.ne.u32 %p1, {RANK}, 1; @%p1 bra $WAIT; {by_thread(0, load)}
    $WAIT: @%p0 bra $END; {wait(BARRIER, 0, "A")} shl.b32 %r0, %tid.x, 2; add.u32 %r0, %r0, {DATA + 192};
      ld.shared.b32 %r0, [%r0];
    $END: {MEET}"""
    _, result = run_pair(body + out("%r0"), tensor_map(data, (4, 16)), data, ctas=4, cluster=(4, 1, 1), policy=policy)
    expected = np.concatenate([np.arange(48, 64), np.arange(16)])
    assert [row.tolist() for row in result] == [expected.tolist()] * 2 + [[99] * LANES] + [expected.tolist()]


@pytest.mark.parametrize("policy", ["early", "late"])
def test_a_copy_that_reports_to_another_cta_than_it_writes_is_a_fault(policy: str) -> None:
    send = f"{far(DATA, '%r2')} .loc 1 9 1\n{SEND} [%r2], [{DATA}], 16, [{BARRIER}];"
    with pytest.raises(Fault, match="writes in CTA rank 1 and reports to a barrier of CTA rank 0") as caught:
        run_pair(
            f"{initialised(1)} {MEET} setp.eq.u32 %p0, {RANK}, 1; @%p0 bra $END; {by_thread(0, send)}\n$END: {MEET}"
        )
    assert caught.value.kind == "cluster" and located(caught.value) == 9


def test_a_copy_that_lands_in_a_cta_that_has_exited_is_a_fault() -> None:
    send = f"{far(DATA, '%r2')} {far(BARRIER, '%r3')} .loc 1 9 1\n{SEND} [%r2], [{DATA}], 16, [%r3];"
    body = f"{initialised(1)} {MEET} setp.eq.u32 %p0, {RANK}, 1; @%p0 bra $END; {by_thread(0, send)}\n$END: {MEET}"
    with pytest.raises(Fault, match="CTA rank 1 is gone") as caught:
        run_pair(body, policy="late")
    assert caught.value.kind == "exited CTA" and located(caught.value) == 9


@pytest.mark.parametrize(
    "statement",
    [
        "mbarrier.arrive.release.cluster.shared::cluster.b64 %rd0, [%r0]", "st.async.b32 [%r0], %r1, [%r2]",
        "ld.acquire.cluster.shared::cluster.b32 %r0, [%r1]",
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b8 [%r0], %h0, [%r2]",
    ],
)  # fmt: skip
def test_what_is_not_modelled_is_refused(statement: str) -> None:
    with pytest.raises(Unsupported, match=r"PTX line \d+"):
        Code(assemble(f"{statement};")).check()
