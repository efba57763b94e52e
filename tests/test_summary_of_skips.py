"""The last lines of a test run: each reason of skipped tests once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest
pytest.importorskip("json")
@pytest.mark.skipif(True, reason="needs a browser")
@pytest.mark.parametrize("number", range(12))
def test_many(number): pass
def test_inside(): pytest.skip("needs a second machine")
def test_runs(): pass
"""
WHOLE = "import pytest\npytest.importorskip('no_such_module', reason='needs a package')\n"


def test_each_reason_is_printed_once(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_skipped.py").write_text(TESTS)
    (tmp_path / "test_whole.py").write_text(WHOLE)
    options = ("-q", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-n", "1")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "needs" in line]
    assert lines[0] == "skipped 12: needs a browser"
    assert sorted(lines[1:]) == ["skipped 1: needs a package", "skipped 1: needs a second machine"]
