"""The backward in pairs of CTAs: right and clean under the checker, and its faults between the CTAs are named."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest

from fa3.config.backward import BackwardConfig, BackwardKey
from fa3.emulator import check
from fa3.emulator.__main__ import check_kernel
from fa3.emulator.check import Finding
from fa3.emulator.mutate import problems
from fa3.emulator.mutate.case import Case
from fa3.emulator.program import Program

pytestmark = pytest.mark.compile

POLICIES = ("early", "late", "random")


def key(causal: bool, deterministic: bool = False) -> BackwardKey:
    config = BackwardConfig(
        256, 256, causal=causal, design="pairs", tile_m=64, tile_n=80, stages_do=1, stages_ds=1, dq_store="direct",
        scores_ahead=True,
    )  # fmt: skip
    return BackwardKey("backward", config, "bf16", deterministic=deterministic)


@pytest.mark.parametrize(("causal", "deterministic"), [(True, False), (False, True)])
def test_right_and_clean(causal: bool, deterministic: bool) -> None:
    report = check_kernel(key(causal, deterministic), POLICIES, seeds=(0,))
    assert not report, str(report)


# ------------------------------------------------------------------------------------------------ planted faults
RACES = {"read before it arrived", "overwritten while read", "uninitialised shared memory"}


@dataclass(frozen=True)
class Fault:
    """Statements that are taken out: those that begin with `opcode`, at lines of Python that contain `text`."""

    opcode: str
    text: str
    kinds: frozenset[str]
    lines: tuple[str, ...]
    """Of which one must be in a finding of a right kind."""

    @property
    def name(self) -> str:
        return f"{self.opcode} of {self.text}"


def fault(opcode: str, text: str, kinds: set[str], *lines: str) -> Fault:
    return Fault(opcode, text, frozenset(kinds), lines or (text,))


SEND, ACQUIRE, WAIT = "ring.send(", "ring.acquire(exchange)", "ring.wait(exchange)"
RELEASE, MEET = "ring.release(exchange)", "meet_cluster()"
FAULTS = (
    fault("mbarrier.try_wait", ACQUIRE, RACES, SEND),
    fault("mbarrier.try_wait", WAIT, RACES, SEND, "start_peer()"),
    fault("mbarrier.arrive", RELEASE, {"deadlock"}, ACQUIRE),
    fault("mbarrier.arrive.expect_tx", SEND, {"deadlock"}, WAIT),
    fault("cp.async.bulk", SEND, {"deadlock"}, WAIT),
    fault("barrier.cluster", "meet_cluster()  #", {"exited CTA"}, SEND, RELEASE),
)
"""The last is the meeting at the end."""


@cache
def case() -> Case:
    return next(problems.case(key(False), shape) for shape in problems.shapes(key(False)) if shape.name == "deep")


def without(program: Program, fault: Fault) -> Program:
    """A wait that is taken out passes at once."""
    for index, at in enumerate(program.statements):
        text = check.Place.of("", 0, at).text
        if at.opcode.startswith(fault.opcode) and fault.text in text:
            program = program.without(index)
            if at.name == "mbarrier" and "try_wait" in at.opcode:
                passed = replace(at, opcode="setp.eq.u32", operands=(at.operands[0], "0", "0"))
                program = program.replaced(index, passed)
    return program


def lines_of(finding: Finding) -> str:
    return " ".join(place.text for place in (finding.at, finding.other) if place)


@pytest.mark.parametrize("policy", ["early", "late"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_faults_between_the_ctas_are_named(fault: Fault, policy: str) -> None:
    run = case().run
    program = without(run.host.program, fault)
    assert program is not run.host.program, "the fault changes nothing"
    run.clear()
    report = check.check(
        run.host.code.with_program(program), run.launch, check.describe(run.key), policies=(policy,), resident=run.sms
    )
    right = [finding for finding in report if finding.kind in fault.kinds]
    assert any(line in lines_of(finding) for finding in right for line in fault.lines), str(report)
    assert all(finding.at.rank in (0, 1) for finding in right)
