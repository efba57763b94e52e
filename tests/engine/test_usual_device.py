"""`device="auto"` on a machine with a GPU that torch sees: the GPU is used, or the CPU with a
stated reason."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cbatch import EngineOptions, FieldError
from cbatch.cli.main import main
from cbatch.demo import demo_paths
from cbatch.engine.build import load_engine
from cbatch.engine.model_files import default_device
from cbatch.runtime.backend import Requirements
from cbatch.runtime.gpu import backend

DEFAULT = Requirements("a model", block_size=16)


@pytest.fixture
def seen_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Pretend that torch sees an H100, on which nothing has run yet."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return monkeypatch


def test_a_gpu_is_used_for_options_that_it_supports(seen_gpu: pytest.MonkeyPatch) -> None:
    assert default_device(DEFAULT) == "cuda"
    assert default_device(DEFAULT._replace(kv_cache_dtype="fp8")) == "cuda"
    assert default_device(DEFAULT._replace(numerics="invariant")) == "cpu"
    assert default_device(DEFAULT._replace(impls=("own", "transformers"))) == "cpu"
    seen_gpu.setattr(backend, "is_gguf", lambda _: True)
    for plain, device in ((True, "cuda"), (False, "cpu")):
        seen_gpu.setattr(backend, "read_config", lambda _, p=plain: SimpleNamespace(plain=p))
        assert default_device(DEFAULT) == device


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cuda", "'cuda' is not available: torch sees 0 GPUs"),
        ("cuda:x", "'cuda:x' is not supported; use auto, cpu, cuda"),
    ],
)
def test_a_missing_device_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], device: str, words: str
) -> None:
    assert main(["generate", "def f():", "--device", device]) == 2
    assert capsys.readouterr().err.startswith(f"cbatch: --device: {words}")


@pytest.mark.parametrize(("field", "value"), [("block_size", 48)])
def test_the_cpu_is_used_for_options_that_a_gpu_does_not_support(
    seen_gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, field: str, value: Any
) -> None:
    with caplog.at_level(logging.WARNING, "cbatch"):
        assert default_device(DEFAULT._replace(**{field: value})) == "cpu"
    assert f"not used: {field}: " in caplog.text
    with pytest.raises(FieldError, match=f"^{field}: .*or --device cpu"):
        load_engine(demo_paths()[0], None, EngineOptions(device="cuda", **{field: value}))


def test_a_gpu_that_cannot_run_the_kernels_is_not_used(
    seen_gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lost() -> tuple[int, int]:
        raise RuntimeError("CUDA unknown error")

    for name, value, reason in (
        ("torch.version.cuda", None, "not built with CUDA"),
        ("cbatch.runtime.gpu.backend.find_spec", lambda _: None, "triton is not installed"),
        ("torch.cuda.get_device_capability", lambda: (7, 5), "is 7.5; kernels need 8.0"),
        ("torch.cuda.get_device_capability", lost, "does not respond: CUDA unknown error"),
    ):
        caplog.clear()
        with seen_gpu.context() as patch, caplog.at_level(logging.WARNING, "cbatch"):
            patch.setattr(name, value)
            assert default_device(DEFAULT) == "cpu"
        assert reason in caplog.text
