"""A picture of a stretch of SASS: which unit each instruction goes to, in the order in which they are issued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fa3.sass.listing import Listing
from fa3.sass.overlap import gemms_in_flight
from fa3.sass.regions import Region, split
from fa3.sass.schedule import Event, events

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LANES = {
    "gemm": "HGMMA issued",
    "exp": "MUFU.EX2",
    "fma": "FFMA FADD FMUL",
    "max": "FMNMX",
    "convert": "F2FP",
}
"""Lanes below "GEMM in flight", from top to bottom."""
COLOURS = {"gemm": "#1f4e79", "exp": "#c00000", "fma": "#7f7f7f", "max": "#bf9000", "convert": "#548235"}
MARKS = {"wait": ("#1f4e79", "-"), "barrier": ("#a6a6a6", ":")}


def in_flight_spans(flights: Sequence[int]) -> list[tuple[int, int, int]]:
    """Stretches with a constant number of GEMMs in flight, as (first, length, how many), zeros left out."""
    spans: list[tuple[int, int, int]] = []
    for position, busy in enumerate(flights):
        if spans and spans[-1][2] == busy and sum(spans[-1][:2]) == position:
            first, length, _ = spans[-1]
            spans[-1] = (first, length + 1, busy)
        elif busy:
            spans.append((position, 1, busy))
    return spans


def draw_region(axes: Axes, listing: Listing, region: Region, flights: Sequence[int]) -> None:
    """Draws one region's trunk into `axes`; x is the position of an instruction, from the top of the region."""
    lanes = list(LANES)
    for first, length, busy in in_flight_spans([flights[index] for index in region.trunk]):
        shade = ["#bdd7ee", "#9dc3e6"][min(busy, 2) - 1]
        axes.broken_barh([(first, length)], (0.1, 0.8), color=shade)
    for event in events(listing, region.trunk, flights):
        if event.lane in MARKS:
            _mark(axes, event, len(lanes))
        else:
            row = lanes.index(event.lane) + 1
            axes.broken_barh([(event.first, event.count)], (row + 0.1, 0.8), color=COLOURS[event.lane])
    axes.set_ylim(len(lanes) + 1, -0.6)
    axes.set_yticks([row + 0.5 for row in range(len(lanes) + 1)], ["GEMM in flight", *LANES.values()])
    axes.set_xlim(0, len(region.trunk))
    axes.set_xlabel("instructions, in the order of the text")
    exponentials = [i for i in region.indices if listing.instructions[i].opcode.startswith("MUFU.EX2")]
    under = sum(flights[i] > 0 for i in exponentials)
    axes.set_title(f"{region.title}: {under} of {len(exponentials)} exponentials under a GEMM", loc="left", fontsize=10)


def _mark(axes: Axes, event: Event, rows: int) -> None:
    colour, style = MARKS[event.lane]
    axes.vlines(event.first, 0, rows + 1, color=colour, linestyle=style, linewidth=1)
    if event.lane == "wait":
        axes.text(event.first, -0.1, event.text, color=colour, fontsize=7, ha="center")


def draw(listing: Listing, title: str = "") -> Figure:
    """One row for each main loop of a kernel. Needs matplotlib (`fa3[examples]`)."""
    from matplotlib.figure import Figure

    flights = gemms_in_flight(listing)
    loops = [region for region in split(listing) if region.main]
    if not loops:
        raise ValueError("the kernel has no loop with a GEMM in it; there is nothing to draw")
    figure = Figure(figsize=(11, 2.5 * len(loops) + 0.5), layout="constrained")
    rows: Any = figure.subplots(len(loops), 1, squeeze=False)
    for (axes,), loop in zip(rows, loops, strict=True):
        draw_region(axes, listing, loop, flights)
    figure.suptitle(title, fontsize=10)
    return figure
