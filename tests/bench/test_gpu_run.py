"""The GPU run without a GPU: sections, cells, tests of kernels, vLLM as a peer, tables, sweep."""

from __future__ import annotations

import json
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import __main__ as command
from bench.gpu import correctness, report, vllm_engine
from bench.gpu.cells import FAULT_EXIT, Cell, NotAvailable, Results, Row, run_cells
from bench.gpu.environment import Bench
from bench.gpu.limits import Ceilings, Cost
from bench.gpu.sweep import WORKLOADS, best_tiles, table_of
from bench.gpu.timing import figures, input_sets


def cell(key: str, outcome: Row | Exception) -> Cell:
    def run() -> Row:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return Cell(key, {"name": key}, run)


def statuses(out: Path, section: str) -> dict[str, str]:
    return {key: row["status"] for key, row in Results(out).of(section).items()}


class OnGpu(Bench):
    full, l2_bytes = True, 50 << 20


def bench(out: Path, peers: Path | None = None) -> Bench:
    """Return the context of a run on a GPU, on which nothing is run."""
    out.mkdir(exist_ok=True)
    return OnGpu(torch.device("cpu"), out, Results(out), peers)


# --- cells and sections ---------------------------------------------------------------------------


def test_every_cell_leaves_a_row(tmp_path: Path) -> None:
    cells = [
        cell("good", {"us": 1.5}),
        cell("null", {"status": "unmeasured"}),
        cell("bad", RuntimeError("no such thing\nmore")),
        cell("full", RuntimeError("CUDA out of memory")),
        cell("absent", NotAvailable("not supplied")),
    ]
    run_cells("s", cells, Results(tmp_path))
    assert statuses(tmp_path, "s") == {
        "good": "ok",
        "null": "unmeasured",
        "bad": "failed: RuntimeError: no such thing",
        "full": "failed: RuntimeError: CUDA out of memory",
        "absent": "skipped: not supplied",
    }
    good = {"section": "s", "cell": "good", "name": "good", "us": 1.5, "status": "ok"}
    row = Results(tmp_path).of("s")["good"]
    begin_s, end_s = row.pop("at_s")
    assert row == good and begin_s <= end_s


@pytest.mark.parametrize("who", ["CUDA error", "Triton Error [CUDA]"])
def test_a_lost_device_ends_the_process_after_its_row(tmp_path: Path, who: str) -> None:
    """The errors are in the words of torch and of Triton's launcher."""
    fault = RuntimeError(f"{who}: an illegal memory access was encountered")
    cells = [cell("fault", fault), cell("next", {})]
    with pytest.raises(SystemExit) as end:
        run_cells("s", cells, Results(tmp_path))
    assert end.value.code == FAULT_EXIT
    assert statuses(tmp_path, "s")["next"] == "not reached"
    run_cells("s", cells, Results(tmp_path))
    assert statuses(tmp_path, "s")["next"] == "ok"
    assert statuses(tmp_path, "s")["fault"].startswith(f"failed: RuntimeError: {who}")


# A section whose cells are named on its command line.
CHILD = """
import os, sys, time
from pathlib import Path
from bench.gpu.cells import Cell, Results, run_cells
def run(name):
    if name == "crash":
        os.abort()
    if name == "hang":
        time.sleep(60)
    return {}
folder, *names = sys.argv[1:]
cells = [Cell(name, {}, lambda name=name: run(name)) for name in names]
run_cells("s", cells, Results(Path(folder)))
"""


@pytest.mark.parametrize(
    "names, states",
    [
        (("a", "crash", "b"), ["ok", "not finished: its process ended", "ok"]),
        (("a", "hang", "b"), ["ok", "not finished: its process ended", "not reached"]),
    ],
)
def test_a_process_that_dies_loses_its_cell(
    names: tuple[str, ...], states: list[str], tmp_path: Path
) -> None:
    words = [sys.executable, "-c", CHILD, str(tmp_path), *names]
    command.run_section("s", words, tmp_path, 2.0 if "hang" in names else 60.0)
    assert list(statuses(tmp_path, "s").values()) == states


