"""Which warps play which role."""

from __future__ import annotations

from dataclasses import dataclass

WARPS_PER_WARPGROUP = 4
THREADS_PER_WARP = 32
MAX_WARPS = 32


@dataclass(frozen=True)
class Role:
    """A named set of consecutive warps. `issuing` warps do the role's work; the rest of its warps idle.

    A role that only steers the copy engine needs one issuing warp, but registers are handed over by whole warpgroups
    (`setmaxnreg`), so it still owns four.
    """

    name: str
    first_warp: int
    warps: int
    issuing: int
    shares: bool = False
    """Whether it shares a warpgroup, and its registers, with its neighbours."""

    @property
    def threads(self) -> int:
        return self.warps * THREADS_PER_WARP


@dataclass(frozen=True)
class RoleSchedule:
    """The roles of a CTA in the order of their warps; every warp has exactly one role."""

    roles: tuple[Role, ...]

    def __post_init__(self) -> None:
        expected = 0
        for role in self.roles:
            if role.first_warp != expected:
                raise ValueError(f"role {role.name!r} starts at warp {role.first_warp}, expected {expected}")
            if not role.shares and (role.first_warp % WARPS_PER_WARPGROUP or role.warps % WARPS_PER_WARPGROUP):
                raise ValueError(f"role {role.name!r} must own whole warpgroups of {WARPS_PER_WARPGROUP} warps")
            if not 1 <= role.issuing <= role.warps:
                raise ValueError(f"role {role.name!r} issues from {role.issuing} of its {role.warps} warps")
            expected += role.warps
        if expected % WARPS_PER_WARPGROUP:
            raise ValueError(f"{expected} warps in a CTA; they must fill warpgroups of {WARPS_PER_WARPGROUP}")
        if expected > MAX_WARPS:
            raise ValueError(f"{expected} warps in a CTA; the hardware allows {MAX_WARPS}")
        names = [role.name for role in self.roles]
        if len(set(names)) != len(names):
            raise ValueError(f"role names must differ: {names}")

    def __getitem__(self, name: str) -> Role:
        for role in self.roles:
            if role.name == name:
                return role
        raise KeyError(f"no role {name!r}; roles: {[role.name for role in self.roles]}")

    @property
    def threads(self) -> int:
        return sum(role.threads for role in self.roles)


def load_and_math(math_warpgroups: int) -> RoleSchedule:
    """A producer and its consumers: `load` (one issuing warp in a warpgroup of its own), then `math0`, `math1`, ..."""
    load = Role("load", 0, WARPS_PER_WARPGROUP, issuing=1)
    math = (
        Role(f"math{i}", (1 + i) * WARPS_PER_WARPGROUP, WARPS_PER_WARPGROUP, issuing=WARPS_PER_WARPGROUP)
        for i in range(math_warpgroups)
    )
    return RoleSchedule((load, *math))


def load_writer_and_math(writer: str, math_warpgroups: int) -> RoleSchedule:
    """As `load_and_math`, with a second role in the producer's warpgroup: `writer`, of one issuing warp."""
    load = Role("load", 0, 1, issuing=1, shares=True)
    second = Role(writer, 1, WARPS_PER_WARPGROUP - 1, issuing=1, shares=True)
    return RoleSchedule((load, second, *load_and_math(math_warpgroups).roles[1:]))
