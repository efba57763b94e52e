"""The limits of the machine are measured together with the systems, which are reported as a share
of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.engine.systems import EngineRun, System
from bench.failures import Failures
from bench.peers import figures
from bench.peers.figures import DECODE, OUTPUT, PREFILL, rows_of
from bench.peers.files import ModelFormats
from bench.peers.gguf_writer import Q8_0, convert, gguf_bytes
from bench.peers.systems import limits
from bench.peers.workers import limits_worker
from tests.runtime.hf_models import SHAPE, build


def files(path: str, folder: Path, kind: str | None = None) -> ModelFormats:
    return ModelFormats(path, kind, folder, llama=None, threads=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFormats:
    return files("llama-1m", tmp_path_factory.mktemp("models"))


def test_limits_take_as_long_as_reading_and_multiplying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_worker, "READ_BYTES", 1 << 16)
    monkeypatch.setattr(limits_worker, "WIDTH", 16)
    threads = torch.get_num_threads()
    limits = limits_worker.MachineLimits(1 << 14, 10.0, 100.0, 512.0, threads=threads)
    assert all(step > 0 for step in limits.run([[1]], 3)["steps_s"])
    done: list[Any] = []

    def best_s(do: Any) -> float:
        done.append(do())
        return 2.0

    monkeypatch.setattr(limits_worker, "best_s", best_s)
    run = limits.run([[1, 2, 3]] * 2, 4)
    assert run["outputs"] == [[0] * 4] * 2
    assert run["steps_s"] == [0.5] * 3, "a quarter of what is read in two seconds"
    crowd = limits.run([[1]] * 10, 3)
    assert crowd["steps_s"] == [1.25] * 2, "ten rows of an eighth of a second each"
    reading_prompts_s = 2 * (3 * 10.0 + 100.0) / (2 * 16**3 / 2.0)
    assert run["seconds"] == pytest.approx(1.5 + reading_prompts_s)
    total, product = done[:2]
    assert float(total) == (1 << 16) / 4 and product.shape == (16, 16)


def test_best_is_the_least_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 5.0, 10.0, 12.0, 20.0, 29.0, 30.0, 33.0])
    monkeypatch.setattr(limits_worker.time, "perf_counter", lambda: next(times))
    assert limits_worker.best_s(lambda: None) == 2.0 and next(times, None) is None


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_and_products_are_those_of_the_matrices(tmp_path: Path, tied: bool) -> None:
    """Rows of an embedding that is no head are looked up: it is not read."""
    source = tmp_path / "source"
    reference = build(source, "llama", tie_word_embeddings=tied)
    matrices = {
        name: parameter.numel()
        for name, parameter in reference.named_parameters()
        if parameter.ndim == 2
    }
    assert ("lm_head.weight" in matrices) is not tied
    if not tied:
        del matrices["model.embed_tokens.weight"]
    count, head = sum(matrices.values()), SHAPE["vocab_size"] * SHAPE["hidden_size"]
    given = files(str(source), tmp_path)
    assert given.weight_bytes == 4 * count
    assert (given.token_flop, given.prompt_flop) == (2 * (count - head), 2 * head)
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(*convert(source, Q8_0)))
    blocks = files(str(path), tmp_path)
    assert blocks.weight_bytes == count // 32 * 34
    assert limits(blocks, 3).settings == {
        "weight_bytes": blocks.weight_bytes,
        "token_flop": given.token_flop,
        "prompt_flop": given.prompt_flop,
        "row_flop": 0,
        "threads": 3,
    }
    assert limits(given, 3).settings["row_flop"] == 2 * count


def test_limits_are_no_peer_and_what_others_are_a_share_of() -> None:
    own, limit = _system("cbatch"), _system("limits")
    rows = rows_of("m", OUTPUT, 8, [own, limit], [[20.0, 30.0], [40.0, 40.0]])
    assert [row["of_limit"] for row in rows] == [0.625, 1.0]
    assert [row["to_peer"] for row in rows] == [None, None]
    values = [[20.0, 30.0], [10.0, 10.0], [40.0, 40.0]]
    _, llama, _ = rows = rows_of("m", OUTPUT, 8, [own, _system("llama.cpp"), limit], values)
    assert [row["of_limit"] for row in rows] == [0.625, 0.25, 1.0]
    assert llama["to_peer"] == 1.0 and rows[0]["to_peer"] == 2.5


def _system(name: str, run: EngineRun | None = None) -> System:
    return System(name, "off", lambda prompts, _: run or pytest.fail("nothing is run"))


def test_decoding_is_reported_for_systems_that_report_their_steps(model: ModelFormats) -> None:
    """The first token of each prompt does not count, nor the time until it."""
    outputs = [[1, 2, 3]] * 4
    systems = [
        _system("cbatch", EngineRun(9.0, outputs, steps_s=[0.5, 1.5])),
        _system("transformers", EngineRun(8.0, outputs)),
        _system("limits", EngineRun(1.0, outputs, steps_s=[0.25, 0.25])),
    ]
    args = argparse.Namespace(prompts=4, prompt_tokens=8, output_tokens=3, repeats=2)
    rows = figures.outputs(model, systems, 4, args, Failures())
    decode = [row for row in rows if row["figure"] == DECODE]
    assert [row["system"] for row in decode] == ["cbatch", "limits"]
    assert [row["value"] for row in decode] == [4.0, 16.0] and decode[0]["of_limit"] == 0.25
    read = [row["read_gb_per_s"] for row in decode]
    assert read == [round(per_s * model.weight_bytes / 1e9, 3) for per_s in (1, 4)]
    whole = [row for row in rows if row["figure"] == OUTPUT]
    assert [row["value"] for row in whole] == [round(12 / s, 3) for s in (9, 8, 1)]
    assert [row["step_p99_to_median"] for row in whole] == [1.5, None, None]


def test_prefill_reports_its_multiplications(model: ModelFormats) -> None:
    args = argparse.Namespace(repeats=1)
    outputs = [[1]] * figures.PREFILL_PROMPTS
    systems = [_system(name, EngineRun(s, outputs)) for name, s in (("cbatch", 4.0), ("limits", 1))]
    rows = figures.prefill(model, systems, args, Failures())
    assert {row["figure"] for row in rows} == {PREFILL} and rows[0]["of_limit"] == 0.25
    tokens = figures.PREFILL_PROMPTS * figures.PREFILL_TOKENS
    flop = tokens * model.token_flop + figures.PREFILL_PROMPTS * model.prompt_flop
    assert rows[0]["multiplied_gflop_per_s"] == pytest.approx(flop / 4 / 1e9, rel=1e-2)