def test_sections_share_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins after the one before. Those that are needed keep their minimum."""
    cache, now_s, given = tmp_path / "cache", [0.0], {}
    (cache / "key").mkdir(parents=True)

    def run_section(name: str, words: list[str], out: Path, seconds: float) -> None:
        assert words[-2:] == ["--child", name]
        given[name] = round(seconds)
        now_s[0] += seconds

    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    monkeypatch.setattr(command, "run_section", run_section)
    monkeypatch.setattr(command.time, "monotonic", lambda: now_s[0])
    out = tmp_path / "out"
    assert command.main(["--out", str(out), "--triton-cache", str(tmp_path / "none.txz")]) == 0
    assert given == {"ceilings": 40, "engine": 208, "correctness": 20, "kernels": 20}
    left_out = {row["section"] for row in Results(out).rows}
    assert left_out == {"models", "engine-1b", "sweep"}
    assert (out / report.TABLE).read_text().startswith("no GPU")
    with tarfile.open(out / command.CACHE) as packed:
        assert "key" in packed.getnames()


def test_every_cell_of_a_device_can_be_named(tmp_path: Path, monkeypatch: Any) -> None:
    """Nothing runs: each section lists its cells, under keys of their own."""
    monkeypatch.setattr("bench.gpu.sweep.resident_programs", lambda *_: 132)
    least = {"ceilings": 3, "kernels": 80, "sweep": 35, "engine": 30, "engine-1b": 30, "vllm": 13}
    for section, count in (least | {"models": 24}).items():
        cells = list(command.SECTIONS[section].cells(bench(tmp_path)))
        assert len({cell.key for cell in cells}) == len(cells) >= count, section
        json.dumps([cell.labels for cell in cells])


def test_peers_that_are_none_are_refused(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        command.parse(["--out", str(tmp_path), "--peers", str(tmp_path)])
    assert "holds neither vllm/ nor vllm.txz" in capsys.readouterr().err


# --- figures --------------------------------------------------------------------------------------


def test_figures_of_a_launch(tmp_path: Path) -> None:
    row = figures([2e-6, 1e-6, 3e-6], Cost(3_000_000, 100), Ceilings(3e12, 1e15))
    assert row["median_us"] == pytest.approx(2.0) and row["limit_us"] == pytest.approx(1.0)
    assert row["fraction_of_limit"] == pytest.approx(0.5) and row["bound"] == "memory"
    assert row["tflop_per_s"] == pytest.approx(100 / 2e-6 / 1e12)
    assert [input_sets(bench(tmp_path), n) for n in (1 << 30, 4 << 20, 1)] == [1, 50, 256]


def test_tables_compare_what_was_measured() -> None:
    def steps(batch: int, lookahead: str, who: str, ms: float, **more: Any) -> Row:
        row = {"section": "engine", "what": "steps", "model": "m", "sampling": "greedy"}
        row |= {"batch": batch, "lookahead": lookahead, "implementation": who, "status": "ok"}
        return row | {"step_ms": ms, "tokens_per_s": batch / ms * 1e3} | more

    kernels = [{"kernel": "gemm", "calls": 32.0, "us": 5000.0}]
    of_step = {"what": "kernels of a step", "kernels": kernels}
    timed = {"section": "kernels", "kernel": "verify", "workload": "64", "status": "ok"}
    rows = [
        steps(64, "off", "cbatch", 6.0, over_limit=1.2),
        steps(64, "off", "vllm", 5.0),
        steps(64, "fixed:4", "cbatch", 12.0, tokens_per_s=16000.0),
        steps(64, "off", "cbatch", 6.0) | of_step,
        steps(64, "off", "vllm", 6.0) | of_step,
        timed | {"implementation": "cbatch", "median_us": 300.0},
        timed | {"implementation": "vllm", "median_us": 150.0},
        {"section": "correctness", "cell": "t", "status": "failed: wrong"},
        {"section": "correctness", "cell": "u", "status": "ok"},
        {"section": "models", "status": "not reached"},
    ]
    text = report.tables({"device": "X", "commit": "c"}, rows)
    lines = [line.split() for line in text.splitlines()]
    assert text.startswith("X, commit c")
    (line,) = [x for x in lines if x[:3] == ["m", "greedy", "64"]]
    assert line[3:5] == ["6", "1.2"] and "1.5" in line
    assert ["verify", "64", "vllm", "150", "-", "-", "-", "0.5"] in lines
    assert ["failed:", "wrong", "t"] in lines and ["models", "not", "reached", "1"] in lines
    assert text.count("gemm") == 2


# --- correctness and vLLM -------------------------------------------------------------------------

TESTS = """
import pytest

