"""The shared library of our own kernels, compiled for this CPU the first time it is wanted."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from cbatch.cache import cache_folder

_SOURCE = Path(__file__).with_name("library.c")
_FLAGS = ("-O2", "-ftree-vectorize", "-march=native", "-fopenmp", "-fPIC")
_COMPILE_TIMEOUT_S = 300.0


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled library, or None: no compiler, or another system."""
    if platform.system() != "Linux":  # elsewhere torch brings another OpenMP
        return None
    try:
        return ctypes.CDLL(str(_compiled()), mode=os.RTLD_NOW)
    except (OSError, subprocess.SubprocessError):
        return None


def version() -> str | None:
    """Names the kernels as they are here, for whatever remembers their speed; None without them."""
    found = library()
    return None if found is None else Path(found._name).stem


def _compiled() -> Path:
    """Its file, from the cache or compiled now. Raises OSError or SubprocessError.

    It is linked without an OpenMP of its own: torch's, which is loaded by then, gives both one pool
    of threads.
    """
    compiler = find_compiler()
    if compiler is None:
        raise FileNotFoundError("no C compiler")
    key = hashlib.sha256()
    for source in sorted(_SOURCE.parent.glob("*.[ch]")):
        key.update(source.read_bytes())
    for part in (compiler, *_FLAGS, _cpu()):
        key.update(part.encode())
    found = cache_folder("compiled") / f"library-{key.hexdigest()[:16]}.so"
    if not found.exists():
        found.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=found.parent) as folder:
            made = Path(folder) / "library"
            _run(compiler, *_FLAGS, "-c", str(_SOURCE), "-o", f"{made}.o")
            _run(compiler, "-shared", f"{made}.o", "-o", f"{made}.so")
            os.replace(f"{made}.so", found)  # another process may do the same
    return found


def find_compiler() -> str | None:
    names = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    return next(filter(None, map(shutil.which, names)), None)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_S)


def _cpu() -> str:
    """What the compiler makes "native" of: the CPU's features."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
