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


def test_the_plot_of_other_engines_shows_the_figures_of_the_document(tmp_path: Path) -> None:
    llama, vllm = pictures.ratios_in_docs("### llama.cpp"), pictures.ratios_in_docs("### vLLM")
    assert llama["SmolLM2-135M Q4_1"][:3] == [3.68, 5.96, 5.37] and len(llama) == 4
    assert vllm["cbatch"][:5] == [1.91, 1.75, 1.54, 1.38, 1.26]
    assert pictures.ratios_in_docs("### llama.cpp", "no such machine") == {}
    pictures.save_peers(tmp_path / "peers.png")
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")
