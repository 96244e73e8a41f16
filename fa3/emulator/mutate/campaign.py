"""Runs the mutants of a kernel under the checker, and says what became of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from fa3.config.backward import AnyKey, BackwardKey
from fa3.emulator.blocks import Code
from fa3.emulator.check import Checks, Finding, ForwardNames, Names, Place, describe
from fa3.emulator.check.checker import Checker
from fa3.emulator.check.fences import find_unfenced
from fa3.emulator.check.regions import Regions
from fa3.emulator.faults import Fault
from fa3.emulator.mutate.case import Case
from fa3.emulator.mutate.dataflow import Dataflow
from fa3.emulator.mutate.judge import CAUGHT, WRONG, Places
from fa3.emulator.mutate.mutant import Mutant
from fa3.emulator.mutate.operators import mutants
from fa3.emulator.mutate.problems import case, shapes
from fa3.emulator.mutate.trace import Trace
from fa3.emulator.observe import Observer
from fa3.emulator.program import Program

if TYPE_CHECKING:
    from fa3.emulator.sync import MBarrier

ATTEMPTS = (
    ("deep", "late"),
    ("wide", "random"),
    ("edge", "random"),
    ("short", "late"),
    ("sections", "late"),
    ("wide", "starve:8-11"),
)
BACKWARD_ATTEMPTS = (
    ("wide", "random"),
    ("deep", "late"),
    ("edge", "random"),
    ("short", "random"),
    ("wide", "starve:1-1"),
)
"""(problem, policy), tried in this order until something is found. Most rules hold for every schedule, so that the
first one finds most. Problems that a kernel does not have are left out."""


STATIC = frozenset(("no wgmma.fence",))
"""What is found in the text alone."""


@dataclass(frozen=True)
class Outcome:
    """What was said about a mutant."""

    mutant: Mutant
    verdict: str
    finding: Finding | None
    attempts: int
    """Runs that it took."""
    seconds: float
    findings: tuple[Finding, ...] = ()
    """All of them."""


@dataclass(frozen=True)
class Kernel:
    """A kernel under test: its program, its problems, its mutants."""

    key: AnyKey

    @cached_property
    def names(self) -> Names:
        return describe(self.key)

    @property
    def attempts(self) -> tuple[tuple[str, str], ...]:
        """Those whose problems the kernel has."""
        attempts = BACKWARD_ATTEMPTS if isinstance(self.key, BackwardKey) else ATTEMPTS
        return tuple(attempt for attempt in attempts if attempt[0] in self.cases)

    @cached_property
    def cases(self) -> dict[str, Case]:
        return {shape.name: case(self.key, shape) for shape in shapes(self.key)}

    @cached_property
    def code(self) -> Code:
        return next(iter(self.cases.values())).run.host.code

    @property
    def program(self) -> Program:
        return self.code.program

    @cached_property
    def mutants(self) -> list[Mutant]:
        return mutants(self.program)

    @cached_property
    def _regions(self) -> dict[str, Regions]:
        return {name: Regions() for name in self.cases}

    @cached_property
    def trace(self) -> Trace:
        trace = Trace(self.names)
        for problem in self.cases.values():
            problem.run.replay(policy="late", observers=[trace])
        return trace

    @cached_property
    def places(self) -> Places:
        edges = {index: frozenset(found) for index, found in self.trace.edges.items()}
        return Places(self.program.statements, edges, self.names.rings, isinstance(self.names, ForwardNames))

    def findings(
        self,
        code: Code,
        attempt: tuple[str, str],
        enough: Callable[[list[Finding]], bool] = lambda found: False,
        seed: int = 0,
    ) -> list[Finding]:
        """What the checkers say about one run of a program. It ends early once `enough` is found."""
        problem, names = self.cases[attempt[0]], self.names
        checks = Checks(names, self._regions[attempt[0]])
        dataflow = [Dataflow(names)] if isinstance(names, ForwardNames) else []
        watch = Watch([*checks.checkers, *dataflow], enough)
        found = []
        try:
            problem.run.replay(code, policy=attempt[1], seed=seed, observers=[checks, *dataflow, watch])
            place = Place.of("the kernel", -1, None)
            wrong = problem.wrong(problem.run.launch.tensors)
            found = [Finding(WRONG, names.kernel, place, sentence, "") for sentence in wrong]
        except Fault as fault:
            checks.stopped(fault)
        except Enough:
            pass
        return [*watch.findings, *found]

    def _code(self, program: Program) -> Code:
        same_length = len(program.statements) == len(self.program.statements)
        return self.code.with_program(program) if same_length else Code(program)

    def outcome(self, mutant: Mutant) -> Outcome:
        """Runs a mutant until something is found, or nothing is left to try. RuntimeError, with the mutant, if the
        emulator fails."""
        try:
            return self._outcome(mutant)
        except Exception as error:
            raise RuntimeError(f"{self.key.name}: {mutant.operator}, {mutant.at}, PTX line {mutant.at.line}") from error

    def _outcome(self, mutant: Mutant) -> Outcome:
        start, attempts = time.perf_counter(), 0
        code = self._code(mutant.build())
        findings = find_unfenced(code.program, self.names)
        for attempt in () if mutant.kinds == STATIC else self.attempts:
            if findings:
                break
            attempts += 1
            findings = self.findings(code, attempt, partial(self._is_caught, mutant))
        verdict, finding = self.places.verdict(mutant, findings)
        return Outcome(mutant, verdict, finding, attempts, time.perf_counter() - start, tuple(findings))

    def _is_caught(self, mutant: Mutant, findings: list[Finding]) -> bool:
        return self.places.verdict(mutant, findings)[0] == CAUGHT


class Enough(Exception):
    """Nothing more need be found in this run."""


class Watch(Observer):
    """Ends a run early. Looks at what was found whenever a barrier's phase is complete."""

    def __init__(self, checkers: Sequence[Checker], enough: Callable[[list[Finding]], bool]) -> None:
        self.checkers, self.enough, self._seen = checkers, enough, 0

    @property
    def findings(self) -> list[Finding]:
        return [finding for checker in self.checkers for finding in checker.findings]

    def completed(self, barrier: MBarrier) -> None:
        found = sum(len(checker.report) for checker in self.checkers)
        if found > self._seen:
            self._seen = found
            if self.enough(self.findings):
                raise Enough
