"""Clocks beside what is measured, from a program that writes as nvidia-smi does."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench.gpu import clocks
from bench.gpu.clocks import Sample, beside, during, parse, recorded, samples

SMI = """#!/bin/sh
[ "$*" = "--query-gpu={query} --format=csv,noheader,nounits -i 0 -lms 200" ] || exit 3
echo "1980, 2619, 41, 120.50, 0x0000000000000001"
echo "1410, 2619, 71, 698.10, 0x0000000000000024"
echo "[N/A], 2619, 71, 698.10, 0x0"
echo "1500, 26"
exec sleep 60
"""


def test_lines_of_a_run_are_kept_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI.format(query=clocks._QUERY))
    program.chmod(0o755)
    monkeypatch.setattr(clocks.shutil, "which", lambda _: str(program))
    with recorded(tmp_path):
        until_s = time.monotonic() + 30
        while len(samples(tmp_path)) < 2 and time.monotonic() < until_s:
            time.sleep(0.01)
    first, second = samples(tmp_path)
    assert (first.sm_mhz, first.throttled) == (1980, [])  # it idled
    assert second.throttled == ["power cap", "heat (driver)"]
    assert first.at_s <= second.at_s <= time.time()


def test_without_the_program_nothing_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clocks.shutil, "which", lambda _: None)
    with recorded(tmp_path):
        pass
    assert samples(tmp_path) == [] and during([])["slowed_by"] is None


def test_a_row_has_the_clocks_of_its_own_time() -> None:
    found = [
        Sample(10.0, 1980, 2619, 40, 300, 0),
        Sample(20.0, 1755, 2619, 60, 650, 0x4),
        Sample(20.2, 1410, 2619, 71, 698, 0x20),
        Sample(30.0, 1980, 2600, 50, 310, 0),
    ]
    row = beside({"at_s": [19.9, 20.3], "status": "ok"}, found)
    assert (row["sm_mhz_low"], row["sm_mhz"]) == (1410, 1582.5)
    assert row["slowed_by"] == "power cap, heat (driver)"
    assert beside({"at_s": [29.9, 30.3]}, found)["slowed_by"] == "nothing"
    assert beside({"status": "skipped"}, found) == {"status": "skipped"}
    assert beside({"at_s": [50.0, 51.0]}, found)["sm_mhz"] is None
    assert (during(found)["celsius_high"], during(found)["memory_mhz_low"]) == (71, 2600)


@pytest.mark.parametrize("line", ["", "1, 2, 3, 0x4", "a, 2, 3, 4, 0x5"])
def test_a_line_that_is_not_whole_is_none(line: str) -> None:
    assert parse(line, 1.0) is None
