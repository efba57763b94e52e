"""The kernels keep to their buffers, whatever blocks a file holds: see bounds.c."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cbatch.runtime.cpu.compiled import build, find_compiler
from cbatch.runtime.cpu.compiled.builds import Build, runnable
from tests.runtime.marks import has_compiler

DRIVER, TILES = (Path(__file__).with_name(name) for name in ("bounds.c", "tiles.h"))
FLAGS = ("-std=gnu11", "-O1", "-g", "-pthread")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# What a late thread may still look at is never given back.
ENVIRONMENT = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}


def compiled(source: Path, program: Path, *flags: str) -> None:
    compiler = find_compiler()
    assert compiler is not None
    compiler.run(*FLAGS, *SANITIZERS, *flags, str(source), "-o", str(program), "-lm")


@functools.cache
def sanitizes() -> bool:
    """Some compilers lack the libraries, and some machines the addresses."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "empty.c", Path(folder) / "empty"
        source.write_text("int main(void) { return 0; }")
        try:
            compiled(source, program)
            subprocess.run([program], check=True, capture_output=True, env=ENVIRONMENT)
        except (OSError, subprocess.CalledProcessError):
            return False
    return True


def builds() -> Iterator[Any]:
    """Of each width of vectors, the best; and tiles, by hand where there are none."""
    found = runnable() if has_compiler() else []
    for each in found:
        if each in found[:1] or each.name in ("avx2", "portable"):
            yield pytest.param(each, (), id=each.name)
        if each.name == "avx512_bf16":
            yield pytest.param(each, ("-include", str(TILES)), id="tiles")


@pytest.mark.skipif(not has_compiler(), reason="no C compiler, or not Linux")
@pytest.mark.parametrize(("of", "more"), list(builds()))
def test_no_kernel_leaves_its_buffers(of: Build, more: tuple[str, ...], tmp_path: Path) -> None:
    """Vectors of each width, and no instructions that are not everywhere."""
    if not sanitizes():
        pytest.skip("the compiler has no sanitizers")
    program, compiler = tmp_path / "bounds", find_compiler()
    assert compiler is not None
    compiled(DRIVER, program, *compiler.flags(of), *more, f"-I{build._SOURCE.parent}")
    done = subprocess.run([program, "1"], capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr[-5000:]
