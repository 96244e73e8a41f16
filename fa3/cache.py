"""Compiled kernels on disk: where they are, what they are valid for, how they get there and how they are loaded.

    $FA3_CACHE_DIR        the folder; default $XDG_CACHE_HOME/fa3, else ~/.cache/fa3. It may be deleted at any time
    $FA3_DISK_CACHE=0     switches it off: compile in every process
    $FA3_PREBUILT_DIR     a folder made by `python -m fa3.build`; looked up first, never written

    <folder>/sm_90a-<cpu>-dsl<version>-<digest of the sources>/<kernel's name>.so

The subfolder says what its kernels are valid for, so that an edited kernel, another DSL or another CPU type never meets
an old file. Neither the Python version nor the machine is part of it: a folder built elsewhere is as good.

A file is the shared object, then the kernel's key, then a SHA-256 of both (loaders ignore what follows an object).
It appears under its name by `os.replace`, complete; a damaged one fails the check and is compiled again. Processes that
want the same kernel wait for the one that compiles it, on a lock that the system drops when its holder ends.

Loading a `.so` needs no compiler and does not import the DSL. Where no C compiler was found to link one, the object is
kept as `.o`, and loading it takes the DSL (about a second).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import json
import logging
import os
import platform
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import filelock

from fa3.config.backward import AnyKey
from fa3.errors import check_dsl

log = logging.getLogger("fa3")

Kernel = Callable[..., Any]
Linker = Callable[[Path, Path], str | None]
"""(object file, shared object to be made) -> None, or the reason why that did not work."""

ARCH = "sm_90a"
PACKAGE = Path(__file__).parent
SOURCES = ("kernels", "pipeline", "layouts", "config", "compile.py")
"""What a kernel's code comes from, relative to the package."""
NOT_SOURCES = ("config/table.py", "config/backward_table.py", "layouts/draw.py", "pipeline/draw.py", "pipeline/model/")
"""The table only chooses a key, and the key is in the file: tuning one row leaves the others valid. Pictures and the
models of the tests are no part of a kernel."""

LOCK_SECONDS = 600.0
"""How long to wait for another process's compilation before doing without it."""

_MAGIC = b"fa3\x00kernel\x01"
_DIGEST_BYTES = 32


