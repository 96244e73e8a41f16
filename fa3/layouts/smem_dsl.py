"""DSL layouts of shared-memory tiles, built from the same numbers as `fa3.layouts.smem`.

The environment variable CUTE_DSL_ARCH must say sm_90a before this module is imported (`fa3.compile` does that).
"""

from __future__ import annotations

import cutlass.cute as cute

from fa3.layouts.algebra import Layout
from fa3.layouts.smem import SharedLayout

__all__ = ["dsl_layout", "dsl_shared_layout"]


def dsl_layout(layout: Layout) -> cute.Layout:
    """The static DSL layout with the same shape and stride. Only while a `@cute.jit` function is traced."""
    return cute.make_layout(layout.shape, stride=layout.stride)


def dsl_shared_layout(shared: SharedLayout) -> cute.ComposedLayout:
    """The staged, swizzled DSL layout of a tile: equal to what `make_smem_layout_a` or `_b` makes for it.

    Use it as they are used: `storage.get_tensor(layout.outer, swizzle=layout.inner)`, and whole for a TMA atom.
    """
    swizzle = cute.make_swizzle(shared.swizzle.bits, shared.swizzle.base, shared.swizzle.shift)
    return cute.make_composed_layout(swizzle, 0, dsl_layout(shared.outer))
