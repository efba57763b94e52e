"""Mutated models, in a process of their own: one may end it."""

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
    told = at.read_text() if at.exists() else "before the first"
    assert done.returncode == 0, f"{told}\n{done.stderr[-5000:]}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_mutated_models_are_served_or_refused(tmp_path: Path) -> None:
    found = fuzzed(tmp_path, 0, 350)
    assert found["served"] > 50 and found["refused"] > 200 and found["ways"] > 100


@pytest.mark.fuzz
def test_ten_thousand_mutated_models(tmp_path: Path) -> None:
    found = fuzzed(tmp_path, SEED, 10_000)
    print(found)
    assert found["served"] > 1500 and found["refused"] > 5000 and found["ways"] > 1000
