"""Looks at a kernel the way ptxas left it: registers, spills, instruction mix, and what really overlaps.

`python -m fa3.sass forward --head-dim 128 --causal` compiles for sm_90a on any machine and prints the report. Or:

    from fa3.config.table import forward_key
    from fa3.sass import inspect

    report = inspect(forward_key(128, 128, causal=True, dtype="bf16"))
    report.ex2_in_flight, report.ex2_total
"""

from __future__ import annotations

from fa3.sass.errors import ParseError, ToolError
from fa3.sass.report import Report, inspect, listing_of, of_artefacts, read, text

__all__ = ["ParseError", "Report", "ToolError", "inspect", "listing_of", "of_artefacts", "read", "text"]
