"""Every family on every device: a table of cases. Logits equal those of transformers' eager pass,
and bits are a row's own."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from cbatch import LLM, FieldError
from cbatch.runtime.cpu.decoder import Model, load_model
from cbatch.runtime.cpu.invariance import probe_batch_invariance
from cbatch.runtime.drafting.lookup import Lookup, LookupDrafter
from cbatch.runtime.gpu import support
from cbatch.runtime.gpu.decoder import load_decoder
from cbatch.runtime.gpu.modelling import OneCall
from cbatch.runtime.gpu.support import unsupported_on_gpu
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.config import UnsupportedModelError
from cbatch.runtime.model.families import families
from cbatch.runtime.model.records import Experts, Recurrence
from tests.runtime import engines
from tests.runtime.hf_models import build, paged, run_all, tokens_of
from tests.runtime.marks import needs_compiler
from tests.runtime.test_transformers_backend import SCARCE, sequences
from tests.runtime.tiny_architectures import tiny_config
from tests.triton_kernels.interpreter.quick import interpret

pytest.importorskip("transformers", minversion="5.0", reason="the extra `models`")
pytestmark = pytest.mark.filterwarnings("ignore::Warning")

BOUND = 1e-4  # of the standard deviation of the logits
BOTH = ["sliding_attention", "full_attention"] * 2
CONVOLVED = ["conv", "full_attention"] * 2
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 3.0,
}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.0}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.2, 1.5, 2.0, 2.5, 3.0],
    "long_factor": [9.0] * 6,
    "partial_rotary_factor": 0.75,
    "rope_theta": 10000.0,
}
# Changes that make a family use all that its records can say, by `model_type`.
CHANGES: dict[str, list[dict[str, Any]]] = {
    "lfm2": [{"layer_types": CONVOLVED, "conv_bias": True}],
    "lfm2_moe": [{"layer_types": CONVOLVED, "routed_scaling_factor": 1.5}],
    "arcee": [{"mlp_bias": True, "attention_bias": True}],
    "ernie4_5": [{"use_bias": True}],
    "exaone4": [{}, {"sliding_window": None, "layer_types": ["full_attention"] * 4}],
    "falcon_h1": [{}, {"mamba_rms_norm": True}],
    "flex_olmo": [{"norm_topk_prob": True}],
    "gemma2": [CAPS],
    "gemma3_text": [{"layer_types": BOTH, "final_logit_softcapping": 5.0}],
    "gemma4_text": [
        {"num_hidden_layers": 6, "layer_types": BOTH + BOTH[:2], "num_kv_shared_layers": 3}
        | {"use_double_wide_mlp": True, "final_logit_softcapping": 5.0}
        | {"per_layer_config": {i: {"head_dim": 24} for i in (1, 3, 5)}},
        {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "layer_types": BOTH}
        | {"per_layer_config": {i: {"head_dim": 24, "num_key_value_heads": 1} for i in (1, 3)}},
    ],
    "gpt_oss": [
        {
            "swiglu_limit": 0.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 10000.0,
                "truncate": False,
            },
        }
    ],
    "granite": [GRANITE | {"attention_bias": True, "mlp_bias": True}],
    "granitemoe": [GRANITE],
    "granitemoehybrid": [
        GRANITE
        | {"mamba_proj_bias": True, "position_embedding_type": "rope"}
        | {"shared_intermediate_size": 112},
        {"num_local_experts": 0, "shared_intermediate_size": 96},
    ],
    "hunyuan_v1_dense": [
        {"attention_bias": True},
        {
            "rope_parameters": {
                "rope_type": "dynamic",
                "factor": 1.0,
                "alpha": 9.0,
                "rope_theta": 1e4,
            }
        },
    ],
    "llama": [
        {"attention_bias": True, "mlp_bias": True},
        {"hidden_size": 63, "intermediate_size": 47}  # they fill neither a vector nor a pair
        | {"num_attention_heads": 3, "num_key_value_heads": 1},
    ],
    "ministral": [{"sliding_window": 8}],
    "mistral": [{}, {"sliding_window": 1}],
    "mixtral": [{"sliding_window": 8}],
    "nemotron": [{"mlp_bias": True}],
    "nemotron_h": [{"mlp_bias": True, "use_bias": True}],
    "phi": [{"vocab_size": 131}],
    "phi3": [
        {"sliding_window": 9},
        {"max_position_embeddings": 256, "original_max_position_embeddings": 64}
        | {"rope_parameters": LONG},
    ],
    "qwen2": [{"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}],
    "qwen2_moe": [{"shared_expert_intermediate_size": 192, "mlp_only_layers": [1]}],
    "qwen3": [
        {"attention_bias": True, "num_key_value_heads": 4, "use_sliding_window": True}
        | {"sliding_window": 8, "layer_types": BOTH},
    ],
    "qwen3_moe": [{"norm_topk_prob": True, "decoder_sparse_step": 2}],
    "seed_oss": [{"attention_out_bias": True, "mlp_bias": True}],
    "smollm3": [{"use_sliding_window": True, "sliding_window": 8, "layer_types": BOTH}],
    "stablelm": [{"use_qkv_bias": True}],
    "starcoder2": [{"sliding_window": 8}],
    "vaultgemma": [CAPS | {"sliding_window": 8, "query_pre_attn_scalar": 16}],
}
KINDS = [family.name for family in families().values()]
CASES = [(kind, i) for kind in KINDS for i in range(len(CHANGES.get(kind, [{}])))]
QUICK_ON_GPU = {"apertus", "exaone4", "gemma2", "gpt_oss", "granite", "lfm2", "olmo2", "phi"}
QUICK_ON_GPU |= {"qwen2_moe"}
NOT_ON_GPU = {"gemma4_text"}


def cells() -> list[Any]:
    """Return kind, case and device of each test. Interpreted kernels of a GPU need a process of
    their own, with TRITON_INTERPRET=1; there, most families are left to `make prove-gpu`."""
    if interpret():
        marks = {False: (), True: pytest.mark.gpu_proofs}
        cases = [case for case in CASES if case[0] not in NOT_ON_GPU]
        return [pytest.param(*e, "gpu", marks=marks[e[0] not in QUICK_ON_GPU]) for e in cases]
    compiled = [pytest.param(*each, "cpu", marks=needs_compiler) for each in CASES]
    return compiled + [pytest.param(*each, "torch") for each in CASES]


def make(kind: str, folder: Path, **changes: Any) -> Any:
    """Write a tiny model of `model_type` with every tensor drawn; return it as transformers reads
    it."""
    from transformers import AutoModelForCausalLM

    values = tiny_config(kind).to_dict() | changes
    config = type(tiny_config(kind))(**values)
    config.architectures = None
    net = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    endings = ("expert_bias", "layer_scalar")
    biases = [each for each in net.named_buffers() if each[0].endswith(endings)]
    with torch.no_grad():
        for name, parameter in [*net.named_parameters(), *biases]:
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("norm.weight", "layer_scalar")):
                parameter.add_(0.2 * noise)  # the mean is 1, or 0 for weights that are added to 1
            else:
                parameter.copy_((0.15 if parameter.dim() < 2 else 0.1) * noise)
    net.save_pretrained(folder)
    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, **how).eval()


@functools.cache
def made(kind: str, case: int) -> tuple[Path, list[np.ndarray], torch.Tensor]:
    """Make the model of a case once. Return its folder, three rows of tokens, and the logits of
    transformers' eager pass for each of them."""
    folder = Path(tempfile.mkdtemp(prefix="family-"))
    net = make(kind, folder, **CHANGES.get(kind, [{}])[case])
    rows = sequences((40, 11, 29))
    with torch.no_grad():
        logits = [net(torch.from_numpy(r)[None], use_cache=False).logits[0] for r in rows]
    return folder, rows, torch.cat(logits)


