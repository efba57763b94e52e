"""The shared library of our own kernels, compiled for this CPU the first time it is wanted."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from cbatch.system.cache import cache_folder

_SOURCE = Path(__file__).with_name("library.c")
_FLAGS = ("-std=gnu11", "-O2", "-ftree-vectorize", "-march=native", "-pthread", "-fPIC")
_SYMBOLS = ("decode", "memory_bytes", "product", "lanes", "rest", "pack", "bytes_of_panel")
_COMPILE_TIMEOUT_S = 300.0
_DIGEST_BYTES = hashlib.sha256().digest_size
_logger = logging.getLogger("cbatch")


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled library, or None, with a warning: no compiler, or another system."""
    try:
        if platform.system() != "Linux":  # elsewhere torch brings another OpenMP
            raise OSError("they are for Linux")
        return _cached_or_built()
    except (OSError, subprocess.SubprocessError) as error:
        _logger.warning("no kernels of our own, torch's products compute: %s", _reason(error))
        return None


def version() -> str | None:
    """Names the kernels as they are here, for whatever remembers their speed; None without them."""
    found = library()
    return None if found is None else Path(found._name).stem


def find_compiler() -> str | None:
    names = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    return next(filter(None, map(shutil.which, names)), None)


def _cached_or_built() -> ctypes.CDLL:
    """From the cache, or compiled now and put there; where it cannot be, for this process alone.
    Raises OSError or SubprocessError."""
    compiler = find_compiler()
    if compiler is None:
        raise FileNotFoundError("no C compiler; install gcc or clang, or name one by CC")
    name = f"library-{_key(compiler)}.so"
    folder = cache_folder("compiled")
    if folder is None:
        _logger.warning("no home for a cache (HOME, XDG_CACHE_HOME): kernels are compiled anew")
        return _built(compiler, name, None)
    try:
        return _cached(folder / name)
    except FileNotFoundError:
        pass
    except OSError as error:
        _logger.warning("%s cannot be used (%s): compiling it anew", folder / name, error)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _built(compiler, name, folder)
    except (OSError, subprocess.CalledProcessError) as error:  # of a full disk, too
        _logger.warning(
            "%s takes no kernels (%s): compiling for this process", folder, _reason(error)
        )
        return _built(compiler, name, None)


def _key(compiler: str) -> str:
    """Of whatever the library depends on."""
    key = hashlib.sha256()
    for source in sorted(_SOURCE.parent.glob("*.[ch]")):
        key.update(source.read_bytes())
    for part in (compiler, *_FLAGS, _cpu()):
        key.update(part.encode())
    return key.hexdigest()[:16]


def _cached(file: Path) -> ctypes.CDLL:
    """Raises OSError if it is not, whole, what was put there. To load a part of a library may end
    the process: its bytes are compared first with the digest behind them."""
    content = file.read_bytes()
    if _digest(content[:-_DIGEST_BYTES]) != content[-_DIGEST_BYTES:]:
        raise OSError("it is not whole")
    return _loaded(file)


def _built(compiler: str, name: str, folder: Path | None) -> ctypes.CDLL:
    """Compiled now, and kept in `folder`, where another process may do the same; None: not kept."""
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as temporary:
        made = Path(temporary) / name
        _run(compiler, *_FLAGS, "-c", str(_SOURCE), "-o", f"{made}.o")
        _run(compiler, "-shared", "-pthread", f"{made}.o", "-o", str(made))
        with made.open("r+b") as file:
            digest = _digest(file.read())
            file.write(digest)
        found = _loaded(made)
        if folder is not None:
            os.replace(made, folder / name)
    return found


def _loaded(file: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(file), mode=os.RTLD_NOW)
    missing = [symbol for symbol in _SYMBOLS if not hasattr(found, symbol)]
    if missing:
        raise OSError(f"it lacks {', '.join(missing)}")
    return found


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_S)


def _reason(error: Exception) -> str:
    """In one line, with the last of what a compiler said."""
    said = getattr(error, "stderr", None) or b""
    last = said.decode(errors="replace").strip().splitlines()[-1:]
    return ": ".join([str(error), *last])


def _cpu() -> str:
    """What the compiler makes "native" of: the CPU's features."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
