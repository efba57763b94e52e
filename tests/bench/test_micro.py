"""Micro-benchmarks and their comparison with a baseline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import micro

PAST = {"yardstick_us": 100.0, "quartile_us": {"a": 10.0, "b": 20.0}}


def test_a_slower_machine_is_not_a_slower_program() -> None:
    """Both took twice as long, and so did the yardstick; `b` took half as long again."""
    now = {"yardstick_us": 200.0, "quartile_us": {"a": 20.0, "b": 60.0, "new": 5.0}}
    a, b, new = micro.rows_of(now, PAST)
    assert (a["raw"], a["ratio"], b["raw"], b["ratio"]) == (2.0, 1.0, 3.0, 1.5)
    assert new["ratio"] is None and new["baseline_us"] is None
    assert [row["ratio"] for row in micro.rows_of(now, None)] == [None] * 3


@pytest.mark.slow
def test_it_runs_saves_and_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "baseline.json"
    options = ["--baseline", str(path), "--only", "survival", "--seconds", "0.05"]
    assert _row_of(options + ["--save"], capsys)["ratio"] is None
    measured = json.loads(path.read_bytes())
    assert list(measured["quartile_us"]) == ["adaptive: survival"]
    monkeypatch.setattr(micro, "run", lambda _: measured)
    assert _row_of(options, capsys)["ratio"] == 1


def _row_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    micro.main(argv)
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert row["benchmark"] == "adaptive: survival" and row["quartile_us"] > 0
    parsed: dict[str, Any] = row
    return parsed


def test_every_room_has_one_and_the_baseline_knows_it() -> None:
    suites = micro.BASELINE.parent.glob("test_*_micro.py")
    rooms = {path.stem.removeprefix("test_").removesuffix("_micro") for path in suites}
    assert rooms >= {"scheduler", "adaptive", "pool", "verification", "text", "http"}
    stored = json.loads(micro.BASELINE.read_bytes())
    assert {name.partition(":")[0] for name in stored["quartile_us"]} == rooms
    assert stored["machine"]["cpu"] and stored["yardstick_us"] > 0
