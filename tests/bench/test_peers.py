"""`python -m bench.peers`: systems compute the same model as cbatch, another model is noticed, and
a system that fails costs itself alone."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.peers import __main__ as peers
from bench.peers import figures, models
from bench.peers.engines import Cbatch, Prompts
from bench.peers.figures import (
    DECODE,
    OUTPUT,
    STARTUP,
    agreement,
    first_differences,
    make_prompts,
    rows_of,
)
from bench.peers.models import (
    ModelFormats,
    Run,
    Sizes,
    System,
    make_systems,
    started,
    write_directory,
)
from bench.report import Failures
from bench.shapes import SHAPES
from cbatch.runtime.model.checkpoint import open_checkpoint
from cbatch.runtime.model.gguf_file import read_gguf
from cbatch.runtime.model.records import Rope
from cbatch.runtime.model.rope import interleave_halves, inverse_frequencies
from tests.gguf_files import F16, F32, Q8_0, convert, write_gguf
from tests.runtime.hf_models import build

HEADS = {"q_proj": 4, "k_proj": 2}
OURS = {"draft": None, "lookahead": "off", "exact": True, "threads": torch.get_num_threads()}
OURS |= {"max_sequences": 4, "tokens": 61, "step_tokens": 240}


def files(path: str | Path, folder: Path, kind: str | None = None, **python: Any) -> ModelFormats:
    return ModelFormats(str(path), kind, folder, **{"llama": None, "threads": 2} | python)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFormats:
    return files("llama-1m", tmp_path_factory.mktemp("models"))


def system(name: str, engine: str = "cbatch", **settings: Any) -> System:
    return System(name, engine, sys.executable, 2, settings)


@pytest.fixture(autouse=True)
def uncollected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting garbage before a turn takes a second in a process that has many modules."""
    monkeypatch.setattr("gc.collect", lambda: 0)


class InProcess:
    """A worker without a process of its own."""

    def __init__(self, system: System) -> None:
        self.system = system

    def start(self) -> float:
        self._llm = Cbatch(**OURS | self.system.settings)
        return 1.0

    def run(self, prompts: Prompts, output_tokens: int) -> Run:
        outputs, ends_s = self._llm.run(prompts, output_tokens)
        return Run(1.0, outputs, np.diff(ends_s).tolist())

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._llm, method)(*arguments)

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None: ...


def fixed(name: str, *seconds: float) -> Any:
    """A worker whose runs take these times; RuntimeError for 0."""
    times_s = iter(seconds)

    def run(prompts: Prompts, output_tokens: int) -> Run:
        run_s = next(times_s)
        if not run_s:
            raise RuntimeError("out of memory")
        steps_s = [run_s / 2 / (output_tokens - 1)] * (output_tokens - 1)
        return Run(run_s, [[7] * output_tokens for _ in prompts], steps_s)

    return SimpleNamespace(system=system(name), run=run)


