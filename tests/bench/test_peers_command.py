"""Arguments, refusals and output of `python -m bench.peers`, without any peer."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.engine.systems import System, build_transformers, make_prompts
from bench.failures import Failures
from bench.peers import __main__ as peers
from bench.peers import files, perplexity
from bench.peers.figures import OUTPUT, STARTUP, rows_of
from bench.peers.files import ModelFormats
from bench.peers.gguf_writer import F16, write_gguf
from bench.peers.processes import Worker, busy
from bench.peers.systems import Entrant, Sizes, make_entrants
from bench.peers.workers.cbatch_worker import CbatchSystem
from tests.runtime.hf_models import build


def started(**settings: Any) -> CbatchSystem:
    sizes = {
        "max_sequences": 4,
        "tokens": 40,
        "step_tokens": 64,
        "threads": torch.get_num_threads(),
    }
    return CbatchSystem(draft=None, lookahead="off", dtype="float32", **sizes | settings)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFormats:
    return ModelFormats("llama-1m", None, tmp_path_factory.mktemp("models"), llama=None, threads=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "no-such"), "--model: no-such is not one of"),
        (("--model", "gone.gguf"), "--model: gone.gguf is not one of"),
        (("--type", "Q3_K"), "argument --type: invalid choice: 'Q3_K'"),
        (("--peer", "ollama"), "argument --peer: invalid choice: 'ollama'"),
        (("--lookahead", "adaptive"), "--lookahead: ratios are relative to off"),
        (("--batch",), "--batch: give a batch, or another measurement"),
        (("--perplexity", "gone.txt"), "--perplexity: gone.txt is not a file"),
        (("--cpus", "0", "9999"), "--cpus: name some of 0"),
        (("--batch", "--startup", "--limits"), "--limits: give --batch or --prefill"),
    ],
)
def test_what_is_refused(
    arguments: tuple[str, ...],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        peers.parse(arguments)
    assert words in capsys.readouterr().err


def test_a_type_that_only_llama_cpp_writes_is_refused_without_it(tmp_path: Path) -> None:
    model = ModelFormats("llama-1m", "Q4_K_M", tmp_path, llama=None, threads=2)
    with pytest.raises(
        ValueError, match="type: Q4_K_M is written by llama.cpp; name it by --llama"
    ):
        _ = model.cbatch_path


class _Quantiser:
    """A substitute for llama.cpp's process."""

    calls: list[tuple[Any, ...]] = []

    def __init__(self, module: str, python: str, threads: int) -> None:
        self.calls.append((module, python, threads))

    def start(self, **settings: Any) -> None:
        assert settings["model"] is None

    def call(self, method: str, source: str, target: str, *rest: Any) -> None:
        self.calls.append((method, Path(source).read_bytes()[:4], target, *rest))
        Path(target).write_bytes(b"new")

    def __enter__(self) -> _Quantiser:
        return self

    def __exit__(self, *_: object) -> None: ...


