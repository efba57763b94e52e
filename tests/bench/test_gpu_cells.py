"""Cells, turns and the parts of a run: measurements are kept, and kept apart."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.gpu import run as run_module
from bench.gpu.cells import FAULT_EXIT, Cell, Journal, NotAvailable, Row, run_cells
from bench.gpu.run import GpuRun, Rows, RunPart
from bench.gpu.turns import DeviceTurns


def cell(key: str, outcome: Row | Exception, *, timed: bool = True) -> Cell:
    def run() -> Row:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return Cell(key, {"name": key}, run, timed)


def test_every_cell_leaves_a_row(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "s.jsonl")
    cells = [
        cell("good", {"us": 1.5}),
        cell("null", {"status": "unmeasured"}, timed=False),
        cell("bad", RuntimeError("no such thing\nmore")),
        cell("full", RuntimeError("CUDA out of memory")),
        cell("absent", NotAvailable("not supplied")),
    ]
    run_cells(cells, journal, DeviceTurns(tmp_path))
    read = Journal(journal.path).rows
    times = [row.pop("at_s") for row in read.values() if "at_s" in row]  # of measured cells
    assert len(times) == 2 and all(begin_s <= end_s for begin_s, end_s in times)
    assert read == {
        "good": {"name": "good", "us": 1.5, "status": "ok"},
        "null": {"name": "null", "status": "unmeasured"},
        "bad": {"name": "bad", "status": "failed: RuntimeError: no such thing"},
        "full": {"name": "full", "status": "failed: RuntimeError: CUDA out of memory"},
        "absent": {"name": "absent", "status": "skipped: not supplied"},
    }
    assert DeviceTurns(tmp_path).is_free()


@pytest.mark.parametrize("who", ["CUDA error", "Triton Error [CUDA]"])
def test_a_lost_device_ends_the_process_after_its_row(tmp_path: Path, who: str) -> None:
    """The errors are in the words of torch and of Triton's launcher."""
    journal, turns = Journal(tmp_path / "s.jsonl"), DeviceTurns(tmp_path)
    fault = RuntimeError(f"{who}: an illegal memory access was encountered")
    cells = [cell("fault", fault), cell("next", {})]
    with pytest.raises(SystemExit) as end:
        run_cells(cells, journal, turns)
    assert end.value.code == FAULT_EXIT
    again = Journal(journal.path)
    assert again.rows["fault"]["status"].startswith(f"failed: RuntimeError: {who}")
    assert again.rows["next"]["status"] == "not reached"
    run_cells(cells, again, turns)
    assert again.rows["next"]["status"] == "ok"
    assert again.rows["fault"]["status"].startswith("failed")


def test_a_journal_survives_a_line_cut_in_two(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "s.jsonl")
    journal.write(rows={"a": {"status": "ok"}}, about={"device": "x"})
    with journal.path.open("a") as file:
        file.write('{"rows": {"b"')
    again = Journal(journal.path)
    again.write(rows={"c": {"status": "ok"}})
    assert list(again.rows) == list(Journal(journal.path).rows) == ["a", "c"]
    assert again.about == {"device": "x"}


# --- turns ----------------------------------------------------------------------------------------

OTHER = """
import os, sys, time
from pathlib import Path
from bench.gpu.turns import DeviceTurns
turns, line = DeviceTurns(Path(sys.argv[1])), Path(sys.argv[2])
turns.acquire()
line.touch()
print("has it", flush=True)
sys.stdin.readline()
turns.release()
while True:
    line.touch(); time.sleep(0.01)
"""


def test_while_one_measures_the_others_are_stopped(tmp_path: Path) -> None:
    turns, line = DeviceTurns(tmp_path), tmp_path / "line"
    command = [sys.executable, "-c", OTHER, str(tmp_path), str(line)]
    other = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with other:
        try:
            turns.begin(other.pid)
            assert other.stdout is not None and other.stdin is not None
            assert other.stdout.readline() == "has it\n"
            assert not turns.is_free()
            other.stdin.write("go on\n")
            other.stdin.flush()
            turns.acquire()  # as soon as the other releases it
            stopped_ns = line.stat().st_mtime_ns
            time.sleep(0.2)
            assert line.stat().st_mtime_ns == stopped_ns
            turns.release()
            until_s = time.monotonic() + 30
            while line.stat().st_mtime_ns == stopped_ns and time.monotonic() < until_s:
                time.sleep(0.01)
            assert line.stat().st_mtime_ns > stopped_ns
        finally:
            other.kill()


