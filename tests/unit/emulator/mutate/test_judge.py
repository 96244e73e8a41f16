"""The rule for right kinds and lines."""

from __future__ import annotations

import pytest

from fa3.emulator.check import Finding, Place
from fa3.emulator.mutate.judge import CAUGHT, CLEAN, ESCAPED, FALSE_ALARM, OTHER_KIND, OTHER_LINE, Places
from fa3.emulator.mutate.mutant import Mutant
from fa3.emulator.program import Program
from fa3.sass.listing import Source
from fa3.sass.ptx_code import Statement

STATEMENTS = [Statement(f"s{i}", source=Source("kernel.py", 10 + i), line=i) for i in range(6)]
EDGES = {0: frozenset("k"), 1: frozenset("k"), 2: frozenset("v"), 3: frozenset(("k", "v")), 4: frozenset()}
PLACES = Places(STATEMENTS, EDGES)


def mutant(index: int = 0, anchors: tuple[int, ...] = (), harmless: bool = False) -> Mutant:
    def build() -> Program:
        raise AssertionError

    return Mutant("op", index, STATEMENTS[index], build, frozenset(("race",)), anchors, harmless=harmless)


def finding(kind: str, line: int, other: int | None = None, subject: str = "") -> Finding:
    def at(number: int) -> Place:
        return Place("math0", 4, "kernel.py", number, "", 0, "")

    return Finding(kind, "k", at(line), "", "", at(other) if other else None, subject)


@pytest.mark.parametrize(
    ("findings", "verdict"),
    [
        ([], ESCAPED),
        ([finding("race", 10)], CAUGHT),
        ([finding("race", 11)], CAUGHT),  # the other end of the ring
        ([finding("race", 13)], CAUGHT),  # of two rings, one of which it is
        ([finding("race", 99, other=11)], CAUGHT),
        ([finding("deadlock", 10)], OTHER_KIND),
        ([finding("race", 12)], OTHER_LINE),  # of another ring
        ([finding("race", 15)], OTHER_LINE),  # of no edge
        ([finding("deadlock", 10), finding("race", 12), finding("race", 11)], CAUGHT),
        ([finding("race", 11, subject="k")], CAUGHT),
        ([finding("race", 13, subject="v")], OTHER_LINE),  # the line fits, but it speaks of another ring
        ([finding("race", 10, subject="v")], CAUGHT),  # its own line
        ([finding("race", 11, subject="lse")], CAUGHT),  # which is no edge
    ],
)
def test_verdict(findings: list[Finding], verdict: str) -> None:
    assert PLACES.verdict(mutant(), findings)[0] == verdict


def test_the_finding_of_the_verdict() -> None:
    wrong, right = finding("race", 12), finding("race", 11)
    assert PLACES.verdict(mutant(), [wrong, right])[1] is right
    assert PLACES.verdict(mutant(), [wrong])[1] is wrong


def test_anchors_bring_their_edges_and_lines() -> None:
    """A bound has no edge of its own."""
    assert PLACES.verdict(mutant(5), [finding("race", 12)])[0] == OTHER_LINE
    assert PLACES.verdict(mutant(5, (2,)), [finding("race", 12)])[0] == CAUGHT
    assert PLACES.verdict(mutant(5, (4,)), [finding("race", 14)])[0] == CAUGHT
    assert PLACES.verdict(mutant(5, (2,)), [finding("race", 10)])[0] == OTHER_LINE


def test_harmless_changes_must_give_nothing() -> None:
    assert PLACES.verdict(mutant(harmless=True), [])[0] == CLEAN
    assert PLACES.verdict(mutant(harmless=True), [finding("race", 10)])[0] == FALSE_ALARM
