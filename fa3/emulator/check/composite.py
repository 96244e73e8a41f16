"""All checkers of a run as one observer, which calls a checker only for what it wants to know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fa3.emulator.check.budget import RegisterBudgets
from fa3.emulator.check.checker import Checker
from fa3.emulator.check.global_memory import GlobalMemory
from fa3.emulator.check.in_flight import InFlight
from fa3.emulator.check.leftovers import Leftovers
from fa3.emulator.check.lifetimes import Lifetimes
from fa3.emulator.check.named_barriers import NamedBarriers
from fa3.emulator.check.names import Names
from fa3.emulator.check.ordering import Order
from fa3.emulator.check.outputs import Outputs
from fa3.emulator.check.phases import Phases
from fa3.emulator.check.regions import Regions
from fa3.emulator.check.registers import Uninitialised
from fa3.emulator.check.report import Finding
from fa3.emulator.check.shared_memory import SharedMemory
from fa3.emulator.check.stops import Stops
from fa3.emulator.faults import Fault
from fa3.emulator.observe import Observer

EVENTS = tuple(name for name in vars(Observer) if not name.startswith("_"))


class Checks(Observer):
    """The checkers of one run. `regions` may be shared by several runs, which spares looking at them again."""

    def __init__(self, names: Names, regions: Regions | None = None) -> None:
        order = Order()
        before: list[Checker] = [Phases(names, order), NamedBarriers(names, order)]
        after: list[Checker] = [
            SharedMemory(names, order, regions or Regions()), InFlight(names), Uninitialised(names), Leftovers(names),
            RegisterBudgets(names), Outputs(names, order), GlobalMemory(names, order), Lifetimes(names, order),
            Stops(names),
        ]  # fmt: skip
        self.checkers = (*before, *after)
        for event in EVENTS:
            setattr(self, event, _together(event, (*before, order, *after)))

    @property
    def findings(self) -> list[Finding]:
        return [finding for checker in self.checkers for finding in checker.findings]

    def stopped(self, fault: Fault) -> None:
        """To be told when the run ended with a fault or a deadlock."""
        for checker in self.checkers:
            checker.stopped(fault)


def _together(event: str, observers: Sequence[Observer]) -> Callable[..., None]:
    """One function that tells an event to those that listen to it."""
    listeners = tuple(
        getattr(observer, event)
        for observer in observers
        if getattr(type(observer), event) is not getattr(Observer, event)
    )
    if not listeners:
        return getattr(Observer(), event)
    if len(listeners) == 1:
        return listeners[0]

    def tell(*arguments: Any) -> None:
        for listener in listeners:
            listener(*arguments)

    return tell