# --- parts ----------------------------------------------------------------------------------------

# A part whose cells are named on its command line: `crash` kills its process, `hang` never ends.
CHILD = """
import os, sys, time
from pathlib import Path
from bench.gpu.cells import Cell, Journal, run_cells
from bench.gpu.turns import DeviceTurns
def run(name):
    if name.startswith("crash"):
        os.abort()
    if name.startswith("hang"):
        time.sleep(60)
    if name.startswith("fault"):
        raise RuntimeError("CUDA error")
    return {"order": time.time()}
folder, part, *names = sys.argv[1:]
cells = [Cell(name, {"name": name}, lambda name=name: run(name)) for name in names]
run_cells(cells, Journal(Path(folder) / f"{part}.jsonl"), DeviceTurns(Path(folder)))
"""


def part(folder: Path, name: str, cells: str, **more: object) -> RunPart:
    command = (sys.executable, "-c", CHILD, str(folder), name, *cells.split(","))
    limits: dict[str, object] = {"least_s": 0.0, "most_s": 60.0}
    return RunPart(name, command, **(limits | more))  # type: ignore[arg-type]


def go(folder: Path, parts: list[RunPart], seconds: float = 60.0) -> Rows:
    written: list[str] = []
    made = GpuRun(folder, seconds, lambda rows, about: written.append(json.dumps(rows)))
    made.run(parts)
    assert json.loads(written[-1]) == made.rows
    assert made.turns.is_free() and not any((folder / "groups").iterdir())
    return made.rows


def test_what_crashes_or_faults_costs_its_own_row(tmp_path: Path) -> None:
    rows = go(tmp_path, [part(tmp_path, "s", "a,crash1,b,crash2,fault1,fault2,c")])["s"]
    assert {name: row["status"].split(":")[0] for name, row in rows.items()} == {
        **dict.fromkeys(("a", "b", "c"), "ok"),
        **dict.fromkeys(("crash1", "crash2"), "not finished"),
        **dict.fromkeys(("fault1", "fault2"), "failed"),
    }


def test_a_part_ends_with_its_time_and_the_next_begins(tmp_path: Path) -> None:
    parts = [
        part(tmp_path, "slow", "a,hang,b", most_s=4.0),
        part(tmp_path, "next", "c", after=("slow",)),
        part(tmp_path, "beside", "d"),
    ]
    rows = go(tmp_path, parts)
    states = [row["status"].split(":")[0] for row in rows["slow"].values()]
    assert states == ["ok", "not finished", "not reached"]
    assert rows["next"]["c"]["status"] == rows["beside"]["d"]["status"] == "ok"
    assert rows["next"]["c"]["order"] > rows["slow"]["a"]["order"]
    assert (tmp_path / "slow.ended").exists()


def test_what_is_needed_is_left_its_least_and_the_rest_is_named(tmp_path: Path) -> None:
    began_s = time.monotonic()
    parts = [
        part(tmp_path, "first", "hang"),
        part(tmp_path, "later", "a", least_s=5.0, after=("first",), needed=True),
        part(tmp_path, "last", "b", least_s=60.0, after=("later",)),
    ]
    rows = go(tmp_path, parts, seconds=9.0)
    assert time.monotonic() - began_s < 60
    assert rows["first"]["hang"]["status"].startswith("not finished")
    assert rows["later"]["a"]["status"] == "ok"
    assert rows["last"]["last"]["status"] == "left out: not enough time"


def test_a_process_that_cannot_start_says_why(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "raise SystemExit('no such module')")
    rows = go(tmp_path, [RunPart("s", command, 0.0, 60.0)])
    assert rows["s"]["s"]["status"] == "failed: exit 1: no such module"


def test_rows_are_written_while_a_part_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "WRITE_S", 0.1)
    seen: list[str] = []

    def write(rows: Rows, about: Row) -> None:
        seen.extend(row["status"] for row in rows.get("s", {}).values())

    GpuRun(tmp_path, 60.0, write).run([part(tmp_path, "s", "a,hang", most_s=5.0)])
    assert "not reached" in seen or "not finished: its process ended" in seen[:-2]