def test_right(): pass
def test_wrong(): assert 1 == 2, "not equal"
@pytest.fixture
def broken(): raise ValueError("no fixture")
def test_without(broken): pass
"""


def test_each_test_leaves_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    monkeypatch.setattr(correctness, "TESTS", str(tmp_path / "test_it.py"))
    words = correctness.command("--rootdir", str(tmp_path))
    monkeypatch.setattr(correctness, "command", lambda *_: words)
    assert correctness.run(bench(tmp_path)) == {"tests": 3}
    rows = statuses(tmp_path, "correctness")
    assert {key.split("::")[1]: status for key, status in rows.items()} == {
        "test_right": "ok",
        "test_wrong": "failed: AssertionError: not equal",
        "test_without": "error: ValueError: no fixture",
    }


# A fake vLLM in which a token takes a millisecond.
VLLM = """
from types import SimpleNamespace as Some
import sibling, time
__version__ = "9"
class SamplingParams:
    def __init__(self, **fields): self.__dict__.update(fields)
class LLM:
    def __init__(self, **fields): self.llm_engine, self.fields = Engine(), fields
    def apply_model(self, function): raise AttributeError("lm_head")
    def generate(self, prompts, params, use_tqdm):
        time.sleep(params.max_tokens * 1e-3)
        return [Some(outputs=[Some(token_ids=[0] * params.max_tokens)]) for _ in prompts]
class Engine:
    names = []
    def add_request(self, name, prompt, params): self.names.append(name)
    def step(self): return [Some(request_id=name) for name in self.names]
    def has_unfinished_requests(self): return bool(self.names and self.names.pop())
"""


def test_packed_vllm_is_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peers, source = tmp_path / "peers", tmp_path / "source"
    (peers / "wheels").mkdir(parents=True)
    (source / "vllm").mkdir(parents=True)
    (source / "vllm" / "__init__.py").write_text(VLLM)
    with tarfile.open(peers / "vllm.txz", "w:xz") as packed:
        packed.add(source / "vllm", "vllm")
    with zipfile.ZipFile(peers / "wheels" / "sibling-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("sibling.py", "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("vllm", "sibling"):
        monkeypatch.setitem(sys.modules, name, None)  # removes the fake module after the test
        del sys.modules[name]
    monkeypatch.setattr(vllm_engine.os, "environ", {})
    monkeypatch.setattr(vllm_engine, "step_kernels", lambda step, steps: {"kernels": [1]})
    context = bench(tmp_path / "out", peers)
    run_cells("vllm", vllm_engine.cells(context), context.results)
    rows = context.results.of("vllm")
    assert {row["status"] for row in rows.values()} == {"ok"}, rows
    note = rows["start"]["note"]
    assert "flashinfer is missing" in note and "logits are flat: AttributeError: lm_head" in note
    assert rows["steps, greedy 64"]["step_ms"] == pytest.approx(1.0, rel=0.5)
    assert rows["steps, top_p 8"]["note"] == note
    assert rows["kernels of a step, top_p 1"]["kernels"] == [1]


# --- the sweep ------------------------------------------------------------------------------------


def swept(keys: int, rows: int, us: float, status: str = "ok") -> Row:
    """Return a candidate that takes `us` for each workload."""
    labels = {"heads": "x", "kv_heads": 8, "group": 4, "head_dim": 128, "page_tokens": 64}
    tile = {"rows": rows, "keys": keys, "num_warps": 4, "num_stages": 3}
    times = dict.fromkeys(WORKLOADS[rows], us)
    return labels | {"arch": "sm_90", "tile": tile, "median_us": times, "status": status}


def test_the_table_of_a_sweep() -> None:
    rows = {
        "a": swept(64, 16, 50.0),
        "b": swept(32, 16, 40.0),
        "failed": swept(128, 16, 1.0, "failed: wrong"),
        "d": swept(64, 128, 50.0),
    }
    assert {key[2]: row["tile"]["keys"] for key, row in best_tiles(rows).items()} == {
        16: 32,
        128: 64,
    }
    key = {"arch": "sm_90", "bits": 16, "kv_bits": 16, "head_dim": 128, "page_tokens": 64}
    others = [
        key | {"group": 4, "rows": 16, "page_tokens": 16},
        key | {"group": 4, "kv_bits": 8, "rows": 16},
    ]
    old = [key | {"group": group, "rows": rows} for group in (4, 32) for rows in (16, 64)]
    table = table_of(rows, {"source": "compiled", "tiles": old + others}, "swept on X")
    assert table["source"] == "swept on X; the rest: compiled"
    kept = [tile for tile in table["tiles"] if "keys" not in tile]
    assert kept == [tile for tile in old if tile["rows"] == 64] + others
    new = [(t["rows"], t["group"], t["keys"]) for t in table["tiles"] if "keys" in t]
    assert sorted(new) == [(16, 4, 32), (128, 4, 64), (128, 32, 64)]
