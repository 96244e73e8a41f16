"""Shared memory that two parties touch without order: stages overwritten while they are read, or read before they are
written, and data that threads wrote and the async proxy reads without a proxy fence.

An asynchronous operation counts from its start, with what its issuer knew then. So the verdict does not depend on when
the operation took effect in this run, nor on which of two unordered accesses came first.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fa3.emulator.check.checker import Checker, Site, site_of
from fa3.emulator.check.names import Names
from fa3.emulator.check.ordering import CtaOrder, Order
from fa3.emulator.check.places import short
from fa3.emulator.check.regions import Region, Regions
from fa3.emulator.memory import SHARED_BASE

if TYPE_CHECKING:
    from fa3.emulator.cta import Cta
    from fa3.emulator.faults import Fault
    from fa3.emulator.observe import Addresses
    from fa3.emulator.operations import Operation
    from fa3.emulator.sync import MBarrier
    from fa3.emulator.warp import Warp
    from fa3.sass.ptx_code import Statement

UNINITIALISED = "uninitialised shared memory"


@dataclass(slots=True)
class Access:
    """One access, for the report."""

    site: Site
    engine: bool
    """Whether the async proxy made it."""

    @property
    def by(self) -> str:
        """With what it was done: "TMA", "WGMMA", "st", ..."""
        at = self.site.at
        name = at.name if at else ""
        return {"cp": "TMA", "wgmma": "WGMMA"}.get(name, name)


@dataclass
class CtaMemory:
    """Who touched what in one CTA: sets of events, by the number of a region."""

    order: CtaOrder
    written: NDArray[np.bool_]
    """Words that somebody has written."""
    readers: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    writers: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """The events that wrote it, as threads see them."""
    fenced_writers: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Likewise as the async proxy sees them: where threads wrote, the bit that says that a fence came behind."""
    accesses: dict[tuple[int, int, bool], Access] = field(default_factory=dict)
    """(region, event, whether it wrote) -> the last such access."""
    near_writers: dict[int, list[int]] = field(default_factory=dict)
    """Region -> the regions written so far that overlap it."""
    full: set[int] = field(default_factory=set)
    """Regions that are written to the last word."""
    unwritten: dict[int, tuple[Site, str]] = field(default_factory=dict)
    """PTX line -> a read of words that nobody had written, and what was read."""
    barriers: int = 0
    """The words of mbarriers, as a set of bits."""

    def __post_init__(self) -> None:
        self.order.cluster.more_live.append(self._live)
        self.order.cluster.more_forget.append(self._forget)

    def all_writers(self, region: int) -> int:
        """The first bits of all events that wrote it."""
        return self.writers[region] | self.fenced_writers[region] | self.fenced_writers[region] >> 1

    def _live(self) -> int:
        """Events that somebody may still meet. What all warps know, nobody can."""
        common, live = self.order.cluster.common, 0
        for sets in (self.readers, self.writers, self.fenced_writers):
            for region, events in sets.items():
                sets[region] = events & ~common
                live |= sets[region]
        return live

    def _forget(self, kept: int) -> None:
        """Events that are not kept are in no set here."""
        self.accesses = {key: access for key, access in self.accesses.items() if key[1] & kept}


