"""Compiles what the tests of this folder launch, several kernels at a time: `python -m tests.gpu.compile --jobs 16`.

They would otherwise be compiled one after the other, each when a test first needs it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import get_args

from fa3 import build, cache
from fa3.config.backward import AnyKey, BackwardKey, Wanted, backward_keys
from fa3.config.backward_table import BACKWARD
from fa3.config.types import DType


def keys() -> list[AnyKey]:
    """Every kernel for all gradients, and those for a gradient of LSE; for some of the gradients only where the tests
    ask for them: bf16, causal."""
    found: dict[AnyKey, None] = dict.fromkeys(build.keys(negative_scale=True, deterministic=True))
    for row in BACKWARD:
        for dtype in get_args(DType):
            found[BackwardKey("backward_prepare", row, dtype, dlse=True)] = None
    for row in (row for row in BACKWARD if row.causal):
        for wanted in get_args(Wanted):
            for dlse in (False, True):
                found.update(dict.fromkeys(backward_keys(row, "bf16", wanted, dlse)))
    return list(found)


def main(arguments: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="tests.gpu.compile", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; default: one for each core")
    args = p.parse_args(arguments)
    folder = cache.folder()
    if folder is None:
        sys.exit("FA3_DISK_CACHE is off: nowhere to put the kernels")
    return 1 if build.build(keys(), folder, args.jobs) else 0


if __name__ == "__main__":
    sys.exit(main())