@pytest.mark.parametrize(("kind", "case", "device"), cells())
def test_logits_are_those_of_transformers(
    kind: str, case: int, device: str, request: pytest.FixtureRequest
) -> None:
    """Chunks and decodes share steps, contexts are longer than windows. Our kernels keep the bits
    of a row; torch need not."""
    folder, rows, expected = made(kind, case)
    if device == "gpu":
        check_on_gpu(folder, rows, expected)
        return
    if device == "torch":
        request.getfixturevalue("torch_pass")
    model = load_model(folder)
    kv = KVCache(model.config, 30, 4, torch.float32, "cpu", num_pages=30, num_slots=3)
    computed = run_all(model, kv, paged(kv, rows), [1, 5, 2, 7], firsts=[9, 4, 1])
    assert (computed - expected).abs().max() < BOUND * expected.std()
    assert probe_batch_invariance(model).batch_invariant == (device == "cpu")


@pytest.mark.usefixtures("decoder_pass")
def test_logits_of_long_contexts(tmp_path: Path) -> None:
    """Several blocks, windows, and segments of values."""
    reference = build(tmp_path, "qwen2", "yarn")
    model = load_model(tmp_path)
    rows = [tokens_of(i, n) for i, n in enumerate((150, 37, 301))]
    kv = KVCache(model.config, 64, 16, model.dtype, model.device)
    logits = run_all(model, kv, paged(kv, rows), [1, 7, 40, 3, 140])
    with torch.no_grad():
        expected = torch.cat([reference(torch.from_numpy(r)[None]).logits[0] for r in rows])
    assert (logits - expected).abs().max() < BOUND * expected.std()


