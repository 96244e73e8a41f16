"""Compiles a small kernel for sm_90a and returns what came out, as text and as data."""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from fa3.sass.listing import Listing, instruction_mix, parse_sass
from fa3.sass.remarks import Remarks, parse_remarks
from fa3.sass.tools import disassemble


@dataclass(frozen=True)
class Probe:
    """A compiled probe."""

    ptx: str
    cubin: bytes
    said: str

    @cached_property
    def listing(self) -> Listing:
        return parse_sass(disassemble(self.cubin))

    @property
    def mix(self) -> dict[str, int]:
        return instruction_mix(self.listing.instructions)

    @property
    def remarks(self) -> Remarks:
        return parse_remarks(self.said)

    @property
    def codes(self) -> set[str]:
        """The numbers of ptxas' diagnostics."""
        return {warning.code for warning in self.remarks.warnings}

    def count(self, opcode: str) -> int:
        """Instructions whose name is `opcode`, with any modifiers."""
        return sum(f"{instruction.opcode}.".startswith(f"{opcode}.") for instruction in self.listing.instructions)

    @property
    def stream(self) -> list[str]:
        """The instructions without addresses and source lines: equal streams are equal programs."""
        return [f"{i.predicate} {i.opcode} {i.operands}" for i in self.listing.instructions]


def compile_probe(host: Any, *arguments: Any) -> Probe:
    """Compiles a `@cute.jit` host function, with its PTX, cubin and ptxas' remarks kept."""
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(said):
        options = f"--gpu-arch sm_90a --keep-ptx --keep-cubin --dump-dir {folder} remarks{{ptx}}"
        compiled = cute.compile(host, *arguments, options=options)
        ptx, cubin = compiled.artifacts.PTX, compiled.artifacts.CUBIN
    return Probe(ptx, cubin, re.sub(r"\x1b\[\d+m", "", said.getvalue()))


def floats(count: int = 1 << 20) -> Any:
    """A stand-in for a float32 tensor in global memory."""
    return make_fake_compact_tensor(cutlass.Float32, (count,), assumed_align=16)


def stream() -> Any:
    return make_fake_stream()
