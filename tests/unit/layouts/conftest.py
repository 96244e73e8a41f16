"""`trace` runs a function while the DSL traces, so that a test can ask DSL layouts for their values without a GPU."""

import os

import pytest
from hypothesis import settings

# Examples here are pure arithmetic, but a shared machine stalls: how long one takes says nothing.
settings.register_profile("layouts", settings(), deadline=None)
settings.load_profile("layouts")

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when cutlass is first imported


@pytest.fixture(scope="session")
def trace():
    """trace(f, *args) -> f(*args), called inside a `@cute.jit` function. Skips where the DSL is not installed."""
    cutlass = pytest.importorskip("cutlass")
    cute = pytest.importorskip("cutlass.cute")

    @cute.jit
    def host(call: cutlass.Constexpr):
        call()

    def run(function, *args):
        results = []
        cute.compile(host, lambda: results.append(function(*args)))
        return results[0]

    return run


@pytest.fixture(scope="session")
def trace_kernel():
    """Like `trace`, inside a `@cute.kernel` of one warpgroup, where register tensors exist."""
    cutlass = pytest.importorskip("cutlass")
    cute = pytest.importorskip("cutlass.cute")

    @cute.kernel
    def kernel(call: cutlass.Constexpr):
        call()

    @cute.jit
    def host(call: cutlass.Constexpr):
        kernel(call).launch(grid=[1, 1, 1], block=[128, 1, 1])

    def run(function, *args):
        results = []
        cute.compile(host, lambda: results.append(function(*args)))
        return results[0]

    return run
