"""The one exception class of our own, the wording of refusals, and the check of the DSL's version.

What is refused is refused before any launch, by Python's own exception classes: `TypeError` for a wrong type or dtype,
`ValueError` for a shape, a stride or a device, `NotImplementedError` for a feature that is not there. Every message
says which argument it is about, what it was, what is allowed, and what to do.
"""

from __future__ import annotations

import importlib.metadata
import re

DSL_PACKAGE = "nvidia-cutlass-dsl"
DSL_RANGE = ">=4.8.1,<4.9"
"""The tested versions; the same text stands in pyproject.toml."""
_DSL_FIRST, _DSL_BEYOND = (4, 8, 1), (4, 9, 0)

NO_SECOND_DERIVATIVE = (
    "fa3: second derivatives are not supported: the gradients of q, k and v cannot be differentiated again. Use "
    "torch.nn.functional.scaled_dot_product_attention with the math backend where you need them."
)
NO_FORWARD_MODE = "fa3: forward-mode differentiation (jvp, dual tensors) of q, k or v is not supported."


class LaunchError(RuntimeError):
    """A kernel could not be launched. The message names the kernel, its configuration and the arguments."""


def dsl_version() -> str | None:
    """The installed version of nvidia-cutlass-dsl, or None if it is not installed."""
    try:
        return importlib.metadata.version(DSL_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_dsl(installed_only: bool = False) -> str:
    """The DSL's version, if it is one that the kernels were tested with; else ImportError.

    With `installed_only` a DSL that is not installed is no error and gives "": a program may import fa3 for its
    reference or its layouts alone.
    """
    version = dsl_version()
    if version is None:
        if installed_only:
            return ""
        raise ImportError(
            f"fa3 needs {DSL_PACKAGE}{DSL_RANGE}, which is not installed. "
            f"Install it with: pip install '{DSL_PACKAGE}[cu13]{DSL_RANGE}'"
        )
    if not _DSL_FIRST <= _numbers(version) < _DSL_BEYOND:
        raise ImportError(
            f"fa3 needs {DSL_PACKAGE}{DSL_RANGE}, but {version} is installed: its kernels rely on behaviour that was "
            f"tested in that range only. Install it with: pip install '{DSL_PACKAGE}[cu13]{DSL_RANGE}'"
        )
    return version


def _numbers(version: str) -> tuple[int, ...]:
    """(4, 8, 1) of "4.8.1" or "4.8.1.post2"; shorter versions are filled up with zeros."""
    match = re.match(r"\d+(\.\d+)*", version)
    parts = [int(x) for x in match.group().split(".")] if match else [0]
    return tuple([*parts, 0, 0, 0][:3])
