"""Compiles the kernels of the table for sm_90a into a folder. It needs no GPU.

    python -m fa3.build --out kernels                    every row, float16 and bfloat16, forward and backward
    python -m fa3.build --out kernels --head-dim 128     only some rows
    python -m fa3.build --out kernels --only forward     for inference
    FA3_PREBUILT_DIR=kernels python train.py             on the GPU machine: compiles nothing

Of the backward these are the kernels for all three gradients. Rarer ones have options below, or are compiled when they
are first needed: for the gradient of LSE, or for only some of the gradients.
The folder serves a machine with the same fa3, the same nvidia-cutlass-dsl and the same CPU type (x86_64 or aarch64).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import get_args

from fa3 import cache, launch
from fa3.config.backward import PARTS, AnyKey, BackwardKey
from fa3.config.backward_table import BACKWARD
from fa3.config.table import FORWARD
from fa3.config.types import DType, KernelKey

MAX_JOBS = 16
"""A job takes about 300 MB of memory."""
PASSES = ("forward", "backward")


def keys(
    head_dims: Iterable[int] | None = None,
    dtypes: Iterable[DType] = get_args(DType),
    negative_scale: bool = False,
    passes: Iterable[str] = PASSES,
    deterministic: bool = False,
) -> list[AnyKey]:
    """The kernels of the tables' rows; with `negative_scale` also the forward's for a softmax_scale below 0, with
    `deterministic` also the backward's that add up dQ in a fixed order."""
    wanted = None if head_dims is None else set(head_dims)
    found: list[AnyKey] = []
    if "forward" in passes:
        signs = (False, True) if negative_scale else (False,)
        rows = [row for row in FORWARD if wanted is None or row.head_dim in wanted]
        found += [KernelKey(row, dtype, sign) for row in rows for dtype in dtypes for sign in signs]
    if "backward" in passes:
        chosen = [row for row in BACKWARD if wanted is None or row.head_dim in wanted]
        found += [BackwardKey(part, row, dtype) for row in chosen for dtype in dtypes for part in PARTS]
        if deterministic:
            found += [BackwardKey("backward", row, dtype, deterministic=True) for row in chosen for dtype in dtypes]
    return found


def build_one(key: AnyKey, root: Path) -> tuple[str, float]:
    """Compiles one kernel into `root`, unless it is there. Returns what happened and the seconds it took."""
    start = time.perf_counter()
    with cache.lock(key, root):
        if cache.find(key, root):
            return "up to date", time.perf_counter() - start
        file = launch.compile_to_disk(key, root)
    return f"{file.stat().st_size / 1024:.0f} KiB", time.perf_counter() - start


def build(wanted: Sequence[AnyKey], root: Path, jobs: int) -> list[str]:
    """Compiles the kernels in `jobs` processes, one line each on stdout. Returns the names of those that failed."""
    failed = []
    # A new interpreter for each worker: the DSL's compiler is not made to be forked, nor to run in threads.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(build_one, key, root): key for key in wanted}
        for done in as_completed(running):
            key = running[done]
            try:
                what, seconds = done.result()
                print(f"{key.name}  {what}  {seconds:.1f} s", flush=True)
            except Exception as error:  # one bad row must not cost the others
                failed.append(key.name)
                print(f"{key.name}  FAILED: {error}", flush=True)
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    cache.check_dsl()
    root = args.out or cache.folder()
    if root is None:
        sys.exit("FA3_DISK_CACHE is off and no --out is given: nowhere to put the kernels")
    wanted = keys(args.head_dim, args.dtype, args.negative_scale, args.only or PASSES, args.deterministic)
    if not wanted:
        known = ", ".join(sorted({str(row.head_dim) for row in FORWARD}, key=int))
        sys.exit(f"no row of the table has --head-dim {args.head_dim}; there are {known}")
    start = time.perf_counter()
    failed = build(wanted, root, max(1, min(args.jobs, len(wanted))))
    print(f"{len(wanted) - len(failed)} of {len(wanted)} kernels in {root / cache.validity()}", end="")
    print(f", {time.perf_counter() - start:.0f} s")
    return 1 if failed else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fa3.build", description="Compiles the kernels of the table for sm_90a."
    )
    parser.add_argument("--out", type=Path, help="folder; default: the disk cache")
    parser.add_argument("--head-dim", type=int, nargs="+", help="only the rows of these head dimensions")
    parser.add_argument("--dtype", nargs="+", choices=get_args(DType), default=list(get_args(DType)))
    parser.add_argument("--only", nargs=1, choices=PASSES, help="the kernels of one pass")
    parser.add_argument("--negative-scale", action="store_true", help="also the forward's for softmax_scale < 0")
    parser.add_argument("--deterministic", action="store_true", help="also the backward's for deterministic=True")
    parser.add_argument("--jobs", type=int, default=min(MAX_JOBS, os.cpu_count() or 1), help="processes")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
