"""Programs of our C: kernels stay within their buffers, whatever blocks a file contains (bounds.c).
On an emulated processor products have the same bits as here (products.c)."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from cbatch.runtime.compiled import CompiledProduct, build, builds, find_compiler
from cbatch.runtime.compiled import product as product_module
from cbatch.runtime.compiled.builds import Build, flags_of
from cbatch.runtime.compiled.compiler import Compiler, has_ziglang
from cbatch.runtime.compiled.product import BLOCK_TYPES, TYPES
from cbatch.system.cache import cache_folder
from tests.runtime.compiled_programs import FLAGS, SANITIZERS, bounds_program, checked_bounds
from tests.runtime.marks import has_compiler
from tests.runtime.test_block_products import COLUMNS, OUT, stored, whole
from tests.runtime.test_builds import FUSED, OWN_BF16, RUNNABLE, use

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


# --- another processor ----------------------------------------------------------------------------

LANES = 4
ROWS = 9
PROGRAM = Path(__file__).with_name("products.c")
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
GCC = shutil.which("aarch64-linux-gnu-gcc")
EMULATED = (
    pytest.mark.slow,
    pytest.mark.skipif(set(FUSED) <= set(OWN_BF16), reason="nothing to compare with"),
    pytest.mark.skipif(EMULATOR is None, reason="needs qemu-aarch64"),
    pytest.mark.skipif(
        GCC is None and not has_ziglang(), reason="needs aarch64-linux-gnu-gcc, or ziglang"
    ),
)


# The second has only the required instructions.
PROCESSORS = {"i8mm": "max", "portable": "cortex-a57"}


def compiled(made: Build, folder: Path) -> Path:
    """Compile a program that needs no libraries."""
    if GCC is not None:
        compiler, target = Compiler((GCC,)), ()
    else:
        compiler = Compiler((sys.executable, "-m", "ziglang", "cc"))
        target = ("-target", "aarch64-linux-musl")
    flags = (*build.FLAGS, *target, *flags_of(made, "aarch64", zig=compiler.is_zig))
    place = ("-static", f"-I{build.SOURCE.parent}", str(PROGRAM), "-lm")
    program = folder / made.name
    compiler.run(*flags, *place, "-o", str(program), scratch=str(folder))
    return program


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("programs")
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(lambda b: compiled(b, folder), builds.builds_of("aarch64"))
        return {program.name: program for program in made}


def problem(number: int, weights: bytes, x: Tensor) -> bytes:
    """Return a problem in the format that products.c reads."""
    head = np.array([number, OUT, COLUMNS, len(x), len(weights)], dtype="<i8")
    return head.tobytes() + weights + x.numpy().tobytes()


@pytest.mark.parametrize("name", [pytest.param(name, marks=EMULATED) for name in PROCESSORS])
def test_products_have_the_same_bits(
    name: str, programs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison is with this processor, without instructions for bf16."""
    here = next(RUNNABLE[each] for each in FUSED if each not in OWN_BF16)
    use(build.library_of(here, find_compiler(), cache_folder("compiled")), monkeypatch)
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    problems, expected = b"", {}
    for dtype, number in TYPES.items():
        weight = torch.randn(OUT, COLUMNS, generator=torch.Generator().manual_seed(1)).to(dtype)
        panels = product_module.panels_of(weight, LANES).view(torch.uint8)
        problems += problem(number, panels.numpy().tobytes(), x)
        expected[str(dtype)] = CompiledProduct(weight, None, None)(x, ROWS)
    for kind, number in BLOCK_TYPES.items():
        matrix, _ = stored(kind)
        problems += problem(number, matrix.rows.tobytes(), x)
        expected[kind] = whole(matrix)(x, ROWS)
    assert EMULATOR is not None
    command = [EMULATOR, "-cpu", PROCESSORS[name], str(programs[name])]
    output = subprocess.run(command, input=problems, capture_output=True, check=True).stdout
    products = torch.frombuffer(bytearray(output), dtype=torch.float32).view(-1, ROWS, OUT)
    assert len(products) == len(expected)
    for (kind, own), emulated in zip(expected.items(), products, strict=True):
        assert torch.equal(own, emulated), kind
