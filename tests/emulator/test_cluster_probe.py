"""Clusters as the DSL writes them: its host code, its special registers, arrivals and stores to another CTA."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fa3.emulator import artefacts, machine
from fa3.emulator.check import Names, checkers
from fa3.emulator.check.composite import Checks
from fa3.emulator.faults import Fault
from fa3.emulator.host import HostCode
from fa3.emulator.program import Program

pytestmark = pytest.mark.compile

CTAS, THREADS = 4, 128


@cache
def probe() -> HostCode:
    from fa3.compile import (
        TARGET,
        cute,
        cutlass,
        make_fake_stream,
        make_fake_tensor,
    )  # before the DSL: it says for what

    from . import cluster_probe

    with tempfile.TemporaryDirectory() as folder:
        options = f"--enable-tvm-ffi {TARGET} --keep-ptx --generate-line-info --dump-dir {folder}"
        y = make_fake_tensor(cutlass.Int32, (CTAS * THREADS,), (1,), assumed_align=16)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        compiled: Any = cute.compile(cluster_probe.host, y, stream, options=options)
        obj, shared = Path(folder, "probe.o"), Path(folder, "probe.so")
        compiled.export_to_c(str(obj), function_name="probe")
        artefacts._link(obj, shared, compiled.artifacts.PTX)
        return HostCode(shared, "probe")


def run(policy: str, program: Program | None = None) -> tuple[torch.Tensor, Checks]:
    y = torch.full((CTAS * THREADS,), -1, dtype=torch.int32)
    (launch,) = probe().capture({"y": y}, ("y",))
    assert launch.cluster == (2, 1, 1) and launch.grid == (CTAS, 1, 1)
    (checks,) = checkers(Names("probe"))
    try:
        machine.run(program or probe().program, launch, policy=policy, observers=[checks], resident=2)
    except Fault as fault:
        checks.stopped(fault)
    return y.view(CTAS, THREADS), checks


@pytest.mark.parametrize("policy", ["early", "late", "random", "starve:0-0", "starve:1-3"])
def test_every_cta_gets_what_its_peer_sends(policy: str) -> None:
    y, checks = run(policy)
    assert not checks.findings, "\n".join(map(str, checks.findings))
    assert torch.equal(y, torch.tensor([[1000], [0], [3000], [2000]]) + torch.arange(THREADS))


@pytest.mark.parametrize(
    ("opcode", "kinds"),
    [
        ("barrier.cluster", {"mbarrier", "barrier not visible", "CTA not started"}),
        ("st.async", {"deadlock"}),
        ("mbarrier.arrive.release.cluster", {"deadlock"}),
        ("fence.mbarrier_init", {"barrier not visible"}),
    ],
)
def test_what_is_left_out_is_found(opcode: str, kinds: set[str]) -> None:
    program = probe().program
    for index, at in enumerate(program.statements):
        if at.opcode.startswith(opcode):
            program = program.without(index)
    assert program is not probe().program
    found = {finding.kind for policy in ("early", "late") for finding in run(policy, program)[1].findings}
    assert found & kinds, found
