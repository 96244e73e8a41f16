"""Shared memory of a CTA, and global memory as the allocations that a launch was given.

Whatever is not in an allocation, or in the CTA's own shared memory, does not exist: an access to it is a `Fault`. So is
an access at an address that is not a multiple of its size (PTX ISA, "Addresses as Operands").

Both classes are made for vectors of addresses, one for each lane, and for whole tiles.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa3.emulator.faults import Fault

Bytes = NDArray[np.uint8]
Addresses = NDArray[Any]

SHARED_BASE = 1024
"""Where dynamic shared memory begins in the shared window. Not 0, so that an address that was never set is caught."""
POISON = 0xAB
"""What shared memory holds before anybody writes it."""
OFFSET_BITS = 24
"""Low bits of a shared address, the offset in the shared memory of one CTA (`fa3.emulator.cluster`)."""
OFFSET_MASK = (1 << OFFSET_BITS) - 1
PAGE_BITS = 10
"""Writes to shared memory are noticed by pages of 1 KiB, the alignment of a swizzled tile."""
PIECE = 16
"""Bytes that every swizzle moves together."""

# 16 bytes are moved as complex numbers: numpy has no larger plain type, and copies them without looking at them.
WORDS: dict[int, type[Any]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
SHIFTS = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}


class Shared:
    """`nbytes` of dynamic shared memory at addresses [SHARED_BASE, SHARED_BASE + nbytes)."""

    def __init__(self, nbytes: int) -> None:
        self.end = SHARED_BASE + nbytes
        storage = np.full(-(-self.end // PIECE) * PIECE, POISON, np.uint8)
        self.bytes: Bytes = storage[: self.end]
        """One byte for each address from 0. Addresses below SHARED_BASE are never legal."""
        self.pieces: NDArray[np.complex128] = storage.view(np.complex128)
        """The same bytes, 16 at a time: piece i is at address 16 i. For whoever has checked the range (`require`)."""
        self._words: dict[int, NDArray[Any]] = {
            size: storage[SHARED_BASE : SHARED_BASE + nbytes // size * size].view(word) for size, word in WORDS.items()
        }
        self._stamps = [0] * ((len(storage) >> PAGE_BITS) + 1)
        self._clock = 0
        self._derived: dict[Hashable, tuple[int, int, int, Any]] = {}

    # ------------------------------------------------------------------------------------ lanes
    def gather(self, addresses: Addresses, nbytes: int) -> Bytes:
        """(n,) addresses -> (n, nbytes) bytes; nbytes is 1, 2, 4, 8 or 16. Fault if any lane may not read there."""
        offsets = addresses.astype(np.int64) - SHARED_BASE
        bits = int(np.bitwise_or.reduce(offsets))  # negative if one of them is, and has all their low bits
        if bits < 0 or bits & (nbytes - 1):
            raise self._lane_fault(addresses, nbytes, "read")
        try:
            words = self._words[nbytes].take(offsets >> SHIFTS[nbytes])
        except IndexError:
            raise self._lane_fault(addresses, nbytes, "read") from None
        return words.view(np.uint8).reshape(-1, nbytes)

    def scatter(self, addresses: Addresses, data: Bytes) -> None:
        """Writes (n, nbytes) bytes to (n,) addresses, lane by lane. Fault, and nothing written, as in `gather`."""
        nbytes = data.shape[1]
        offsets = addresses.astype(np.int64) - SHARED_BASE
        first, last = int(offsets.min()), int(offsets.max()) + nbytes
        if first < 0 or SHARED_BASE + last > self.end or int(np.bitwise_or.reduce(offsets)) & (nbytes - 1):
            raise self._lane_fault(addresses, nbytes, "write")
        self._words[nbytes][offsets >> SHIFTS[nbytes]] = _as_words(data)
        self.touch(SHARED_BASE + first, SHARED_BASE + last)

    def _lane_fault(self, addresses: Addresses, nbytes: int, what: str) -> Fault:
        for lane, address in enumerate(addresses.tolist()):
            if not SHARED_BASE <= address <= self.end - nbytes:
                return Fault("out of bounds", f"lane {lane}: {self._outside(address, address + nbytes, what)}")
            if address % nbytes:
                return _misaligned("shared", address, nbytes, what, f"lane {lane}: ")
        raise AssertionError("every lane is right")

    def _outside(self, lo: int, hi: int, what: str) -> str:
        where = f"the CTA's {self.end - SHARED_BASE} bytes of shared memory, [{SHARED_BASE}, {self.end})"
        if lo < SHARED_BASE:
            return f"{what} of {hi - lo} bytes at {lo} begins {SHARED_BASE - lo} bytes before {where}"
        return f"{what} of {hi - lo} bytes at {lo} ends {hi - self.end} bytes past {where}"

    # ------------------------------------------------------------------------------------ tiles
    def require(self, lo: int, hi: int, what: str) -> None:
        """Fault unless [lo, hi) lies in the CTA's shared memory. `what` names the access: "TMA write"."""
        if lo < SHARED_BASE or hi > self.end:
            raise Fault("out of bounds", self._outside(lo, hi, what))

    def read_at(self, index: NDArray[Any]) -> Bytes:
        """The bytes at an array of addresses of any shape."""
        if index.size:
            self.require(int(index.min()), int(index.max()) + 1, "read")
        return self.bytes.take(index)

    def write_at(self, index: NDArray[Any], data: Bytes) -> None:
        """Writes bytes to an array of addresses of the same shape."""
        if index.size:
            lo, hi = int(index.min()), int(index.max()) + 1
            self.require(lo, hi, "write")
            self.bytes[index] = data
            self.touch(lo, hi)

    # ------------------------------------------------------------------------------------ versions
    def touch(self, lo: int, hi: int) -> None:
        """Notes that bytes of [lo, hi) were written. For whoever writes `bytes` or `pieces` directly."""
        self._clock += 1
        first, last = lo >> PAGE_BITS, (hi - 1) >> PAGE_BITS
        if first == last:
            self._stamps[first] = self._clock
        else:
            self._stamps[first : last + 1] = [self._clock] * (last + 1 - first)

    def version(self, lo: int, hi: int) -> int:
        """A number that is another one whenever a byte of [lo, hi) may have been written since."""
        return max(self._stamps[lo >> PAGE_BITS : ((hi - 1) >> PAGE_BITS) + 1])

    def derived(self, key: Hashable) -> Any | None:
        """What was `remember`ed under this key, if the bytes that it was made of are still the same."""
        found = self._derived.get(key)
        if found is None or self.version(found[1], found[2]) != found[0]:
            return None
        return found[3]

    def remember(self, key: Hashable, lo: int, hi: int, value: Any) -> None:
        """Keeps something computed from the bytes [lo, hi), for `derived`."""
        if len(self._derived) >= 128:
            self._derived.clear()
        self._derived[key] = (self.version(lo, hi), lo, hi, value)


