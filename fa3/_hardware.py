"""Whether this machine can run the kernels: private to the demo, the benchmarks and the tests."""

from __future__ import annotations

import torch

from fa3.checks import CAPABILITY


def why_no_hopper() -> str | None:
    """Why the kernels cannot run here, in words that end a sentence; None if they can."""
    needed = f"a Hopper GPU (compute capability {CAPABILITY[0]}.{CAPABILITY[1]})"
    if not torch.cuda.is_available():
        return f"needs {needed}; torch sees no CUDA device here"
    found = torch.cuda.get_device_capability()
    if tuple(found) != tuple(CAPABILITY):
        return f"needs {needed}; this is {torch.cuda.get_device_name()} ({found[0]}.{found[1]})"
    return None
