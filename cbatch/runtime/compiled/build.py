"""The shared library of our own kernels, compiled for this CPU when it is first needed."""

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

from cbatch.runtime.compiled import builds
from cbatch.runtime.compiled.builds import Build
from cbatch.runtime.compiled.compiler import Compiler, find_compiler
from cbatch.system.cache import cache_folder
from cbatch.system.private import require_private, temporary_place

SOURCE = Path(__file__).with_name("library.c")
FLAGS = ("-std=gnu11", "-D_GNU_SOURCE", "-O2", "-ftree-vectorize", "-pthread", "-fPIC")
SYMBOLS: tuple[str, ...] = (
    "decode",
    "memory_bytes",
    "product",
    "row_form",
    "can_gate",
    "lanes",
    "rest",
    "pack",
    "bytes_of_panel",
)
SYMBOLS += ("look_up", "choose", "race")
SYMBOLS += ("begin_attention", "end_attention", "attend_layer", "attention_floats")
SYMBOLS += ("run_experts", "experts_bytes")
_DIGEST_BYTES = hashlib.sha256().digest_size
_logger = logging.getLogger("cbatch")


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """Return the compiled library. Without a compiler or on a system other than Linux, log a
    warning and return None. Raises FieldError if CBATCH_KERNELS names no build that runs here."""
    try:
        if platform.system() != "Linux":  # elsewhere torch has another OpenMP
            raise OSError("they support Linux only")
        return _cached_or_built()
    except (OSError, subprocess.SubprocessError) as error:
        _logger.warning("kernels are not available, torch computes products: %s", _reason(error))
        return None


def version() -> str | None:
    """Return an identifier of the compiled kernels, for reports and caches; None without
    kernels."""
    kernels = library()
    return None if kernels is None else Path(kernels._name).stem


def build_name() -> str | None:
    """Return the name of the build in use (see `builds`); None without kernels."""
    kernels = version()
    return None if kernels is None else kernels.partition("-")[0]


def _cached_or_built() -> ctypes.CDLL:
    candidates, compiler = builds.candidate_builds(), find_compiler()
    if compiler is None:
        raise FileNotFoundError("no C compiler; install gcc, clang or ziglang, or set CC")
    folder = _trusted_folder()
    build = _choice(candidates, compiler, folder)
    kernels = library_of(build, compiler, folder)
    if build is not candidates[0]:
        reason = f"{compiler} does not support {candidates[0].name}"
        _logger.warning(
            "%s: kernels are %s; a newer compiler would support faster ones", reason, build.name
        )
    return kernels


def _trusted_folder() -> Path | None:
    """Return the cache folder, or None (logs a warning) if other users could plant a library."""
    folder = cache_folder("compiled")
    if folder is None:
        _logger.warning(
            "no cache folder (set HOME or XDG_CACHE_HOME): kernels are compiled at every start"
        )
        return None
    try:
        for place in (folder.parents[1], folder.parent, folder):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_private(folder)
    except PermissionError as error:
        _logger.warning("%s: kernels are compiled at every start", error)
        return None
    except OSError:  # reported when the library is written
        pass
    return folder


def _choice(candidates: list[Build], compiler: Compiler, folder: Path | None) -> Build:
    """Return the first build that is cached or that the compiler supports. The last build is not
    tested: its failed compilation gives a better message."""
    *others, last = candidates
    for build in others:
        kept = folder is not None and (folder / _file_name(build, compiler)).exists()
        if kept or compiler.supports(build):
            return build
    return last


def library_of(build: Build, compiler: Compiler, folder: Path | None) -> ctypes.CDLL:
    """Return the library from the cache, or compile and cache it. If it cannot be cached, this
    process compiles it for itself. Raises OSError or SubprocessError."""
    name = _file_name(build, compiler)
    if folder is None:
        return _built(build, compiler, None)
    try:
        return _cached(folder / name)
    except FileNotFoundError:
        pass
    except OSError as error:
        _logger.warning("%s cannot be used (%s): compiling it again", folder / name, error)
    try:
        return _built(build, compiler, folder)
    except (OSError, subprocess.CalledProcessError) as error:  # e.g. because the disk is full
        kernels = _built(build, compiler, None)
        _logger.warning(
            "kernels cannot be cached in %s (%s): they are compiled for this process",
            folder,
            _reason(error),
        )
        return kernels


def _file_name(build: Build, compiler: Compiler) -> str:
    """Return a name that depends on everything that determines the library."""
    key = hashlib.sha256()
    for source in sorted(SOURCE.parent.glob("*.[ch]")):
        key.update(source.read_bytes())
    for part in (*compiler.command, *FLAGS, *compiler.flags(build), builds.cpu_features()):
        key.update(part.encode())
    return f"{build.name}-{key.hexdigest()[:16]}.so"


def _cached(file: Path) -> ctypes.CDLL:
    """Load a cached library. Raises OSError if another user could have written it, or if the digest
    at the end of the file is wrong: loading a damaged library may kill the process."""
    require_private(file)
    content = file.read_bytes()
    if _digest(content[:-_DIGEST_BYTES]) != content[-_DIGEST_BYTES:]:
        raise OSError("the file is incomplete")
    return load_library(file)


def _built(build: Build, compiler: Compiler, folder: Path | None) -> ctypes.CDLL:
    """Compile a library, load it, and move its file to `folder` (atomically; None: delete it)."""
    name = _file_name(build, compiler)
    place = temporary_place() if folder is None else folder
    with tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True) as temporary:
        made = Path(temporary) / name
        flags = (*FLAGS, *compiler.flags(build))
        compiler.run(*flags, "-c", str(SOURCE), "-o", f"{made}.o", scratch=temporary)
        compiler.run(*flags, "-shared", f"{made}.o", "-lm", "-o", str(made), scratch=temporary)
        with made.open("r+b") as file:
            digest = _digest(file.read())
            file.write(digest)
        kernels = load_library(made)
        if folder is not None:
            made.chmod(0o700)  # whatever the umask
            os.replace(made, folder / name)
    return kernels


def load_library(file: Path) -> ctypes.CDLL:
    kernels = ctypes.CDLL(str(file), mode=os.RTLD_NOW)
    missing = [symbol for symbol in SYMBOLS if not hasattr(kernels, symbol)]
    if missing:
        raise OSError(f"it lacks {', '.join(missing)}")
    return kernels


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _reason(error: Exception) -> str:
    said = getattr(error, "stderr", None) or b""
    last = said.decode(errors="replace").strip().splitlines()[-1:]
    return ": ".join([str(error), *last])
