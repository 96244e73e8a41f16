"""What ptxas and cuobjdump say about a kernel: registers, spills and numbered diagnostics."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fa3.sass.errors import ParseError


@dataclass(frozen=True)
class Diagnostic:
    """A numbered diagnostic of ptxas, such as C7508 "'setmaxnreg' ignored ..."."""

    code: str
    text: str

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"


@dataclass(frozen=True)
class Remarks:
    """What ptxas says about one kernel. Bytes are per thread."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    warnings: tuple[Diagnostic, ...]

    @property
    def spill_bytes(self) -> int:
        return self.spill_store_bytes + self.spill_load_bytes


_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_DIAGNOSTIC = re.compile(r"\((C7\d+)\) (.*?)(?= ptxas info| ptxas \.| ptxas warning| -->| suggestion:|$)")
_MANGLED = re.compile(r"'kernel_\w{30,}'")


def parse_remarks(text: str) -> Remarks:
    """Reads ptxas' output as the DSL prints it for `remarks{ptx}`, ANSI colours already removed.

    If there are spills the DSL wraps the lines, so lines mean nothing here: all white space is one blank.
    """
    text = " ".join(text.split())
    spills, used = _SPILLS.search(text), _USED.search(text)
    if not spills or not used:
        raise ParseError("ptxas reported neither registers nor spills; was the kernel compiled with remarks{ptx}?")
    found = ((code, _MANGLED.sub("'kernel'", words)) for code, words in _DIAGNOSTIC.findall(text))
    warnings = tuple(dict.fromkeys(Diagnostic(code, words.strip()) for code, words in found))
    stack, stores, loads = (int(value) for value in spills.groups())
    return Remarks(int(used[1]), stack, stores, loads, warnings)


_RESOURCES = re.compile(r"\b(REG|STACK|SHARED|LOCAL):(\d+)")


def parse_resources(text: str) -> dict[str, int]:
    """Reads `cuobjdump --dump-resource-usage`: {"REG": 168, "STACK": 0, "SHARED": 1024, "LOCAL": 0}."""
    found = {name: int(value) for name, value in _RESOURCES.findall(text)}
    if "REG" not in found:
        raise ParseError("no resource line in cuobjdump's output")
    return found
