"""Fixtures for tiny models."""

from __future__ import annotations

import pytest

from cbatch.runtime.cpu import layers
from tests.one_thread import one_thread
from tests.runtime.marks import has_compiler

__all__ = ["one_thread"]


@pytest.fixture
def torch_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute passes by torch, also where our kernels are available."""
    monkeypatch.setattr(layers, "compiles", lambda dtype: False)


@pytest.fixture(params=["compiled", "torch"])
def decoder_pass(request: pytest.FixtureRequest) -> str:
    """Run the test once with each pass."""
    if request.param == "torch":
        request.getfixturevalue("torch_pass")
    elif not has_compiler():
        pytest.skip("no C compiler, or not Linux")
    return str(request.param)
