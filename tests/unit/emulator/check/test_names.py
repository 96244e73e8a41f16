"""Names of a forward kernel's parts, and places in reports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import fa3
from fa3.config.backward import BackwardConfig, BackwardKey
from fa3.config.budget import forward_smem, forward_topology
from fa3.config.table import FORWARD, forward_key
from fa3.config.types import KernelKey
from fa3.emulator.check import Finding, Names, Place, Report, describe
from fa3.emulator.check.advice import ADVICE, advice_for
from fa3.emulator.check.names import count_of, ranges
from fa3.emulator.memory import SHARED_BASE
from fa3.sass.listing import Source
from fa3.sass.ptx_code import Statement

KEY = forward_key(64, 64, True, "bf16")
NAMES = describe(KEY)


# ------------------------------------------------------------------------------------------------ names
def test_roles() -> None:
    assert [NAMES.role(warp) for warp in (0, 3, 4, 11, 15)] == ["load", "load", "math0", "math1", "math2"]
    assert NAMES.warp(9) == "math1 (warp 9)" and NAMES.role(16) == "warpgroup 4"
    assert NAMES.warps({4, 5, 6, 7, 9}) == "math0, math1 (warps 4-7, 9)"


@pytest.mark.parametrize("config", FORWARD)
def test_every_mbarrier_has_a_name(config: object) -> None:
    """In the order in which the topology lays them out, and with its counts."""
    names, topology = describe(KernelKey(config, "bf16")), forward_topology(config)
    addresses = sorted(names.mbarriers or ())
    assert addresses == list(range(SHARED_BASE, SHARED_BASE + topology.bytes, 8))
    for plan in topology.plans:
        for stage in range(plan.edge.stages):
            full = SHARED_BASE + 8 * (plan.first_barrier + stage)
            empty = full + 8 * plan.edge.stages
            assert names.mbarrier(full) == f"{plan.edge.name}.full[{stage}]"
            assert names.mbarrier(empty) == f"{plan.edge.name}.empty[{stage}]"
            for address, count in ((full, plan.full_arrivals), (empty, plan.empty_arrivals)):
                found = names.plan(address)
                assert found and found.arrivals == count == len(found.warps)
            assert names.plan(full).bytes == plan.edge.bytes and names.plan(empty).bytes == 0


def test_edges_between_ctas() -> None:
    """One warp announces what the other CTA sends; who has read it tells that one."""
    config = BackwardConfig(
        256, 256, causal=True, design="pairs", tile_m=64, tile_n=80, stages_do=1, stages_ds=1, dq_store="direct"
    )
    names = describe(BackwardKey("backward", config, "bf16"))
    plans = [plan for plan in map(names.plan, names.mbarriers or ()) if plan and plan.edge == "ds_peer"]
    full, empty = sorted(plans, key=lambda plan: plan.across)
    assert (full.name, full.warps, full.arrivals, full.across) == ("ds_peer.full[0]", {4}, 1, False)
    assert (empty.name, empty.warps, empty.arrivals, empty.across) == ("ds_peer.empty[0]", set(range(4, 12)), 8, True)
    assert full.bytes == 2 * 64 * 80 and full.times == empty.times == 1


@pytest.mark.parametrize("config", FORWARD)
def test_every_byte_of_a_buffer_has_a_name(config: object) -> None:
    names, smem = describe(KernelKey(config, "bf16")), forward_smem(config)
    for field in smem.fields[1:]:
        first, last = SHARED_BASE + field.offset, SHARED_BASE + field.end - 1
        assert names.buffer(first) == names.buffer(last) == field.name
        assert names.shared(first, first) == f"{field.name} stage 0"
        assert names.shared(last, last).startswith(f"{field.name} stage ")
    assert names.buffer(SHARED_BASE + smem.total_bytes) == ""


def test_stages() -> None:
    keys = SHARED_BASE + forward_smem(KEY.config)["k"].offset
    assert NAMES.shared(keys + 16384, keys + 32767) == "k stage 1"
    assert NAMES.shared(keys, keys + 32767) == "k stage 0 to stage 1"
    assert "shared addresses" in NAMES.shared(5, 6)


def test_named_barriers() -> None:
    """Numbers as `fa3.kernels.forward.Plan` gives them out."""
    text = (Path(fa3.__file__).parent / "kernels" / "forward.py").read_text()
    assert 'BarrierNames((("turn", groups), ("rows", groups)))' in text
    assert [NAMES.event(n) for n in range(1, 7)] == [f"{e} of math{i}" for e in ("turn", "rows") for i in range(3)]
    assert NAMES.named(2) == "turn of math1 (named barrier 2)" and NAMES.named(9) == "named barrier 9"
    assert NAMES.meeting(0) == frozenset(range(16))
    assert NAMES.meeting(1) == frozenset((4, 5, 6, 7, 12, 13, 14, 15))  # the last one gives the first its turn
    assert NAMES.meeting(2) == frozenset(range(4, 12)) and NAMES.meeting(5) == frozenset(range(8, 12))
    assert NAMES.may_be_left(3, 4) and not NAMES.may_be_left(3, 3) and not NAMES.may_be_left(4, 4)


def test_registers() -> None:
    assert NAMES.registers == {"load": 32, "math0": 160, "math1": 160, "math2": 160}


def test_names_of_an_unknown_kernel() -> None:
    names = Names("k")
    assert names.role(5) == "warpgroup 1" and names.plan(1024) is None and names.registers is None
    assert names.mbarrier(1032) == "the mbarrier at shared address 1032" and names.meeting(1) is None


def test_words() -> None:
    assert ranges({1, 2, 3, 7, 9, 10}) == "1-3, 7, 9-10" and ranges({4}) == "4"
    assert count_of(1, "warp") == "1 warp" and count_of(2, "warp") == "2 warps"


# ------------------------------------------------------------------------------------------------ places and reports
def place(line: int = 3, role: str = "load", file: str = "/elsewhere/fa3/pipeline/ring.py") -> Place:
    return Place.of(role, 0, Statement("nop", source=Source(file, line), line=40 + line))


def test_place_of_a_kernel_that_was_compiled_elsewhere() -> None:
    """The line is found in this installation."""
    found = place(1)
    assert (
        found.file == "fa3/pipeline/ring.py"
        and found.text == '"""A circular buffer between roles, guarded by mbarriers.'
    )
    assert str(found) == f"load (warp 0) at fa3/pipeline/ring.py:1 (PTX line 41): {found.text}"


