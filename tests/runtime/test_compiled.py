"""Our own products: what they compute, that company changes no bit, and how they come about."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from cbatch.runtime.compiled import CompiledProduct, build, compiles
from tests.runtime.marks import needs_compiler


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 2), (47, 96), (49, 30), (203, 256), (5000, 64)])
@pytest.mark.parametrize("parts", ["", "scale", "bias", "scale bias"])
def test_values(dtype: torch.dtype, shape: tuple[int, int], parts: str) -> None:
    gen = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=gen).to(dtype)
    scale = torch.rand(shape[1], generator=gen) + 0.5 if "scale" in parts else None
    bias = torch.randn(shape[0], generator=gen).to(dtype) if "bias" in parts else None
    product = CompiledProduct(weight, bias, scale)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 23, 64):
        x = torch.randn(rows, shape[1], generator=gen)
        scaled = x if scale is None else x * scale
        expected = scaled.double() @ weight.double().T
        expected = expected if bias is None else expected + bias.double()
        found = product(x, rows)
        assert found.shape == (rows, shape[0]) and found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-4)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_bits_depend_on_nobody(dtype: torch.dtype) -> None:
    """Neither on how many rows there are, nor on its place, nor on the threads (3 million
    multiplications: enough for two)."""
    gen = torch.Generator().manual_seed(1)
    product = CompiledProduct(torch.randn(203, 256, generator=gen).to(dtype), None, None)
    x = torch.randn(60, 256, generator=gen)
    torch.set_num_threads(2)
    whole = product(x, 60)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in range(1, 34):
            for start in (0, 5):
                some = x[start : start + rows].contiguous()
                assert torch.equal(product(some, rows), whole[start : start + rows])


def test_what_it_does_not_compute() -> None:
    assert not compiles(47, torch.float32)
    assert not compiles(64, torch.float16)
    with pytest.raises(ValueError, match="weight"):
        CompiledProduct(torch.zeros(8, 47), None, None)


@needs_compiler
def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a source that takes no time; other tests call what is compiled of the real one."""
    source, cache = tmp_path / "source" / "library.c", tmp_path / "cache"
    source.parent.mkdir()
    source.write_text("int nothing;\n")
    monkeypatch.setattr(build, "_SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    library = build._compiled()
    assert library.is_relative_to(cache) and [*library.parent.iterdir()] == [library]

    def unwanted(*_: str) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(build, "_run", unwanted)
    assert build._compiled() == library


@pytest.mark.parametrize("trouble", ["no compiler", "fails", "no folder"])
def test_without_a_compiler_there_is_no_kernel(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    cache = tmp_path / "file" if trouble == "no folder" else tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    if trouble == "no compiler":
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CC", raising=False)
    if trouble == "fails":

        def fails(*command: str) -> None:
            raise subprocess.CalledProcessError(1, command)

        monkeypatch.setattr(build, "_run", fails)
    assert build.library.__wrapped__() is None
