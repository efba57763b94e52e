"""`cbatch serve`: what its options come to, and what it says before it loads a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cbatch.cli.main import FAILED, main
from cbatch.server.gate import Gate
from tests.cli.conftest import INFO
from tests.toy_engine import make_engine


def test_keys_come_from_options_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[tuple[Gate, dict[str, Any]]] = []
    monkeypatch.setattr("uvicorn.run", lambda app, **options: served.append((app, options)))
    monkeypatch.setattr("cbatch.cli.serve.load_engine", lambda *_: (make_engine(), INFO))
    monkeypatch.setenv("CBATCH_API_KEY", "third")
    keys = ["--api-key", "first", "--api-key", "second"]
    assert main(["serve", str(tmp_path), "--port", "1", *keys]) == 0
    ((app, options),) = served
    for key in ("first", "second", "third"):
        assert app.admits(f"Bearer {key}".encode())
    assert not app.admits(b"Bearer fourth") and not app.admits(b"")
    assert options["port"] == 1
    assert "http://127.0.0.1:1/v1" in capsys.readouterr().err


def test_a_template_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = str(tmp_path / "none")
    assert main(["serve", str(tmp_path), "--chat-template", template]) == FAILED
    assert "none cannot be read" in capsys.readouterr().err
