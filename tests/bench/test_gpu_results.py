"""Stored results have all that is needed to quote them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

RESULTS = sorted((Path(__file__).parents[2] / "bench" / "results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_file_says_what_made_its_rows(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    document = json.loads(text)
    for name in ("device", "driver", "date", "commit", "made_by"):
        assert document["about"][name], name
    assert document["about"]["versions"]["triton"] and len(document["rows"]) > 20
    assert all(row["section"] for row in document["rows"])
    assert not re.search(r'"/|\.\./| /\w+/', text), "a path of some machine"
    assert path.name in (path.parent / "README.md").read_text(encoding="utf-8")


def test_there_are_some() -> None:
    assert len(RESULTS) >= 2
