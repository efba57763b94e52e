"""The kernels keep to their buffers, whatever blocks a file holds: see bounds.c."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from cbatch.runtime.cpu.compiled import build, find_compiler
from cbatch.runtime.cpu.compiled.builds import Build, runnable
from tests.runtime.marks import has_compiler

DRIVER = Path(__file__).with_name("bounds.c")
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


def builds() -> list[Build]:
    """Of each width of vectors, the best."""
    found = runnable() if has_compiler() else []
    return [each for each in found if each in found[:1] or each.name in ("avx2", "portable")]


@pytest.mark.skipif(not has_compiler(), reason="no C compiler, or not Linux")
@pytest.mark.parametrize("of", [pytest.param(each, id=each.name) for each in builds()])
def test_no_kernel_leaves_its_buffers(of: Build, tmp_path: Path) -> None:
    """Vectors of each width, and no instructions that are not everywhere."""
    if not sanitizes():
        pytest.skip("the compiler has no sanitizers")
    program, compiler = tmp_path / "bounds", find_compiler()
    assert compiler is not None
    compiled(DRIVER, program, *compiler.flags(of), f"-I{build._SOURCE.parent}")
    done = subprocess.run([program, "1"], capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr[-5000:]
