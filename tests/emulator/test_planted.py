"""Faults planted in Python are compiled, and named by kind and line."""

from __future__ import annotations

import fnmatch
from pathlib import Path

import pytest

from fa3.sass.record import keys_of

from .planted import PLANTED, Planted, findings, plant

pytestmark = [pytest.mark.compile, pytest.mark.slow]

NAMES = [key.name for key in keys_of(None)]


@pytest.mark.parametrize("fault", PLANTED.values(), ids=PLANTED)
def test_a_planted_fault_is_named(fault: Planted, tmp_path: Path) -> None:
    plant(fault, tmp_path)
    (name,) = fnmatch.filter(NAMES, fault.kernel)
    found = findings(name, tmp_path)
    said = [(finding["kind"], *(_text(finding[party]) for party in ("at", "other"))) for finding in found]
    right = [one for one in said if one[0] in fault.kinds and any(fault.line in text for text in one[1:])]
    assert right, f"expected {sorted(fault.kinds)} at {fault.line!r}; found {said}"


def _text(place: dict[str, object] | None) -> str:
    return str(place["text"]) if place else ""
