"""Builds of the kernels: the CPU features that each one may use, and the builds that run here.

A build's name fixes its instructions, so a build gives the same bits on every processor. The
processor only affects their order (`-mtune`). The C sources test the compiler's macros for the
instructions (`__AVX2__` ...).
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import NamedTuple

from cbatch.core.request.errors import FieldError

KERNELS = "CBATCH_KERNELS"  # variable that names the build to use, for tests and diagnosis


class Build(NamedTuple):
    """A build. `features` are the CPU features that it needs, as named in /proc/cpuinfo."""

    name: str
    features: tuple[str, ...] = ()


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_AVX512_VNNI = (*_AVX512, "avx512_vnni")
_AVX512_BF16 = (*_AVX512_VNNI, "avx512_bf16")
_TILE = "amx_tile"
# For some processors gcc leaves one of two dependent `a * b + c` unfused, depending on nearby code.
# A row's bits would then depend on the number of rows. Other compilers ignore this option.
_FUSE = "--param=avoid-fma-max-bits=0"
_NATIVE = Build("native")  # all features of this CPU; for architectures without named builds
_PORTABLE = Build("portable")
# Builds of each architecture (`platform.machine()`), the preferred one first.
_BUILDS = {
    "x86_64": (
        Build("amx", (*_AVX512_BF16, _TILE, "amx_bf16", "amx_int8")),
        Build("avx512_bf16", _AVX512_BF16),
        Build("avx512_vnni", _AVX512_VNNI),
        Build("avx512", _AVX512),
        Build("avx_vnni", (*_AVX2, "avx_vnni")),
        Build("avx2", _AVX2),
        _PORTABLE,
    ),
    "aarch64": (Build("i8mm", ("i8mm",)), _PORTABLE),
}
_OF_ANOTHER_MACHINE = (_NATIVE, _PORTABLE)


def builds_of(machine: str) -> tuple[Build, ...]:
    """Return all builds for an architecture (`platform.machine()`), the preferred one first."""
    return _BUILDS.get(machine, _OF_ANOTHER_MACHINE)


def runnable() -> list[Build]:
    """Return the builds that this processor can run, the preferred one first. Raises OSError
    without /proc."""
    features = set(cpu_features().split())
    if _TILE in features and not may_use_tiles():
        features.remove(_TILE)
    return [each for each in builds_of(platform.machine()) if features.issuperset(each.features)]


def may_use_tiles() -> bool:
    """Request AMX tile state from Linux (arch_prctl, ARCH_REQ_XCOMP_PERM); return whether it was
    granted."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def candidate_builds() -> list[Build]:
    """Return `runnable()`, or only the build named by CBATCH_KERNELS. Raises FieldError if that
    build does not run here."""
    runnable_builds, name = runnable(), os.environ.get(KERNELS)
    if not name:
        return runnable_builds
    chosen = [each for each in runnable_builds if each.name == name]
    if not chosen:
        known = {each.name: each.features for each in builds_of(platform.machine())}
        lacking = [word for word in known.get(name, ()) if word not in cpu_features().split()]
        problem = f"needs a CPU with {' and '.join(lacking)}" if lacking else "is not known"
        names = ", ".join(each.name for each in runnable_builds)
        raise FieldError(KERNELS, f"{name!r} {problem}", f"use one of {names}, or leave it out")
    return chosen


def flags_of(build: Build, machine: str, *, zig: bool) -> tuple[str, ...]:
    """Return a build's options for gcc or clang, or for zig's clang, whose CPU names differ."""
    tiles = [word for word in build.features if word.startswith("amx_")]
    words = [word.replace("_", "") for word in build.features if word not in tiles]
    if zig:
        cpu = "native" if build is _NATIVE else "+".join(["baseline", *words, *tiles])
        return (f"-mcpu={cpu}", "-fno-sanitize=undefined")  # zig adds run-time checks by default
    if machine == "x86_64":
        words += [word.replace("_", "-") for word in tiles]
        return ("-march=x86-64", "-mtune=native", _FUSE, *(f"-m{word}" for word in words))
    if machine == "aarch64":
        return (f"-march={'+'.join(['armv8.2-a' if words else 'armv8-a', *words])}", _FUSE)
    return ("-mcpu=native", _FUSE) if build is _NATIVE else (_FUSE,)


def cpu_features() -> str:
    """Return the line of /proc/cpuinfo with the CPU's features. Raises OSError without /proc."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
