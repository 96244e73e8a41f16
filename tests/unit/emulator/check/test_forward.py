"""The checkers on a compiled forward kernel: nothing where it is right, and names where one statement is missing."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from fa3.config.table import forward_key
from fa3.config.types import KernelKey
from fa3.emulator.backend import KernelRun, record
from fa3.emulator.check import Report, check, describe
from fa3.emulator.check.fences import find_unfenced
from fa3.sass.ptx_code import Statement

pytestmark = pytest.mark.compile

KEYS = (forward_key(64, 64, True, "bf16"), forward_key(128, 128, False, "bf16"))


@cache
def recorded(key: KernelKey, rows: int = 200, keys: int = 328) -> KernelRun:
    """Two CTAs share four tiles or more; the rings go around, and no length is a multiple of the tile."""
    random = torch.Generator().manual_seed(3)
    d = key.config.head_dim
    q = torch.randn(1, rows, 2, d, generator=random).to(torch.bfloat16)
    k, v = (torch.randn(1, keys, 1, d, generator=random).to(torch.bfloat16) for _ in range(2))
    return record(q, k, v, causal=key.config.causal)


def checked(key: KernelKey, which: Callable[[Statement], bool] | None = None, number: int = 0) -> Report:
    """The report on the kernel, without the statement number `number` of those that `which` picks."""
    run, program = recorded(key), recorded(key).program
    if which is not None:
        program = program.without([i for i, at in enumerate(program.statements) if which(at)][number])
    names: Any = describe(key)
    schedules = ("early", "late", "random") if which is None else ("late", "random")
    return check(program, run.launch, names, policies=schedules, seeds=range(2 if which is None else 1))


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_right_kernels(key: KernelKey) -> None:
    report = checked(key)
    assert not report, str(report)
    assert report.kernel == key.name and report.runs == 4


def test_missing_proxy_fence() -> None:
    report = checked(KEYS[0], lambda at: at.opcode.startswith("fence.proxy"))
    assert report.kinds == {"no proxy fence"}
    finding = report.findings[0]
    assert finding.at.role.startswith("math") and "o stage" in finding.happened and finding.subject == "o"
    assert finding.at.file == "fa3/kernels/parts/epilogue.py" and finding.at.text.startswith("cute.copy(")
    assert finding.other and finding.other.ptx.startswith("stmatrix")


def test_missing_release() -> None:
    """The producer waits for a stage that nobody frees."""
    report = checked(KEYS[0], lambda at: at.opcode.startswith("mbarrier.arrive.shared"), number=-3)
    assert report.kinds & {"deadlock", "barrier left mid-phase"}, str(report)
    (finding, *_) = report
    assert finding.subject in {"k", "v", "q", "tile"} and ".empty[" in finding.happened


def test_missing_wait_for_wgmma() -> None:
    report = checked(KEYS[1], lambda at: at.opcode.startswith("wgmma.wait_group"))
    assert "accumulator in flight" in report.kinds
    assert all(finding.at.role.startswith("math") for finding in report.of("accumulator in flight"))


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_every_fence_before_wgmma_is_needed(key: KernelKey) -> None:
    program = recorded(key).program
    fences = [i for i, at in enumerate(program.statements) if at.opcode.startswith("wgmma.fence")]
    assert len(fences) >= 3 and not find_unfenced(program, describe(key))
    assert all(find_unfenced(program.without(i), describe(key)) for i in fences)
