"""Cells, journals and the processes that run them: what is measured is kept, whatever happens."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from bench.gpu import supervise
from bench.gpu.cells import FAULT_EXIT, Absent, Cell, Journal, Row, TimeBudget, run_cells, shard
from bench.gpu.supervise import SectionPlan, Shard, rows_of, run_section


def cell(key: str, outcome: Row | Exception) -> Cell:
    def run() -> Row:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return Cell(key, {"name": key}, run)


def test_every_cell_leaves_a_row(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "s.jsonl")
    cells = [
        cell("good", {"us": 1.5}),
        cell("wrong", {"status": "wrong"}),
        cell("bad", RuntimeError("no such thing\nmore")),
        cell("full", RuntimeError("CUDA out of memory")),
        cell("absent", Absent("not supplied")),
    ]
    run_cells(cells, journal, lambda: 1.0)
    expected = {
        "good": {"name": "good", "us": 1.5, "status": "ok"},
        "wrong": {"name": "wrong", "status": "wrong"},
        "bad": {"name": "bad", "status": "failed: RuntimeError: no such thing"},
        "full": {"name": "full", "status": "failed: RuntimeError: CUDA out of memory"},
        "absent": {"name": "absent", "status": "skipped: not supplied"},
    }
    read = Journal(journal.path).rows
    assert journal.rows == read
    times = [row.pop("at_s") for row in read.values() if "at_s" in row]  # of what was measured
    assert len(times) == 2 and all(begin_s <= end_s for begin_s, end_s in times)
    assert read == expected


@pytest.mark.parametrize("who", ["CUDA error", "Triton Error [CUDA]"])
def test_a_lost_device_ends_the_process_behind_its_row(tmp_path: Path, who: str) -> None:
    """As torch and as Triton's launcher say it."""
    journal = Journal(tmp_path / "s.jsonl")
    cells = [
        cell("fault", RuntimeError(f"{who}: an illegal memory access was encountered")),
        cell("next", {}),
    ]
    with pytest.raises(SystemExit) as end:
        run_cells(cells, journal, lambda: 1.0)
    assert end.value.code == FAULT_EXIT
    again = Journal(journal.path)
    assert again.rows["fault"]["status"].startswith(f"failed: RuntimeError: {who}")
    assert "next" not in again.rows and again.begun is None
    run_cells(cells, again, lambda: 1.0)
    assert again.rows["next"]["status"] == "ok"


def test_what_time_does_not_reach_is_named(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "s.jsonl")
    left_s = iter([1.0, 0.0, -1.0])
    run_cells([cell(k, {}) for k in "abc"], journal, lambda: next(left_s))
    states = [row["status"].split(":")[0] for row in journal.rows.values()]
    assert states == ["ok", "skipped", "skipped"]


def test_a_journal_survives_a_line_cut_in_two(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "s.jsonl")
    run_cells([cell("done", {})], journal, lambda: 1.0)
    journal.begin(cell("open", {}))
    with journal.path.open("a") as file:
        file.write('{"key": "open", "ro')
    again = Journal(journal.path)
    assert list(again.rows) == ["done"]
    assert again.abandon("crashed: SIGKILL") and not again.abandon("twice")
    assert again.rows["open"] == {"name": "open", "status": "crashed: SIGKILL"}


def test_budgets_run_down_and_shards_share() -> None:
    now = [10.0]
    budget = TimeBudget(5.0, clock=lambda: now[0])
    now[0] = 12.0
    assert budget.left_s() == 3.0
    cells = [cell(k, {}) for k in "abcde"]
    parts = [shard(cells, i, 2) for i in range(2)]
    assert [[c.key for c in part] for part in parts] == [["a", "c", "e"], ["b", "d"]]


# A child that writes as `run_cells` does: `crash` kills it, `hang` never ends,
# `fault` says so and gives up.
CHILD = """
import json, os, sys, time
path, names = sys.argv[1], sys.argv[2].split()
done = {json.loads(x).get("key") for x in open(path)} if os.path.exists(path) else ()
out = open(path, "a")
def say(entry):
    out.write(json.dumps(entry) + "\\n"); out.flush()
for name in names:
    if name in done:
        continue
    say({"begins": name, "labels": {"name": name}})
    if name.startswith("crash"):
        os.abort()
    if name.startswith("hang"):
        time.sleep(60)
    fault = name.startswith("fault")
    say({"key": name, "row": {"name": name, "status": "failed: CUDA error" if fault else "ok"}})
    if fault:
        sys.exit(70)
"""


def run_children(
    out: Path, names: str, *, seconds: float = 20.0, shards: int = 1, warms: bool = False
) -> dict[str, Row]:
    def command(section: str, part: Shard, left_s: float) -> list[str]:
        chosen = " ".join(names.split(",")[part.index :: part.count])
        child = CHILD if names else "raise SystemExit(3)"
        return [sys.executable, "-S", "-c", child, str(part.journal(out, section)), chosen]

    run_section(SectionPlan("s", seconds, shards, warms), out, command)
    return rows_of(out, "s")


def test_what_crashes_faults_or_hangs_costs_its_own_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "_START_S", 0.0)
    monkeypatch.setattr(supervise, "_CELL_S", 1.5)
    rows = run_children(tmp_path, "a,crash1,b,crash2,fault1,fault2,c,hang,d")
    assert {name: row["status"].split(":")[0] for name, row in rows.items()} == {
        **dict.fromkeys(("a", "b", "c", "d"), "ok"),
        **dict.fromkeys(("crash1", "crash2"), "crashed"),
        **dict.fromkeys(("fault1", "fault2"), "failed"),
        "hang": "hung",
    }
    assert rows["crash1"]["status"] == "crashed: SIGABRT"


def test_a_section_ends_with_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "GRACE_S", 0.2)
    started_s = time.monotonic()
    rows = run_children(tmp_path, "a,hang,b", seconds=1.5)
    assert time.monotonic() - started_s < 30
    assert rows["hang"]["status"].startswith("cut off")
    assert "b" not in rows


def test_shards_and_warming_processes(tmp_path: Path) -> None:
    rows = run_children(tmp_path, "a,b,c,d,e", shards=3)
    assert sorted(rows) == list("abcde")
    assert len(list(tmp_path.glob("s.*.jsonl"))) == 3
    other = tmp_path / "other"
    assert sorted(run_children(other, "a,b", warms=True)) == ["a", "b"]
    assert sorted(rows_of(other / "warming", "s")) == ["a", "b"]


def test_a_child_that_cannot_start_is_given_up(tmp_path: Path) -> None:
    started_s = time.monotonic()
    assert run_children(tmp_path, "", seconds=60.0) == {}
    assert time.monotonic() - started_s < 30
