"""The shared library of our own kernels, compiled for this CPU the first time it is wanted."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from pathlib import Path

from cbatch.runtime.cpu.compiled import builds
from cbatch.runtime.cpu.compiled.builds import Build
from cbatch.runtime.cpu.compiled.compiler import Compiler, find_compiler
from cbatch.system.cache import cache_folder

SOURCE = Path(__file__).with_name("library.c")
FLAGS = ("-std=gnu11", "-O2", "-ftree-vectorize", "-pthread", "-fPIC")
SYMBOLS = ("decode", "memory_bytes", "product", "lanes", "rest", "pack", "bytes_of_panel")
SYMBOLS += ("look_up", "score_drafts", "choose")
SYMBOLS += ("fuse", "ingest", "draft", "head_bytes")
SYMBOLS += ("begin_attention", "end_attention", "attend_layer", "attention_floats")
SYMBOLS += ("run_experts", "experts_bytes")
_DIGEST_BYTES = hashlib.sha256().digest_size
_logger = logging.getLogger("cbatch")


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled library, or None, with a warning: no compiler, or another system. Raises
    `FieldError` where CBATCH_KERNELS names no build that runs here."""
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


def build_name() -> str | None:
    """Of the build among `builds`; None without kernels."""
    found = version()
    return None if found is None else found.partition("-")[0]


def _cached_or_built() -> ctypes.CDLL:
    """Raises OSError or SubprocessError."""
    offered, compiler = builds.offered(), find_compiler()
    if compiler is None:
        raise FileNotFoundError("no C compiler; install gcc, clang or ziglang, or name one by CC")
    folder = cache_folder("compiled")
    if folder is None:
        _logger.warning("no home for a cache (HOME, XDG_CACHE_HOME): kernels are compiled anew")
    build = _choice(offered, compiler, folder)
    found = library_of(build, compiler, folder)
    if build is not offered[0]:
        told = f"{compiler} does not know {offered[0].name}"
        _logger.warning("%s: kernels are %s; a newer compiler would do more", told, build.name)
    return found


def _choice(offered: list[Build], compiler: Compiler, folder: Path | None) -> Build:
    """The first that was compiled before or that the compiler knows; the last is not asked about:
    what it says while compiling is more."""
    *others, last = offered
    for build in others:
        kept = folder is not None and (folder / _file_name(build, compiler)).exists()
        if kept or compiler.takes(build):
            return build
    return last


def library_of(build: Build, compiler: Compiler, folder: Path | None) -> ctypes.CDLL:
    """From the cache, or compiled now and put there; where it cannot be, or there is none, for this
    process alone. Raises OSError or SubprocessError."""
    name = _file_name(build, compiler)
    if folder is None:
        return _built(build, compiler, None)
    try:
        return _cached(folder / name)
    except FileNotFoundError:
        pass
    except OSError as error:
        _logger.warning("%s cannot be used (%s): compiling it anew", folder / name, error)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _built(build, compiler, folder)
    except (OSError, subprocess.CalledProcessError) as error:  # of a full disk, too
        found = _built(build, compiler, None)
        _logger.warning(
            "%s takes no kernels (%s): they are compiled for this process", folder, _reason(error)
        )
        return found


def _file_name(build: Build, compiler: Compiler) -> str:
    """Of whatever the library depends on."""
    key = hashlib.sha256()
    for source in sorted(SOURCE.parent.glob("*.[ch]")):
        key.update(source.read_bytes())
    for part in (*compiler.command, *FLAGS, *compiler.flags(build), builds.cpu_features()):
        key.update(part.encode())
    return f"{build.name}-{key.hexdigest()[:16]}.so"


def _cached(file: Path) -> ctypes.CDLL:
    """Raises OSError if it is not, whole, what was put there. To load a part of a library may end
    the process: its bytes are compared first with the digest behind them."""
    content = file.read_bytes()
    if _digest(content[:-_DIGEST_BYTES]) != content[-_DIGEST_BYTES:]:
        raise OSError("it is not whole")
    return load_library(file)


def _built(build: Build, compiler: Compiler, folder: Path | None) -> ctypes.CDLL:
    """Compiled now, and kept in `folder`, where another process may do the same; None: not kept."""
    name = _file_name(build, compiler)
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as temporary:
        made = Path(temporary) / name
        flags = (*FLAGS, *compiler.flags(build))
        compiler.run(*flags, "-c", str(SOURCE), "-o", f"{made}.o", scratch=temporary)
        compiler.run(*flags, "-shared", f"{made}.o", "-lm", "-o", str(made), scratch=temporary)
        with made.open("r+b") as file:
            digest = _digest(file.read())
            file.write(digest)
        found = load_library(made)
        if folder is not None:
            os.replace(made, folder / name)
    return found


def load_library(file: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(file), mode=os.RTLD_NOW)
    missing = [symbol for symbol in SYMBOLS if not hasattr(found, symbol)]
    if missing:
        raise OSError(f"it lacks {', '.join(missing)}")
    return found


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _reason(error: Exception) -> str:
    """In one line, with the last of what a compiler said."""
    said = getattr(error, "stderr", None) or b""
    last = said.decode(errors="replace").strip().splitlines()[-1:]
    return ": ".join([str(error), *last])
