"""One kernel's report: from its artefacts to a dataclass, to text and to a plain dict."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fa3.sass import tools
from fa3.sass.frozen import frozen_waits
from fa3.sass.listing import (
    Instruction,
    Listing,
    Source,
    instruction_mix,
    mma_of,
    parse_sass,
    register_changes,
)
from fa3.sass.overlap import gemms_in_flight
from fa3.sass.ptx import Wgmma, requested_registers, wgmma_forms
from fa3.sass.regions import Region, split
from fa3.sass.remarks import Diagnostic, parse_remarks
from fa3.sass.schedule import schedule

if TYPE_CHECKING:
    from fa3.compile import Artefacts
    from fa3.config.backward import AnyKey


@dataclass(frozen=True)
class Exponentials:
    """How many exponentials a place issues, and how many of them while a GEMM is in flight on every path."""

    place: str
    in_flight: int
    total: int

    @property
    def ratio(self) -> float:
        return self.in_flight / self.total if self.total else 0.0


@dataclass(frozen=True)
class RegionReport:
    """What one loop with a GEMM (or the rest of the kernel) does."""

    title: str
    depth: int
    main: bool
    ex2_in_flight: int
    ex2_total: int
    mma: dict[str, int]
    schedule: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """All that `python -m fa3.sass` knows about a kernel. Counts are of instructions in the text, not of executions."""

    name: str
    registers: int
    """Per thread when the kernel starts, before any `setmaxnreg`."""
    spill_bytes: int
    """Spill stores plus spill loads, per thread."""
    stack_bytes: int
    setmaxnreg: dict[str, tuple[int, ...]]
    """The values that ptxas honoured, {"dec": (24,), "inc": (240,)}."""
    setmaxnreg_requested: dict[str, tuple[int, ...]]
    wgmma: tuple[Wgmma, ...]
    """From the PTX."""
    mma: dict[str, int]
    """From the SASS: {"m64n128k16 RS": 16}."""
    warnings: tuple[Diagnostic, ...]
    frozen_waits: tuple[str, ...]
    """Waits on a barrier, by source line, whose cursor their loop does not advance (rule 1 of docs/dsl_rules.md)."""
    smem_bytes: int
    mix: dict[str, int]
    regions: tuple[RegionReport, ...]
    lines: tuple[Exponentials, ...]
    """Exponentials by source line."""

    @property
    def ex2_in_flight(self) -> int:
        return sum(region.ex2_in_flight for region in self.regions)

    @property
    def ex2_total(self) -> int:
        return sum(region.ex2_total for region in self.regions)

    @property
    def main_loops(self) -> tuple[RegionReport, ...]:
        return tuple(region for region in self.regions if region.main)

    def as_dict(self) -> dict[str, Any]:
        """Plain values only, for JSON."""
        return {**asdict(self), "ex2_in_flight": self.ex2_in_flight, "ex2_total": self.ex2_total}


def inspect(key: AnyKey) -> Report:
    """Compiles a kernel for sm_90a, without a GPU, and reports on it. Raises ToolError without a disassembler."""
    from fa3.compile import artefacts

    tools.find("nvdisasm")  # fail before the compilation, not after it
    return of_artefacts(artefacts(key))


def listing_of(artefacts: Artefacts) -> Listing:
    """The SASS of a compiled kernel, for pictures and for questions that the report does not answer."""
    return parse_sass(tools.disassemble(artefacts.cubin))


def of_artefacts(artefacts: Artefacts) -> Report:
    """Reports on a kernel that has been compiled for inspection."""
    return read(
        name=artefacts.key.name,
        ptx=artefacts.ptx,
        sass=tools.disassemble(artefacts.cubin),
        remarks=artefacts.remarks,
        smem_bytes=artefacts.smem_bytes,
    )


def read(name: str, ptx: str, sass: str, remarks: str, smem_bytes: int) -> Report:
    """The report as a pure function of the compiler's texts. Raises ParseError if one of them is not understood."""
    listing, said = parse_sass(sass), parse_remarks(remarks)
    flights = gemms_in_flight(listing)
    return Report(
        name=name,
        registers=said.registers,
        spill_bytes=said.spill_bytes,
        stack_bytes=said.stack_bytes,
        setmaxnreg=register_changes(listing.instructions),
        setmaxnreg_requested=requested_registers(ptx),
        wgmma=wgmma_forms(ptx),
        mma=_mma_counts(listing.instructions),
        warnings=said.warnings,
        frozen_waits=tuple(map(str, frozen_waits(ptx))),
        smem_bytes=smem_bytes,
        mix=instruction_mix(listing.instructions),
        regions=tuple(_region(listing, region, flights) for region in split(listing)),
        lines=_lines(listing, flights),
    )


