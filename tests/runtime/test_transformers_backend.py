"""Models of transformers' modelling code: logits and text equal those of its own eager pass."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from cbatch import LLM, Completion, FieldError, SamplingParams
from cbatch.engine.model_files import choose_impl
from cbatch.engine.options import EngineOptions
from cbatch.runtime.compiled import compiles
from cbatch.runtime.cpu.invariance import probe_batch_invariance
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.config import ModelError

pytest.importorskip("transformers", minversion="5.0", reason="the extra `models`")

from cbatch.runtime.cpu.transformers_backend.attention import CpuStep
from cbatch.runtime.cpu.transformers_backend.loading import load_transformers_model
from cbatch.runtime.gpu.modelling import load_modelling_decoder
from cbatch.runtime.transformers_backend import attention
from cbatch.runtime.transformers_backend.step import LAYER
from tests.runtime.hf_models import paged, run_all
from tests.runtime.tiny_architectures import EVERY, SEVERAL, make_tiny, tiny_config

pytestmark = pytest.mark.filterwarnings("ignore::Warning")
FIRST, VOCAB = 3, 120  # ids that no architecture uses for padding
SIZES = [1, 5, 2, 7]
SCARCE: dict[str, Any] = {
    "model_impl": "transformers",
    "tokenizer": "none",
    "num_blocks": 20,
    "block_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
}


def sequences(lengths: tuple[int, ...]) -> list[np.ndarray]:
    return [np.random.default_rng(i).integers(FIRST, VOCAB, n) for i, n in enumerate(lengths)]


def greedy(net: Any, prompt: list[int], output: Sequence[int]) -> list[int]:
    """Return the greedy token of an eager pass at each position of an output. It equals the output
    exactly if that is the net's own greedy text."""
    with torch.no_grad():
        logits = net(torch.tensor([[*prompt, *output]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def assert_greedy(
    net: Any, prompts: list[list[int]], completions: list[Completion], count: int
) -> None:
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = list(completion.token_ids)
        assert len(tokens) == count and tokens == greedy(net, prompt, tokens)


def check_logits(folder: Path, net: Any) -> None:
    """Compare chunks and decodes that share steps, within 1e-4 of the logits' standard
    deviation."""
    rows = sequences((23, 11, 17))
    with torch.no_grad():
        expected = torch.cat(
            [net(torch.from_numpy(r)[None], use_cache=False).logits[0] for r in rows]
        )
    model = load_transformers_model(folder)
    kv = KVCache(model.config, 20, 4, torch.float32, "cpu")
    logits = run_all(model, kv, paged(kv, rows), SIZES, firsts=[9, 4, 1])
    assert (logits - expected).abs().max() < 1e-4 * expected.std()


def check_text(folder: Path, net: Any) -> None:
    """Serve six requests in a pool too small for them, which preempts. All begin with the same
    tokens, and one comes twice: the prefix cache has hits. Drafts of repeated text are on and
    off."""
    same, *rest = (s.tolist() for s in sequences((18, 5, 9, 3, 12)))
    prompts = [same + tail for tail in rest] + [same + rest[0], same]
    for lookahead in ("off", "fixed:4"):
        llm = LLM(folder, lookahead=lookahead, drafter=("ngram",), **SCARCE)
        params = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
        assert_greedy(net, prompts, llm.generate(prompts, params), 32)
        stats = llm.engine.scheduler.stats
        assert stats.preemptions and stats.prefix_hit_tokens
        assert bool(stats.drafted_tokens) == (lookahead != "off")
        assert llm.info.code.startswith("transformers ")


@pytest.mark.parametrize("kind", SEVERAL)
def test_logits_and_text_are_those_of_its_own_eager_pass(kind: str, tmp_path: Path) -> None:
    net = make_tiny(kind, tmp_path)
    check_logits(tmp_path, net)
    if kind in ("deepseek_v3", "gemma3_text", "gpt2", "qwen3_moe"):
        check_text(tmp_path, net)


@pytest.mark.models
@pytest.mark.parametrize("kind", [kind for kind in EVERY if kind not in SEVERAL])
def test_every_other_architecture(kind: str, tmp_path: Path) -> None:
    net = make_tiny(kind, tmp_path)
    check_logits(tmp_path, net)
    check_text(tmp_path, net)


def test_half_precision_keeps_a_row_to_itself(tmp_path: Path) -> None:
    make_tiny("qwen3", tmp_path, dtype=torch.bfloat16)
    model = load_transformers_model(tmp_path)
    assert model.dtype == torch.bfloat16
    assert probe_batch_invariance(model).batch_invariant or not compiles(torch.bfloat16)


def test_random_weights_are_the_seeds(tmp_path: Path) -> None:
    tiny_config("phi3").save_pretrained(tmp_path)
    one, same, other = (
        load_transformers_model(tmp_path, random_weights_seed=seed, dtype="float32")
        for seed in (1, 1, 2)
    )
    first = [next(iter(m.net.parameters())) for m in (one, same, other)]
    assert torch.equal(first[0], first[1]) and not torch.equal(first[0], first[2])


def test_a_draft_may_be_of_transformers_too(tmp_path: Path) -> None:
    net = make_tiny("olmo2", tmp_path)
    prompt = sequences((9,))[0].tolist()
    llm = LLM(tmp_path, tmp_path, lookahead="fixed:3", **SCARCE)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    (done,) = llm.generate(prompt, params)
    assert_greedy(net, [prompt], [done], 12)
    assert done.speculation.mean_accepted_tokens > 2  # it drafts what it would say itself


def test_auto_is_our_own_pass_where_it_knows_the_family(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path / "llama")
    make_tiny("gpt_neox", tmp_path / "gpt_neox")
    codes = {}
    for kind in ("llama", "gpt_neox"):
        options = SCARCE | {"model_impl": "auto"}
        codes[kind] = LLM(tmp_path / kind, **options).info.lines()[1]
    assert codes["llama"] == "code: our own (llama)"
    other = codes["gpt_neox"]
    assert other.startswith("code: transformers ") and "GPTNeoXForCausalLM" in other


def test_what_differs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some windows are too wide, and some rows see each other."""
    make_tiny("mistral", tmp_path)
    register = attention.register_layer

    def widened(*given: Any) -> Any:
        out = register(*given)
        layer = getattr(given[0], LAYER)
        layer.mixer = structs.replace(layer.mixer, window=layer.mixer.window + 2)
        return out

    with monkeypatch.context() as patch:
        patch.setattr(attention, "register_layer", widened)
        with pytest.raises(
            ModelError, match="MistralForCausalLM computes other logits with our attention"
        ):
            load_transformers_model(tmp_path)
    computed = CpuStep.compute

    def leaking(step: CpuStep, *given: Any) -> torch.Tensor:
        out = computed(step, *given)
        return out + 0.1 * out.mean(0)

    with monkeypatch.context() as patch:
        patch.setattr(CpuStep, "compute", leaking)
        with pytest.raises(
            ModelError, match="computes other logits for rows in a batch than for each"
        ):
            load_transformers_model(tmp_path)
    load_transformers_model(tmp_path)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "Mamba layers"),
        ({"model_type": "jamba", "architectures": ["JambaForCausalLM"]}, "JambaForCausalLM keeps"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "is an encoder"),
        (
            {"model_type": "t5", "architectures": ["T5Model"], "is_encoder_decoder": True},
            "an encoder with a decoder",
        ),
        (
            {
                "model_type": "gemma3",
                "architectures": ["Gemma3ForConditionalGeneration"],
                "vision_config": {},
            },
            "Gemma3ForConditionalGeneration is multimodal",
        ),
        ({"model_type": "deepseek_v4", "architectures": ["X_ForCausalLM"]}, "sparse attention"),
        (
            {
                "model_type": "phi3",
                "architectures": ["Phi3ForCausalLM"],
                "quantization_config": {"quant_method": "awq", "bits": 4},
            },
            "quantization_config: awq: transformers' modelling code supports unquantised weights "
            "only",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name_at_once(
    values: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    for impl in ("auto", "transformers"):
        began = time.monotonic()
        with pytest.raises(ModelError, match=said):
            choose_impl(tmp_path, EngineOptions(model_impl=impl))
        assert time.monotonic() - began < 1


def test_what_the_code_does_not_serve_is_refused_by_name(tmp_path: Path) -> None:
    make_tiny("gpt_neox", tmp_path)
    with pytest.raises(FieldError) as caught:
        load_modelling_decoder(tmp_path, device="cpu", numerics="invariant")
    assert caught.value.field == "numerics"
    with pytest.raises(ModelError, match="GPTNeoXForCausalLM is not supported"):
        LLM(tmp_path, **SCARCE | {"model_impl": "own"})
