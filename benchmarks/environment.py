"""On what a result was measured: the `env` object of a result file."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def describe(peers: Mapping[str, str], matmul_tflops: float | None = None) -> dict[str, object]:
    """Everything that a reader needs to judge or repeat a run. `peers` maps providers to their versions."""
    on_gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "multiprocessors": torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        if on_gpu
        else None,
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else None,
        "power_limit": _first_line("nvidia-smi", "--query-gpu=power.limit", "--format=csv,noheader")
        if on_gpu
        else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": _cudnn_version() if on_gpu else None,
        "dsl": _installed("nvidia-cutlass-dsl"),
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "peers": dict(peers),
        "matmul_tflops": None if matmul_tflops is None else round(matmul_tflops, 1),
    }


def commit() -> str:
    """The revision of this tree: FA3_COMMIT (for a machine that has the files but no history), else git's."""
    given = os.environ.get("FA3_COMMIT")
    if given:
        return given
    revision = _first_line("git", "-C", str(ROOT), "rev-parse", "HEAD")
    if revision is None:
        return "unknown"
    changed = _first_line("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no", "--", "fa3")
    return f"{revision}-dirty" if changed else revision


def _first_line(*command: str) -> str | None:
    """The first line that a command prints; None if it prints nothing, fails, or is not installed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.splitlines()
    return lines[0].strip() if lines else None


def _installed(wheel: str) -> str | None:
    try:
        return importlib.metadata.version(wheel)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cudnn_version() -> str | None:
    """9.19.0 for 91900, as cuDNN counts since its version 9."""
    number = torch.backends.cudnn.version()
    return None if number is None else f"{number // 10000}.{number % 10000 // 100}.{number % 100}"
