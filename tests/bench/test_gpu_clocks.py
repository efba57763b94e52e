"""Clock rates during a measurement, from a program that writes like nvidia-smi."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench.gpu import clocks
from bench.gpu.clocks import Sample, during, parse, recorded

SMI = """#!/bin/sh
[ "$*" = "--query-gpu={query} --format=csv,noheader,nounits -i 0 -lms 200" ] || exit 3
echo "1980, 120.50, 0x0000000000000001"
echo "1410, 698.10, 0x0000000000000024"
echo "[N/A], 698.10, 0x0"
echo "1500, 26"
exec sleep 60
"""


def test_lines_of_a_run_are_kept_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI.format(query=clocks.QUERY))
    program.chmod(0o755)
    monkeypatch.setattr(clocks.shutil, "which", lambda _: str(program))
    with recorded() as samples:
        until_s = time.monotonic() + 30
        while len(samples) < 2 and time.monotonic() < until_s:
            time.sleep(0.01)
    first, second = samples
    assert (first.sm_mhz, second.watts) == (1980, 698.1)
    assert during([first], first.at_s, first.at_s)["slowed_by"] == "nothing"  # it idled
    assert during([second], second.at_s, second.at_s)["slowed_by"] == "heat (driver), power cap"
    assert first.at_s <= second.at_s <= time.time()


def test_without_the_program_nothing_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks.shutil, "which", lambda _: None)
    with recorded() as samples:
        pass
    assert samples == [] and during(samples, 0.0, 1e12) == {}


def test_a_row_has_the_clocks_of_its_own_time() -> None:
    samples = [
        Sample(10.0, 1980, 300, 0),
        Sample(20.0, 1755, 650, 0x4),
        Sample(20.2, 1410, 698, 0x20),
        Sample(30.0, 1980, 310, 0),
    ]
    row = during(samples, 19.9, 20.3)
    assert row == {"sm_mhz_low": 1410, "watts_high": 698, "slowed_by": "heat (driver), power cap"}
    assert during(samples, 29.9, 30.3)["slowed_by"] == "nothing"
    assert during(samples, 50.0, 51.0) == {}


@pytest.mark.parametrize("line", ["", "1, 2, 3, 0x4", "a, 2, 0x5"])
def test_a_line_that_is_not_whole_is_none(line: str) -> None:
    assert parse(line, 1.0) is None
