"""The one command without a GPU, its tables, vLLM as a peer, and the table that a sweep leaves."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import __main__ as command
from bench.gpu import correctness, report, vllm_engine
from bench.gpu.cells import Journal, Row, run_cells
from bench.gpu.child import CELLS
from bench.gpu.environment import Bench, RunMode
from bench.gpu.sweep import DECODES, best_tiles, score, table_of, workloads_of, write_table
from bench.gpu.turns import DeviceTurns


def test_the_dry_run_ends_with_a_document_of_nulls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sections run in processes of their own, as on a device. The user's cache is not packed."""
    out, kernels = tmp_path / "out", tmp_path / "kernels"
    (kernels / "key").mkdir(parents=True)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(kernels))
    sections = ("ceilings", "engine", "kernels")
    words = [word for name in sections for word in ("--section", name)]
    cache = tmp_path / "none.txz"
    assert command.main(["--out", str(out), *words, "--triton-cache", str(cache)]) == 0
    printed = capsys.readouterr().out
    assert "every figure is null" in printed
    files = {"results.json", "table.txt", "log.txt", command.CACHE}
    assert {path.name for path in out.iterdir()} == files
    with tarfile.open(out / command.CACHE) as packed:
        assert "key" in packed.getnames()
    assert printed == (out / report.TABLE).read_text() + "\n"
    document = json.loads((out / report.RESULTS).read_text())
    about, rows = document["about"], document["rows"]
    assert about["world"] == "listed" and about["device"] is None
    assert about["commit"] and about["versions"]["torch"]
    for section in sections:
        states = [row["status"] for row in rows if row["section"] == section]
        assert states and all(s == "unmeasured" or s.startswith("skipped: ") for s in states)
    figures = ("median_us", "step_ms", "per_s")
    assert not any(row.get(name) for row in rows for name in figures)


def test_every_cell_of_a_device_can_be_named(tmp_path: Path) -> None:
    """Nothing runs: each section lists its cells, under keys of their own."""
    bench = Bench(RunMode.DEVICE, torch.device("cpu"), tmp_path)
    for section, least in SECTIONS.items():
        cells = list(CELLS[section](bench))
        assert len({cell.key for cell in cells}) == len(cells) >= least, section
        json.dumps([cell.labels for cell in cells])


SECTIONS = {
    "ceilings": 3, "kernels": 90, "sweep": 40, "engine": 30, "engine-1b": 30, "vllm": 14,
    "models": 36,
}  # fmt: skip


def test_parts_follow_one_another(tmp_path: Path) -> None:
    """The engine's steps run before vLLM's, and both before long sections."""
    parts = {p.name: p for p in command.parts(tmp_path, tmp_path, command.SECTIONS)}
    assert list(parts) == list(command.SECTIONS) and not parts["engine"].after
    assert not parts["vllm"].after and parts["vllm"].most_s >= 150
    assert parts["kernels"].after == ("correctness", "vllm")
    assert "vllm" not in {p.name for p in command.parts(tmp_path, None, command.SECTIONS)}
    assert sum(p.least_s for p in parts.values() if p.needed) < 60


def test_peers_that_are_none_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.parse(["--out", str(tmp_path), "--peers", str(tmp_path)])
    assert "holds neither vllm/ nor vllm.txz" in capsys.readouterr().err


# --- correctness ----------------------------------------------------------------------------------

TESTS = """
import os
import pytest

def test_right(): pass
def test_wrong(): assert 1 == 2, "not equal"
@pytest.fixture
def broken(): raise ValueError("no fixture")
def test_without(broken): pass
def test_fault(): raise RuntimeError("CUDA error: an illegal memory access")
"""


def test_each_test_leaves_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    monkeypatch.setattr(correctness, "TESTS", str(tmp_path / "test_it.py"))
    monkeypatch.setenv("CBATCH_TEST_JOURNAL", str(tmp_path / "rows.jsonl"))
    words = [*correctness.command(processes=0), "--rootdir", str(tmp_path)]
    subprocess.run(words, check=False, capture_output=True)
    rows = Journal(tmp_path / "rows.jsonl").rows
    assert {key.split("::")[1]: row["status"] for key, row in rows.items()} == {
        "test_right": "ok",
        "test_wrong": "failed: AssertionError: not equal assert 1 == 2",
        "test_without": "failed: ValueError: no fixture",
        "test_fault": "failed: RuntimeError: CUDA error: an illegal memory access",
    }


# --- vLLM -----------------------------------------------------------------------------------------

# A fake vLLM that prints its calls, and in which a token takes a millisecond.
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
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("vllm", "sibling"):
        monkeypatch.setitem(sys.modules, name, None)  # removes the fake module after the test
        del sys.modules[name]
    monkeypatch.setattr(vllm_engine.os, "environ", {})
    monkeypatch.setattr(vllm_engine, "step_kernels", lambda step, steps: [{"kernel": "k"}])
    turns = DeviceTurns(out)
    turns.announce("engine")
    journal = Journal(out / "vllm.jsonl")
    bench = Bench(RunMode.DEVICE, torch.device("cpu"), out, peers)
    run_cells(vllm_engine.cells(bench), journal, turns)
    rows = journal.rows
    assert {row["status"] for row in rows.values()} == {"ok"}, rows
    note = rows["start"]["note"]
    assert "flashinfer is missing" in note and "logits are flat: AttributeError: lm_head" in note
    assert rows["steps, greedy 64"]["step_ms"] == pytest.approx(1.0, rel=0.5)
    assert rows["steps, top_p 8"]["note"] == note
    assert rows["kernels of a step, top_p 1"]["kernels"] == [{"kernel": "k"}]
    assert vllm_engine.os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"