def test_a_file_is_turned_into_another_type(
    model: ModelFormats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp makes all types of a file, and the file itself stays."""
    source = tmp_path / "from" / "a.gguf"
    source.parent.mkdir()
    write_gguf(model.source, source, F16)
    monkeypatch.setattr(files, "Worker", _Quantiser)
    for kind in ("Q4_K_M", "BF16"):
        _Quantiser.calls.clear()
        turned = ModelFormats(str(source), kind, tmp_path, llama="/l/python", threads=3)
        assert turned.name == f"a.gguf {kind}" and turned.cbatch_path == tmp_path / f"a-{kind}.gguf"
        call = ("quantise", b"GGUF", str(turned.cbatch_path), kind, 3)
        assert _Quantiser.calls == [("llama_cpp", "/l/python", 3), call]
        assert turned.cbatch_path.read_bytes() == b"new" and source.exists()
        with pytest.raises(ValueError, match=f"type: {kind} is written by llama.cpp"):
            _ = ModelFormats(str(source), kind, tmp_path, llama=None, threads=3).cbatch_path
    assert ModelFormats(str(source), None, tmp_path, llama=None, threads=3).cbatch_path == source
    shape = ModelFormats("llama-1m", "Q4_K_M", tmp_path, llama="/l/python", threads=3)
    assert shape.cbatch_path.read_bytes() == b"new"
    assert sorted(path.name for path in tmp_path.glob("llama-1m*.gguf")) == [shape.cbatch_path.name]


def test_all_compute_in_fp32_where_the_file_is_to_have_it(tmp_path: Path) -> None:
    """llama.cpp does so, whatever type the source has."""
    build(tmp_path, "llama")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "bfloat16"}))
    dtypes = {
        kind: ModelFormats(str(tmp_path), kind, tmp_path, llama=None, threads=2).dtype
        for kind in (None, "BF16", "F32")
    }
    assert dtypes == {None: "bfloat16", "BF16": "bfloat16", "F32": "float32"}


def test_peers_are_found_where_they_are_named(model: ModelFormats) -> None:
    args = peers.parse(["--llama", "/l/python", "--vllm", "/v/python", "--threads", "3"])
    chosen = make_entrants(model, args, Sizes(8, 128, 1024))
    named = {entrant.name: entrant for entrant in chosen}
    assert list(named) == ["cbatch", "llama.cpp", "vllm", "transformers", "transformers continuous"]
    assert named["llama.cpp"].python == "/l/python" and named["vllm"].python == "/v/python"
    assert {entrant.threads for entrant in chosen} == {3}
    for entrant in chosen:
        assert entrant.settings.get("threads", 3) == 3
    assert named["vllm"].settings["model"] == str(model.source)
    assert named["llama.cpp"].settings["model"].endswith("llama-1m-F32.gguf")
    assert named["cbatch"].settings["dtype"] == "auto", "blocks of a GGUF file stay blocks"
    exact, *_ = make_entrants(model, args, Sizes(8, 128, 1024), exact=True)
    assert exact.settings["dtype"] == "float32"
    few = peers.parse(["--peer", "generate"])
    names = [entrant.name for entrant in make_entrants(model, few, Sizes(1, 8, 64))]
    assert names == ["cbatch", "transformers"]


def test_openvino_runs_gguf_files_alone(model: ModelFormats, tmp_path: Path) -> None:
    write_gguf(model.source, tmp_path / "a.gguf", F16)
    file = ModelFormats(str(tmp_path / "a.gguf"), None, tmp_path, llama=None, threads=3)
    args = peers.parse(["--peer", "openvino", "--openvino", "/o/python", "--threads", "3"])
    (_, openvino) = make_entrants(file, args, Sizes(8, 128, 1024), exact=True)
    assert (openvino.name, openvino.worker, openvino.python) == (
        "openvino",
        "openvino",
        "/o/python",
    )
    assert openvino.settings == {
        "model": str(file.source),
        "max_sequences": 8,
        "tokens": 128,
        "step_tokens": 1024,
        "threads": 3,
        "exact": True,
    }
    assert [each.name for each in make_entrants(model, args, Sizes(8, 128, 1024))] == ["cbatch"]


def test_a_model_that_openvino_cannot_read_is_noted(
    model: ModelFormats, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(model.name, OUTPUT, 8, [_named("cbatch")], [[1.0]])
    monkeypatch.setattr(peers, "time_systems", lambda *_: rows)
    command = ["--model", "llama-1m", "--peer", "openvino", "--skip-agreement"]
    peers.main([*command, "--openvino", "/o/python"])
    assert "openvino reads only GGUF files; left out: llama-1m" in capsys.readouterr().out
    monkeypatch.setattr(peers, "python_of", lambda *_: None)
    peers.main(command)
    assert "openvino left out: name a Python that has it by --openvino" in capsys.readouterr().out


def test_rows_are_medians_and_ratios_within_a_turn() -> None:
    systems = [_named(name) for name in ("cbatch", "llama.cpp", "vllm")]
    values = [[20.0, 60.0, 10.0], [10.0, 40.0, 10.0], [5.0, 10.0, 2.0]]
    own, llama, vllm = rows_of("m", OUTPUT, 8, systems, values)
    assert (own["value"], own["least"], own["most"]) == (20.0, 10.0, 60.0)
    assert (own["to_peer"], own["to_least"], own["to_most"]) == (1.5, 1.0, 2.0)
    assert (llama["to_peer"], llama["ours_to_it"]) == (1.0, 1.5)
    assert (vllm["to_peer"], vllm["ours_to_it"]) == (0.25, 5.0)
    (alone,) = rows_of("m", STARTUP, 0, systems[:1], values[:1])
    assert alone["to_peer"] is None and alone["ours_to_it"] == 1.0


def _named(name: str) -> System:
    return System(name, "off", lambda prompts, _: pytest.fail("nothing is run"))


def test_a_table_has_what_its_rows_have() -> None:
    rows = rows_of("m", OUTPUT, 8, [_named("cbatch")], [[1.0]])
    rows += rows_of("m", STARTUP, 0, [_named("cbatch")], [[2.0]])
    rows[0]["step_p99_to_median"] = 1.5
    (row,) = peers.rows_of_figure(OUTPUT, rows)
    assert row["step_p99_to_median"] == 1.5 and "to_peer" not in row and "figure" not in row
    assert "step_p99_to_median" not in peers.rows_of_figure(STARTUP, rows)[0]


def test_our_log_probabilities_are_those_of_the_model(model: ModelFormats) -> None:
    prompts = make_prompts(model.source, 20, 2, real=False)
    logprobs = started(model=str(model.source)).logprobs(prompts)
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(model.source, dtype=torch.float32).eval()
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        expected = peer(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    assert np.allclose(logprobs, expected.numpy(), atol=1e-4)


def test_our_steps_are_reported_without_the_first(model: ModelFormats) -> None:
    prompts = make_prompts(model.source, 12, 3, real=False)
    run = started(model=str(model.source)).run(prompts, 6)
    assert run["outputs"] == build_transformers(model.source, "float32").run(prompts, 6).outputs
    assert len(run["steps_s"]) == 5 and 0 < sum(run["steps_s"]) < run["seconds"]


def test_perplexity_and_the_distance_to_the_first() -> None:
    one = np.log(np.array([[0.5, 0.5], [0.25, 0.25]]))
    other = one - np.array([[0.1], [0.3]])
    own, other_row = perplexity.rows_of("m", [("cbatch", one), ("llama.cpp", other)])
    assert own["perplexity"] == pytest.approx(math.sqrt(8), abs=1e-3) and own["tokens"] == 4
    assert own["more_nats"] == 0.0
    assert other_row["more_nats"] == pytest.approx(0.2)
    assert other_row["ci95"] == pytest.approx(12.706 * 0.1, abs=1e-3)
    assert perplexity.rows_of("m", [("cbatch", one[:1])])[0]["ci95"] is None


def test_a_text_is_cut_into_whole_windows(tmp_path: Path, model: ModelFormats) -> None:
    text = tmp_path / "text"
    text.write_text("for i in range(10):\n    print(i)\n" * 200)
    demo = ModelFormats("demo", None, tmp_path, llama=None, threads=2)
    windows = perplexity.windows(demo, text)
    assert demo.tokenizer is not None and {len(ids) for ids in windows} == {
        perplexity.WINDOW_TOKENS
    }
    flat = [token for ids in windows for token in ids]
    whole = list(demo.tokenizer.encode(text.read_text()))
    assert flat == whole[: len(flat)] and len(whole) - len(flat) < perplexity.WINDOW_TOKENS
    text.write_text("short")
    with pytest.raises(ValueError, match="a window has 512"):
        perplexity.windows(demo, text)
    with pytest.raises(ValueError, match="has no tokenizer"):
        perplexity.windows(model, text)


def test_a_worker_that_dies_says_why() -> None:
    with (
        Worker("cbatch", sys.executable, 1) as worker,
        pytest.raises(RuntimeError, match="(?s)the worker of cbatch died:.*unexpected keyword"),
    ):
        worker.start(nonsense=1)


def loops() -> int:
    process = subprocess.run(["pgrep", "-fc", "getppid.. == parent"], capture_output=True)
    return int(process.stdout)


@pytest.mark.skipif(platform.system() != "Linux", reason="needs processors to be named")
def test_all_that_is_timed_runs_on_these_processors_together_with_the_loops(
    model: ModelFormats, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = os.sched_getaffinity(0)
    first = min(mine)
    seen: list[tuple[str, set[int], int]] = []

    def see(what: str) -> None:
        tell = "import os; print(*os.sched_getaffinity(0))"
        process = subprocess.run([sys.executable, "-c", tell], capture_output=True, text=True)
        seen.append((what, set(map(int, process.stdout.split())), loops() - before))

    def starting(
        entrants: list[Entrant], failures: Failures
    ) -> AbstractContextManager[list[System]]:
        see("start")
        return nullcontext([])

    before = loops()
    monkeypatch.setattr(peers, "startups", lambda *_: see("startups") or [])
    monkeypatch.setattr(peers, "started", starting)
    for name in ("outputs", "prefill"):
        monkeypatch.setattr(peers, name, lambda *_, name=name: see(name) or [])
    flags = ["--startup", "--prefill", "--batch", "1", "--cpus", str(first), "--busy", "2"]
    args = peers.parse([*flags, "--peer"])
    assert args.threads == 1
    assert peers.time_systems(model, args, Failures()) == []
    beside = {"startups": 2, "start": 0, "outputs": 2, "prefill": 2}
    assert seen == [(what, {first}, count) for what, count in beside.items()]
    assert os.sched_getaffinity(0) == mine


def test_busy_loops_end() -> None:
    before = loops()
    with busy(2):
        for _ in range(100):
            if loops() == before + 2:
                break
            time.sleep(0.05)
        assert loops() == before + 2
    assert loops() == before
