"""`trace` runs a function while the DSL traces, so that a test can ask DSL layouts for their values without a GPU."""

import pytest


@pytest.fixture(scope="session")
def trace():
    """trace(f, *args) -> f(*args), called inside a `@cute.jit` function. Skips where the DSL is not installed."""
    cutlass = pytest.importorskip("cutlass")
    cute = pytest.importorskip("cutlass.cute")

    @cute.jit
    def host(call: cutlass.Constexpr):
        call()

    return _runner(cute, host)


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

    return _runner(cute, host)


def _runner(cute, host):
    """run(f, *args) -> f(*args), called while `host` is traced."""

    def run(function, *args):
        results = []
        cute.compile(host, lambda: results.append(function(*args)))
        return results[0]

    return run
