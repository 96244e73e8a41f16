"""What part of the algorithm a line of Python belongs to, for colours and sums."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

from fa3.sass.listing import Source

OTHER = "control"
"""Cursors, addresses, loops: whatever has no label of its own."""
OF_FUNCTION = {
    ("softmax.py", "scale_row"): "rescale",
    ("softmax.py", "scale_rows"): "rescale",
    ("softmax.py", "scale_rows_if_needed"): "rescale",
    ("softmax.py", "finish"): "epilogue",
    ("backward.py", "probabilities"): "softmax",
    ("backward_wide.py", "probabilities"): "softmax",
    ("backward.py", "score_gradients"): "gradient",
    ("backward_wide.py", "score_gradients"): "gradient",
    ("backward.py", "share"): "exchange",
    ("backward_wide.py", "store_transposed"): "exchange",
    ("backward.py", "multiply"): "epilogue",
    ("gemm.py", "_pack_pair"): "convert",
    ("gemm.py", "convert_16"): "convert",
}
"""(file, function) -> label."""
OF_FILE = {
    "softmax.py": "softmax",
    "mask.py": "mask",
    "key_mask.py": "mask",
    "dq.py": "dq",
    "turnstile.py": "turnstile",
    "epilogue.py": "epilogue",
    "tiles.py": "schedule",
    "key_tiles.py": "schedule",
}
"""File -> label of its other functions."""


@lru_cache(maxsize=4096)
def label(source: Source | None) -> str:
    """The label of a line. A file that is not there any more counts by its name alone."""
    if source is None:
        return OTHER
    file = Path(source.file).name
    return OF_FUNCTION.get((file, function_of(source))) or OF_FILE.get(file, OTHER)


def function_of(source: Source) -> str:
    """The innermost function around a line, or an empty string."""
    inside = [(first, name) for first, last, name in _functions(source.file) if first <= source.line <= last]
    return max(inside)[1] if inside else ""


@lru_cache(maxsize=64)
def _functions(file: str) -> tuple[tuple[int, int, str], ...]:
    """First line, last line and name of every function in a file."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ()
    return tuple(
        (node.lineno, node.end_lineno or node.lineno, node.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    )
