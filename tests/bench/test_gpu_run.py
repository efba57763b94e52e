"""The one command without a GPU, the verdicts, and the table that a sweep leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.gpu import __main__ as command
from bench.gpu import combine, preflight, summary, supervise
from bench.gpu.cells import Row
from bench.gpu.limits import CHUNK, DECODE, VERIFY
from bench.gpu.summary import verdicts
from bench.gpu.sweep import DECODES, best_tiles, score, table_of, workloads_of, write_table
from bench.gpu.world import Bench, World


def test_the_dry_run_ends_with_a_document_of_nulls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_world", lambda: World.LISTED)
    assert command.main(["--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed.splitlines()[-1])
    assert found == json.loads((tmp_path / summary.RESULTS).read_text())
    assert "unmeasured" in printed
    assert found["about"]["world"] == "listed" and found["about"]["device"] is None
    assert found["about"]["commit"] and found["about"]["versions"]["torch"]
    for section in ("limits", "correctness", "kernels", "sweep", "engine"):
        states = [row["status"] for row in found[section]]
        assert states and all(s == "unmeasured" or s.startswith("skipped: ") for s in states)
    assert all(row.get("median_us") is None for row in found["kernels"])
    assert all(row["mbytes_a_step"] > 0 and row["step_ms"] is None for row in found["engine"])
    assert {target["met"] for target in found["targets"]} == {None}


def test_a_section_runs_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device; the process itself finds none, and says so in its rows."""
    monkeypatch.setattr(command, "find_world", lambda: World.DEVICE)
    monkeypatch.setattr(command, "device_of", lambda world: torch.device("cpu"))
    monkeypatch.setattr(command, "describe", lambda world: dict(ABOUT))
    args = command.parse(["--out", str(tmp_path), "--section", "limits", "--minutes", "9"])
    found = command.run(args)
    assert [row["ceiling"] for row in found["limits"]] == ["copy", "matmul"]
    assert {row["status"] for row in found["limits"]} == {"unmeasured"}
    assert (tmp_path / "limits.log").read_text() == ""


ABOUT = {"device": "a device", "versions": {"torch": "2.11.0"}, "date": "today", "commit": "c"}


def test_every_cell_of_a_device_can_be_named(tmp_path: Path) -> None:
    """Nothing runs: each section lists what it would, under keys of their own."""
    bench = Bench(World.DEVICE, torch.device("cpu"), tmp_path, None, lambda: 0.0)
    for section, least in SECTIONS.items():
        cells = list(command.cells_of(section)(bench))
        assert len({cell.key for cell in cells}) == len(cells) >= least, section
        json.dumps([cell.labels for cell in cells])


SECTIONS = {"limits": 2, "correctness": 45, "kernels": 100, "sweep": 40, "engine": 48}


@pytest.mark.slow
def test_sections_with_interpreted_kernels(interpreted: tuple[int, str]) -> None:
    status, output = interpreted
    assert status == 0, output
    assert " passed" in output and "skipped" not in output


def test_time_is_shared_out_among_the_sections_asked_for() -> None:
    shares = command.seconds_of(["kernels", "sweep"], 245.0)
    assert list(shares) == ["limits", "kernels", "sweep"]
    assert sum(shares.values()) == pytest.approx(240.0)
    assert shares["kernels"] == pytest.approx(20 + (240 - 12 - 20 - 30) * 115 / (5 + 115 + 60))


@pytest.mark.parametrize(
    ("minutes", "fits"),
    [
        (0.2, []),
        (0.5, ["correctness"]),
        (1, ["correctness", "limits", "kernels"]),
        (2, ["correctness", "limits", "kernels", "engine"]),
        (9, ["correctness", "limits", "kernels", "engine", "sweep"]),
    ],
)
def test_no_more_is_begun_than_the_minutes_hold(minutes: float, fits: list[str]) -> None:
    shares = command.seconds_of(["sweep", "correctness", "kernels", "engine"], 60 * minutes)
    assert list(shares) == fits
    assert sum(shares.values()) <= 60 * minutes
    assert all(seconds > supervise.GRACE_S for seconds in shares.values())


