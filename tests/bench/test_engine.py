"""`python -m bench.engine`: shapes with random weights, computed by each modelling code."""

from __future__ import annotations

import json

import pytest

from bench.engine import __main__ as engine
from bench.engine.shapes import FLAGGED

SMALL = ["--no-peer", "--batch", "2", "--repeats", "1", "--prompts", "2"]
SHORT = ["--prompt-tokens", "8", "--output-tokens", "4"]


@pytest.mark.parametrize(
    ("shape", "words", "systems"),
    [
        *((shape, [], ["cbatch"]) for shape in FLAGGED),
        (
            "llama-1m",
            ["--model-impl", "own", "transformers"],
            ["cbatch", "cbatch, transformers' layers"],
        ),
    ],
)
def test_a_shape_is_measured_by_each_modelling_code(
    shape: str,
    words: list[str],
    systems: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("sys.argv", ["bench.engine", "--shape", shape, *words, *SMALL, *SHORT])
    engine.main()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [row["system"] for row in rows] == systems
    assert all(row["output_tokens_per_s"] > 0 and row["ratio_to_off"] for row in rows)