@dataclass(eq=False)
class _Allocation:
    name: str
    base: int
    bytes: Bytes
    writable: bool
    _words: dict[int, tuple[int, NDArray[Any]]] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.base + len(self.bytes)

    def words(self, nbytes: int) -> tuple[int, NDArray[Any]]:
        """Its aligned words of `nbytes`, and the address of the first."""
        if nbytes not in self._words:
            skip = -self.base % nbytes
            count = max(0, len(self.bytes) - skip) // nbytes
            self._words[nbytes] = self.base + skip, self.bytes[skip : skip + count * nbytes].view(WORDS[nbytes])
        return self._words[nbytes]

    def distance(self, lo: int, hi: int) -> int:
        return max(self.base - lo, hi - self.end, 0)

    def __str__(self) -> str:
        return f"{self.name!r} [{self.base:#x}, {self.end:#x})"


class Global:
    """Global memory: named pieces of the process's own memory. They may overlap (k and v of one storage)."""

    def __init__(self) -> None:
        self._allocations: list[_Allocation] = []

    def add(self, name: str, address: int, nbytes: int, writable: bool = True) -> None:
        """Makes [address, address + nbytes) of this process accessible. It must stay allocated."""
        memory = np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(address))
        self._allocations.append(_Allocation(name, address, memory, writable))

    def gather(self, addresses: NDArray[np.uint64], nbytes: int) -> Bytes:
        """(n,) addresses -> (n, nbytes) bytes; nbytes is 1, 2, 4, 8 or 16. Fault if any lane may not read there."""
        found = self._of_lanes(addresses, nbytes, write=False)
        if found is None:
            return np.concatenate([self.gather(addresses[i : i + 1], nbytes) for i in range(len(addresses))])
        first, words = found.words(nbytes)
        index = (addresses - np.uint64(first)) >> np.uint64(SHIFTS[nbytes])
        return words.take(index.astype(np.int64)).view(np.uint8).reshape(-1, nbytes)

    def scatter(self, addresses: NDArray[np.uint64], data: Bytes) -> None:
        """Writes (n, nbytes) bytes to (n,) addresses, lane by lane. Fault if any lane may not write there."""
        nbytes = data.shape[1]
        found = self._of_lanes(addresses, nbytes, write=True)
        if found is None:
            for i in range(len(addresses)):
                self._of_lanes(addresses[i : i + 1], nbytes, write=True)
            for i in range(len(addresses)):
                self.scatter(addresses[i : i + 1], data[i : i + 1])
            return
        first, words = found.words(nbytes)
        index = (addresses - np.uint64(first)) >> np.uint64(SHIFTS[nbytes])
        words[index.astype(np.int64)] = _as_words(data)

    def window(self, lo: int, hi: int, write: bool) -> tuple[int, Bytes]:
        """(base address, all bytes) of an allocation that contains [lo, hi). Fault if there is none."""
        found = self._containing(lo, hi, write)
        if found is None:
            raise self._outside(lo, hi, write)
        return found.base, found.bytes

    def _of_lanes(self, addresses: NDArray[np.uint64], nbytes: int, write: bool) -> _Allocation | None:
        """The allocation that holds all lanes; None if several do, or for one lane a Fault."""
        if int(np.bitwise_or.reduce(addresses)) & (nbytes - 1):
            lane = int(np.flatnonzero(addresses & np.uint64(nbytes - 1))[0])
            what = "write" if write else "read"
            raise _misaligned("global", int(addresses[lane]), nbytes, what, f"lane {lane}: ")
        lo, hi = int(addresses.min()), int(addresses.max()) + nbytes
        found = self._containing(lo, hi, write)
        if found is None and lo + nbytes == hi:
            raise self._outside(lo, hi, write)
        return found

    def _containing(self, lo: int, hi: int, write: bool) -> _Allocation | None:
        for allocation in self._allocations:
            if allocation.base <= lo and hi <= allocation.end and (allocation.writable or not write):
                return allocation
        return None

    def _outside(self, lo: int, hi: int, write: bool) -> Fault:
        """What is wrong with an access that no allocation admits, by the allocation that comes nearest."""
        access = f"{'write' if write else 'read'} of {hi - lo} bytes at {lo:#x}"
        if not self._allocations:
            return Fault("out of bounds", f"{access}: there is no global memory")
        nearest = min(self._allocations, key=lambda a: a.distance(lo, hi))
        if nearest.distance(lo, hi) == 0:
            return Fault("read only", f"{access}: {nearest} may only be read")
        if hi > nearest.end:
            return Fault("out of bounds", f"{access} ends {hi - nearest.end} bytes past {nearest}")
        return Fault("out of bounds", f"{access} begins {nearest.base - lo} bytes before {nearest}")


def _as_words(data: Bytes) -> NDArray[Any]:
    """(n, nbytes) bytes -> (n,) words of nbytes."""
    words: NDArray[Any] = np.ascontiguousarray(data).view(WORDS[data.shape[1]])[:, 0]
    return words


def _misaligned(space: str, address: int, nbytes: int, what: str, lane: str = "") -> Fault:
    return Fault(
        "misaligned", f"{lane}{space} {what} of {nbytes} bytes at {address:#x}, which is no multiple of {nbytes}"
    )
