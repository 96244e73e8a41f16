"""Runs a launch under several schedules with all checkers, and compares the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from fa3.emulator.check.advice import advice_for
from fa3.emulator.check.composite import Checks
from fa3.emulator.check.fences import find_unfenced
from fa3.emulator.check.names import Names
from fa3.emulator.check.places import Place
from fa3.emulator.check.regions import Regions
from fa3.emulator.check.report import Finding, Report
from fa3.emulator.faults import Fault

if TYPE_CHECKING:
    from fa3.emulator.blocks import Code
    from fa3.emulator.host import Launch
    from fa3.emulator.program import Program

POLICIES = ("early", "late", "random")
Results = dict[str, torch.Tensor]
TOLERANCE = 2.0**-7
"""How far results of two schedules may differ, relative to the largest element: bf16 rounds to 2^-9, and sums of a
WGMMA may be taken in another order."""


def check(
    program: Program | Code,
    launch: Launch,
    description: Names | None = None,
    *,
    policies: Sequence[str] = POLICIES,
    seeds: Sequence[int] = (0,),
    reference: Callable[[Results], Iterable[str]] | None = None,
    resident: int = 4,
) -> Report:
    """Everything that the checkers find in a launch.

    Args:
        program: the kernel, or its blocks (`Code`), which spares making them again.
        launch: is executed once for each schedule. Outputs start as NaN (`Names.written_once`), other tensors that it
            may write as they are now; afterwards they have the results of the last run.
        description: what the kernel's parts are called (`describe`); numbers without.
        policies: those that make random choices run once for each of `seeds`, the others once.
        reference: is given the written tensors after each run, and returns a sentence for each that is wrong.
        resident: CTAs that run at the same time.
    """
    from fa3.emulator.blocks import Code
    from fa3.emulator.machine import run

    code = program if isinstance(program, Code) else Code(program)
    names = description or Names(code.program.name)
    report = Report(find_unfenced(code.program, names), names.kernel)
    regions, first = Regions(), None
    before = _written(launch)
    for policy, seed in _schedules(policies, seeds):
        schedule = f"{policy}, seed {seed}" if seed is not None else policy
        checks, tensors = Checks(names, regions), _restored(launch, before, names)
        findings = []
        try:
            run(code, launch, policy=policy, seed=seed or 0, observers=[checks], resident=resident)
            findings += _judge(names, tensors, first, reference)
            first = first or {name: tensor.clone() for name, tensor in tensors.items()}
        except Fault as fault:
            checks.stopped(fault)
        for finding in [*checks.findings, *findings]:
            finding.schedules = [schedule]
            report.add(finding)
        report.runs += 1
    return report


def _schedules(policies: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, int | None]]:
    found: list[tuple[str, int | None]] = []
    for policy in policies:
        found += [(policy, None)] if policy in ("early", "late") else [(policy, seed) for seed in seeds]
    return found


def _written(launch: Launch) -> Results:
    """Copies of the tensors that the kernel may write."""
    tensors = getattr(launch, "tensors", {})
    names = [allocation.name for allocation in launch.allocations if allocation.writable]
    return {name: tensors[name].clone() for name in names if name in tensors}


def _restored(launch: Launch, before: Results, names: Names) -> Results:
    """The tensors themselves, as they were before the first run; outputs full of NaN."""
    for name, values in before.items():
        poison = name in names.written_once and values.is_floating_point()
        launch.tensors[name].copy_(torch.full_like(values, torch.nan) if poison else values)
    return {name: launch.tensors[name] for name in before}


def _judge(
    names: Names, results: Results, first: Results | None, reference: Callable[[Results], Iterable[str]] | None
) -> list[Finding]:
    """Compares the results of a run with those of the first one, and with the reference."""
    wrong = [("wrong result", "", sentence) for sentence in (reference(results) if reference else ())]
    for name, tensor in results.items() if first else ():
        assert first is not None
        if tensor.is_floating_point() and (text := _difference(first[name], tensor)):
            wrong.append(("different results", name, f"{name} differs from that of the first run: {text}."))
    place = Place.of("the kernel", -1, None)
    return [Finding(kind, names.kernel, place, what, advice_for(kind), subject=name) for kind, name, what in wrong]


def _difference(first: torch.Tensor, second: torch.Tensor) -> str:
    """What is different between the results of two schedules; "" if they agree."""
    if torch.equal(first, second):
        return ""
    a, b = first.float(), second.float()
    other = (a.isnan() != b.isnan()) | (a.isinf() != b.isinf())
    if other.any():
        return f"{int(other.sum())} elements are NaN or infinite in one of them only"
    finite = a.isfinite() & b.isfinite()
    distance = (a - b)[finite].abs()
    scale = a[finite].abs().max() if len(distance) else torch.tensor(0.0)
    if not len(distance) or distance.max() <= TOLERANCE * scale:
        return ""
    return f"by up to {float(distance.max()):.3g}, where the largest element is {float(scale):.3g}"
