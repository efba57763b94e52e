"""The builds of our kernels: which one is chosen, and, for each that runs here, its results and
which other builds share its bits."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cbatch.core.request.errors import FieldError
from cbatch.runtime.compiled import CompiledProduct, build, builds, find_compiler
from cbatch.runtime.compiled import experts as experts_module
from cbatch.runtime.compiled import layer_attention as attention_module
from cbatch.runtime.compiled import product as product_module
from cbatch.runtime.compiled.builds import Build
from cbatch.runtime.compiled.product import BLOCK_TYPES
from cbatch.runtime.cpu import compiled_pass
from cbatch.runtime.cpu.decoder import load_model
from cbatch.runtime.cpu.invariance import probe_batch_invariance
from cbatch.system.cache import cache_folder
from tests.gguf_files import Q8_0
from tests.runtime.compiled_programs import BY_HAND, tiles_by_hand
from tests.runtime.hf_models import build as build_model
from tests.runtime.marks import has_compiler, needs_compiler
from tests.runtime.test_block_products import COLUMNS, OUT, assert_values, stored, whole
from tests.runtime.test_experts import assert_sums
from tests.runtime.test_gguf_model import as_gguf, logits
from tests.runtime.test_layer_attention import assert_batch_invariant, assert_right

RUNNABLE = {each.name: each for each in builds.runnable()} if has_compiler() else {}
NOT_HERE = [each for each in builds.builds_of(platform.machine()) if each.name not in RUNNABLE]
# Builds where `a * b + c` is one instruction and is rounded once; others round twice.
FUSED = [name for name, each in RUNNABLE.items() if "fma" in each.features or name == "i8mm"]
FUSED += ["portable"] if platform.machine() == "aarch64" else []
# The best one, and one of each kind of instructions; by hand, all of them (`-m builds`).
QUICK = [*list(RUNNABLE)[:1], *(n for n in ("avx512", "avx_vnni", "portable") if n in RUNNABLE)]
QUICK += [BY_HAND] if "avx512_bf16" in QUICK else []
COMPUTED = [*RUNNABLE, *([BY_HAND] if "avx512_bf16" in RUNNABLE else [])]
COMPUTED = [n if n in QUICK else pytest.param(n, marks=pytest.mark.builds) for n in COMPUTED]
OWN_BF16 = ("avx512_bf16", "amx", BY_HAND)
MAX_ROWS = 40


# ---- which one is chosen -------------------------------------------------------------------------

V3 = "fpu sse2 avx avx2 fma f16c bmi1 bmi2"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.mark.parametrize(
    ("machine", "features", "expected"),
    [
        ("x86_64", f"{V4} avx512_vnni avx512_bf16 amx_tile amx_int8 amx_bf16", "amx"),
        ("x86_64", f"{V4} avx512_vnni avx512_bf16 amx_int8 avx_vnni", "avx512_bf16"),
        ("x86_64", f"{V4} avx512_vnni", "avx512_vnni"),
        ("x86_64", V4, "avx512"),
        ("x86_64", f"{V3} avx_vnni", "avx_vnni"),
        ("x86_64", f"{V3} avx512f avx512cd avx512er avx512pf", "avx2"),
        ("x86_64", "fpu sse2 avx avx2", "portable"),
        ("x86_64", "", "portable"),
        ("aarch64", "fp asimd asimddp i8mm bf16", "i8mm"),
        ("aarch64", "fp asimd asimddp", "portable"),
        ("riscv64", "", "native"),
    ],
)
def test_the_best_that_the_processor_runs_is_taken(
    monkeypatch: pytest.MonkeyPatch, machine: str, features: str, expected: str
) -> None:
    monkeypatch.delenv(builds.KERNELS, raising=False)
    pretend(monkeypatch, machine, features)
    assert builds.candidate_builds()[0].name == expected
    assert builds.candidate_builds()[-1].name == "portable"


def pretend(monkeypatch: pytest.MonkeyPatch, machine: str, features: str) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(builds, "cpu_features", lambda: f"flags\t\t: {features}")
    monkeypatch.setattr(builds, "may_use_tiles", lambda: True)


def test_tiles_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the system's permission their first use ends the process."""
    may_use_tiles = builds.may_use_tiles
    pretend(monkeypatch, "x86_64", f"{V4} avx512_vnni avx512_bf16 amx_tile amx_int8 amx_bf16")
    monkeypatch.setattr(builds, "may_use_tiles", lambda: False)
    assert builds.runnable()[0].name == "avx512_bf16"
    assert "amx" not in RUNNABLE or may_use_tiles()


