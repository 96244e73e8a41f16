"""Line information that names the line of the role, not of the helper that it calls."""

from collections.abc import Callable
from functools import wraps
from inspect import unwrap
from typing import Any

from cutlass._mlir_helpers.op import loc_transform
from cutlass.cutlass_dsl import dsl_user_op


def call_site(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives all instructions of a helper the line that called it; stands above `@cute.jit`.

    The DSL notes for every instruction the innermost line outside its own files. In `ring.wait` that would be a line
    of `Ring`, the same for every ring and role. `dsl_user_op` is how the DSL's own functions learn where they were
    called. Within `loc_transform`, what such functions emit takes that place over; `with loc` does the same for
    instructions without a place of their own. If helpers with this decorator call one another, the outermost call
    counts. Without line information (`--generate-line-info`) there is no `loc`, and nothing happens.
    """

    @dsl_user_op
    @wraps(function)
    def located(*arguments, loc, **keywords):
        if loc is None:
            return function(*arguments, **keywords)
        with loc, loc_transform(lambda _: loc):
            return function(*arguments, **keywords)

    located.__wrapped__ = unwrap(function)  # the plain text, for tests, as `cute.jit` keeps it
    return located
