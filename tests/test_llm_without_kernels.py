"""Models where our kernels cannot be compiled or cached: a warning says so, and they are served."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cbatch import LLM, SamplingParams
from cbatch.cli.main import main
from cbatch.runtime.compiled import build
from tests.gguf_files import Q8_0
from tests.runtime.hf_models import build as build_model
from tests.runtime.marks import needs_compiler, without_compilers
from tests.runtime.test_gguf_model import as_gguf


@pytest.fixture(autouse=True)
def uncached_library() -> Iterator[None]:
    build.library.cache_clear()
    yield
    build.library.cache_clear()


def serves(model: Path, caplog: pytest.LogCaptureFixture, expected: str, computes: str) -> None:
    llm = LLM(model, tokenizer="none", max_num_seqs=2, threads=1, num_blocks=20, lookahead="off")
    completions = llm.generate([[1, 2, 3], [7, 8]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert [len(each.token_ids) for each in completions] == [4, 4]
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    (warning,) = [each for each in warnings if "kernels" in each]
    assert re.fullmatch(expected, warning), warning
    assert re.search(computes, llm.info.batch_invariance)


def test_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build_model(tmp_path, "llama")
    model = as_gguf(tmp_path, Q8_0)
    without_compilers(monkeypatch)
    expected = "kernels are not available, torch computes products: no C compiler; install .*"
    serves(model, caplog, expected, "batch_invariant: no .*products: torch")


@needs_compiler
def test_with_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even root can write it. Kernels are compiled without optimisation, which takes 2 s."""
    build_model(tmp_path, "llama")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nobody")
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O0"))
    expected = (
        r"kernels cannot be cached in /proc/nobody/cbatch/compiled \(.*\): they are compiled for .*"
    )
    kernels = f"products: compiled Q8_0; kernels: {build.builds.candidate_builds()[0].name}"
    serves(as_gguf(tmp_path, Q8_0), caplog, expected, kernels)


def test_the_demo_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cbatch.cli.demo.chat", lambda *_: [])
    without_compilers(monkeypatch)
    arguments = "demo", "--prompts", "1", "--max-tokens", "4", "--lookahead", "off"
    assert main(arguments) == 0, capsys.readouterr().err
    assert "batch_invariant: no" in capsys.readouterr().out