def test_a_name_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "x86_64", f"{V3} avx_vnni")
    monkeypatch.setenv("CBATCH_KERNELS", "avx2")
    assert [each.name for each in builds.candidate_builds()] == ["avx2"]
    others = "use one of avx_vnni, avx2, portable, or leave it out"
    monkeypatch.setenv("CBATCH_KERNELS", "avx3")
    with pytest.raises(FieldError, match=f"CBATCH_KERNELS: 'avx3' is not known; {others}"):
        build.library.__wrapped__()
    monkeypatch.setenv("CBATCH_KERNELS", "avx512")
    lacking = "avx512f and avx512bw and avx512cd and avx512dq and avx512vl"
    with pytest.raises(FieldError, match=f"'avx512' needs a CPU with {lacking}; {others}"):
        build.library.__wrapped__()


INSTRUCTIONS = {"portable": set(), "avx2": {"AVX2", "FMA", "F16C"}}
INSTRUCTIONS["avx_vnni"] = INSTRUCTIONS["avx2"] | {"AVXVNNI"}
INSTRUCTIONS["avx512"] = INSTRUCTIONS["avx2"] | {"AVX512F", "AVX512BW"}
INSTRUCTIONS["avx512_vnni"] = INSTRUCTIONS["avx512"] | {"AVX512VNNI"}
INSTRUCTIONS["avx512_bf16"] = INSTRUCTIONS["avx512_vnni"] | {"AVX512BF16"}
INSTRUCTIONS["amx"] = INSTRUCTIONS["avx512_bf16"] | {"AMX_TILE"}


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86 processors")
@pytest.mark.parametrize("made", builds.builds_of("x86_64"), ids=lambda made: made.name)
def test_a_name_fixes_the_instructions(made: Build) -> None:
    """The instructions are those that our kernels test for with the compiler's macros."""
    compiler = find_compiler()
    assert compiler is not None
    if not compiler.supports(made):
        pytest.skip("the compiler is older")
    command = [*compiler.command, *compiler.flags(made), "-E", "-dM", "-x", "c", os.devnull]
    macros = subprocess.check_output(command, text=True).split()
    features = INSTRUCTIONS["amx"] | INSTRUCTIONS["avx_vnni"]
    assert {each for each in features if f"__{each}__" in macros} == INSTRUCTIONS[made.name]


@needs_compiler
@pytest.mark.parametrize("made", NOT_HERE, ids=lambda made: made.name)
def test_what_does_not_run_here_compiles(made: Build, tmp_path: Path) -> None:
    compiler = find_compiler()
    assert compiler is not None
    if not compiler.supports(made):
        pytest.skip("the compiler is older")
    flags = (*build.FLAGS, "-O0", *compiler.flags(made))
    compiler.run(*flags, "-c", str(build.SOURCE), "-o", str(tmp_path / "library.o"))


# ---- results of each -----------------------------------------------------------------------------


@functools.cache
def library_of(name: str) -> ctypes.CDLL:
    """Return a compiled library. It takes seconds to compile unless a test before did it."""
    compiler = find_compiler()
    assert compiler is not None
    made = RUNNABLE["avx512_bf16" if name == BY_HAND else name]
    if not compiler.supports(made):
        pytest.skip("the compiler is older")
    if name == BY_HAND:
        return tiles_by_hand(compiler, made)
    return build.library_of(made, compiler, cache_folder("compiled"))


def use(kernel: ctypes.CDLL, patch: pytest.MonkeyPatch) -> None:
    for module in (product_module, compiled_pass, attention_module, experts_module):
        patch.setattr(module, "library", lambda: kernel)


@pytest.fixture(params=COMPUTED)
def build_in_use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use(library_of(str(request.param)), monkeypatch)


