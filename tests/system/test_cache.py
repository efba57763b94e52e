from __future__ import annotations

from pathlib import Path

import pytest

from cbatch.system.cache import cache_folder


def test_the_folder_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder("costs") == Path("/cache/cbatch/costs")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder("costs") == Path("/home/me/.cache/cbatch/costs")


def test_a_user_without_a_home_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder("costs") is None
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder("costs") == Path("/cache/cbatch/costs")
