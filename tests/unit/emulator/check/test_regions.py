"""Regions of shared memory against sets of bytes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fa3.emulator.check.regions import Regions

WORDS = st.sets(st.integers(0, 600), min_size=1, max_size=6)
LANES = st.tuples(st.lists(st.integers(0, 300), min_size=1, max_size=5), st.sampled_from([1, 2, 4, 16]))


@settings(max_examples=200, deadline=None)
@given(st.lists(WORDS | LANES, max_size=8))
def test_overlaps_and_covers(pieces: list[set[int] | tuple[list[int], int]]) -> None:
    regions, contents = Regions(), {}
    for piece in pieces:
        if isinstance(piece, set):
            region = regions.of_words(np.array(sorted(piece)))
            content = {4 * word + i for word in piece for i in range(4)}
        else:
            addresses, nbytes = piece
            region = regions.of_lanes(np.array(addresses) * nbytes, nbytes)
            content = {nbytes * address + i for address in addresses for i in range(nbytes)}
        assert region is not None
        contents[region.number] = content
        assert (region.first, region.last) == (min(content), max(content))
    assert len({frozenset(content) for content in contents.values()}) == len(contents)
    for number, content in contents.items():
        region = regions.all[number]
        assert set(region.overlaps) == {other for other in contents if contents[other] & content}
        assert set(region.covers) == {other for other in contents if contents[other] <= content}


def test_arrays_that_come_again() -> None:
    regions, words = Regions(), np.arange(4)
    assert regions.of_words(words) is regions.of_words(words) is regions.of_words(np.arange(4))
    assert regions.of_words(np.arange(0)) is None
    assert len(regions.all) == 1


def test_lanes_and_words_of_one_content() -> None:
    regions = Regions()
    assert regions.of_words(np.array([4, 5])) is regions.of_lanes(np.array([20, 16]), 4)
