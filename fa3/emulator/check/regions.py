"""Pieces of shared memory that accesses touch, and which of them overlap.

A kernel touches the same few hundred pieces over and over: boxes of TMA, operands of WGMMA, addresses of a warp. Each
is looked at once; afterwards a check compares sets of events, not addresses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

WORD = 4
PAGE = 256
"""Words in a page of the index, 1 KiB."""
Indices = NDArray[np.int64]


@dataclass(eq=False, slots=True)
class Region:
    """`words`: sorted indices of 4-byte words. `parts`: sorted byte addresses, where words are touched in part only."""

    number: int
    words: Indices
    parts: Indices | None
    bits: int
    """The words as a set of bits."""
    overlaps: list[int] = field(default_factory=list)
    """Numbers of the regions that share a byte with it, itself included."""
    covers: list[int] = field(default_factory=list)
    """Numbers of the regions that lie within it, itself included."""

    @property
    def first(self) -> int:
        """The first byte."""
        return int(self.words[0]) * WORD if self.parts is None else int(self.parts[0])

    @property
    def last(self) -> int:
        return int(self.words[-1]) * WORD + WORD - 1 if self.parts is None else int(self.parts[-1])

    def byte_bits(self) -> int:
        """The bytes as a set of bits."""
        if self.parts is not None:
            return _bits(self.parts)
        return _bits((self.words[:, None] * WORD + np.arange(WORD)).reshape(-1))


class Regions:
    """All regions of a program, shared by its CTAs."""

    def __init__(self) -> None:
        self.all: list[Region] = []
        self._by_array: dict[int, tuple[Any, Region]] = {}
        self._by_lanes: dict[tuple[int, bytes], Region] = {}
        self._by_content: dict[tuple[bytes, bytes], Region] = {}
        self._pages: defaultdict[int, set[int]] = defaultdict(set)

    def of_words(self, words: Indices) -> Region | None:
        """The region of unique, sorted word indices; None if there are none. Arrays that come again are recognised."""
        known = self._by_array.get(id(words))
        if known is not None and known[0] is words:
            return known[1]
        if not len(words):
            return None
        region, new = self._of_content(words, None)
        if new:  # an array that is made afresh each time need not be kept
            self._by_array[id(words)] = (words, region)
        return region

    def of_lanes(self, addresses: Indices, nbytes: int) -> Region | None:
        """The region that lanes touch which access `nbytes` at each of these byte addresses; None without
        lanes, or below address 0."""
        key = (nbytes, addresses.tobytes())
        region = self._by_lanes.get(key)
        if region is None and len(addresses) and addresses.min() >= 0:
            touched = np.unique(addresses.astype(np.int64)[:, None] + np.arange(nbytes))
            words = np.unique(touched // WORD)
            parts = touched if len(touched) < WORD * len(words) else None
            region = self._by_lanes[key] = self._of_content(words, parts)[0]
        return region

    def _of_content(self, words: Indices, parts: Indices | None) -> tuple[Region, bool]:
        """The region, and whether it is new."""
        key = (words.tobytes(), b"" if parts is None else parts.tobytes())
        known = self._by_content.get(key)
        if known is not None:
            return known, False
        region = self._by_content[key] = Region(len(self.all), words, parts, _bits(words))
        self._place(region)
        return region, True

    def _place(self, region: Region) -> None:
        pages = np.unique(region.words // PAGE).tolist()
        for other in self._near(pages):
            _relate(region, other)
        region.overlaps.append(region.number)
        region.covers.append(region.number)
        self.all.append(region)
        for page in pages:
            self._pages[page].add(region.number)

    def _near(self, pages: list[int]) -> Iterator[Region]:
        near: set[int] = set().union(*(self._pages[page] for page in pages))
        return (self.all[number] for number in sorted(near))


def _relate(new: Region, old: Region) -> None:
    """Notes whether two regions overlap, and whether one covers the other."""
    a, b = new.bits, old.bits
    if new.parts is not None or old.parts is not None:
        a, b = new.byte_bits(), old.byte_bits()
    common = a & b
    if not common:
        return
    new.overlaps.append(old.number)
    old.overlaps.append(new.number)
    if common == b:
        new.covers.append(old.number)
    if common == a:
        old.covers.append(new.number)


def _bits(indices: Indices) -> int:
    """Indices as a set of bits."""
    flags = np.zeros(int(indices[-1]) + 1, np.bool_)
    flags[indices] = True
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")