def test_what_the_minutes_do_not_hold_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_world", lambda: World.LISTED)
    assert command.main(["--out", str(tmp_path), "--minutes", "1"]) == 0
    printed = capsys.readouterr().out
    assert "left out, for 1 minutes do not hold them: engine, sweep" in printed
    found = json.loads((tmp_path / summary.RESULTS).read_text())
    assert found["about"]["left_out"] == ["engine", "sweep"] and "sweep" not in found


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("torch.cuda.is_available", lambda: False, "torch sees no GPU"),
        ("torch.cuda.get_device_capability", lambda: (7, 5), "compute capability is 7.5"),
        ("bench.gpu.preflight.shutil.which", lambda *_, **__: None, "needs a C compiler"),
        (
            "bench.gpu.preflight.sysconfig.get_paths",
            lambda: {"include": "/nowhere"},
            "needs Python.h",
        ),
    ],
)
def test_what_nothing_runs_without_is_told_in_a_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: object,
    told: str,
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(command, "find_world", lambda: World.DEVICE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(name, value)
    assert command.main(["--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bench.gpu: ") and told in line
    assert not any(tmp_path.iterdir())


def test_what_is_skipped_for_want_of_something_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "find_spec", lambda _: None)
    monkeypatch.setattr(preflight.shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20 << 30, 80 << 30))
    missing = [each.what for each in preflight.lacks(None)]
    assert missing == [
        "compute-sanitizer", "nvidia-smi", "transformers", "--peers DIR with vllm/",
        "40 GiB of free memory",
    ]  # fmt: skip
    assert len(preflight.line(preflight.lacks(None)).splitlines()) == 1
    (tmp_path / "vllm").mkdir()
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 << 30, 80 << 30))
    monkeypatch.setattr(preflight.shutil, "which", lambda name, **_: name)
    assert preflight.line(preflight.lacks(tmp_path)) == "nothing is missing"


def attention(workload: str, implementation: str, us: float, **more: float) -> dict[str, Row]:
    key = f"attention {workload} {implementation}"
    row = {"kernel": "attention", "workload": workload, "implementation": implementation}
    return {key: row | {"median_us": us} | more}


def test_verdicts() -> None:
    kernels = attention(DECODE, "cbatch", 400.0, fraction_of_limit=0.895)
    kernels |= attention(VERIFY, "cbatch", 440.0, fraction_of_limit=0.8)
    kernels |= attention(CHUNK, "cbatch", 300.0, tflop_per_s=450.0)
    kernels |= attention(DECODE, "vllm triton", 800.0) | attention(VERIFY, "vllm triton", 430.0)
    right = {"a": {"status": "ok"}, "b": {"status": "ok"}}
    engine = {"llama-3.1-8b batch 64 off cbatch": {"over_limit": 1.2}}
    found = {v.target: (v.found, v.met) for v in verdicts(right, kernels, engine)}
    assert found["decode attention, of copy bandwidth"] == (0.895, True)
    assert found["verify (k = 7), of copy bandwidth"] == (0.8, False)
    assert found["verify (k = 7) over decode"] == (1.1, False)
    assert found["few long sequences, of copy bandwidth"] == (None, None)
    assert found["prefill chunk of 2048, TFLOP/s"] == (450.0, True)
    assert found["vLLM's Triton attention over ours, worst row"] == (430 / 440, False)
    assert found["engine step over its limit, 8B, batch 64"] == (1.2, False)
    assert found["correctness cells that are wrong"] == (0, True)


def test_what_is_left_out_is_not_called_right() -> None:
    def met(*states: str) -> bool | None:
        rows = {str(i): {"status": state} for i, state in enumerate(states)}
        return verdicts(rows, {}, {})[0].met

    assert met("ok", "skipped: no time") is None
    assert met("unmeasured") is None and met() is None
    assert met("ok", "wrong") is False and met("ok", "crashed: SIGABRT") is False
    ahead = attention(DECODE, "vllm triton", 800.0) | attention(DECODE, "cbatch", 400.0)
    ahead |= attention(VERIFY, "vllm triton", 800.0)
    assert verdicts({}, ahead, {})[-2].met is None, "one row was not measured"


@pytest.mark.parametrize(
    ("exit_code", "text", "status"),
    [
        (0, "relative error 1e-3\n========= ERROR SUMMARY: 0 errors", "ok"),
        (0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", "ok"),
        (9, "========= Invalid __global__ read\n========= ERROR SUMMARY: 3 errors", "wrong"),
        (1, "========= Error: Device not supported", "skipped"),
        (0, "nothing was said", "skipped"),
    ],
)
def test_the_sanitizer_is_understood(exit_code: int, text: str, status: str) -> None:
    assert combine.judge(exit_code, text)["status"].split(":")[0] == status


def swept(keys: int, rows: int, us: float | None, *, decoded_us: float | None = None) -> Row:
    """A candidate that takes `us` for each workload; for decodes another time, if given."""
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
    """One of few rows that decodes slower than one of more has no use, nor has one of many rows
    that takes prompts slower than one of fewer."""
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