# --- tables ---------------------------------------------------------------------------------------


def steps(batch: int, lookahead: str, who: str, ms: float, **more: Any) -> Row:
    row = {"section": "engine", "what": "steps", "model": "m", "sampling": "greedy"}
    row |= {"batch": batch, "lookahead": lookahead, "implementation": who, "status": "ok"}
    return row | {"step_ms": ms, "tokens_per_s": batch / ms * 1e3} | more


def test_tables_compare_what_was_measured(tmp_path: Path) -> None:
    kernels = [{"kernel": "gemm", "calls": 32.0, "us": 5000.0}]
    of_step = {"what": "kernels of a step", "kernels": kernels}
    timed = {"section": "kernels", "kernel": "verify", "workload": "64", "status": "ok"}
    rows = [
        steps(64, "off", "cbatch", 6.0, over_limit=1.2),
        steps(64, "off", "vllm", 5.0),
        steps(64, "fixed:4", "cbatch", 12.0, tokens_per_s=16000.0),
        steps(8, "off", "cbatch", 5.0),
        steps(64, "off", "cbatch", 6.0) | of_step,
        steps(64, "off", "vllm", 6.0) | of_step,
        timed | {"implementation": "cbatch", "median_us": 300.0},
        timed | {"implementation": "vllm", "median_us": 150.0},
        {"section": "correctness", "test": "t", "status": "failed: wrong"},
        {"section": "correctness", "test": "u", "status": "ok"},
        {"section": "models", "status": "not reached"},
    ]
    report.write(tmp_path, {"device": "X", "commit": "c"}, rows)
    assert json.loads((tmp_path / report.RESULTS).read_text())["rows"] == rows
    text = (tmp_path / report.TABLE).read_text()
    lines = [line.split() for line in text.splitlines()]
    assert text.startswith("X, commit c")
    names = next(line for line in lines if line[:3] == ["model", "sampling", "rows"])
    assert next(x for x in lines if x[:3] == ["m", "greedy", "64"])[:5] == [
        "m",
        "greedy",
        "64",
        "6",
        "1.2",
    ]
    (line,) = [x for x in lines if x[:3] == ["m", "greedy", "64"]]
    assert "1.2" in line and "1.5" in line and names
    assert ["verify", "64", "vllm", "150", "-", "-", "-", "0.5"] in lines
    assert ["failed:", "wrong", "t"] in lines and ["models", "not", "reached", "1"] in lines
    assert text.count("32 x gemm") == 2


def swept(keys: int, rows: int, us: float | None, *, decoded_us: float | None = None) -> Row:
    """Return a candidate that takes `us` for each workload; for decodes another time, if given."""
    labels = {"heads": "x", "kv_heads": 8, "group": 4, "head_dim": 128, "page_tokens": 64}
    tile = {"rows": rows, "keys": keys, "num_warps": 4, "num_stages": 3}
    times = {n: decoded_us if decoded_us and n in DECODES else us for n in workloads_of(rows)}
    return labels | {"arch": "sm_90", "tile": tile, "split_tokens": 64, "median_us": times}


ROWS = {
    "a": swept(64, 16, 50.0),
    "b": swept(32, 16, 40.0),
    "longer parts": swept(16, 16, 30.0) | {"split_tokens": 128},
    "not measured": swept(16, 128, None),
    "beaten": swept(64, 32, 70.0),
    "c": swept(64, 64, 60.0),
    "d": swept(64, 128, 50.0),
}


def test_each_kind_of_query_has_its_best_tile() -> None:
    """A tile of few rows is useless if it decodes slower than one of more. So is a tile of many
    rows that takes prompts slower than one of fewer."""
    best = {key[2]: row["tile"]["keys"] for key, row in best_tiles(ROWS).items()}
    assert best == {16: 32, 64: 64, 128: 64}
    faster = ROWS | {"c": swept(128, 64, 60.0, decoded_us=35.0)}
    assert {key[2] for key in best_tiles(faster)} == {64, 128}
    faster["d"] = swept(64, 128, 130.0)
    assert {key[2] for key in best_tiles(faster)} == {64}
    assert score({"a": 2.0, "b": 8.0}, {"a": 1.0, "b": 1.0}) == pytest.approx(4.0)
    assert score({"a": 2.0, "b": None}, {"a": 1.0, "b": 1.0}) == float("inf")


def test_the_table_of_a_sweep(tmp_path: Path) -> None:
    key = {"arch": "sm_90", "bits": 16, "kv_bits": 16, "head_dim": 128, "page_tokens": 64}
    others = [
        key | {"group": 4, "rows": 16, "page_tokens": 16},
        key | {"group": 4, "kv_bits": 8, "rows": 16},
    ]
    old = [key | {"group": group, "rows": rows} for group in (4, 32) for rows in (16, 32, 64)]
    shipped = {"source": "compiled, untimed", "tiles": old + others}
    table = table_of(ROWS, shipped, "swept on X")
    assert table["source"] == "swept on X; the rest: compiled, untimed"
    assert table["tiles"][:2] == others
    new = [(t["rows"], t["group"], t["keys"]) for t in table["tiles"][2:]]
    assert sorted(new) == [(16, 4, 32), (64, 4, 64), (64, 32, 64), (128, 4, 64), (128, 32, 64)]
    assert not {"heads", "kv_heads", "median_us"} & set(table["tiles"][-1])
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps(shipped))
    written = write_table(ROWS, path, "swept on X", tmp_path / "..")
    assert written is not None and json.loads(written.read_text()) == table
    assert write_table({}, path, "nothing", tmp_path) is None
