"""Pictures of rings and turns, for notebooks and documentation. matplotlib is imported when the first one is drawn.

Every function takes a timeline of the model (`fa3.pipeline.model.play`) and an optional matplotlib axis, draws into the
axis and returns it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from fa3.pipeline.model import Buffer, MBarrier, State, Timeline

__all__ = ["phases", "stages", "work"]

COLOURS = {"free": "#eeeeee", "filling": "#e6a03c", "arrived": "#6aaed6", "reading": "#2a7f4f"}
"""Who owns a buffer. They differ in brightness too."""
PALETTE = ("#2a7f4f", "#e6a03c", "#6aaed6", "#8c6bb1", "#b0b0b0")

Span = tuple[float, float, Any]
"""Begin, end, and what was so in between."""


def stages(timeline: Timeline, edge: str, ax: Any = None, until: float | None = None, legend: bool = True) -> Any:
    """The stages of a ring over time, coloured by owner: free, filling, arrived (nobody reads yet), reading.

    The number in a span is the item. `until`: where the time axis ends, to compare several pictures.
    """
    ax = _axis(ax)
    rows = _stages(timeline, edge)
    for row in range(rows):
        for begin, end, (owner, item) in spans(timeline, partial(_owner, edge=edge, stage=row)):
            ax.barh(row, end - begin, left=begin, height=0.8, color=COLOURS[owner], edgecolor="white")
            if owner != "free":
                colour = "white" if owner == "reading" else "black"
                ax.text((begin + end) / 2, row, str(item), ha="center", va="center", fontsize=7, color=colour)
    _finish(ax, timeline, [f"{edge}[{row}]" for row in range(rows)], until)
    if legend:
        _legend(ax, COLOURS)
    return ax


def phases(timeline: Timeline, edge: str, ax: Any = None, until: float | None = None) -> Any:
    """The phase bit of every barrier of a ring over time: raised while a phase of parity 1 is under way.

    The number is the phase.
    """
    ax = _axis(ax)
    names = [f"{edge}.{kind}[{stage}]" for stage in range(_stages(timeline, edge)) for kind in ("full", "empty")]
    for row, name in enumerate(names):
        colour = COLOURS["arrived" if ".full" in name else "filling"]
        for begin, end, phase in spans(timeline, partial(_phase, barrier=name)):
            height = row - 0.5 * (phase % 2)
            ax.plot([begin, end], [height, height], color=colour, linewidth=2)
            ax.text((begin + end) / 2, height, str(phase), ha="center", va="bottom", fontsize=7)
    _finish(ax, timeline, names, until)
    ax.set_ylim(len(names) - 0.7, -1)
    return ax


def work(timeline: Timeline, labels: Sequence[str], ax: Any = None, until: float | None = None) -> Any:
    """What each actor works on over time: the steps with one of `labels`; it waits in between.

    Actors without such a step are left out.
    """
    ax = _axis(ax)
    colours = dict(zip(labels, PALETTE, strict=False))
    moments = [moment for moment in timeline.moments if moment.step.label in colours]
    actors = [actor for actor in timeline.machine.programs if any(moment.actor == actor for moment in moments)]
    for moment in moments:
        row, length = actors.index(moment.actor), moment.time - moment.begin
        ax.barh(row, length, left=moment.begin, height=0.8, color=colours[moment.step.label], edgecolor="white")
    _finish(ax, timeline, actors, until)
    _legend(ax, colours)
    return ax


def spans(timeline: Timeline, value: Callable[[State], Any]) -> Iterator[Span]:
    """The stretches of time in which `value` of the state stays the same; those of no length are left out."""
    begin, now = 0.0, value(timeline.machine.start())
    for time, state in timeline.states():
        if value(state) != now:
            if time > begin:
                yield begin, time, now
            begin, now = time, value(state)
    if timeline.end > begin:
        yield begin, timeline.end, now


def _owner(state: State, edge: str, stage: int) -> tuple[str, int | None]:
    buffer = state.things[f"{edge}[{stage}]"]
    assert isinstance(buffer, Buffer)
    return buffer.owner, buffer.item


def _phase(state: State, barrier: str) -> int:
    found = state.things[barrier]
    assert isinstance(found, MBarrier)
    return found.phase


def _stages(timeline: Timeline, edge: str) -> int:
    found = sum(name.startswith(f"{edge}[") for name in timeline.machine.things)
    if not found:
        raise KeyError(f"no edge {edge!r} in {sorted(timeline.machine.things)}")
    return found


def _axis(ax: Any) -> Any:
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(9, 1.8), layout="constrained")[1]


def _finish(ax: Any, timeline: Timeline, rows: Sequence[str], until: float | None) -> None:
    ax.set_yticks(range(len(rows)), rows, fontsize=8)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xlim(0, until if until is not None else timeline.end)
    ax.set_xlabel("time", fontsize=8)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)


def _legend(ax: Any, colours: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=label) for label, colour in colours.items()]
    ax.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7, frameon=False)
