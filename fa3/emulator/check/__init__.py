"""Finds faults in emulated kernels: races, deadlocks, missing fences and waits, wrong counts, unwritten outputs.

`check` runs a launch under several schedules and returns a `Report`; `checkers` are the observers for a run of one's
own. `describe` names the parts of a forward kernel, so that the report speaks of "k.full[1]" and "math0".

What a checker finds does not depend on luck where that can be avoided: most rules ask what a warp *knew* when it did
something (`ordering`), not in which order things happened to be done.
"""

from __future__ import annotations

from fa3.emulator.check.composite import Checks
from fa3.emulator.check.names import ForwardNames, Names, describe
from fa3.emulator.check.places import Place
from fa3.emulator.check.report import Finding, Report
from fa3.emulator.check.runs import POLICIES, check

__all__ = [
    "POLICIES",
    "Checks",
    "Finding",
    "ForwardNames",
    "Names",
    "Place",
    "Report",
    "check",
    "checkers",
    "describe",
]


def checkers(description: Names | None = None) -> list[Checks]:
    """Fresh observers for one run: attach them with `machine.run(..., observers=...)`, then read their `findings`.

    If the run ends with a Fault, tell it to each of them (`stopped`), so that it becomes a finding. What needs no run,
    a missing wgmma.fence, is found by `fa3.emulator.check.fences`.
    """
    return [Checks(description or Names())]
