"""Test programs compiled from our C sources and kept in the cache of compiled kernels."""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from cbatch.runtime.compiled import build, builds
from cbatch.runtime.compiled.builds import Build
from cbatch.runtime.compiled.compiler import Compiler
from cbatch.system.cache import cache_folder
from tests.runtime.marks import has_compiler

# The build that does AMX in C (see tiles.h) on a processor with all its other instructions.
BY_HAND = "amx by hand"
TILES, BOUNDS = (Path(__file__).with_name(name) for name in ("tiles.h", "bounds.c"))
FLAGS = ("-std=gnu11", "-D_GNU_SOURCE", "-O1", "-g", "-pthread")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def tiles_by_hand(compiler: Compiler, like: Build) -> ctypes.CDLL:
    flags = (*build.FLAGS, *compiler.flags(like), "-include", str(TILES), "-shared")
    made = _once("tiles.so", lambda to: compiler.run(*flags, str(build.SOURCE), "-lm", "-o", to))
    return build.load_library(made)


def checked_bounds() -> Iterator[tuple[str, Build, tuple[str, ...]]]:
    """Return the best build for each vector width, and tiles, by hand where the processor has
    none."""
    runnable = builds.runnable() if has_compiler() else []
    for one in runnable:
        if one in runnable[:1] or one.name in ("avx2", "portable"):
            yield one.name, one, ()
        if one.name == "avx512_bf16" and one in runnable[:1]:
            yield "tiles", one, ("-include", str(TILES))


def bounds_program(compiler: Compiler, name: str, of: Build, more: tuple[str, ...]) -> Path:
    """Compile the program of bounds.c. Raises like `Compiler.run` if the compiler lacks the
    sanitizers."""
    flags = (*FLAGS, *SANITIZERS, *compiler.flags(of), *more, f"-I{build.SOURCE.parent}")
    return _once(f"bounds-{name}", lambda to: compiler.run(*flags, str(BOUNDS), "-o", to, "-lm"))


def _once(name: str, make: Callable[[str], object]) -> Path:
    """Return a file of the cache; make it unless one from the same sources exists."""
    folder = cache_folder("compiled")
    assert folder is not None
    sources = sorted(build.SOURCE.parent.glob("*.[ch]"))
    text = b"".join(file.read_bytes() for file in (*sources, TILES, BOUNDS))
    path = folder / f"{hashlib.sha256(text).hexdigest()[:16]}-{name}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / name
            make(str(made))
            os.replace(made, path)
    return path