def test_all_of_them_agree_and_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each runs in a process of its own: cbatch, and peers that are installed."""
    sizes = ("--prompt-tokens", "12", "--output-tokens", "6", "--prompts", "1", "--repeats", "1")
    packages = {"llama.cpp": "llama_cpp", "vllm": "vllm"}
    present = [peer for peer, package in packages.items() if importlib.util.find_spec(package)]
    peers.main(
        ["--model", "llama-1m", "--type", "bf16", "--batch", "3", "--peer", *present, *sizes]
    )
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["system"] for row in summary["agreement"]] == present
    assert all(row["agrees"] and row["sequences"] == 4 for row in summary["agreement"])
    timed = ["cbatch", *present]
    stepping = [name for name in timed if name != "vllm"]
    assert [(row["figure"], row["system"]) for row in summary["results"]] == [
        *((OUTPUT, name) for name in timed),
        *((DECODE, name) for name in stepping),
    ]
    assert all(row["value"] > 0 for row in summary["results"])


def test_another_model_is_found_out(
    model: ModelFormats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotary pairs are in the other order, as a wrong conversion would leave them."""
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    (wrong / "config.json").write_bytes((model.source / "config.json").read_bytes())
    tensors = load_file(model.source / "model.safetensors")
    for name, tensor in tensors.items():
        heads = HEADS.get(name.split(".")[-2])
        if heads is not None:
            halves = tensor.reshape(heads, 2, -1, tensor.shape[1])
            tensors[name] = halves.transpose(1, 2).reshape(tensor.shape).contiguous()
    save_file(tensors, wrong / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(figures, "Worker", InProcess)
    systems = [system("x", model=str(path)) for path in (model.source, model.source, wrong)]
    systems[1] = system("x", model=str(model.source), model_impl="transformers")
    right, other = agreement(model, systems, make_prompts(model, 48, 4), 12, Failures())
    assert right["agrees"] and right["equal"] == 4
    assert not other["agrees"] and other["equal"] < 4 and other["logit_gap"] > 0.1


def test_only_the_first_difference_counts() -> None:
    assert first_differences([[7, 8]], [[1, 2, 3]], [[1, 2, 3]]) == []
    assert first_differences([[7, 8]], [[3, 1, 0]], [[3, 2, 3]]) == [[7, 8, 3, 1], [7, 8, 3, 2]]
    with pytest.raises(ValueError, match="shorter"):
        first_differences([[7]], [[1, 2]], [[1]])


def test_our_worker_reports_steps_and_log_probabilities(model: ModelFormats) -> None:
    """The first step has the first token of every prompt."""
    prompts, worker = make_prompts(model, 20, 3), InProcess(system("x", model=str(model.source)))
    worker.start()
    run = worker.run(prompts, 6)
    assert len(run.steps_s) == 5 and min(run.steps_s) > 0 and run.tokens == 18
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(model.source, dtype=torch.float32).eval()
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        expected = peer(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    assert np.allclose(worker.call("logprobs", prompts), expected.numpy(), atol=1e-4)


@pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="needs llama_cpp, of the extra `peers`"
)
def test_llama_cpp_turns_a_file_into_another_type(tmp_path: Path) -> None:
    """Weights are the same as before, of a quantised source too."""
    build(tmp_path, "llama", hidden_size=256, intermediate_size=256)
    source, gates = tmp_path, []
    for kind in ("Q8_0", "Q4_K_M"):
        source = files(source, tmp_path, kind, llama=sys.executable).cbatch_path
        gates.append(read_gguf(source).tensors["blk.1.ffn_gate.weight"])
    one, other = (gate.dequantised(torch.float32).flatten() for gate in gates)
    assert torch.cosine_similarity(one, other, dim=0) > 0.99 and gates[1].type.name == "Q4_K"


# -- the command


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "no-such"), "--model: no-such is not one of"),
        (("--type", "Q3_K"), "argument --type: invalid choice: 'Q3_K'"),
        (("--peer", "ollama"), "argument --peer: invalid choice: 'ollama'"),
        (("--lookahead", "adaptive"), "--lookahead: ratios are relative to off"),
        (("--batch",), "--batch: give a batch, or another measurement"),
    ],
)
def test_what_is_refused(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        peers.parse(arguments)
    assert words in capsys.readouterr().err


def test_what_was_measured_is_printed_with_notes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def time_systems(model: ModelFormats, args: Any, failures: Failures) -> list[dict[str, Any]]:
        if model.name == "demo":
            raise ValueError("the demo cannot be converted")
        with failures.caught("vllm"):
            raise RuntimeError("no such device")
        return rows_of(model.name, OUTPUT, 1, [(system("cbatch"), [2.0])])

    monkeypatch.setattr(peers, "time_systems", time_systems)
    named = ["--peer", "openvino", "--openvino", "/o/python", "--skip-agreement"]
    with pytest.raises(SystemExit, match="llama-1m, vllm, demo"):
        peers.main(["--model", "llama-1m", "demo", *named])
    out, err = capsys.readouterr()
    assert [row["model"] for row in json.loads(out.splitlines()[-1])["results"]] == ["llama-1m"]
    assert "openvino reads only GGUF files; left out: llama-1m" in out
    assert "vllm failed: no such device" in err and "demo failed: the demo cannot be" in err


def test_peers_are_found_where_they_are_named(model: ModelFormats, tmp_path: Path) -> None:
    words = ["--llama", "/l/python", "--vllm", "/v/python", "--openvino", "/o/python"]
    args = peers.parse([*words, "--threads", "3"])
    named = {each.name: each for each in make_systems(model, args, Sizes(8, 128, 1024))}
    assert list(named) == ["cbatch", "llama.cpp", "vllm", "transformers"]
    assert named["llama.cpp"].python == "/l/python" and named["vllm"].python == "/v/python"
    assert {each.threads for each in named.values()} == {3}
    assert named["vllm"].settings["model"] == str(model.source)
    assert named["llama.cpp"].settings["model"].endswith("llama-1m-F32.gguf")
    assert named["transformers"].settings["model_impl"] == "transformers"
    assert not named["cbatch"].settings["exact"], "blocks of a GGUF file stay blocks"
    write_gguf(tmp_path / "a.gguf", *convert(model.source, F16))
    file = files(tmp_path / "a.gguf", tmp_path)
    _, _, _, openvino, _ = make_systems(file, args, Sizes(8, 128, 1024), exact=True)
    assert openvino.python == "/o/python" and openvino.settings == {
        **{"model": str(file.source), "max_sequences": 8, "tokens": 128},
        **{"step_tokens": 1024, "threads": 3, "exact": True},
    }


class Quantiser(InProcess):
    """A substitute for llama.cpp's process."""

    calls: list[tuple[Any, ...]] = []

    def start(self) -> float:
        assert self.system.settings["model"] is None and self.system.python == "/l/python"
        return 0.0

    def call(self, method: str, *arguments: Any) -> None:
        self.calls.append((method, *arguments))
        Path(arguments[1]).write_bytes(b"new")


def test_a_file_is_turned_into_another_type(
    model: ModelFormats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp makes all types of a file, and the file itself stays."""
    source = tmp_path / "from" / "a.gguf"
    source.parent.mkdir()
    write_gguf(source, *convert(model.source, F16))
    monkeypatch.setattr(models, "Worker", Quantiser)
    for kind in ("Q4_K_M", "BF16"):
        turned = files(source, tmp_path, kind, llama="/l/python")
        assert turned.name == f"a.gguf {kind}" and turned.cbatch_path == tmp_path / f"a-{kind}.gguf"
        assert Quantiser.calls[-1] == ("quantise", str(source), str(turned.cbatch_path), kind, 2)
        assert turned.cbatch_path.read_bytes() == b"new" and source.exists()
        with pytest.raises(ValueError, match=f"{kind} is written by llama.cpp; name it by --llama"):
            _ = files(source, tmp_path, kind).cbatch_path
    assert files(source, tmp_path).cbatch_path == source
    exact = files(model.source, tmp_path, "F32")
    assert exact.dtype == "float32" and read_gguf(exact.cbatch_path).tensors


@pytest.mark.parametrize(
    ("family", "rope", "kind"),
    [
        ("llama", "llama3", F32),
        ("mistral", "linear", Q8_0),
        ("qwen3", "yarn", Q8_0),
    ],
)
def test_a_directory_from_a_file_is_the_same_model(
    tmp_path: Path, family: str, rope: str, kind: int
) -> None:
    build(tmp_path, family, rope)
    if rope == "llama3":  # with the context of its pretraining, which a file does not have
        config = json.loads((tmp_path / "config.json").read_text())
        config["rope_parameters"] = SHAPES["llama-1b"]["rope_parameters"]
        (tmp_path / "config.json").write_text(json.dumps(config))
    file, directory = tmp_path / "model.gguf", tmp_path / "directory"
    write_gguf(file, *convert(tmp_path, kind))
    write_directory(file, directory)
    one, other = open_checkpoint(file, "bfloat16"), open_checkpoint(directory)
    c, m = one.config, one.config.attention
    plain = Rope(theta=m.rope.theta)
    frequencies, expected = (
        inverse_frequencies(x.config.attention.rope, m.key_dim) for x in (one, other)
    )
    assert torch.allclose(frequencies, expected, rtol=1e-5)
    assert torch.equal(frequencies, inverse_frequencies(plain, m.key_dim)) == (rope == "default")
    assert other.config.with_mixers(rope=plain) == msgspec.structs.replace(
        c.with_mixers(rope=plain), torch_dtype="bfloat16"
    )
    for name, shape in (
        ("model.embed_tokens.weight", (c.vocab_size, c.hidden_size)),
        ("model.norm.weight", (c.hidden_size,)),
    ):
        assert torch.equal(one.weights.get(name, shape), other.weights.get(name, shape))
    name, shape = "model.layers.1.self_attn.q_proj.weight", (m.heads * m.key_dim, c.hidden_size)
    in_order, in_halves = (
        interleave_halves(each.weights.get(name, shape), each.config.attention.rope, m.key_dim)
        for each in (one, other)
    )
    assert torch.equal(in_order, in_halves)


# -- figures


@pytest.mark.parametrize("tokens", [1, 300])
def test_prompts_have_the_length_asked_for(tokens: int, model: ModelFormats) -> None:
    for source in (model, files("demo", Path("unused"))):
        prompts = make_prompts(source, tokens, 20)
        assert [len(prompt) for prompt in prompts] == [tokens] * 20
        assert tokens < 24 or len({tuple(prompt) for prompt in prompts}) == 20


def test_a_system_that_fails_is_left_out(
    model: ModelFormats, capsys: pytest.CaptureFixture[str]
) -> None:
    """It fails in the warm-up, in the first repeat, in the last, or never."""
    args = argparse.Namespace(prompts=2, prompt_tokens=5, output_tokens=3, repeats=3)
    workers = [fixed("early", 0.0), fixed("first", 1.0, 0.0), fixed("last", 1.0, 1.0, 1.0, 0.0)]
    workers += [fixed("never", 1.0, 2.0, 4.0, 8.0)]
    failures = Failures()
    whole, decoding = figures.outputs(model, workers, 2, args, failures)
    assert whole["system"] == decoding["system"] == "never"
    assert whole["value"] == 6 / 4 and (whole["min"], whole["max"]) == (6 / 8, 6 / 2)
    assert decoding["value"] == 4 / 2, "without each prompt's first token, and the time until it"
    assert list(failures.words) == ["early", "first", "last"]
    assert capsys.readouterr().err.count("failed: out of memory") == 3
    with pytest.raises(SystemExit, match="early, first, last"):
        failures.end()


def test_a_system_that_does_not_start_is_left_out(tmp_path: Path) -> None:
    """One has no engine, the other's engine fails after its imports."""
    python, failures = tmp_path / "python", Failures()
    python.write_text("#!/bin/sh\necho '{}'\nread line\necho no such model >&2\nexit 1\n")
    python.chmod(0o755)
    broken = System("broken", "cbatch", str(python), 2, {})
    with started([system("gone", "gone"), broken], failures) as workers:
        assert workers == []
    assert "KeyError: 'gone'" in failures.words["gone"]
    assert failures.words["broken"] == "the worker of broken died:\nno such model"


def test_rows_are_medians_and_ratios_within_a_turn(
    model: ModelFormats, monkeypatch: pytest.MonkeyPatch
) -> None:
    systems = [system(name) for name in ("cbatch", "llama.cpp", "vllm")]
    values = [[20.0, 60.0, 10.0], [10.0, 40.0, 10.0], [5.0, 10.0, 2.0]]
    own, llama, vllm = rows_of("m", OUTPUT, 8, list(zip(systems, values, strict=True)))
    assert (own["value"], own["min"], own["max"]) == (20.0, 10.0, 60.0)
    assert (own["to_peer"], own["to_min"], own["to_max"]) == (1.5, 1.0, 2.0)
    assert llama["to_peer"] == 1.0 and llama["ours_to_it"] == 1.5
    assert (vllm["to_peer"], vllm["ours_to_it"]) == (0.25, 5.0)
    monkeypatch.setattr(InProcess, "start", lambda self: 3.0)
    monkeypatch.setattr(figures, "Worker", InProcess)
    (alone,) = figures.startups(model, systems[:1], 2, Failures())
    assert (alone["figure"], alone["value"], alone["to_peer"]) == (STARTUP, 3.0, None)
