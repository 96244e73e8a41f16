"""A copy of a module of `fa3.kernels.parts` that the DSL never traced, on Python's integers.

The DSL rewrites a function when it first traces it, so the copy is made from the file.
"""

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from types import ModuleType


class PlainCutlass:
    """What index arithmetic uses of `cutlass`."""

    max, min = max, min


def fresh(name: str) -> ModuleType:
    spec = spec_from_file_location(f"fa3.kernels.parts.untraced_{name}", find_spec(f"fa3.kernels.parts.{name}").origin)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    module.cutlass, module.Int32 = PlainCutlass, int
    return module
