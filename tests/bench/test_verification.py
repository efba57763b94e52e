"""Tokens a step by way of verification."""

from __future__ import annotations

import json

import pytest

from bench.verification import main, row_of


def test_the_interval_is_over_choices() -> None:
    row = row_of("block", 4, 1.0, [2.0, 2.2])
    assert row["tokens a step"] == 2.1
    assert row["+- 95 %"] == pytest.approx(12.706 * 0.1, abs=1e-3)


def test_a_row_for_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--lookahead", "3", "--prompts", "2", "--choices", "2", "--max-tokens", "12"]
    main([*small, "--temperature", "1", "--verification", "block", "coupled"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [row["verification"] for row in rows] == ["block", "coupled"]
    assert all(1 <= row["tokens a step"] <= 4 and row["k"] == 3 for row in rows)
