"""python -m fa3.sass forward --head-dim 128 --causal: compile for sm_90a without a GPU, and look at what came out."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fa3._arguments import KERNELS, add_kernel, key_of
from fa3.sass.diff import changes, commit_of, report_at, side_by_side
from fa3.sass.errors import ParseError, ToolError

if TYPE_CHECKING:
    from fa3.config.backward import AnyKey


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fa3.sass", description=__doc__, allow_abbrev=False)
    add_kernel(parser, required=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--schedule", action="store_true", help="print the order of GEMMs, waits and exponentials")
    parser.add_argument("--diff", metavar="REV", help="compare with another git revision of this checkout")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the main loops")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE.json",
        help="write the overlap of every row of the tables, or of those of the kernel",
    )
    return parser


def without(arguments: Sequence[str], *options: str) -> list[str]:
    """The command line without some options that take a value, and without the switches that only shape the output."""
    kept: list[str] = []
    rest = iter(arguments)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name in options:
            if not equals:
                next(rest, None)
        elif word not in ("--json", "--schedule"):
            kept.append(word)
    return kept


def plot(key: AnyKey, path: Path) -> None:
    """Writes the picture of a kernel's main loops. Raises ToolError without matplotlib."""
    from fa3.compile import artefacts
    from fa3.sass.report import listing_of

    try:
        from fa3.sass.draw import draw

        figure = draw(listing_of(artefacts(key)), key.name)
    except ImportError as error:
        raise ToolError(f"--plot needs matplotlib: pip install matplotlib ({error})") from error
    figure.savefig(path, dpi=150)


def run(arguments: argparse.Namespace, words: Sequence[str]) -> str:
    """What to print. Raises ToolError, ParseError or ValueError with a message for the user."""
    from fa3.sass.record import record_kernel
    from fa3.sass.report import inspect, text

    if arguments.record:
        return f"{record_kernel(arguments.record, arguments.kernel)} kernels written to {arguments.record}"
    key = key_of(arguments)
    if arguments.diff:
        commit_of(arguments.diff)  # a revision that does not exist is refused before anything is compiled
    if arguments.plot:
        plot(key, arguments.plot)
    report = inspect(key)
    if arguments.diff:
        old = report_at(arguments.diff, without(words, "--diff", "--plot"))
        rows = changes(old, json.loads(json.dumps(report.as_dict())))
        if arguments.json:
            return json.dumps({"revision": arguments.diff, "changes": rows, "report": report.as_dict()})
        return f"{report.name}\n{side_by_side(rows, arguments.diff)}"
    return json.dumps(report.as_dict()) if arguments.json else text(report, arguments.schedule)


def main(words: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if words is None else words)
    commands = parser()
    arguments = commands.parse_args(words)
    if not arguments.kernel and not arguments.record:
        commands.error(f"say which kernel: {', '.join(KERNELS)} (or --record FILE.json)")
    try:
        print(run(arguments, words), flush=True)
    except BrokenPipeError:  # a reader such as `head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ToolError, ParseError, ValueError) as error:
        print(f"fa3.sass: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
