"""Finds and runs the disassemblers: NVIDIA's pip wheels first, then PATH. Neither needs a GPU or a CUDA toolkit."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from fa3.sass.errors import ToolError

_WHEELS = {"nvdisasm": "nvidia-cuda-nvdisasm", "cuobjdump": "nvidia-cuda-cuobjdump"}


def find(tool: str, search: Iterable[str] | None = None) -> str:
    """The path of `nvdisasm` or `cuobjdump`. The wheels come first: they are the version that the parser knows.

    Raises ToolError that names the extra and the wheels if neither a wheel nor PATH has it.
    """
    for folder in sys.path if search is None else search:
        found = sorted(Path(folder or ".").glob(f"nvidia/*/bin/{tool}*"))
        if found:
            return str(found[-1])
    if path := shutil.which(tool):
        return path
    wheels = " ".join(_WHEELS.values())
    raise ToolError(
        f'{tool} was found neither in site-packages nor on PATH. In a checkout: pip install -e ".[sass]"; '
        f"elsewhere: pip install {wheels}"
    )


def disassemble(cubin: bytes) -> str:
    """SASS with source lines, as `nvdisasm -g -c` prints it."""
    return _run([find("nvdisasm"), "-g", "-c"], cubin)


def resource_usage(cubin: bytes) -> str:
    """`cuobjdump --dump-resource-usage`: registers at entry, stack, static shared memory."""
    return _run([find("cuobjdump"), "--dump-resource-usage"], cubin)


def _run(command: list[str], cubin: bytes) -> str:
    with tempfile.TemporaryDirectory(prefix="fa3-sass-") as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        try:
            done = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=120)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ToolError(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        raise ToolError(f"{command[0]} failed with status {done.returncode}: {done.stderr.strip()}")
    return done.stdout
