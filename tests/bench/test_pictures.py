"""The plot of the README: its statements about the default are true, and it can be drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import pictures


def test_the_plot_of_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "CLIENTS", (1, 4))
    monkeypatch.setattr(pictures, "REQUESTS", 60)
    path = tmp_path / "policies.png"
    rows = {row["policy"]: row for row in pictures.save_policies(path)}
    assert path.read_bytes().startswith(b"\x89PNG")
    for clients in ("1", "4"):
        assert rows["adaptive"][clients] == max(row[clients] for row in rows.values()) > 1
