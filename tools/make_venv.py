"""Make the project's virtual environment: `python3 tools/make_venv.py .venv`. Standard library only.

A torch that the calling interpreter already sees, if it is recent enough, is used as it is: the environment then looks
through to it, and pip is told to leave it alone. Otherwise constraints.txt names the version to install.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_TORCH = (2, 9)
PYTHONS = ((3, 10), (3, 13))
EXTRAS = "cu13,test"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.absolute()
    python = folder / "bin" / "python"
    if not works(python):
        create(folder)
    torch = torch_version(python)
    print(f"installing fa3[{EXTRAS}] into {folder.name}: a few minutes the first time", flush=True)
    print("torch:", f"{torch}, as installed" if torch else "to be installed, see constraints.txt", flush=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pinned:
        pinned.write(f"torch=={torch}\n")
        pinned.flush()
        constraints = pinned.name if torch else str(ROOT / "constraints.txt")
        pip(python, "install", "--constraint", constraints, "--editable", f"{ROOT}[{EXTRAS}]")


def works(python: Path) -> bool:
    """Whether `folder` is an environment already, with a pip in it."""
    return python.exists() and subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0


def create(folder: Path) -> None:
    """Make the environment; end with a readable message where this Python cannot."""
    first, last = PYTHONS
    if not first <= sys.version_info[:2] <= last:
        named = " to ".join(".".join(map(str, v)) for v in PYTHONS)
        sys.exit(
            f"fa3 needs Python {named}; {sys.executable} is {sys.version.split()[0]}. Try: make PYTHON=python3.12 ..."
        )
    seen = torch_version(Path(sys.executable)) is not None
    command = [sys.executable, "-m", "venv", "--clear", *(["--system-site-packages"] if seen else []), str(folder)]
    if subprocess.run(command).returncode != 0:
        sys.exit(
            f"{sys.executable} cannot make a virtual environment. On Debian and Ubuntu its parts are in a package of "
            f"their own: apt install python3-venv. Or name another interpreter: make PYTHON=python3.12 ..."
        )
    if seen and sys.prefix != sys.base_prefix:
        look_through(folder)


def look_through(folder: Path) -> None:
    """Let the environment see the packages of the one that is active now, which `--system-site-packages` skips."""
    own = ask(folder / "bin" / "python", "import sysconfig; print(sysconfig.get_path('purelib'))")
    Path(own, "outer-environment.pth").write_text(sysconfig.get_path("purelib") + "\n")


def torch_version(python: Path) -> str | None:
    """The version of torch that `python` sees, or None where it is missing or older than OLDEST_TORCH."""
    version = ask(python, "from importlib.metadata import version; print(version('torch'))")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return version if numbers and tuple(map(int, numbers.groups())) >= OLDEST_TORCH else None


def ask(python: Path, program: str) -> str:
    """What a line of Python prints under another interpreter; empty if it fails."""
    return subprocess.run([python, "-c", program], capture_output=True, text=True, cwd=ROOT / "tools").stdout.strip()


def pip(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments, "--quiet"]
    if subprocess.run(command).returncode != 0:
        sys.exit("pip did not finish; its message is above. Run the same make again once the cause is gone.")


if __name__ == "__main__":
    main()
