"""Kernels stay within their buffers, whatever blocks a file contains: a program of C (bounds.c)."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from cbatch.runtime.compiled import find_compiler
from cbatch.runtime.compiled.builds import Build
from tests.runtime.compiled_programs import FLAGS, SANITIZERS, bounds_program, checked_bounds
from tests.runtime.marks import has_compiler

BUILDS = list(checked_bounds())
# Memory that a late thread may still read is never freed.
ENVIRONMENT = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}


@functools.cache
def sanitizes() -> bool:
    """Check for sanitizers: some compilers lack the libraries, and some machines the address
    space."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "empty.c", Path(folder) / "empty"
        source.write_text("int main(void) { return 0; }")
        try:
            compiler = find_compiler()
            assert compiler is not None
            compiler.run(*FLAGS, *SANITIZERS, str(source), "-o", str(program), "-lm")
            subprocess.run([program], check=True, capture_output=True, env=ENVIRONMENT)
        except (OSError, subprocess.CalledProcessError):
            return False
    return True


@pytest.mark.skipif(not has_compiler(), reason="no C compiler, or not Linux")
@pytest.mark.parametrize(("name", "of", "more"), BUILDS, ids=[name for name, *_ in BUILDS])
def test_no_kernel_leaves_its_buffers(name: str, of: Build, more: tuple[str, ...]) -> None:
    """The builds are the best of each vector width, and the portable one."""
    if not sanitizes():
        pytest.skip("the compiler has no sanitizers")
    compiler = find_compiler()
    assert compiler is not None
    program = bounds_program(compiler, name, of, more)
    done = subprocess.run([program, "1"], capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr[-5000:]
