"""The GPU run without a GPU: sections, cells, limits, vLLM as a peer, tables, sweep, results."""

from __future__ import annotations

import json
import re
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.gpu import __main__ as command
from bench.gpu import correctness, engine, host, models, report
from bench.gpu.cells import FAULT_EXIT, Bench, Cell, NotAvailable, Row
from bench.gpu.inputs import ROWS, VOCAB, profiles, recorded_logits
from bench.gpu.sweep import WORKLOADS, best_tiles, table_of
from bench.gpu.timing import (
    ATTENTION,
    HEADS,
    MODELS,
    RAGGED,
    Ceilings,
    Cost,
    Query,
    attention_cost,
    decode_cost,
    figures,
    input_sets,
    workload,
)

RESULTS = sorted((Path(__file__).parents[2] / "bench" / "results").glob("*.json"))


class OnGpu(Bench):
    """The context of a run on a GPU, on which nothing is run."""

    l2_bytes = 50 << 20

    def __init__(self, out: Path, peers: Path | None = None) -> None:
        out.mkdir(exist_ok=True)
        super().__init__(out, peers)
        self.full = True


def cell(key: str, outcome: Row | Exception) -> Cell:
    def run() -> Row:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return Cell(key, {"name": key}, run)


def statuses(out: Path, section: str) -> dict[str, str]:
    return {key: row["status"] for key, row in Bench(out).of(section).items()}


# --- cells and sections ---------------------------------------------------------------------------


def test_every_cell_leaves_a_row(tmp_path: Path) -> None:
    cells = [
        cell("good", {"us": 1.5}),
        cell("bad", RuntimeError("no such thing\nmore")),
        cell("full", RuntimeError("CUDA out of memory")),
        cell("absent", NotAvailable("not supplied")),
    ]
    Bench(tmp_path).measure("s", cells)
    assert statuses(tmp_path, "s") == {
        "good": "ok",
        "bad": "failed: RuntimeError: no such thing",
        "full": "failed: RuntimeError: CUDA out of memory",
        "absent": "skipped: not supplied",
    }
    row = Bench(tmp_path).of("s")["good"]
    begin_s, end_s = row.pop("at_s")
    assert begin_s <= end_s
    assert row == {"section": "s", "cell": "good", "name": "good", "us": 1.5, "status": "ok"}


@pytest.mark.parametrize("who", ["CUDA error", "Triton Error [CUDA]"])
def test_a_lost_device_ends_the_process_after_its_row(tmp_path: Path, who: str) -> None:
    """The errors are in the words of torch and of Triton's launcher. The next process goes on."""
    fault = RuntimeError(f"{who}: an illegal memory access was encountered")
    cells = [cell("fault", fault), cell("next", {})]
    with pytest.raises(SystemExit) as end:
        Bench(tmp_path).measure("s", cells)
    assert end.value.code == FAULT_EXIT
    assert statuses(tmp_path, "s")["next"] == "not reached"
    Bench(tmp_path).measure("s", cells)
    assert statuses(tmp_path, "s")["next"] == "ok"
    assert statuses(tmp_path, "s")["fault"].startswith(f"failed: RuntimeError: {who}")


# A section's process: the first one dies in its second cell, and the next one hangs in the fourth.
CHILD = """
import json, sys, time
from pathlib import Path
path = Path(sys.argv[1])
document = json.loads(path.read_text()) if path.exists() else {"about": {}, "rows": []}
rows = document["rows"] = document["rows"] or [
    {"section": "s", "cell": cell, "status": "not reached"} for cell in "abcde"
]
for row in rows:
    if row["status"] == "not reached":
        row["status"] = "not finished"
        path.write_text(json.dumps(document))
        if row["cell"] == "b":
            sys.exit(70)
        if row["cell"] == "d":
            time.sleep(60)
        row["status"] = "ok"
"""


