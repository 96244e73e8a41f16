"""A picture of a timeline in the manner of the paper's figure of ping-pong scheduling: who does what, side by side.

A lane for the load warp and for others that start copies, one for each math warpgroup (its first warp stands for all
four), then the units that they share. matplotlib is imported when the first picture is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa3.emulator.timing.timeline import Interval, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "softmax": "#c00000",
    "rescale": "#e07b39",
    "gradient": "#c55a8a",
    "exchange": "#bf9000",
    "dq": "#2f7f7f",
    "turnstile": "#404040",
    "convert": "#548235",
    "mask": "#7030a0",
    "epilogue": "#7f6000",
    "issue": "#1f4e79",
    "gemm": "#bdd7ee",
    "copy": "#1f4e79",
    "control": "#7f7f7f",
    "schedule": "#7f7f7f",
    "wait": "#ececec",
    "barrier": "#d0d0d0",
}
"""Kind of an interval of a warp -> colour. `mufu`, `load` and `store` of the units are below."""
MEANINGS = {
    "softmax": "softmax",
    "rescale": "rescale O",
    "gradient": "dS = P (dP - D)",
    "exchange": "dS to shared memory",
    "dq": "dQ on its way out",
    "turnstile": "waits for its turn to add",
    "convert": "P to 16 bits",
    "mask": "mask",
    "epilogue": "epilogue",
    "issue": "issue WGMMA or TMA",
    "gemm": "waits for its GEMM",
    "control": "addresses, loops, arrivals",
    "wait": "waits for an mbarrier",
    "barrier": "waits at a named barrier",
}
"""What the legend says, in its order."""
WARPGROUPS = ("#2e75b6", "#1a3a5c", "#7db0dc", "#4a6fa5")
"""Colours of the warpgroups' GEMMs on the tensor cores."""
UNITS = {"MUFU 0": "#c00000", "TMA load": "#e6a03c", "TMA store": "#7f6000"}


def draw(timeline: Timeline, begin: float = 0.0, end: float | None = None, title: str = "") -> Figure:
    """A figure of the cycles from `begin` to `end` (default: the whole CTA).

    Raises:
        ImportError: matplotlib is missing; the message says how to get it.
        ValueError: there is nothing between `begin` and `end`.
    """
    end = timeline.end if end is None else end
    if not begin < end:
        raise ValueError(f"from cycle {begin} to cycle {end} there is nothing to draw")
    figure_type = _matplotlib()
    lanes = _lanes(timeline, begin, end)
    figure = figure_type(figsize=(12, 0.55 * len(lanes) + 1.7), layout="constrained")
    axes: Any = figure.subplots()
    for row, (_, coloured) in enumerate(lanes):
        for colour, spans in coloured.items():
            axes.broken_barh(spans, (row + 0.08, 0.84), color=colour, linewidth=0)
    _finish(axes, [name for name, _ in lanes], begin, end)
    axes.set_title(title or _title(timeline), loc="left", fontsize=9)
    _legend(figure, timeline, begin, end)
    return figure


def save(timeline: Timeline, file: Path, begin: float = 0.0, end: float | None = None, title: str = "") -> None:
    """Writes the picture as PNG, or as what the file's ending says."""
    draw(timeline, begin, end, title).savefig(file, dpi=150)


def _matplotlib() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "a picture of a timeline needs matplotlib, which is not installed: pip install 'fa3[benchmarks]'"
        ) from error
    return Figure


Coloured = dict[str, list[tuple[float, float]]]
"""Colour -> (first cycle, cycles)."""


def _lanes(timeline: Timeline, begin: float, end: float) -> list[tuple[str, Coloured]]:
    def of(intervals: Iterable[Interval], colour: Any) -> Coloured:
        found: Coloured = {}
        for i in intervals:
            first, last = max(i.start, begin), min(i.end, end)
            if first < last:
                found.setdefault(colour(i), []).append((first, last - first))
        return found

    def of_kind(interval: Interval) -> str:
        return COLOURS.get(interval.kind, COLOURS["control"])

    lanes = []
    for warp in dict.fromkeys((0, *timeline.copy_warps) if timeline.warps and 0 not in timeline.math_warps else ()):
        name = (
            "load warp" if warp == 0 else timeline.roles.get(warp, f"warp {warp}").replace("_", " ").replace("dq", "dQ")
        )
        lanes.append((name, of(timeline.warps[warp], of_kind)))
    for number, warp in enumerate(timeline.math_warps):
        lanes.append((f"warpgroup {number}", of(timeline.warps[warp], of_kind)))
    order = _warpgroups(timeline)
    lanes.append(("tensor cores", of(timeline.units["tensor cores"], lambda i: _of_warpgroup(order, i))))
    for unit, colour in UNITS.items():
        spans = of(timeline.units.get(unit, ()), lambda _, colour=colour: colour)
        if spans:
            lanes.append((unit.replace(" 0", ""), spans))
    return lanes


def _warpgroups(timeline: Timeline) -> list[str]:
    """Names of the warpgroups in the labels of the tensor cores' intervals, in order."""
    return sorted({interval.label.split(",")[0] for interval in timeline.units["tensor cores"]})


def _of_warpgroup(order: Sequence[str], interval: Interval) -> str:
    return WARPGROUPS[order.index(interval.label.split(",")[0]) % len(WARPGROUPS)]


def _title(timeline: Timeline) -> str:
    busy = f"tensor cores {timeline.utilisation('tensor cores'):.0%}, MUFU {timeline.utilisation('MUFU 0'):.0%}"
    return f"CTA {timeline.number}: {timeline.end:.0f} cycles, {busy}"


def _finish(axes: Axes, names: Sequence[str], begin: float, end: float) -> None:
    axes.set_yticks([row + 0.5 for row in range(len(names))], names)
    axes.set_ylim(len(names), 0)
    axes.set_xlim(begin, end)
    axes.set_xlabel("cycles", fontsize=9)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _legend(figure: Figure, timeline: Timeline, begin: float, end: float) -> None:
    from matplotlib.patches import Patch

    warps = [warp for warp in (0, *timeline.copy_warps, *timeline.math_warps) if warp < len(timeline.warps)]
    seen = {i.kind for warp in warps for i in timeline.warps[warp] if i.start < end and i.end > begin}
    patches = [Patch(color=COLOURS[kind], label=text) for kind, text in MEANINGS.items() if kind in seen]
    order = _warpgroups(timeline)
    patches += [Patch(color=WARPGROUPS[i % len(WARPGROUPS)], label=f"GEMM of warpgroup {i}") for i in range(len(order))]
    figure.legend(handles=patches, loc="outside lower center", ncols=min(7, len(patches)), fontsize=8, frameon=False)
