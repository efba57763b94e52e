"""The C compiler: `CC`, one of the system's, or the one in the Python package ziglang."""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from cbatch.runtime.compiled.builds import Build, flags_of

_TIMEOUT_S = 300.0  # of one call of the compiler
_ZIG_CACHES = ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")
_logger = logging.getLogger("cbatch")


class Compiler(NamedTuple):
    """A compiler; `command` is a program with its first arguments."""

    command: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.command)

    @property
    def is_zig(self) -> bool:
        return any(Path(word).name in ("zig", "ziglang") for word in self.command)

    def flags(self, build: Build) -> tuple[str, ...]:
        return flags_of(build, platform.machine(), zig=self.is_zig)

    def supports(self, build: Build) -> bool:
        """Return whether the compiler supports the instructions of a build; an old one may not."""
        if self.is_zig:  # every zig is recent enough
            return True
        try:
            self.run(*self.flags(build), "-E", "-x", "c", os.devnull, "-o", os.devnull)
        except (OSError, subprocess.SubprocessError):
            return False
        return True

    def run(self, *arguments: str, scratch: str | None = None) -> None:
        """Run the compiler. `scratch` is a folder for zig's caches: its default is in the user's
        home, takes 50 MB, and fails without a home. Raises OSError or SubprocessError."""
        caches = {} if scratch is None else dict.fromkeys(_ZIG_CACHES, scratch)
        subprocess.run(
            [*self.command, *arguments],
            check=True,
            capture_output=True,
            timeout=_TIMEOUT_S,
            env=caches | os.environ,
        )


def find_compiler() -> Compiler | None:
    """Return the compiler that CC names (a command, with arguments if needed). If CC is unset or
    does not exist (logs a warning), return another compiler, or None."""
    given = os.environ.get("CC", "").strip()
    compiler = _on_path(given)
    if compiler is None:
        compiler = next(filter(None, map(_on_path, ("cc", "gcc", "clang"))), None)
        if compiler is None and has_ziglang():
            compiler = Compiler((sys.executable, "-m", "ziglang", "cc"))
        if given and compiler is not None:
            _logger.warning("CC: %r does not exist; compiling with %s", given, compiler)
    return compiler


def has_ziglang() -> bool:
    return importlib.util.find_spec("ziglang") is not None


def _on_path(command: str) -> Compiler | None:
    try:
        words = shlex.split(command)
    except ValueError:  # an unclosed quotation mark
        return None
    program = shutil.which(words[0]) if words else None
    return None if program is None else Compiler((program, *words[1:]))