def test_a_process_that_dies_loses_its_cell_and_another_continues(tmp_path: Path) -> None:
    words = [sys.executable, "-S", "-c", CHILD, str(tmp_path / "results.json")]
    command.run_section("s", words, tmp_path, 3.0)
    states = list(statuses(tmp_path, "s").values())
    assert states == ["ok", "not finished", "ok", "not finished", "not reached"]


def test_sections_share_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    left_out = {"models", "engine-1b", "sweep", "host"}
    assert {
        row["section"] for row in json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    } == left_out
    assert (out / command.TABLE).read_text().startswith("no GPU")
    with tarfile.open(out / command.CACHE) as packed:
        assert "key" in packed.getnames()


def test_every_cell_of_a_device_can_be_named(tmp_path: Path, monkeypatch: Any) -> None:
    """Nothing runs: each section lists its cells, under keys of their own."""
    monkeypatch.setattr("bench.gpu.sweep.resident_programs", lambda *_: 132)
    least = {"ceilings": 3, "kernels": 80, "sweep": 35, "engine": 30, "engine-1b": 30, "vllm": 13}
    for section, count in (least | {"models": 24}).items():
        cells = list(command.SECTIONS[section].cells(OnGpu(tmp_path)))
        assert len({cell.key for cell in cells}) == len(cells) >= count, section
        json.dumps([cell.labels for cell in cells])
    assert all(folder.is_dir() for folder in models.HEADS.values())


