"""Bar charts in the style of the FlashAttention papers: `python -m benchmarks.charts results/*.json --out charts`.

One picture for each mode and dtype; in it one panel for each head dim and mask; in a panel a group of bars for each
sequence length, one bar for each provider, ours in colour and the others in greys.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__" and not __package__:  # started as a file: the repository's root is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import matplotlib
from matplotlib.figure import Figure

from benchmarks import results
from fa3._providers import NAMES, OURS

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

matplotlib.use("Agg")  # pictures go to files; no display is needed

LABELS = {
    OURS: "fa3 (ours)",
    "fa4": "flash-attn-4",
    "fa3_cpp": "FlashAttention-3 C++",
    "cudnn": "cuDNN",
    "fa2": "FlashAttention-2",
}
COLOURS = {OURS: "#c8452c", "fa4": "#3f5d7d", "fa3_cpp": "#7390ae", "cudnn": "#a9a9a9", "fa2": "#d6d6d6"}
OTHER_COLOUR = "#ededed"
GROUP_WIDTH = 0.86
MODE_TITLES = {"fwd": "forward", "bwd": "backward"}

Panel = tuple[int, int, bool]
"""(head_dim, head_dim_v, causal)"""


def draw(loaded: Sequence[results.Result], stem: Path) -> list[Path]:
    """Draw the rows of some results into `<stem>.png`, or `<stem>-<mode>-<dtype>.png` if there are several kinds.

    A case that is in several results is drawn from the last. Returns the files written.
    """
    rows = _latest(row for result in loaded for row in result["rows"])
    kinds = sorted({(row["mode"], row["dtype"]) for row in rows})
    written = []
    for mode, dtype in kinds:
        path = Path(f"{stem}.png") if len(kinds) == 1 else Path(f"{stem}-{mode}-{dtype}.png")
        figure = picture([row for row in rows if (row["mode"], row["dtype"]) == (mode, dtype)], _headline(loaded[-1]))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
        written.append(path)
    return written


def picture(rows: Sequence[results.Row], headline: str) -> Figure:
    """One picture of rows of one mode and dtype: a row of panels for each mask, a column for each head dim."""
    masks = sorted({row["causal"] for row in rows})
    widths = sorted({(row["head_dim"], row["head_dim_v"]) for row in rows})
    figure = Figure(figsize=(1.0 + 4.6 * len(widths), 0.9 + 3.1 * len(masks)), layout="constrained")
    axes = figure.subplots(len(masks), len(widths), squeeze=False)
    for i, causal in enumerate(masks):
        for j, (head_dim, head_dim_v) in enumerate(widths):
            chosen = [row for row in rows if _panel(row) == (head_dim, head_dim_v, causal)]
            _draw_panel(axes[i][j], chosen, _panel_title(rows[0]["mode"], (head_dim, head_dim_v, causal)))
        axes[i][0].set_ylabel("TFLOP/s")
    handles: dict[str, Artist] = {}
    for axis in figure.axes:
        bars, labels = axis.get_legend_handles_labels()
        handles.update(zip(labels, bars, strict=True))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=max(1, len(handles)), frameon=False
    )
    figure.suptitle(f"Attention {MODE_TITLES.get(rows[0]['mode'], rows[0]['mode'])}, {rows[0]['dtype']}. {headline}")
    return figure


def providers_in(rows: Iterable[results.Row]) -> list[str]:
    """Every provider with a figure: slow ones first and ours last, as in the papers, then unknown names."""
    seen = {name for row in rows for name in row["tflops"]}
    known = [name for name in reversed(NAMES) if name in seen]
    return sorted(seen - set(known)) + known


def _draw_panel(axis: Axes, rows: Sequence[results.Row], title: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    if not rows:
        axis.set_axis_off()
        return
    rows = sorted(rows, key=lambda row: (row["seqlen_k"], row["seqlen_q"], row["heads_kv"]))
    providers = providers_in(rows)
    width = GROUP_WIDTH / len(providers)
    for at, name in enumerate(providers):
        left = [group + (at - (len(providers) - 1) / 2) * width for group in range(len(rows))]
        bars = axis.bar(
            left,
            [row["tflops"].get(name, 0.0) for row in rows],
            width * 0.94,
            label=LABELS.get(name, name),
            color=COLOURS.get(name, OTHER_COLOUR),
        )
        numbers = [f"{row['tflops'][name]:.0f}" if name in row["tflops"] else "" for row in rows]
        axis.bar_label(bars, numbers, fontsize=6, fontweight="bold" if name == OURS else "normal", padding=1)
    axis.set_xticks(range(len(rows)), [_tick(row) for row in rows], fontsize=8)
    axis.set_xlabel("sequence length", fontsize=8)
    axis.margins(y=0.12)


def _panel(row: results.Row) -> Panel:
    return row["head_dim"], row["head_dim_v"], row["causal"]


def _panel_title(mode: str, panel: Panel) -> str:
    head_dim, head_dim_v, causal = panel
    width = f"{head_dim}" if head_dim == head_dim_v else f"({head_dim}, {head_dim_v})"
    return f"{MODE_TITLES.get(mode, mode)}, head dim {width}, {'causal' if causal else 'no mask'}"


def _tick(row: results.Row) -> str:
    """The label under a group; the ratio to the best peer in its second line."""
    k, q = _short(row["seqlen_k"]), _short(row["seqlen_q"])
    heads = "" if row["heads_q"] == row["heads_kv"] else f" {row['heads_q']}:{row['heads_kv']}"
    ratio = "" if row["ratio"] is None else f"\n{row['ratio']:.2f}x"
    return f"{k if q == k else f'{q}x{k}'}{heads}{ratio}"


def _short(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else f"{length}"


def _latest(rows: Iterable[results.Row]) -> list[results.Row]:
    return list({results.case_of(row): row for row in rows}.values())


def _headline(result: results.Result) -> str:
    env = result["env"]
    return f"{env.get('gpu') or 'no GPU'}, {str(env.get('date', ''))[:10]}, {str(env.get('commit', ''))[:12]}"


def main(arguments: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="benchmarks.charts", description=__doc__.splitlines()[0] if __doc__ else None)
    p.add_argument("files", type=Path, nargs="+", metavar="FILE.json")
    p.add_argument("--out", type=Path, default=None, metavar="STEM", help="default: beside the last file")
    args = p.parse_args(arguments)
    stem = args.out or args.files[-1].with_suffix("")
    for path in draw([results.read(file) for file in args.files], stem):
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
