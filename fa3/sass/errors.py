"""What can go wrong while looking at a compiled kernel."""

from __future__ import annotations


class ParseError(ValueError):
    """A tool's output does not look as expected, most likely because the tool is newer than this parser."""


class ToolError(RuntimeError):
    """A disassembler or git is missing, or refused what it was asked."""