@pytest.fixture
def in_each(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """Return an iterator over builds that makes each the current one; it yields names and vector
    widths."""

    def through() -> Iterator[tuple[str, int]]:
        for name in QUICK:
            kernel = library_of(name)
            use(kernel, monkeypatch)
            yield name, kernel.lanes()

    return through()


def dense(dtype: torch.dtype, columns: int) -> Tensor:
    gen = torch.Generator().manual_seed(columns)
    return torch.randn(OUT, columns, generator=gen).to(dtype)


def rows(columns: int) -> Tensor:
    """Return rows that need no rounding to bf16, which products of some processors would do."""
    gen = torch.Generator().manual_seed(1)
    return torch.randn(MAX_ROWS, columns, generator=gen).bfloat16().float()


def products(columns: int = COLUMNS) -> dict[str, CompiledProduct]:
    """Return products of every type of weights; those of blocks take the given number of
    columns."""
    made = {
        str(dtype): CompiledProduct(dense(dtype, columns), None, None)
        for dtype in (torch.float32, torch.bfloat16)
    }
    if columns == COLUMNS:
        made |= {name: whole(stored(name)[0]) for name in BLOCK_TYPES}
    return made


@pytest.mark.usefixtures("build_in_use")
def test_products_are_right() -> None:
    for name in BLOCK_TYPES:
        assert_values(name)
    for columns in (1, 63, 513):
        for dtype in (torch.float32, torch.bfloat16):
            x, weight = rows(columns), dense(dtype, columns)
            expected, size = x.double() @ weight.double().T, x.abs() @ weight.abs().float().T
            result = CompiledProduct(weight, None, None)(x, MAX_ROWS)
            assert ((result - expected).abs() <= 4e-6 * size).all()


@pytest.mark.usefixtures("build_in_use")
@pytest.mark.parametrize("columns", [COLUMNS, 513])
def test_company_changes_no_bit(columns: int) -> None:
    """This holds for any product: full panels and one that is not, tiles of any number of rows."""
    x = rows(columns)
    for name, product in products(columns).items():
        expected = product(x, MAX_ROWS)
        for count in (1, 2, 3, 4, 5, 8, 9, 16, 17):
            some = x[5 : 5 + count].contiguous()
            assert torch.equal(product(some, count), expected[5 : 5 + count]), (name, count)


@pytest.mark.usefixtures("build_in_use")
def test_passes_are_batch_invariant(tmp_path: Path) -> None:
    build_model(tmp_path, "llama", head_dim=32)  # tiles attend to whole ones
    for path, dtype in (
        (tmp_path, "float32"),
        (tmp_path, "bfloat16"),
        (as_gguf(tmp_path, Q8_0), "auto"),
    ):
        report = probe_batch_invariance(load_model(path, dtype=dtype, numerics="invariant"))
        assert report.batch_invariant and report.products[0].startswith("compiled"), str(report)


@pytest.mark.usefixtures("build_in_use")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_and_experts_by_themselves(dtype: torch.dtype) -> None:
    for name in ("all of it", "tiles", "values wider"):
        assert_right(name, 16, dtype)
    assert_batch_invariant("tiles", dtype)
    for gate in ("silu", "gelu", "clamped"):
        assert_sums(gate, dtype, bias=True)


def test_fused_products_have_the_same_bits_everywhere(in_each: Iterator[tuple[str, int]]) -> None:
    """This holds for any vector width and any way to sum integers. It does not hold with
    instructions for bf16, nor without fused ones."""
    x = torch.randn(MAX_ROWS, COLUMNS, generator=torch.Generator().manual_seed(2))
    expected: dict[str, Tensor] = {}
    others = []
    for build_name, _ in in_each:
        for name, product in products().items():
            result = product(x, MAX_ROWS)
            own = name == "torch.bfloat16" and build_name in OWN_BF16
            if build_name in (*FUSED, BY_HAND) and not own:
                assert torch.equal(result, expected.setdefault(name, result)), (name, build_name)
            else:
                others.append((name, result))
    for name, result in others:
        rounding = 1e-2 if name == "torch.bfloat16" else 1e-6
        assert (result - expected[name]).norm() <= rounding * expected[name].norm(), name


@pytest.mark.parametrize(
    ("stored_as", "far"), [("float32", 1e-5), ("bfloat16", 0.05), ("blocks", 0.06)]
)
def test_passes_have_the_bits_of_their_width(
    tmp_path: Path, in_each: Iterator[tuple[str, int]], stored_as: str, far: float
) -> None:
    """Norms and softmax are vector sums: builds of the same width, all fused, agree to the bit.
    Others differ in the last bits, and by the rounding to 8 bits that follows."""
    build_model(tmp_path, "llama", head_dim=32)
    exact = logits(tmp_path, dtype="float32")
    path = as_gguf(tmp_path, Q8_0) if stored_as == "blocks" else tmp_path
    dtype = "auto" if stored_as == "blocks" else stored_as
    by_width: dict[tuple[int, bool], Tensor] = {}
    for name, width in in_each:
        computed = logits(path, dtype=dtype, numerics="invariant")
        assert (computed - exact).norm() <= far * exact.norm()
        if stored_as != "bfloat16" or name not in OWN_BF16:
            first = by_width.setdefault((width, name in (*FUSED, BY_HAND)), computed)
            assert torch.equal(computed, first), name
    assert len(by_width) < 2 or not torch.equal(*list(by_width.values())[:2])
