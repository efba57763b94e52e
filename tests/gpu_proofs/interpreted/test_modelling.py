"""Models of transformers' modelling code on the GPU executor equal those on the CPU's, step by
step. They equal their own eager pass too, with our kernels, as checked at every load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cbatch.core.request.errors import FieldError
from cbatch.runtime.gpu.attention import PagedAttention
from cbatch.runtime.model.config import ModelError
from tests.gpu_proofs.interpreted.references import use_references
from tests.gpu_proofs.interpreted.stream import Stream
from tests.gpu_proofs.interpreted.test_executor import happened, prompts
from tests.gpu_proofs.interpreted.twins import Pair, run_twins

pytest.importorskip("transformers", minversion="5.0", reason="the extra `models`")

from cbatch.runtime.cpu.transformers_backend.loading import load_transformers_model
from cbatch.runtime.gpu.modelling import load_modelling_decoder
from tests.runtime.tiny_architectures import make_tiny

pytestmark = [
    pytest.mark.filterwarnings("ignore::Warning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


class Model:
    """A model, like `Pair`: on the CPU, and by kernels."""

    def __init__(self, kind: str, folder: Path) -> None:
        make_tiny(kind, folder)
        self.model: Any = load_transformers_model(folder)
        self.decoder: Any = load_modelling_decoder(folder, device="cpu")
        self.config = self.decoder.config


def test_steps_are_those_of_the_cpu(
    tmp_path: Path, bare_stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows and soft caps. The load has compared the kernels; here attention is their
    reference."""
    target = Model("gemma2", tmp_path)
    use_references(bare_stream, monkeypatch)
    draft = Pair(vocab_size=target.config.vocab_size)
    tight = {"max_num_seqs": 3, "max_num_batched_tokens": 20}
    _, seen = run_twins(prompts(23, 5, 30, max_tokens=5), target, draft, k=3, **tight)
    happened(seen, "unfinished chunks", "rejected", "mixed steps", "catch-ups")
    assert bare_stream.seen["replayed"] > 4


def test_what_differs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variant lacks the soft cap of its scores."""
    make_tiny("gemma2", tmp_path)
    run = PagedAttention.run

    def uncapped(self: Any, layer: int, window: int | None, q: Any, **more: Any) -> Any:
        assert more["soft_cap"]
        return run(self, layer, window, 3 * q, **more | {"soft_cap": None})

    monkeypatch.setattr(PagedAttention, "run", uncapped)
    said = "Gemma2ForCausalLM computes other logits with our attention"
    with pytest.raises(ModelError, match=said):
        load_modelling_decoder(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("gpt_oss", "uses attention sinks"),
        ("deepseek_v3", "keys and values differ in width"),
        ("gemma4_text", "heads of different shapes"),
    ],
)
def test_what_the_kernels_lack_is_refused_by_name(kind: str, said: str, tmp_path: Path) -> None:
    make_tiny(kind, tmp_path)
    with pytest.raises(ModelError, match=said):
        load_modelling_decoder(tmp_path, device="cpu")


def test_code_that_reads_from_the_device_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph cannot capture it."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    own = LlamaMLP.forward
    make_tiny("llama", tmp_path)
    with pytest.raises(FieldError, match="numerics"):
        load_modelling_decoder(tmp_path, device="cpu", numerics="invariant")
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: own(self, x) * float(x.max() > -9))
    with pytest.raises(ModelError, match="reads from the device"):
        load_modelling_decoder(tmp_path, device="cpu")
