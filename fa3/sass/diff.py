"""The same report on another revision of the source, and what changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fa3.sass.errors import ToolError


def report_at(revision: str, arguments: Sequence[str], start: Path | None = None) -> dict[str, Any]:
    """Runs `python -m fa3.sass <arguments> --json` on the source of `revision`, with this interpreter.

    `start` is any folder of the checkout; by default the one that this file lies in. Raises ToolError if that is no git
    checkout, git does not know the revision, or the run fails there.
    """
    with worktree(revision, start) as tree:
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        command = [sys.executable, "-m", "fa3.sass", *arguments, "--json"]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ToolError(f"fa3.sass failed at {revision}: {last}")
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError as error:
        raise ToolError(f"fa3.sass at {revision} printed no report: {error}") from error
    return found


def commit_of(revision: str, start: Path | None = None) -> tuple[Path, str]:
    """The top folder of the checkout around `start`, and the commit that `revision` names there. Raises ToolError."""
    start = start or Path(__file__).parent
    top = _git(start, "rev-parse", "--show-toplevel", failure=f"{start} is not in a git checkout; --diff needs one")
    commit = _git(
        Path(top),
        *("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"),
        failure=f"git does not know the revision {revision!r}",
    )
    return Path(top), commit


@contextmanager
def worktree(revision: str, start: Path | None = None) -> Iterator[Path]:
    """A temporary checkout of `revision` beside the one in use, which is not touched."""
    top, commit = commit_of(revision, start)
    with tempfile.TemporaryDirectory(prefix="fa3-sass-diff-") as folder:
        tree = Path(folder, "tree")
        _git(top, "worktree", "add", "--detach", str(tree), commit, failure=f"git cannot check out {revision!r}")
        try:
            yield tree
        finally:
            _git(top, "worktree", "remove", "--force", str(tree), failure=f"git cannot remove {tree}")


def _git(folder: Path, *arguments: str, failure: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True)
    except OSError as error:
        raise ToolError(f"{failure} ({error})") from error
    if done.returncode:
        detail = done.stderr.strip().splitlines()
        raise ToolError(f"{failure}: {detail[-1]}" if detail else failure)
    return done.stdout.strip()


# Figures that a name and a value describe; the rest of a report is text.
_LEFT_OUT = ("regions", "lines")


def figures(report: dict[str, Any]) -> dict[str, str]:
    """A report as flat figures: {"registers": "168", "mix.FFMA": "178", "main loop 1": "66 of 66 in flight", ...}."""
    flat = {}
    for name, value in report.items():
        if name in _LEFT_OUT:
            continue
        if isinstance(value, dict):
            flat.update({f"{name}.{key}": _plain(inner) for key, inner in value.items()})
        elif name == "wgmma":
            flat.update(
                {f"wgmma.{form['shape']} {form['operands']} {form['types']}": str(form["count"]) for form in value}
            )
        elif name == "frozen_waits":
            flat[name] = "; ".join(value) or "none"
        elif name == "warnings":
            flat[name] = "; ".join(sorted({warning["code"] for warning in value})) or "none"
        else:
            flat[name] = _plain(value)
    for region in report.get("regions", ()):
        flat[region["title"].split(" (")[0]] = f"{region['ex2_in_flight']} of {region['ex2_total']} in flight"
    return flat


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The figures that differ, as (name, before, after), in the order of the report; "-" where one side has none."""
    old, new = figures(before), figures(after)
    names = [*new, *(name for name in old if name not in new)]
    pairs = ((name, old.get(name, "-"), new.get(name, "-")) for name in names)
    return [(name, left, right) for name, left, right in pairs if left != right]


def side_by_side(rows: Sequence[tuple[str, str, str]], revision: str) -> str:
    """The changes as a table for a terminal."""
    if not rows:
        return f"no figure differs from {revision}"
    table = [("", revision, "now"), *rows]
    first, second = (max(len(row[column]) for row in table) for column in (0, 1))
    return "\n".join(f"{name:<{first}}  {old:>{second}}  {new}" for name, old, new in table)
