"""The files that the emulator runs a kernel from: its host code linked with `shim.c`, and its PTX inside.

    <folder of fa3.cache>/emulator-<digest of the shim>/<validity>/<kernel's name>.so

A file is made, sealed, found and waited for as the kernels' own are (`fa3.cache`), and a process that finds one needs
neither a C compiler nor the DSL.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import re
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import tvm_ffi.libinfo

from fa3 import cache
from fa3.config.backward import AnyKey
from fa3.emulator.host import HostCode

log = logging.getLogger("fa3")

SHIM = Path(__file__).with_name("shim.c")
FLAGS = ("-O1", "-fPIC", "-Wl,-Bsymbolic", "-Wl,-z,defs")
"""-Bsymbolic: the object finds the shim's functions, not the CUDA runtime's, whatever else the process has loaded.
-z defs: a function that nobody defines is an error of the linker, not of the first call."""

_loaded: dict[AnyKey, HostCode] = {}
_lock = threading.RLock()


def host_code(key: AnyKey) -> HostCode:
    """The host code and PTX of a kernel: from memory, else from disk, else compiled now.

    RuntimeError if there is no C compiler, or if the host code calls what `shim.c` does not answer. ImportError without
    a tested DSL.
    """
    found = _loaded.get(key)
    if found is None:
        with _lock:
            found = _loaded.get(key)
            if found is None:
                found = _loaded[key] = _from_disk(key) or _temporary(key)
    return found


def root() -> Path | None:
    """Where the emulator's files are kept, or None if the disk cache is switched off."""
    folder = cache.folder()
    digest = hashlib.sha256(SHIM.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:8]
    return folder / f"emulator-{digest}" if folder else None


def _from_disk(key: AnyKey) -> HostCode | None:
    """Found there, or compiled and put there. None, with a warning, if the disk does not serve."""
    home = root()
    if home is None:
        return None
    try:
        file = cache.find(key, home)
        if file is None:
            with cache.lock(key, home):  # another process may be faster
                file = cache.find(key, home) or _store(key, home)
        return HostCode(file, key.name)
    except OSError as error:
        log.warning("%s: the emulator does without the disk cache: %s", key.name, error)
        return None


def _store(key: AnyKey, home: Path) -> Path:
    start = time.perf_counter()
    compiled, ptx = importlib.import_module("fa3.compile").compile_with_ptx(key)
    file = cache.store(compiled, key, home, partial(_link, ptx=ptx))
    log.info("compiled %s for the emulator in %.1f s; stored as %s", key.name, time.perf_counter() - start, file)
    return file


def _temporary(key: AnyKey) -> HostCode:
    """Compiled for this process only. A loaded file may be deleted."""
    cache.check_dsl()
    start = time.perf_counter()
    compiled, ptx = importlib.import_module("fa3.compile").compile_with_ptx(key)
    with tempfile.TemporaryDirectory() as folder:
        obj, shared = Path(folder, "host.o"), Path(folder, "host.so")
        compiled.export_to_c(str(obj), function_name=key.name)
        _link(obj, shared, ptx)
        made = HostCode(shared, key.name)
    log.info("compiled %s for the emulator in %.1f s; not stored", key.name, time.perf_counter() - start)
    return made


def _link(obj: Path, shared: Path, ptx: str) -> None:
    """`fa3.cache.link` with the shim and the PTX, but RuntimeError where that returns a reason."""
    text = obj.with_suffix(".ptx")
    text.write_text(ptx)
    try:
        runtime = tvm_ffi.libinfo.find_libtvm_ffi()
        why_not = cache.link(obj, shared, str(SHIM), f'-DPTX_FILE="{text}"', *FLAGS, runtime)
    finally:
        text.unlink()
    if why_not is None:
        return
    if missing := sorted(set(re.findall(r"undefined reference to .(\w+)", why_not))):
        raise RuntimeError(f"fa3: the kernel's host code calls {', '.join(missing)}, which {SHIM.name} does not answer")
    raise RuntimeError(f"fa3: the emulator must link a kernel's host code with {SHIM.name}: {why_not}")
