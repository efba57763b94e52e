"""The C compiler: `CC`, one of the system's, or the one that the Python package ziglang brings."""

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

from cbatch.runtime.cpu.compiled.builds import Build, flags_of

_TIMEOUT_S = 300.0
_ZIG_CACHES = ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")
_logger = logging.getLogger("cbatch")


class Compiler(NamedTuple):
    """`command`: a program and its first arguments."""

    command: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.command)

    @property
    def is_zig(self) -> bool:
        return any(Path(word).name in ("zig", "ziglang") for word in self.command)

    def flags(self, build: Build) -> tuple[str, ...]:
        return flags_of(build, platform.machine(), zig=self.is_zig)

    def takes(self, build: Build) -> bool:
        """Whether it knows the instructions of a build: an old one does not know the latest."""
        if self.is_zig:  # recent enough
            return True
        try:
            self.run(*self.flags(build), "-E", "-x", "c", os.devnull, "-o", os.devnull)
        except (OSError, subprocess.SubprocessError):
            return False
        return True

    def run(self, *arguments: str, scratch: str | None = None) -> None:
        """`scratch` is a folder for what nobody wants afterwards: zig would keep 50 MB in the
        user's home, and without a home do nothing. Raises OSError or SubprocessError."""
        caches = {} if scratch is None else dict.fromkeys(_ZIG_CACHES, scratch)
        subprocess.run(
            [*self.command, *arguments],
            check=True,
            capture_output=True,
            timeout=_TIMEOUT_S,
            env=caches | os.environ,
        )


def find_compiler() -> Compiler | None:
    """CC is a command, of one word or more. Where it is not there, another is taken, and a warning
    says so."""
    given = os.environ.get("CC", "").strip()
    found = _on_path(given)
    if found is None:
        found = next(filter(None, map(_on_path, ("cc", "gcc", "clang"))), None)
        if found is None and has_ziglang():
            found = Compiler((sys.executable, "-m", "ziglang", "cc"))
        if given and found is not None:
            _logger.warning("CC: there is no %r here; compiling by %s", given, found)
    return found


def has_ziglang() -> bool:
    return importlib.util.find_spec("ziglang") is not None


def _on_path(command: str) -> Compiler | None:
    try:
        words = shlex.split(command)
    except ValueError:  # a quotation without its end
        return None
    program = shutil.which(words[0]) if words else None
    return None if program is None else Compiler((program, *words[1:]))
