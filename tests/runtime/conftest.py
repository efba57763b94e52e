"""Fixtures for tiny models: one thread is the fastest, and a busy machine then cannot stall a
barrier."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cbatch.runtime.cpu.compiled_pass import CompiledDecoder
from tests.runtime.marks import has_compiler


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def torch_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute passes by operations of torch, also where our own pass is available."""
    monkeypatch.setattr(CompiledDecoder, "of", lambda *parts: None)


@pytest.fixture(params=["compiled", "torch"])
def decoder_pass(request: pytest.FixtureRequest) -> str:
    """Run the test once with each pass."""
    if request.param == "torch":
        request.getfixturevalue("torch_pass")
    elif not has_compiler():
        pytest.skip("no C compiler, or not Linux")
    return str(request.param)