def test_place_outside_the_package() -> None:
    found = place(file="/nowhere/kernel.py")
    assert found.file == "/nowhere/kernel.py" and found.text == ""
    assert Place.of("load", 0, Statement("nop", line=7)).line_of_source == ("PTX", 7)


def test_repetitions_only_count() -> None:
    finding = Finding("deadlock", "k", place(3), "happened", "advice", place(4), "k", schedules=["late"])
    turned = replace(finding, at=place(4), other=place(3), schedules=["early"])
    report = Report([finding, turned, replace(finding, subject="v"), replace(finding, at=place(5))])
    assert [found.count for found in report] == [2, 1, 1]
    assert report.findings[0].schedules == ["late", "early"] and report.kinds == {"deadlock"}


def test_report_as_text_and_as_json() -> None:
    report = Report([Finding("deadlock", "k", place(), "It happened.", "Do this.", place(4))], "k", 3)
    text = str(report)
    for part in ("1 finding in 3 runs of k", "1. deadlock", "It happened.", "Do this.", "ring.py:3", "ring.py:4"):
        assert part in text
    data = json.loads(json.dumps(report.as_dict()))
    assert data["findings"][0]["at"]["ptx_line"] == 43 and data["runs"] == 3
    assert str(Report(kernel="k", runs=1)) == "no findings in 1 run of k" and not Report()


def test_every_kind_that_is_found_has_advice() -> None:
    """Kinds are literals in the checkers; each must be in the table."""
    folder = Path(fa3.__file__).parent / "emulator" / "check"
    text = "\n".join(file.read_text() for file in folder.glob("*.py") if file.name != "advice.py")
    assert {kind for kind in ADVICE if f'"{kind}"' not in text} == set()
    assert advice_for("no such kind") == ""