def test_peers_that_are_none_are_refused(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        command.parse(["--out", str(tmp_path), "--peers", str(tmp_path)])
    assert "holds neither vllm/ nor vllm.txz" in capsys.readouterr().err


def test_the_section_of_the_host_leaves_a_row_per_line_and_needs_no_device(tmp_path: Path) -> None:
    made = {"lookahead": "off", "requests": "stay", "host_us": 300.0}
    program = [sys.executable, "-c", f"print({json.dumps(made)!r})"]
    assert host.run(Bench(tmp_path), program) == {"steps": 1}
    with pytest.raises(RuntimeError, match="exit status 3 after 1 rows"):
        host.run(Bench(tmp_path), [*program[:2], f"{program[2]}; exit(3)"])
    (row,) = Bench(tmp_path).rows
    assert report.tables([row])["host time"][0]["host_us"] == 300.0
    assert [name for name, each in command.SECTIONS.items() if each.anywhere] == ["host"]


# --- workloads, limits and tables -----------------------------------------------------------------


def test_workloads_are_read_as_vllm_writes_them() -> None:
    assert workload("2q2k_32q1s4k") == [Query(2048, 2048)] * 2 + [Query(1, 4096)] * 32
    assert workload("q5_2q1s33") == [Query(5, 5), Query(1, 33), Query(1, 33)]
    assert sorted({q.query_tokens for q in workload(RAGGED)}) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(set(ATTENTION)) == len(ATTENTION) and all(workload(name) for name in ATTENTION)
    for name in ("", "q", "s4k", "4x1s1k", "q1s1k_", "q8s4", "q0s4"):
        with pytest.raises(ValueError, match=r"^workload: "):
            workload(name)


def test_limits_are_those_computed_by_hand() -> None:
    """64 x 4096 tokens of 4096 bytes of KV, and 64 x 4096 elements of q and of the result."""
    h100 = Ceilings(read_bytes_per_s=3.0e12, matmul_flop_per_s=798e12)
    decode, verify, chunk = (
        attention_cost(workload(name), HEADS["llama-8b"]) for name in ("64q1s4k", "64q8s4k", "q2k")
    )
    assert decode == Cost(1_073_741_824 + 2 * 524_288, 4 * 128 * 32 * 64 * 4096)
    assert decode.limit(h100)[0] * 1e6 == pytest.approx(358.26, abs=0.01)
    assert verify.num_bytes / decode.num_bytes == pytest.approx(1.0068, abs=1e-4)
    assert chunk.flop == 4 * 128 * 32 * (2048 * 2049 // 2)  # a token sees those before it
    assert [cost.limit(h100)[1] for cost in (decode, verify, chunk)] == ["memory"] * 2 + ["matmul"]
    # Parameters as published, less the embedding (which is looked up) and the norms.
    for shape, weights in zip(MODELS.values(), (7_504_658_432, 1_235_746_816), strict=True):
        cost, layers = decode_cost(shape, 3, 10), shape.num_hidden_layers
        kv_width, width = 8 * shape.head_size, 32 * shape.head_size
        assert cost.num_bytes == 2 * weights + 3 * 10 * layers * 2 * kv_width * 2
        assert cost.flop == 3 * (2 * weights + 10 * layers * 4 * width)


def test_figures_of_a_launch(tmp_path: Path) -> None:
    row = figures([2e-6, 1e-6, 3e-6], Cost(3_000_000, 100), Ceilings(3e12, 1e15))
    assert [row[f"{name}_us"] for name in ("median", "low", "high")] == pytest.approx([2, 1, 3])
    assert row["limit_us"] == pytest.approx(1) and row["fraction_of_limit"] == pytest.approx(0.5)
    assert [input_sets(OnGpu(tmp_path), n) for n in (1 << 30, 4 << 20, 1)] == [1, 50, 256]


def test_tables_compare_what_was_measured() -> None:
    def steps(lookahead: str, who: str, ms: float, **more: Any) -> Row:
        row = {"section": "engine", "what": "steps", "model": "m", "sampling": "greedy"}
        row |= {"batch": 64, "lookahead": lookahead, "implementation": who, "status": "ok"}
        return row | {"step_ms": ms, "tokens_per_s": 64 / ms * 1e3} | more

    kernels = [{"kernel": "gemm", "calls": 32.0, "us": 5000.0}]
    of_step = {"what": "kernels of a step", "kernels": kernels}
    timed = {"section": "kernels", "kernel": "verify", "workload": "64", "status": "ok"}
    rows = [
        steps("off", "cbatch", 6.0, over_limit=1.2),
        steps("off", "vllm", 5.0),
        steps("fixed:4", "cbatch", 12.0, tokens_per_s=16000.0),
        steps("off", "cbatch", 6.0) | of_step,
        timed | {"implementation": "cbatch", "median_us": 300.0},
        timed | {"implementation": "vllm", "median_us": 150.0},
        {"section": "correctness", "cell": "t", "status": "failed: wrong"},
        {"section": "correctness", "cell": "u", "status": "ok"},
        {"section": "models", "status": "not reached"},
    ]
    tables = report.tables(rows)
    off, _, fixed = tables["steps"]
    assert (off["over_limit"], off["over_vllm"], off["over_off"]) == (1.2, 1.2, 1.0)
    assert (fixed["over_vllm"], fixed["over_off"]) == (None, 1.5)
    assert [row["over_ours"] for row in tables["kernels"]] == [1.0, 0.5]
    assert {"outcome": "failed: wrong", "tests": "t"} in tables["tests by outcome"]
    assert tables["not measured"] == [{"section": "models", "status": "not reached", "cells": 1}]
    assert tables["kernels of a step"][0]["kernel"] == "gemm"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_stored_file_says_what_made_its_rows(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    document = json.loads(text)
    for name in ("device", "driver", "date", "commit", "made_by"):
        assert document["about"][name], name
    assert document["about"]["versions"]["triton"] and len(document["rows"]) > 20
    assert all(row["section"] for row in document["rows"])
    assert not re.search(r'"/|\.\./| /\w+/', text), "a path of some machine"
    assert path.name in (path.parent / "README.md").read_text(encoding="utf-8")


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
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # one process
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    words = correctness.command(str(tmp_path / "test_it.py"), "--rootdir", str(tmp_path))
    assert correctness.run(OnGpu(tmp_path), words) == {"tests": 3}
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
    monkeypatch.chdir(tmp_path)  # which vLLM's engine changes
    for name in ("vllm", "sibling"):
        monkeypatch.setitem(sys.modules, name, None)  # removes the fake module after the test
        del sys.modules[name]
    monkeypatch.setattr(engine.os, "environ", {})
    monkeypatch.setattr(engine, "step_kernels", lambda step, steps: {"kernels": [1]})
    context = OnGpu(tmp_path / "out", peers)
    context.measure("vllm", engine.vllm_cells(context))
    rows = context.of("vllm")
    assert {row["status"] for row in rows.values()} == {"ok"}, rows
    note = rows["start"]["note"]
    assert "flashinfer is missing" in note and "logits are flat: AttributeError: lm_head" in note
    assert rows["steps, off greedy 64"]["step_ms"] == pytest.approx(1.0, rel=0.5)
    assert rows["steps, off top_p 8"]["note"] == note
    assert rows["kernels of a step, off top_p 1"]["kernels"] == [1]


# --- recorded logits ------------------------------------------------------------------------------


def nuclei(logits: Tensor) -> Tensor:
    """Return the tokens that temperature 0.8 and top_p 0.9 keep, for each row, ascending."""
    probs = (logits.double() / 0.8).softmax(-1).sort(-1, descending=True).values
    return ((probs.cumsum(-1) < 0.9).sum(-1) + 1).sort().values


def test_nuclei_are_those_of_the_recorded_model_in_any_vocabulary() -> None:
    sizes = nuclei(torch.from_numpy(profiles(VOCAB)))
    assert sizes[[0, ROWS // 2, -1]].tolist() == pytest.approx([1, 10, 874], rel=0.2)
    stretched, recorded = profiles(128_256), profiles(VOCAB)
    assert stretched.shape == (ROWS, 128_256) and (np.diff(stretched) <= 0).all()
    assert np.array_equal(stretched[:, :1024], recorded[:, :1024])
    assert np.allclose(stretched[:, -1], recorded[:, -1])
    with pytest.raises(ValueError, match=r"^vocab: 2047 tokens, at least 2048"):
        profiles(2047)


def test_rows_are_permutations_of_profiles() -> None:
    logits = recorded_logits(ROWS + 2, 4096, seed=3)
    expected = torch.from_numpy(profiles(4096)).bfloat16()
    assert torch.equal(logits[:ROWS].sort(descending=True).values, expected)
    assert torch.equal(logits[ROWS:].sort(descending=True).values, expected[:2])
    assert not torch.equal(logits[0], logits[ROWS]), "each row has its own order"


# --- the sweep ------------------------------------------------------------------------------------


def swept(keys: int, rows: int, us: float, status: str = "ok") -> Row:
    """Return a candidate that takes `us` for each workload."""
    labels = {"heads": "x", "kv_heads": 8, "group": 4, "head_dim": 128, "page_tokens": 64}
    tile = {"rows": rows, "keys": keys, "num_warps": 4, "num_stages": 3}
    times = dict.fromkeys(WORKLOADS[rows], us)
    return labels | {"arch": "sm_90", "tile": tile, "median_us": times, "status": status}


def test_the_table_of_a_sweep() -> None:
    rows = [
        swept(64, 16, 50.0),
        swept(32, 16, 40.0),
        swept(128, 16, 1.0, "failed: wrong"),
        swept(64, 128, 50.0),
    ]
    best = best_tiles(rows)
    assert [(row["tile"]["rows"], row["tile"]["keys"]) for row in best] == [(16, 32), (128, 64)]
    key = {"arch": "sm_90", "bits": 16, "kv_bits": 16, "head_dim": 128, "page_tokens": 64}
    others = [
        key | {"group": 4, "rows": 16, "page_tokens": 16},
        key | {"group": 4, "kv_bits": 8, "rows": 16},
    ]
    old = [key | {"group": group, "rows": rows} for group in (4, 32) for rows in (16, 64)]
    table = table_of(best, old + others)
    kept = [tile for tile in table if "keys" not in tile]
    assert kept == [tile for tile in old if tile["rows"] == 64] + others
    new = [(t["rows"], t["group"], t["keys"]) for t in table if "keys" in t]
    assert sorted(new) == [(16, 4, 32), (128, 4, 64), (128, 32, 64)]
