"""Mutated models are loaded in a process of their own, since one may end it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SEED = int(os.environ.get("CBATCH_FUZZ_SEED", "0"))

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="asks Linux for its memory")


def fuzzed(folder: Path, seed: int, count: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.runtime.model_fuzz", str(folder), str(seed), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    at = folder / "at"
    mutation = at.read_text() if at.exists() else "before the first"
    assert done.returncode == 0, f"{mutation}\n{done.stderr[-5000:]}"
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def test_mutated_models_are_served_or_refused(tmp_path: Path) -> None:
    summary = fuzzed(tmp_path, 0, 350)
    assert summary["served"] > 50 and summary["refused"] > 200 and summary["ways"] > 100


@pytest.mark.fuzz
def test_ten_thousand_mutated_models(tmp_path: Path) -> None:
    summary = fuzzed(tmp_path, SEED, 10_000)
    print(summary)
    assert summary["served"] > 1500 and summary["refused"] > 5000 and summary["ways"] > 1000
