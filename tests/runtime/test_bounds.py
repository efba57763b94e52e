"""The kernels keep to their buffers, whatever blocks a file holds: see bounds.c."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import tempfile
from pathlib import Path

import pytest

from cbatch.runtime.cpu.compiled import build
from tests.runtime.marks import has_compiler

DRIVER = Path(__file__).with_name("bounds.c")
FLAGS = ("-std=gnu11", "-O1", "-g", "-pthread")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# What a late thread may still look at is never given back.
ENVIRONMENT = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}


def compiled(source: Path, program: Path, *flags: str) -> None:
    compiler = build.find_compiler()
    assert compiler is not None
    command = [compiler, *FLAGS, *SANITIZERS, *flags, str(source), "-o", str(program), "-lm"]
    subprocess.run(command, check=True, capture_output=True)


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


@pytest.mark.skipif(not has_compiler(), reason="no C compiler, or not Linux")
@pytest.mark.parametrize("march", ["native", "x86-64-v3", "x86-64"])
def test_no_kernel_leaves_its_buffers(march: str, tmp_path: Path) -> None:
    """Vectors of each width, and no instructions that are not everywhere."""
    if march != "native" and platform.machine() != "x86_64":
        pytest.skip("for another processor")
    if march == "x86-64-v3" and "avx2" not in build._cpu().split():
        pytest.skip("for processors with AVX2")
    if not sanitizes():
        pytest.skip("the compiler has no sanitizers")
    program = tmp_path / "bounds"
    compiled(DRIVER, program, f"-march={march}", f"-I{build._SOURCE.parent}")
    done = subprocess.run([program, "1"], capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr[-5000:]
