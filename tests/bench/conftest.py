"""Benchmarks collect garbage before they time: here that would go through all that the suite holds,
again and again."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "collect", lambda *_: 0)