class Mistaken(Lookup):
    """Drafts the rest of known texts, with a mistake at every third position."""

    struct = None

    def __init__(self, texts: list[list[int]]) -> None:
        self._texts = texts

    def guess(self, text: np.ndarray, depth: int) -> list[int]:
        own, size = text.tolist(), len(text)
        rest: list[int] = next((each[size:] for each in self._texts if each[:size] == own), [])
        return [token ^ ((size + i) % 3 == 0) for i, token in enumerate(rest[:depth])]


def check_on_gpu(folder: Path, rows: list[np.ndarray], expected: torch.Tensor) -> None:
    """Compute fewer tokens, since kernels are interpreted: by ragged steps, then all in one."""
    decoder = load_decoder(folder, device="cpu", numerics="invariant")
    lengths = [19 if decoder.config.recurrent else 12, 3, 9]  # states are kept after 16
    expected = torch.cat(
        [part[:n] for part, n in zip(expected.split([*map(len, rows)]), lengths, strict=True)]
    )
    rows = [row[:n] for row, n in zip(rows, lengths, strict=True)]
    model, logits = cast("Model", OneCall(decoder)), []
    for sizes in ([5, 1, 8], lengths[:1]):
        kv = KVCache(decoder.config, 6, 16, torch.float32, "cpu", num_pages=6, num_slots=3)
        with torch.inference_mode():
            logits.append(run_all(model, kv, paged(kv, rows), sizes))
    assert (logits[0] - expected).abs().max() < BOUND * expected.std()
    assert torch.equal(*logits)


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_bits_outlive_drafts_hits_and_preemptions(kind: str) -> None:
    """The draft is the same model in bf16: most drafts are accepted, and some are not. The pool is
    too small, and prompts share a prefix. A model with recurrent layers is no draft: there the
    drafts are the known text with mistakes."""
    folder, _, _ = made(kind, 0)
    target = load_model(folder)
    same, *rest = (s.tolist() for s in sequences((18, 5, 9, 3, 12)))
    prompts = [same + tail for tail in rest] + [same + rest[0], same]
    requests = [engines.make_request(f"r{i}", p, max_tokens=16) for i, p in enumerate(prompts)]
    pages = {"num_state_pages": 24, "state_interval": 2} if target.config.recurrent else {}
    alone = {"max_num_seqs": 1, "enable_prefix_caching": False}
    plain = engines.run_engine(requests, target, **alone, **pages)
    settings = pages | {"lookahead": "fixed:4", "num_blocks": 20, "max_num_seqs": 4}
    draft = None
    if target.config.recurrent:
        texts = [p + plain.outputs[f"r{i}"] for i, p in enumerate(prompts)]
        settings |= {"drafting": LookupDrafter(Mistaken(texts)), "drafter": ("ngram",)}
    else:
        draft = load_model(folder, dtype="bfloat16")
    varied = engines.run_engine(requests, target, draft, **settings, max_num_batched_tokens=16)
    assert varied.outputs == plain.outputs
    bits = varied.executor.bits
    assert [key for key, each in plain.executor.bits.items() if bits[key] != each] == []
    stats = varied.scheduler.stats
    assert stats.preemptions and stats.prefix_hit_tokens and (varied.accepted > 0).any()


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "architecture", "more"),
    [
        (
            "qwen3_5_text",
            "Qwen3_5ForConditionalGeneration",
            ["model.visual.patch_embed.weight", "mtp.norm.weight"],
        ),
        (
            "gemma4_text",
            "Gemma4ForConditionalGeneration",
            ["model.vision_tower.a", "model.embed_audio.b"]
            + ["model.language_model.layers.3.self_attn.k_norm.weight"],
        ),
    ],
)
def test_a_vision_tower_is_left_out(
    kind: str, architecture: str, more: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, rows, expected = made(kind, 0)
    config = json.loads((folder / "config.json").read_text())
    config["use_bidirectional_attention"] = "vision"
    wrapper = {"architectures": [architecture], "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(wrapper))
    tensors = {name: torch.ones(3) for name in more}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors[name.replace("model.", "model.language_model.", 1)] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    model = load_model(tmp_path)
    assert [each.getMessage() for each in caplog.records if each.name == "cbatch"] == [
        f"{tmp_path}: its vision tower is left out; prompts are text only"
    ]
    kv = KVCache(model.config, 30, 4, torch.float32, "cpu", num_pages=30, num_slots=3)
    computed = run_all(model, kv, paged(kv, rows), [40])
    assert (computed - expected).abs().max() < BOUND * expected.std()
    if "gemma" in kind:  # all tokens would see later ones
        config["use_bidirectional_attention"] = "all"
        (tmp_path / "config.json").write_text(json.dumps(wrapper))
        with pytest.raises(UnsupportedModelError, match="bidirectional_attention: 'all' is not"):
            load_model(tmp_path)


@needs_compiler
@pytest.mark.parametrize("kind", ["gemma3_text", "qwen2_moe", "qwen3_5_text"])
def test_half_precision_and_threads_leave_a_row_its_bits(kind: str) -> None:
    model = load_model(made(kind, 0)[0], dtype="bfloat16")
    assert probe_batch_invariance(model).batch_invariant
    rows, bits = sequences((23, 14)), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        kv = KVCache(model.config, 20, 4, torch.bfloat16, "cpu", num_pages=20, num_slots=2)
        bits.append(run_all(model, kv, paged(kv, rows), [3 * threads]))
    assert torch.equal(*bits)


@needs_compiler
def test_values_may_be_narrower_than_keys(request: pytest.FixtureRequest) -> None:
    """Both passes compute the same."""
    config = engines.tiny_config().with_mixers(key_dim=12, value_dim=6, scale=0.3)
    logits = []
    for compiled in (True, False):
        if not compiled:
            request.getfixturevalue("torch_pass")
        model = Model(config, engines.NoisyWeights(1), torch.float32, "fast")
        assert model.compiled == compiled
        kv = KVCache(config, 30, 4, torch.float32, "cpu")
        logits.append(run_all(model, kv, paged(kv, [np.arange(33), np.arange(9)]), [5, 1]))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_numbers_above_the_range_of_float16(tmp_path: Path) -> None:
    """Squares of activations exceed it: weights may be float16, products are float32."""
    net = make("nemotron", tmp_path)
    for layer in net.model.layers:
        layer.mlp.up_proj.weight.data *= 512
    net.save_pretrained(tmp_path)
    logits = []
    for dtype in ("float32", "float16"):
        model = load_model(tmp_path, dtype=dtype)
        kv = KVCache(model.config, 20, 4, model.dtype, "cpu")
        logits.append(run_all(model, kv, paged(kv, [np.arange(33)]), [5]))
    assert (logits[0] - logits[1]).abs().max() < 0.05 * logits[0].std()


def test_every_family_is_served_without_kernels(tmp_path: Path) -> None:
    make("granite", tmp_path)
    settings = SCARCE | {"model_impl": "auto"}
    llm = LLM(tmp_path, dtype="float16", **settings)
    assert llm.info.code == "our own (granite)" and not llm.info.batch_invariant


def test_what_a_gpu_does_not_interpret_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record's new field, or a value of it, is refused until the GPU's interpreter has it."""
    config = engines.tiny_config()
    assert unsupported_on_gpu(config) is None
    assert unsupported_on_gpu(config.with_mixers(value_dim=6)) == "values narrower than keys"
    clamped = config.with_feed_forwards(activation="clamped")
    assert unsupported_on_gpu(clamped) == "the activation clamped"
    lone = Recurrence(rule="convolution", heads=1, value_dim=32, kernel=3)
    lone_layers = (structs.replace(config.layers[0], mixer=lone, feed_forward=None),)
    recurrent = structs.replace(config, layers=lone_layers)
    assert unsupported_on_gpu(recurrent) == "no layer with attention"
    apart = structs.replace(config.layers[0].mixer, kv_heads=1)
    layers = config.layers[0], structs.replace(config.layers[0], mixer=apart)
    mixed = structs.replace(config, layers=layers)
    assert unsupported_on_gpu(mixed) == "layers with heads of different shapes"
    make("mixtral", tmp_path)
    monkeypatch.delitem(support._FIELDS, Experts)
    with pytest.raises(UnsupportedModelError, match=r"mixtral \(experts\) is not supported on a"):
        LLM(tmp_path, device="cuda", **SCARCE | {"model_impl": "own"})
    with pytest.raises(UnsupportedModelError, match=r"mixtral \(experts\) is not supported on a"):
        load_decoder(tmp_path, device="cpu")


@needs_compiler
@pytest.mark.parametrize("kind", ["granite", "qwen3_5_text"])
def test_a_head_for_such_a_model_is_refused(kind: str, tmp_path: Path) -> None:
    make(kind, tmp_path / "model")
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text(json.dumps({"model_type": "medusa"}))
    with pytest.raises(FieldError) as caught:
        LLM(tmp_path / "model", tmp_path / "head", **SCARCE | {"model_impl": "auto"})
    assert caught.value.field == "draft"


@needs_compiler
def test_random_weights_are_drawn(tmp_path: Path) -> None:
    for kind in ("gpt_oss", "phi"):
        tiny_config(kind).save_pretrained(tmp_path)
        model = load_model(tmp_path, random_weights_seed=0, dtype="float32")
        kv = KVCache(model.config, 4, 4, torch.float32, "cpu")
        assert run_all(model, kv, paged(kv, [np.arange(9)]), [9]).isfinite().all()