def _is_exp2(instruction: Instruction) -> bool:
    return instruction.opcode.startswith("MUFU.EX2")


def _mma_counts(instructions: tuple[Instruction, ...]) -> dict[str, int]:
    return dict(Counter(str(mma) for mma in map(mma_of, instructions) if mma))


def _region(listing: Listing, region: Region, flights: list[int]) -> RegionReport:
    exponentials = [i for i in region.indices if _is_exp2(listing.instructions[i])]
    return RegionReport(
        title=region.title,
        depth=region.depth,
        main=region.main,
        ex2_in_flight=sum(flights[i] > 0 for i in exponentials),
        ex2_total=len(exponentials),
        mma=_mma_counts(tuple(listing.instructions[i] for i in region.indices)),
        schedule=tuple(schedule(listing, region.trunk, flights)),
    )


def _lines(listing: Listing, flights: list[int]) -> tuple[Exponentials, ...]:
    total: Counter[Source | None] = Counter()
    under: Counter[Source | None] = Counter()
    for instruction, busy in zip(listing.instructions, flights, strict=True):
        if _is_exp2(instruction):
            total[instruction.source] += 1
            under[instruction.source] += busy > 0
    return tuple(Exponentials(str(source or "?"), under[source], count) for source, count in total.items())


# --- text ------------------------------------------------------------------------------------------------------------


def text(report: Report, with_schedule: bool = False) -> str:
    """The report for a terminal."""
    rows = [
        ("registers", f"{report.registers} at entry, setmaxnreg {_changes(report)}"),
        ("spills", f"{report.spill_bytes} bytes, stack {report.stack_bytes} bytes"),
        ("shared memory", f"{report.smem_bytes} bytes"),
        ("wgmma (PTX)", ", ".join(map(str, report.wgmma)) or "none"),
        ("mma (SASS)", _counts(report.mma)),
        ("ptxas warnings", "; ".join(map(str, report.warnings)) or "none"),
        ("frozen waits", "; ".join(report.frozen_waits) or "none"),
        ("instructions", ", ".join(f"{name} {count}" for name, count in report.mix.items() if count)),
        ("exponentials", f"{report.ex2_in_flight} of {report.ex2_total} are issued while a GEMM is in flight"),
    ]
    lines = [report.name, *(f"  {name:<15} {value}" for name, value in rows)]
    for region in report.regions:
        if region.ex2_total or region.mma:
            lines.append(_region_text(region))
            if with_schedule:
                lines += _wrapped(region.schedule)
    lines += [f"    at {line.place}: {line.in_flight} of {line.total}" for line in report.lines]
    return "\n".join(lines)


def _changes(report: Report) -> str:
    asked, honoured = report.setmaxnreg_requested, report.setmaxnreg
    if not any(asked.values()):
        return "not asked for"
    shown = " / ".join(str(value) for kind in ("dec", "inc") for value in honoured[kind])
    return (shown or "none") + ("" if asked == honoured else f" (IGNORED by ptxas; asked for {asked})")


def _counts(counted: dict[Any, int]) -> str:
    return ", ".join(f"{kind} x{count}" for kind, count in counted.items()) or "none"


def _region_text(region: RegionReport) -> str:
    return f"    {region.title}: {region.ex2_in_flight} of {region.ex2_total}, {_counts(region.mma)}"


def _wrapped(words: tuple[str, ...], width: int = 110) -> list[str]:
    lines, line = [], ""
    for word in words:
        if line and len(line) + len(word) + 3 > width:
            lines.append(line)
            line = ""
        line = f"{line} | {word}" if line else word
    return [f"        {line}" for line in [*lines, line] if line]
