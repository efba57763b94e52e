"""Fates of real drafts, and what the simulator makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench import ablation
from bench.fates import fates_of, main
from cbatch.text.outputs import Output


def step(tokens: int, drafted: int, accepted: int) -> Output:
    return Output("r", 0, "", tuple(range(tokens)), drafted, accepted)


def test_what_stands_is_right_and_what_replaces_a_draft_was_drafted_wrongly() -> None:
    first = step(1, 0, 0)
    assert fates_of([first, step(3, 4, 2), step(1, 4, 0)]) == [1, 1, 0, 0]
    assert fates_of([first, step(3, 2, 2)]) == [1, 1, 1], "nothing is known of the third"
    assert fates_of([first, step(1, 0, 0)]) == [0], "a lookup that found nothing"
    assert fates_of([first, step(2, 4, 2)]) == [1, 1], "cut behind the second"


def test_recorded_fates_are_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The demo pair's own: drafts are often right, and a fixed k wins what they say."""
    file = tmp_path / "fresh.json"
    main(["--output-tokens", "24", "--out", str(file)])
    found = json.loads(file.read_text())
    assert 0.4 < np.mean(np.concatenate(found)) < 0.95
    recorded = ["--text", "--fates", str(file), "--exact", "--without", "--fixed", "1"]
    ablation.main(["--load", "1", *recorded, "--processes", "1"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    speeds = {row["without"]: row["of_off"] for row in rows}
    assert list(speeds) == ["off", "goodput", "fixed:1", "the best fixed k"]
    assert speeds["goodput"] > speeds["fixed:1"] > 1.1
    assert rows[1]["there"] == "8B + 1B, H100, fresh, 1"
