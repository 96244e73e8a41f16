"""Checks one kernel as it is compiled from this package's sources, and prints what was found as JSON.

    python -m fa3.emulator.mutate.examine forward_bf16_d64_causal_m192n128s2_overlap_pingpong_rising_staged

For faults that are planted in a copy of the sources, in a process of its own.
"""

from __future__ import annotations

import json
import sys

from fa3.emulator.check.fences import find_unfenced
from fa3.emulator.mutate.campaign import Kernel
from fa3.sass.record import keys_of


def main(name: str) -> None:
    """KeyError if no kernel of the tables is called so."""
    kernel = Kernel({key.name: key for key in keys_of(None)}[name])
    found = find_unfenced(kernel.program, kernel.names)
    for attempt in kernel.attempts:
        if found:
            break
        found = kernel.findings(kernel.code, attempt)
    print(json.dumps([finding.as_dict() for finding in found]))


if __name__ == "__main__":
    main(sys.argv[1])
