"""FlashAttention-3 for Hopper GPUs (sm_90a), written in Python through CuTe DSL.

    import fa3

    out = fa3.flash_attn_func(q, k, v, causal=True)             # (B, S, H, D) tensors, fp16 or bf16, on a Hopper GPU
    out, lse = fa3.reference.attention(q, k, v, causal=True)    # the same in float64, on any machine
    with fa3.emulate():
        out = fa3.flash_attn_func(q, k, v, causal=True)         # the compiled kernel on CPU tensors, step by step

The public names are listed in `__all__` and imported on first use, so that `import fa3` costs next to nothing: it
brings in neither torch nor the DSL and does not touch CUDA. It only looks up the version of an installed DSL, so that
one which the kernels do not fit is refused here, in words, and not deep inside the first call.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from fa3._version import __version__
from fa3.errors import check_dsl

if TYPE_CHECKING:
    from fa3 import reference
    from fa3.api import explain, flash_attn_func, warmup
    from fa3.emulator.backend import emulate

__all__ = ["__version__", "emulate", "explain", "flash_attn_func", "reference", "warmup"]

check_dsl(installed_only=True)


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for (PEP 562): the module `reference`, or a function."""
    if name not in __all__:
        raise AttributeError(f"module 'fa3' has no attribute {name!r}")
    if name == "reference":
        return importlib.import_module("fa3.reference")  # which also sets the attribute of the package
    home = "fa3.emulator.backend" if name == "emulate" else "fa3.api"
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
