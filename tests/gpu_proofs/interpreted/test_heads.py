"""Heads on a stream that runs nothing before the host waits, with graphs that are tapes; and in an
engine on a simulated GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cbatch import LLM, FieldError, SamplingParams
from cbatch.engine.loading import trial_texts
from cbatch.runtime.cpu.decoder import Model
from cbatch.runtime.gpu.head_pass import DeviceStates
from cbatch.runtime.model.shapes import Numerics
from tests.gpu_proofs.interpreted.references import use_queued_references
from tests.gpu_proofs.interpreted.stream import HostReads, Stream, substituted
from tests.gpu_proofs.interpreted.test_stream import Captures, replayed
from tests.gpu_proofs.pretence.gpu import Cuda, pretending, use_references
from tests.runtime import made_heads
from tests.runtime.engines import make_request
from tests.runtime.marks import needs_compiler
from tests.runtime.pairs import VOCAB, NoisyWeights
from tests.triton_kernels.interpreter import twins
from tests.triton_kernels.interpreter.fitted_heads import eagle1, eagle3, medusa
from tests.triton_kernels.interpreter.light import without_overflow_checks
from tests.triton_kernels.interpreter.test_gpu_executor import happened, prompts
from tests.triton_kernels.interpreter.twins import CPU, Pair, run_twins

pytestmark = [
    needs_compiler,
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    without_overflow_checks(monkeypatch)
    with substituted() as stream:
        monkeypatch.setattr(twins, "ReplayingDevice", lambda: Captures(CPU))
        use_queued_references(stream, monkeypatch)
        yield stream


def requests() -> list[Any]:
    sampled = make_request("sampled", range(5, 15), max_tokens=12, temperature=0.8, seed=1)
    shaped = make_request("shaped", range(9, 12), max_tokens=12, frequency_penalty=2.0)
    return [*prompts(23, 1, 30, max_tokens=12), sampled, shaped]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("make", [eagle3, eagle1, medusa])
def test_captured_steps_are_those_of_the_cpu(
    make: Any, depth: int, tmp_path: Path, stream: Stream
) -> None:
    target = Pair()
    _, seen = run_twins(
        requests(),
        target,
        make(tmp_path, target, prompts(23, 1, 30, max_tokens=12)),
        lookahead="fixed:3",
        depth=depth,
        max_num_seqs=3,
        num_blocks=8,
        max_num_batched_tokens=20,
    )
    happened(seen, "accepted", "rejected", "unfinished chunks", "slots used again")
    assert not replayed(stream)["reads"]


def test_a_host_that_reads_states_is_caught(
    tmp_path: Path, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = DeviceStates.after_verification

    def after_verification(self: DeviceStates, layout: Any) -> None:
        real(self, layout)
        int(self._state.kv_len.sum())

    target = Pair()
    head = medusa(tmp_path, target, prompts(9, max_tokens=8))
    monkeypatch.setattr(DeviceStates, "after_verification", after_verification)
    with pytest.raises(HostReads):
        run_twins(prompts(9, max_tokens=8), target, head, lookahead="fixed:2")


class Recorded(NoisyWeights):
    """Weights that record what they returned."""

    def __init__(self) -> None:
        super().__init__(1)
        self.given: dict[str, Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.given[name] = super().get(name, shape)
        return self.given[name]


def written(folder: Path, target: Pair) -> Path:
    """Write the target as a checkpoint."""
    source, c = Recorded(), target.config
    Model(c, source, torch.float32, Numerics(mode="fast", may_pack=False))
    folder.mkdir()
    save_file(source.given, folder / "model.safetensors")
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "max_position_embeddings": c.max_position_tokens,
        "rms_norm_eps": c.rms_norm_eps,
        "torch_dtype": "float32",
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    with pretending() as cuda:
        use_references(cuda, monkeypatch)
        yield cuda


@pytest.mark.parametrize("make", [eagle3, medusa])
def test_a_gpu_serves_heads(
    make: Any, tmp_path: Path, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads pass their self-test, steps are captured, and drafts are as good as on a CPU. A head
    that only guesses is refused."""
    monkeypatch.setattr(made_heads, "DIM", 16)
    target, head = Pair(), tmp_path / "head"
    model = written(tmp_path / "target", target)
    texts = [list(text) for text in trial_texts(VOCAB, None)]
    inputs = [texts[0][:20], texts[0][20:30], [7]]
    answers = [make_request(f"r{i}", text, max_tokens=8) for i, text in enumerate(inputs)]
    make(head, target, [*texts, *answers])
    llms = [
        LLM(model, head, device=device, max_num_seqs=2, tokenizer="none", lookahead="fixed:2")
        for device in ("auto", "cpu")
    ]
    assert [llm.info.device for llm in llms] == ["cuda", "cpu"]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    tokens = [[c.token_ids for c in llm.generate(inputs, params)] for llm in llms]
    assert tokens[0] == tokens[1]
    stats = [llm.engine.stats.speculation for llm in llms]
    assert stats[0].accepted_tokens == stats[1].accepted_tokens > 0
    assert cuda.only.seen["replayed"] > 10
    random = made_heads.medusa_tensors(5) if make is medusa else made_heads.eagle3_tensors(5)
    made_heads.write_head(head, json.loads((head / "config.json").read_text()), random)
    with pytest.raises(FieldError, match="no more than always guessing the same token"):
        LLM(model, head, max_num_seqs=2, tokenizer="none")
