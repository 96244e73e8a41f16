"""SASS as data: what `nvdisasm -g -c` prints, as instructions with their source lines and their control flow.

Text in, dataclasses out: nothing here runs a tool. The forms are those of nvdisasm 13.x for sm_90a.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from fa3.sass import flow
from fa3.sass.errors import ParseError


@dataclass(frozen=True, order=True)
class Source:
    """A line of Python that an instruction was compiled from."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"


@dataclass(frozen=True)
class Instruction:
    """One line of SASS: `@!P0 HGMMA.64x128x16.F32.BF16 R24, R176, gdesc[UR8].tnspB, R24, gsb0`."""

    address: int
    opcode: str
    operands: str = ""
    predicate: str = ""
    source: Source | None = None

    @property
    def base(self) -> str:
        return self.opcode.split(".", 1)[0]

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels that the operands name, as in "`(.L_x_3)"."""
        return tuple(_REFERENCE.findall(self.operands))


@dataclass(frozen=True)
class Listing:
    """The SASS of one kernel. `labels` maps a label to the index of the instruction behind it."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    @cached_property
    def graph(self) -> flow.Graph:
        return flow.build([self._step(index) for index in range(len(self.instructions))])

    def _step(self, index: int) -> flow.Step:
        """Conservative where SASS is not explicit: a call comes back, and also goes where its label says."""
        instruction = self.instructions[index]
        base, conditional = instruction.base, bool(instruction.predicate)
        targets = tuple(self._index(label) for label in instruction.labels)
        if base in _NO_RETURN:
            return flow.Step(falls=conditional)
        if base == "BRA":
            # `BRA.DIV UR4, `(.L)` and `BRA.U UP0, `(.L)` carry their condition as an operand.
            condition = conditional or "," in instruction.operands
            return flow.Step(falls=condition, targets=targets)
        if base == "BSYNC":
            return flow.Step(targets=self._reconvergence(index))
        if base in _INDIRECT:
            raise ParseError(
                f"{instruction.opcode} at {instruction.address:#x} is an indirect jump; its targets are unknown"
            )
        if base in ("CALL", "WARPSYNC", "JMP"):
            return flow.Step(falls=base != "JMP" or conditional, targets=targets)
        return flow.Step()

    def _reconvergence(self, index: int) -> tuple[int, ...]:
        """`BSYNC B0` continues at the label of the nearest `BSSY B0` above it, normally the next instruction."""
        register = self.instructions[index].operands.split(",")[0].strip()
        for earlier in reversed(self.instructions[:index]):
            if earlier.base == "BSSY" and earlier.operands.split(",")[0].strip() == register:
                return tuple(self._index(label) for label in earlier.labels)
        return ()

    def _index(self, label: str) -> int:
        try:
            return self.labels[label]
        except KeyError:
            raise ParseError(f"the listing jumps to {label}, which it does not define") from None


_NO_RETURN = ("EXIT", "RET", "KILL")
_INDIRECT = ("BRX", "BRXU", "JMX", "JMXU")
_REFERENCE = re.compile(r"`\((\.[\w.$]+)\)")
_LABEL = re.compile(r"^(\.L[\w.$]*):")
_SOURCE = re.compile(r'^\s*//## File "([^"]+)", line (\d+)')
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")


def parse_sass(text: str) -> Listing:
    """Reads `nvdisasm -g -c`. Padding behind the last real instruction (a branch to itself, then NOPs) is dropped."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    source: Source | None = None
    for line in text.splitlines():
        if match := _SOURCE.match(line):
            source = Source(match[1], int(match[2]))
        elif match := _LABEL.match(line):
            labels[match[1]] = len(instructions)
        elif match := _INSTRUCTION.match(line):
            address, predicate, opcode, operands = match.groups()
            instructions.append(Instruction(int(address, 16), opcode, operands, predicate or "", source))
    if not instructions:
        raise ParseError("no instructions in the disassembly")
    return _without_padding(Listing(tuple(instructions), labels))


def _without_padding(listing: Listing) -> Listing:
    end = len(listing.instructions)
    while end and listing.instructions[end - 1].base == "NOP":
        end -= 1
    last = listing.instructions[end - 1] if end else None
    if last and last.base == "BRA" and any(listing.labels.get(label) == end - 1 for label in last.labels):
        end -= 1
    labels = {label: index for label, index in listing.labels.items() if index <= end}
    return Listing(listing.instructions[:end], labels)


@dataclass(frozen=True)
class Mma:
    """A warpgroup matrix instruction in SASS. `from_registers` is the RS form; `commits` closes a group (gsb0)."""

    shape: str
    from_registers: bool
    commits: bool

    @property
    def operands(self) -> str:
        return "RS" if self.from_registers else "SS"

    def __str__(self) -> str:
        return f"{self.shape} {self.operands}"


_MMA = re.compile(r"^(?:HGMMA|QGMMA|IGMMA|BGMMA)\.(?:SP\.)?(\d+)x(\d+)x(\d+)")


def mma_of(instruction: Instruction) -> Mma | None:
    """`HGMMA.64x128x16.F32.BF16 R24, R176, gdesc[UR8]..., R24, gsb0` -> m64n128k16 RS, commits."""
    match = _MMA.match(instruction.opcode)
    if not match:
        return None
    operands = [operand.strip() for operand in instruction.operands.split(",")]
    m, n, k = match.groups()
    return Mma(f"m{m}n{n}k{k}", not operands[1].startswith("gdesc"), "gsb0" in operands)


_WAIT = re.compile(r"gsb0, (0x[0-9a-f]+)")


def wait_of(instruction: Instruction) -> int | None:
    """`WARPGROUP.DEPBAR.LE gsb0, 0x1` -> 1: at most that many groups are outstanding behind it."""
    if not instruction.opcode.startswith("WARPGROUP.DEPBAR"):
        return None
    match = _WAIT.search(instruction.operands)
    if not match:
        raise ParseError(f"cannot read {instruction.opcode} {instruction.operands}")
    return int(match[1], 16)


# Instructions worth counting: the name in the report, and the opcodes that start with it.
MIX = (
    "MUFU.EX2 FFMA FADD FMUL FMNMX F2FP SHFL LDL STL R2UR WARPSYNC SYNCS BAR UTMALDG UTMASTG "
    "UBLKCP UBLKRED REDG HGMMA QGMMA WARPGROUP.ARRIVE WARPGROUP.DEPBAR"
).split()


def instruction_mix(instructions: Iterable[Instruction]) -> dict[str, int]:
    """How often each kind of `MIX` occurs, zeros included."""
    counts: Counter[str] = Counter()
    for instruction in instructions:
        dotted = instruction.opcode + "."
        counts.update(kind for kind in MIX if dotted.startswith(kind + "."))
    return {kind: counts[kind] for kind in MIX}


def register_changes(instructions: Iterable[Instruction]) -> dict[str, tuple[int, ...]]:
    """The `setmaxnreg` values that ptxas honoured: {"dec": (24,), "inc": (240,)}; empty tuples if it ignored them."""
    found: dict[str, list[int]] = {"dec": [], "inc": []}
    for instruction in instructions:
        if instruction.base == "USETMAXREG":
            kind = "dec" if ".DEALLOC" in instruction.opcode else "inc"
            value = int(instruction.operands.split(",")[-1].strip(), 16)
            if value not in found[kind]:
                found[kind].append(value)
    return {kind: tuple(values) for kind, values in found.items()}
