"""Progress of long work: a bar on a terminal, otherwise occasional lines."""

from __future__ import annotations

import pytest

from cbatch import Output
from cbatch.engine import progress
from cbatch.engine.progress import ProgressBar


def test_lines_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter([0.0, 0.0, 3.0, 12.0, 13.0, 30.0])  # made, entered, advanced four times
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(now))
    with ProgressBar(5, unit="batches") as bar:
        bar.advance()
        bar.advance()
        bar.advance(2, "7 tokens/s")
        bar.advance(1, "9 tokens/s")
    assert capsys.readouterr().err.splitlines() == ["2 of 5 batches", "5 of 5 batches, 9 tokens/s"]


def test_outputs_of_steps_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with ProgressBar(2, shown=False) as bar:
        bar.advance()
    assert not capsys.readouterr().err
    with ProgressBar(2) as bar:
        bar.update([Output("a", 0, "x", (1, 2))])
    assert "0 of 2 sequences, " in (output := capsys.readouterr().err) and "tokens/s" in output