# ------------------------------------------------------------------------------------------------ places
def folder() -> Path | None:
    """Where kernels are kept, or None if the disk cache is switched off."""
    if os.environ.get("FA3_DISK_CACHE", "1").lower() in ("0", "off", "false", "no"):
        return None
    if chosen := os.environ.get("FA3_CACHE_DIR"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "fa3"


def prebuilt_folder() -> Path | None:
    chosen = os.environ.get("FA3_PREBUILT_DIR")
    return Path(chosen).expanduser() if chosen else None


def validity() -> str:
    """What compiled kernels are valid for, as a folder name. ImportError without a tested DSL."""
    return f"{ARCH}-{platform.machine()}-dsl{check_dsl()}-{_SOURCES_AT_IMPORT}"


def sources_digest(package: Path) -> str:
    """16 hex digits of the text of every source file that kernels are made of."""
    digest = hashlib.sha256()
    files = [f for name in SOURCES for f in sorted((package / name).rglob("*.py")) or [package / name]]
    for file in files:
        name = file.relative_to(package).as_posix()
        if not name.startswith(NOT_SOURCES) and file.is_file():
            text = file.read_bytes()
            digest.update(f"{name}\0{len(text)}\0".encode())
            digest.update(text)
    return digest.hexdigest()[:16]


_SOURCES_AT_IMPORT = sources_digest(PACKAGE)
"""Read before the kernels are imported. Whoever edits a kernel while the process runs gets the imported code on, and it
is not stored (see `store`)."""


# ------------------------------------------------------------------------------------------------ files
def find(key: AnyKey, root: Path | None) -> Path | None:
    """The intact file of this kernel under `root`, or None."""
    if root is None:
        return None
    for suffix in (".so", ".o"):
        file = root / validity() / (key.name + suffix)
        if file.is_file():
            if _is_intact(file, key):
                return file
            log.warning("%s is damaged or of another kernel; it is not used", file)
    return None


def store(compiled: Any, key: AnyKey, root: Path, linker: Linker | None = None) -> Path:
    """Writes a compiled kernel (what `fa3.compile.compile_kernel` returns) under `root`; returns its file.

    `linker` takes the place of `link`. OSError if the disk does not take the file, or if the kernel may have been
    compiled from other sources than the folder says.
    """
    if sources_digest(PACKAGE) != _SOURCES_AT_IMPORT:
        raise OSError("fa3's sources were edited since this process imported them; the edit counts in a new process")
    home = root / validity()
    home.mkdir(parents=True, exist_ok=True)
    draft = home / f".{uuid.uuid4().hex}.o"
    linked = draft.with_suffix(".so")
    try:
        compiled.export_to_c(str(draft), function_name=key.name)
        why_not = (linker or link)(draft, linked)
        if why_not:
            log.warning("%s: kept as an object file, which loads slowly: %s", key.name, why_not)
            linked = draft
        with open(linked, "ab") as file:
            file.write(_seal(linked.read_bytes(), key))
        target = home / (key.name + linked.suffix)
        os.replace(linked, target)
        return target
    finally:
        for leftover in (draft, linked):
            leftover.unlink(missing_ok=True)


def link(obj: Path, shared: Path, *more: str) -> str | None:
    """Links an object file into a shared object. None if that worked, else the reason why not.

    The DSL's and TVM-FFI's functions stay undefined: both libraries are loaded before the object is (see `load`).
    `more` are further inputs and options of the C compiler.
    """
    compiler = next((found for name in (os.environ.get("CC"), "cc", "gcc", "clang") if (found := _which(name))), None)
    if compiler is None:
        return "no C compiler found ($CC, cc, gcc, clang)"
    command = [compiler, "-shared", "-Wl,-z,noexecstack", "-o", str(shared), str(obj), *more]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    return f"{' '.join(command)} failed: {done.stderr.strip()[-300:]}"


def _which(name: str | None) -> str | None:
    return shutil.which(name) if name else None


def _seal(body: bytes, key: AnyKey) -> bytes:
    """What follows the object in a file: the key, its length, a digest of everything so far, a magic word."""
    text = _key_text(key)
    tail = text + len(text).to_bytes(8, "little")
    return tail + hashlib.sha256(body + tail).digest() + _MAGIC


def _is_intact(file: Path, key: AnyKey) -> bool:
    try:
        content = file.read_bytes()
    except OSError:
        return False
    seal_bytes = len(_seal(b"", key))
    body = content[:-seal_bytes]
    return bool(body) and content[-seal_bytes:] == _seal(body, key)


def _key_text(key: AnyKey) -> bytes:
    return json.dumps(key.as_dict(), sort_keys=True).encode()


@contextlib.contextmanager
def lock(key: AnyKey, root: Path) -> Iterator[None]:
    """One process at a time for this kernel. Where locks do not work, or take too long, everybody goes ahead: that
    costs a second compilation, and the files stay right."""
    home = root / validity()
    home.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(filelock.FileLock(home / f"{key.name}.lock", timeout=LOCK_SECONDS))
        except (filelock.Timeout, OSError, NotImplementedError) as error:
            log.warning("%s: going ahead without a lock (%s)", key.name, error)
        yield


# ------------------------------------------------------------------------------------------------ loading
def load(file: Path, key: AnyKey) -> Kernel:
    """The kernel in a file that `find` or `store` returned."""
    if file.suffix == ".o":
        os.environ.setdefault("CUTE_DSL_ARCH", ARCH)
        from cutlass import cute

        module: Any = cute.runtime.load_module(str(file), enable_tvm_ffi=True)
        return getattr(module, key.name)
    _load_runtime()
    import tvm_ffi

    return tvm_ffi.load_module(str(file.absolute()))[key.name]


@cache
def _load_runtime() -> ctypes.CDLL:
    """The DSL's runtime, its symbols visible to the kernels loaded after it."""
    return ctypes.CDLL(str(runtime_library()), mode=ctypes.RTLD_GLOBAL)


def runtime_library() -> Path:
    """libcute_dsl_runtime.so, found without importing the DSL: $CUTE_DSL_LIBS, else the newest CUDA flavour installed
    that the driver can run (the DSL's own rule), else the newest."""
    name = "libcute_dsl_runtime.so"
    for path in filter(None, os.environ.get("CUTE_DSL_LIBS", "").split(os.pathsep)):
        if path.endswith(name):
            return Path(path)
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = list(spec.submodule_search_locations or []) if spec else []
    flavours = {int(f.parts[-3][2:]): f for root in roots for f in Path(root).glob(f"cu[0-9]*/lib/{name}")}
    if not flavours:
        raise ImportError(f"fa3: {name} was not found in the nvidia-cutlass-dsl installation at {roots or 'nowhere'}")
    driver = _driver_major()
    return flavours[max([major for major in flavours if major <= driver] or flavours)]


def _driver_major() -> int:
    """13 for a driver that runs CUDA 13, and so on; a large number where there is no driver."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 1 << 16
    return version.value // 1000
