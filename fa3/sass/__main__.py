"""python -m fa3.sass forward --head-dim 128 --causal: compile for sm_90a without a GPU, and look at what came out."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fa3.sass.diff import changes, commit_of, report_at, side_by_side
from fa3.sass.errors import ParseError, ToolError

if TYPE_CHECKING:
    from fa3.config.types import ForwardConfig, KernelKey


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fa3.sass", description=__doc__, allow_abbrev=False)
    parser.add_argument("kernel", nargs="?", choices=["forward"], help="which kernel to compile")
    parser.add_argument("--head-dim", type=int, default=128, metavar="D", help="columns of Q and K (default 128)")
    parser.add_argument("--head-dim-v", type=int, metavar="D", help="columns of V (default: as --head-dim)")
    parser.add_argument("--causal", action="store_true", help="with the causal mask")
    parser.add_argument("--dtype", choices=["bf16", "fp16"], default="bf16")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="change the table's row, such as tile_n=112 or algorithm=plain; may be given several times",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--schedule", action="store_true", help="print the order of GEMMs, waits and exponentials")
    parser.add_argument("--diff", metavar="REV", help="compare with another git revision of this checkout")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the main loops")
    parser.add_argument("--record", type=Path, metavar="FILE.json", help="write the overlap of every row of the table")
    return parser


def key_of(arguments: argparse.Namespace) -> KernelKey:
    """The key that the command line describes. Raises ValueError for what makes no sense or does not fit an SM."""
    from fa3.config.budget import check_forward
    from fa3.config.table import forward_key

    head_dim_v = arguments.head_dim_v or arguments.head_dim
    key = forward_key(arguments.head_dim, head_dim_v, arguments.causal, arguments.dtype)
    for setting in arguments.set:
        key = dataclasses.replace(key, config=changed(key.config, setting))
    check_forward(key.config)
    return key


def changed(config: ForwardConfig, setting: str) -> ForwardConfig:
    """`tile_n=112` applied to a row. Raises ValueError if there is no such field, or its type does not fit."""
    field, equals, value = setting.partition("=")
    known = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    if not equals or field not in known:
        raise ValueError(f"--set takes FIELD=VALUE with a field of {', '.join(known)}; got {setting!r}")
    old = known[field]
    if isinstance(old, bool):
        new: object = {"true": True, "false": False}[value.lower()] if value.lower() in ("true", "false") else None
    else:
        new = value if isinstance(old, str) else int(value) if value.isdecimal() else None
    if new is None:
        raise ValueError(f"{field} is {old!r} in the row; {value!r} does not fit")
    return dataclasses.replace(config, **{field: new})  # type: ignore[arg-type]


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


def plot(key: KernelKey, path: Path) -> None:
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
    from fa3.sass.record import record, table_keys
    from fa3.sass.report import inspect, text

    if arguments.record:
        return f"{len(record(arguments.record, table_keys()))} kernels written to {arguments.record}"
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
        commands.error("say which kernel: forward (or --record FILE.json)")
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
