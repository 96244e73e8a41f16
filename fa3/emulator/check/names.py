"""What the parts of a kernel are called: roles, barriers, stages, and what is known of them beforehand.

`Names` knows nothing, and calls everything by its number. `ForwardNames` and `BackwardNames` are made from a key;
everything that they say follows from `fa3.config`, which the kernels are built from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from fa3.config.backward import AnyKey, BackwardKey
from fa3.config.backward_budget import backward_registers, backward_schedule, backward_smem, backward_topology
from fa3.config.budget import TILE_SLOTS, forward_registers, forward_schedule, forward_smem, forward_topology
from fa3.config.types import KernelKey
from fa3.emulator.memory import SHARED_BASE
from fa3.layouts.smem import Placed, SharedMemoryPlan
from fa3.pipeline.registers import RegisterBudget
from fa3.pipeline.schedule import THREADS_PER_WARP, WARPS_PER_WARPGROUP, Role, RoleSchedule
from fa3.pipeline.topology import BYTES_PER_BARRIER, EdgePlan, Topology


@dataclass(frozen=True)
class BarrierPlan:
    """What an mbarrier is for: `full` or `empty` of a stage of an edge."""

    name: str
    """Such as "k.full[1]"."""
    edge: str
    arrivals: int
    """Arrivals of a phase."""
    warps: frozenset[int]
    """The warps that arrive, each once in a phase."""
    senders: tuple[str, ...]
    """Their roles."""
    bytes: int
    """Bytes of a phase; 0 where no copy reports to it."""
    across: bool = False
    """Whether the warps are those of the other CTAs of the cluster."""

    @property
    def times(self) -> int:
        """How often each warp arrives in a phase: once, or once for each CTA that has such a warp."""
        return max(1, self.arrivals // max(1, len(self.warps)))


class Names:
    """Of a kernel that nothing is known about."""

    def __init__(self, kernel: str = "") -> None:
        self.kernel = kernel

    def role(self, warp: int) -> str:
        return f"warpgroup {warp // WARPS_PER_WARPGROUP}"

    def warp(self, warp: int) -> str:
        return f"{self.role(warp)} (warp {warp})"

    def warps(self, warps: frozenset[int] | set[int]) -> str:
        """Several warps, by role: "math0, math1 (warps 4-7, 9)"."""
        roles = dict.fromkeys(self.role(warp) for warp in sorted(warps))
        return f"{', '.join(roles)} (warp{'s' * (len(warps) > 1)} {ranges(warps)})"

    def mbarrier(self, address: int) -> str:
        plan = self.plan(address)
        return plan.name if plan else f"the mbarrier at shared address {address}"

    def plan(self, address: int) -> BarrierPlan | None:
        return None

    @property
    def mbarriers(self) -> frozenset[int] | None:
        """The addresses of all mbarriers, or None if they are not known."""
        return None

    def shared(self, first: int, last: int) -> str:
        """Bytes `first` to `last` of the shared window."""
        return f"shared addresses {first} to {last}"

    def buffer(self, first: int) -> str:
        """The name of the buffer that a byte belongs to, without a stage."""
        return ""

    rings: Mapping[str, str] = MappingProxyType({})
    """Buffer -> the edge that it belongs to, where their names differ."""

    def named(self, number: int) -> str:
        event = self.event(number)
        return f"{event} (named barrier {number})" if event else f"named barrier {number}"

    def event(self, number: int) -> str:
        """What a named barrier stands for, such as "turn of math0", or ""."""
        return ""

    def meeting(self, number: int) -> frozenset[int] | None:
        """The warps that meet at a named barrier, or None if that is not known."""
        return None

    written_once = frozenset(("o", "lse"))
    """Arguments of which every element is written exactly once in a launch."""

    earlier: frozenset[str] = frozenset()
    """Arguments that an earlier kernel of the chain writes, which this one may overtake."""

    sums: frozenset[str] = frozenset()
    """Arguments that CTAs add to."""

    counters: frozenset[str] = frozenset()
    """Arguments that tell CTAs how far others are."""

    ordered = False
    """Whether sums come in a fixed order."""

    most_left: float = math.inf
    """At how many named barriers arrivals may be left over when the kernel ends."""

    def may_be_left(self, number: int, warps: int) -> bool:
        """Whether the arrivals of so many warps may be left over at a named barrier."""
        return True

    @property
    def registers(self) -> dict[str, int] | None:
        """Role -> registers per thread that it asks for, or None if that is not known."""
        return None


class PlannedNames(Names):
    """Of a kernel whose roles, edges and buffers are data."""

    schedule: RoleSchedule
    topology: Topology
    smem: SharedMemoryPlan
    budget: RegisterBudget
    events: tuple[tuple[str, int], ...]
    """Named barriers in order, as `fa3.pipeline.barriers.BarrierNames` gives them out: event, how many."""

    # ---- roles
    def role(self, warp: int) -> str:
        for role in self.schedule.roles:
            if role.first_warp <= warp < role.first_warp + role.warps:
                return role.name
        return super().role(warp)

    @property
    def registers(self) -> dict[str, int]:
        budget = self.budget
        return {role.name: budget.math if role in self._math else budget.load for role in self.schedule.roles}

    @property
    def _math(self) -> list[Role]:
        return [role for role in self.schedule.roles if role.name.startswith("math")]

    # ---- mbarriers
    def plan(self, address: int) -> BarrierPlan | None:
        return self._plans.get(address)

    @property
    def mbarriers(self) -> frozenset[int]:
        return frozenset(self._plans)

    @cached_property
    def _plans(self) -> dict[int, BarrierPlan]:
        base = SHARED_BASE + self.smem["barriers"].offset
        found = {}
        for plan in self.topology.plans:
            for stage in range(plan.edge.stages):
                full = base + BYTES_PER_BARRIER * (plan.first_barrier + stage)
                found[full] = self._full(plan, stage)
                found[full + BYTES_PER_BARRIER * plan.edge.stages] = self._empty(plan, stage)
        return found

    def _full(self, plan: EdgePlan, stage: int) -> BarrierPlan:
        edge = plan.edge
        writers = edge.fillers(stage)
        warps = frozenset().union(*(_issuing(self.schedule[name]) for name in writers))
        if edge.across:  # one warp announces what the other CTA sends
            warps = frozenset(sorted(warps)[: plan.full_arrivals])
        name = f"{edge.name}.full[{stage}]"
        return BarrierPlan(name, edge.name, plan.full_arrivals, warps, writers, edge.bytes)

    def _empty(self, plan: EdgePlan, stage: int) -> BarrierPlan:
        edge = plan.edge
        readers = (edge.consumers[stage],) if edge.private else edge.consumers
        warps = frozenset().union(*(_issuing(self.schedule[name]) for name in readers))
        name = f"{edge.name}.empty[{stage}]"
        return BarrierPlan(name, edge.name, plan.empty_arrivals, warps, readers, 0, edge.across)

    # ---- buffers
    def shared(self, first: int, last: int) -> str:
        field = self._field(first)
        if field is None:
            return super().shared(first, last)
        begin, end = self._stage(field, first), self._stage(field, last) if self._field(last) == field else "..."
        return f"{field.name} {begin}" if begin == end else f"{field.name} {begin} to {end}"

    def buffer(self, first: int) -> str:
        field = self._field(first)
        return field.name if field else ""

    def _field(self, address: int) -> Placed | None:
        offset = address - SHARED_BASE
        return next((field for field in self.smem.fields if field.offset <= offset < field.end), None)

    def _stage(self, field: Placed, address: int) -> str:
        offset = address - SHARED_BASE - field.offset
        stages = self._stages(field.name)
        return f"stage {offset * stages // field.bytes}" if stages else f"byte {offset}"

    def _stages(self, name: str) -> int:
        edges = {plan.edge.name: plan.edge.stages for plan in self.topology.plans}
        return edges.get(name, 0)

    # ---- named barriers
    def event(self, number: int) -> str:
        if number == 0:
            return "the whole CTA"
        return self._events.get(number, "")

    def meeting(self, number: int) -> frozenset[int] | None:
        """All math warpgroups, or one of them."""
        if number == 0:
            return frozenset(range(self.schedule.threads // THREADS_PER_WARP))
        event, _, role = self.event(number).partition(" of ")
        if not event:
            return frozenset()
        members = [self.schedule[role]] if role else self._math
        return frozenset().union(*(_issuing(member) for member in members))

    @cached_property
    def _events(self) -> dict[int, str]:
        names = []
        for event, count in self.events:
            names += [event] if count == 1 != len(self._math) else [f"{event} of {r.name}" for r in self._math[:count]]
        return dict(enumerate(names, 1))


class ForwardNames(PlannedNames):
    """Of a forward kernel (`fa3.kernels.forward`)."""

    def __init__(self, key: KernelKey) -> None:
        super().__init__(key.name)
        self.key = key
        self.schedule = forward_schedule(key.config)
        self.topology = forward_topology(key.config)
        self.smem = forward_smem(key.config)
        self.budget = forward_registers(key.config)
        self.events = (("turn", key.config.math_warpgroups), ("rows", key.config.math_warpgroups))

    def _stages(self, name: str) -> int:
        slots = {"tiles": TILE_SLOTS, "o": self.key.config.math_warpgroups}
        return slots.get(name) or super()._stages(name)

    def meeting(self, number: int) -> frozenset[int] | None:
        """A turn joins the warpgroup that takes it with the one that gives it (`PingPong`)."""
        warps = super().meeting(number)
        event, _, role = self.event(number).partition(" of ")
        if event != "turn" or warps is None:
            return warps
        math = [other.name for other in self._math]
        return warps | _issuing(self.schedule[math[math.index(role) - 1]])

    rings = MappingProxyType({"tiles": "tile"})
    most_left = 1

    def may_be_left(self, number: int, warps: int) -> bool:
        """One turn is given that nobody takes (`fa3.pipeline.barriers.PingPong`)."""
        return self.event(number).startswith("turn") and warps == WARPS_PER_WARPGROUP


class BackwardNames(PlannedNames):
    """Of the main kernel of the backward (`fa3.kernels.backward`)."""

    def __init__(self, key: BackwardKey) -> None:
        super().__init__(key.name)
        self.config = key.config
        self.schedule = backward_schedule(key.config)
        self.topology = backward_topology(key.config, key.wanted)
        self.smem = backward_smem(key.config, key.wanted)
        self.budget = backward_registers(key.config, key.wanted)
        self.events = (("ds", 1), ("rows", key.config.math_warpgroups))
        self.ordered = key.deterministic

    rings = MappingProxyType({"lse": "q", "delta": "do"})
    written_once = frozenset(("dk", "dv"))
    earlier = frozenset(("lse_log2", "delta", "dq_accum", "turns"))
    sums = frozenset(("dq_accum",))
    counters = frozenset(("turns",))
    most_left = 0

    def may_be_left(self, number: int, warps: int) -> bool:
        return False

    def _stages(self, name: str) -> int:
        c = self.config
        slots = {"lse": c.stages_q, "delta": c.stages_do, "ds": c.stages_ds * c.key_slabs}
        slots |= dict.fromkeys("kv", c.key_slabs)
        return slots.get(name) or super()._stages(name)


class PrepareNames(Names):
    """Of the kernel in front of it (`fa3.kernels.backward_prepare`)."""

    written_once = frozenset(("lse_log2", "delta", "turns"))


class FinishNames(Names):
    """Of the kernel behind it (`fa3.kernels.backward_finish`)."""

    written_once = frozenset(("dq",))
    earlier = frozenset(("dq_accum",))


def _issuing(role: Role) -> frozenset[int]:
    return frozenset(range(role.first_warp, role.first_warp + role.issuing))


def ranges(numbers: frozenset[int] | set[int]) -> str:
    """ "4-7, 9"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


def count_of(number: int, what: str) -> str:
    """ "1 arrival", "2 arrivals"."""
    return f"{number} {what}{'s' * (number != 1)}"


def describe(key: AnyKey) -> Names:
    """The names of the kernel of a key."""
    if not isinstance(key, BackwardKey):
        return ForwardNames(key)
    if key.part == "backward":
        return BackwardNames(key)
    return PrepareNames(key.name) if key.part == "backward_prepare" else FinishNames(key.name)