class SharedMemory(Checker):
    """Races in shared memory, missing proxy fences, and reads of what was never written."""

    def __init__(self, names: Names, order: Order, regions: Regions) -> None:
        super().__init__(names)
        self.order, self.regions = order, regions
        self._ctas: dict[Cta, CtaMemory] = {}
        self._racing: set[int] = set()
        """PTX lines of accesses that took part in a race."""

    # ---- accesses
    def shared(self, warp: Warp, at: Statement, addresses: Addresses, nbytes: int, write: bool) -> None:
        region = self.regions.of_lanes(addresses, nbytes)
        if region is None:
            return
        lanes, me = self.order.lanes(warp), self.order.of(warp)
        access = Access(site_of(warp, at), engine=False)
        self._access(self._cta(warp.cta), region, write, me.access(lanes), me.by_threads(lanes), access)

    def remote(self, warp: Warp, at: Statement, cta: Cta, addresses: Addresses, nbytes: int, write: bool) -> None:
        region = self.regions.of_lanes(addresses, nbytes)
        if region is None:
            return
        known = self.order.of(warp).by_threads(self.order.lanes(warp))
        access = Access(site_of(warp, at), engine=False)
        self._access(self._cta(cta), region, write, self.order.far[warp], known, access)

    def issued(self, warp: Warp, operation: Operation) -> None:
        # st.async is not among the operations of the async proxy (PTX ISA, "Async proxy")
        access = Access(site_of(warp, operation.at), engine=operation.kind != "st.async")
        event = self.order.event_of(operation)
        known = self.order.of(warp).by_engine(self.order.lanes(warp))
        accesses = ((operation.reads, warp.cta, False), (operation.writes, operation.target, True))
        for words, cta, write in accesses:
            region = self.regions.of_words(words) if len(words) else None
            if region is not None:
                self._access(self._cta(cta), region, write, event, known, access)

    def _access(self, cta: CtaMemory, region: Region, write: bool, event: int, known: int, access: Access) -> None:
        number = region.number
        if number not in cta.full and region.last >= 4 * len(cta.written):
            return  # outside shared memory: the machine's fault
        writers = cta.fenced_writers if access.engine else cta.writers
        met = 0
        if write:
            for near in region.overlaps:
                met |= writers[near] | cta.readers[near]
        else:
            for near in self._near_writers(cta, region):
                met |= writers[near]
            if number not in cta.full:
                self._need_written(cta, region, access)
        met &= ~(known | event)
        if met:
            self._report(cta, region, write, met, known, access)
        if write:
            if cta.barriers & region.bits:
                self._overwritten(cta, region, access)
            self._write(cta, region, event, access.engine)
        else:
            cta.readers[number] |= event
        cta.accesses[number, event, write] = access

    def _near_writers(self, cta: CtaMemory, region: Region) -> list[int]:
        near = cta.near_writers.get(region.number)
        if near is None:
            near = [number for number in region.overlaps if cta.writers.get(number)]
            cta.near_writers[region.number] = near
        return near

    def _write(self, cta: CtaMemory, region: Region, event: int, engine: bool) -> None:
        """Whatever comes after this write comes after those that it has covered, or was reported."""
        number = region.number
        for covered in region.covers:
            cta.readers[covered] = cta.writers[covered] = cta.fenced_writers[covered] = 0
        cta.writers[number] = event
        cta.fenced_writers[number] = event if engine else event << 1
        if number not in cta.full:
            cta.written[region.words] = True
            cta.full.add(number)
        for near in region.overlaps:
            known = cta.near_writers.get(near)
            if known is not None and number not in known:
                known.append(number)

    def _need_written(self, cta: CtaMemory, region: Region, access: Access) -> None:
        """A read before the first write is judged at the end: if a write comes later, without order, it is a race."""
        missing = region.words[~cta.written[region.words]]
        if not len(missing):
            cta.full.add(region.number)
            return
        at = access.site.at
        first = 4 * int(missing[0])
        what = f"{len(missing)} of {len(region.words)} words, from {self.names.shared(first, first)} on"
        cta.unwritten.setdefault(at.line if at else 0, (access.site, what))

    # ---- reports
    def _report(self, cta: CtaMemory, region: Region, write: bool, met: int, known: int, access: Access) -> None:
        near = set(region.overlaps)
        for (number, event, wrote), other in list(cta.accesses.items()):
            if number not in near or not (met & (event | event << 1)) or not (write or wrote):
                continue
            if event & (cta.all_writers(number) if wrote else cta.readers[number]):
                fence_only = bool(known & event) and access.engine and not other.engine
                self._race(region, self.regions.all[number], write, wrote, access, other, fence_only)

    def _race(
        self, region: Region, near: Region, write: bool, wrote: bool, new: Access, old: Access, fence_only: bool
    ) -> None:
        self._racing.update(at.line for at in (new.site.at, old.site.at) if at)
        first = max(region.first, near.first)
        place = self.names.shared(first, min(region.last, near.last))
        me, he = self.who(new.site), self.who(old.site)
        there = f"by {old.by} at {short(old.site.at)}"
        if fence_only:
            kind = "no proxy fence"
            what = f"{me} {'writes' if write else 'reads'} {place} by {new.by}, in the async proxy, after {he} has "
            what += f"written it {there}: they are in order, but no fence.proxy.async lies in between."
        elif write and wrote:
            kind = "written twice at once"
            what = (
                f"{me} writes {place} by {new.by} while {he} may still be writing it {there}: nothing orders the two."
            )
        elif write:
            kind = "overwritten while read"
            what = f"{me} writes {place} by {new.by} while {he} may still read it {there}: nothing orders the two."
        else:
            kind = "read before it arrived"
            what = f"{me} reads {place} by {new.by} while {he} may still be writing it {there}: nothing orders the two."
        self.find(kind, new.site, what, old.site, self.names.buffer(first))

    def _overwritten(self, cta: CtaMemory, region: Region, access: Access) -> None:
        hit = cta.barriers & region.bits
        address = 4 * ((hit & -hit).bit_length() - 1) & ~7
        happened = f"{self.who(access.site)} writes over {self.names.mbarrier(address)} by {access.by}."
        self.find("barrier overwritten", access.site, happened)

    # ---- CTAs
    def initialised(self, warp: Warp, at: Statement, barrier: MBarrier) -> None:
        self._cta(warp.cta).barriers |= 3 << barrier.address // 4

    def finished(self, cta: Cta) -> None:
        self._judge(self._ctas.pop(cta, None))

    def stopped(self, fault: Fault) -> None:
        for cta in self._ctas.values():
            self._judge(cta)
        self._ctas.clear()

    def _judge(self, cta: CtaMemory | None) -> None:
        """Reads of what was not written, unless a race was found there."""
        for line, (site, what) in cta.unwritten.items() if cta else ():
            if line not in self._racing:
                happened = f"{self.who(site)} reads shared memory that nobody has written: {what}."
                self.find(UNINITIALISED, site, happened)

    def _cta(self, cta: Cta) -> CtaMemory:
        found = self._ctas.get(cta)
        if found is None:
            words = (SHARED_BASE + cta.machine.launch.smem_bytes + 3) // 4
            found = self._ctas[cta] = CtaMemory(self.order.cta(cta), np.zeros(words, np.bool_))
        return found
