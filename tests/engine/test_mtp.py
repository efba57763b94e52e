"""A model's own head for multi-token prediction: its drafts follow the equations, no draft changes
a text, and files without a usable head are refused or served without one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.peers.gguf_converter import convert
from cbatch import LLM, FieldError, SamplingParams
from cbatch.demo import demo_head, demo_paths, demo_prompts
from cbatch.runtime.cpu.decoder import load_model
from cbatch.runtime.cpu.drafters.eagle import EagleDrafter
from cbatch.runtime.cpu.drafters.eagle_head import EagleHead
from cbatch.runtime.drafting.heads.loading import load_heads
from cbatch.runtime.drafting.heads.trial import read_states
from tests.gguf_files import F32, Q8_0, gguf_bytes, stored
from tests.runtime.marks import needs_compiler

HYBRID = Path(__file__).parents[1] / "data" / "tiny_hybrid"
TOKENIZER = str(demo_paths()[0])
HEADS, KV_HEADS, DIM, ROTATED, EPS = 4, 2, 32, 8, 1e-6
PROMPTS = [*demo_prompts()[:5], "x = 1", *demo_prompts()[:2]]


def make(folder: Path = HYBRID, **options: Any) -> LLM:
    return LLM(folder, **{"tokenizer": TOKENIZER, "max_num_seqs": 4} | options)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], 1 + weight, EPS)


def rotated(x: Tensor) -> Tensor:
    """Rotate the first dimensions of heads [heads, T, DIM]."""
    rates = 10000.0 ** (-torch.arange(0, ROTATED, 2) / ROTATED)
    angles = (torch.arange(x.shape[1])[:, None] * rates).repeat(1, 2)
    a, rest = x[..., :ROTATED], x[..., ROTATED:]
    halves = torch.cat([-a[..., ROTATED // 2 :], a[..., : ROTATED // 2]], dim=-1)
    return torch.cat([a * angles.cos() + halves * angles.sin(), rest], dim=-1)


class Reference:
    """The equations of the head over one sequence, without KV."""

    def __init__(self) -> None:
        tensors = load_file(HYBRID / "model.safetensors")
        self.t = {name.removeprefix("mtp."): each.float() for name, each in tensors.items()}
        self.target = load_model(HYBRID, dtype="float32")

    def logits(self, tokens: list[int], drafts: list[int]) -> Tensor:
        """Return the logits after the last of `drafts`, which follow known tokens."""
        ids = torch.tensor(tokens)
        _, hidden = read_states(self.target, (self.target.config.num_layers,), ids[:-1])
        states = norm(hidden[:, 0], self.t["model.norm.weight"])
        output = self.outputs(ids[1:], states)
        for draft in drafts:
            ids, states = torch.cat([ids, torch.tensor([draft])]), torch.cat([states, output[-1:]])
            output = self.outputs(ids[1:], states)
        return output[-1] @ self.t["model.embed_tokens.weight"].T

    def outputs(self, ids: Tensor, states: Tensor) -> Tensor:
        t, layer = self.t, "layers.0."
        embedded = norm(t["model.embed_tokens.weight"][ids], t["pre_fc_norm_embedding.weight"])
        pair = torch.cat([embedded, norm(states, t["pre_fc_norm_hidden.weight"])], dim=-1)
        x = pair @ t["fc.weight"].T
        rows = norm(x, t[f"{layer}input_layernorm.weight"])
        q, k, v = (rows @ t[f"{layer}self_attn.{n}_proj.weight"].T for n in "qkv")
        q, gate = q.view(-1, HEADS, 2, DIM).unbind(2)
        k, v = (each.view(-1, KV_HEADS, DIM).transpose(0, 1) for each in (k, v))
        q = rotated(norm(q.transpose(0, 1), t[f"{layer}self_attn.q_norm.weight"]))
        k = rotated(norm(k, t[f"{layer}self_attn.k_norm.weight"]))
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=0) for each in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
        mixed = (mixed * gate.sigmoid()).flatten(1)
        x = x + mixed @ t[f"{layer}self_attn.o_proj.weight"].T
        rows = norm(x, t[f"{layer}post_attention_layernorm.weight"])
        gate, up, down = (t[f"{layer}mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        x = x + (F.silu(rows @ gate.T) * (rows @ up.T)) @ down.T
        return norm(x, t["norm.weight"])


@needs_compiler
@torch.inference_mode()
def test_drafted_logits_are_those_of_the_equations(monkeypatch: pytest.MonkeyPatch) -> None:
    """For three drafts of each row, after prefix hits and rejected drafts, too."""
    reference, seen, wrong = Reference(), list[Tensor](), list[float]()
    choices, propose = EagleHead.choices, EagleDrafter.propose

    def keep(head: EagleHead, *inputs: Any) -> tuple[Tensor, Tensor]:
        logits, states = choices(head, *inputs)
        seen.extend([logits] if len(logits) else [])
        return logits, states

    def check(drafter: EagleDrafter, rows: Any) -> Any:
        seen.clear()
        proposal = propose(drafter, rows)
        for depth, logits in enumerate(seen):
            drafting = np.flatnonzero(proposal.num_drafted > depth)
            for own, row in zip(logits, drafting, strict=True):
                known = drafter.table.tokens[rows.slots[row], : rows.num_tokens[row]].tolist()
                expected = reference.logits(known, proposal.tokens[row, :depth].tolist())
                wrong.append(float((own - expected).abs().max() / expected.std()))
        return proposal

    monkeypatch.setattr(EagleHead, "choices", keep)
    monkeypatch.setattr(EagleDrafter, "propose", check)
    llm = make(dtype="float32", drafter=("mtp",), lookahead="fixed:3", block_size=8)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    for _ in range(2):
        llm.generate(PROMPTS[3:6], params)
    total = llm.engine.stats.speculation
    assert llm.engine.scheduler.stats.prefix_hit_tokens > 0
    assert total.accepted_tokens > 0 and total.rejections > 0 and len(wrong) > 60
    assert max(wrong) < 1e-4


@needs_compiler
@pytest.mark.parametrize("kind", ["greedy", "coupled"])
def test_no_drafter_changes_a_text(kind: str) -> None:
    """With prefix hits and chunks of prompts, too."""
    params = [
        SamplingParams(
            max_tokens=40 + i,
            temperature=0.0 if kind == "greedy" else 0.7,
            seed=None if kind == "greedy" else i,
            ignore_eos=True,
        )
        for i in range(len(PROMPTS))
    ]
    texts = []
    for options in (
        {"lookahead": "off"},
        {"lookahead": "fixed:3"},
        {"drafter": ("mtp", "suffix"), "lookahead": "fixed:5", "overlap": 1},
        {"drafter": ("ngram", "mtp"), "lookahead": "adaptive:2", "max_num_batched_tokens": 32},
        {"drafter": ("ngram",), "lookahead": "fixed:4"},
        {"drafter": ("suffix",), "lookahead": "fixed:4"},
    ):
        llm = make(**options)
        for _ in range(2):
            texts.append([each.token_ids for each in llm.generate(PROMPTS, params)])
        total = llm.engine.stats.speculation
        assert llm.engine.scheduler.stats.prefix_hit_tokens > 0
        if options.get("drafter", ("mtp",))[0] == "mtp" and options["lookahead"] != "off":
            assert total.accepted_tokens > 100 and total.rejections > 50
            assert sum(n for k, n in total.k_histogram.items() if k >= 2) > 50
    assert all(each == texts[0] for each in texts)


def write(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    config = json.loads((HYBRID / "config.json").read_text())
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(16)]
    config |= {"layer_types": kinds, "linear_conv_kernel_dim": 4}  # defaults
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def assert_drafts_like_the_hybrid(path: Path, *, tolerance: float) -> None:
    """Assert that no draft changes a text, and that as many are accepted as in the hybrid."""
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    runs = [make(file, lookahead="fixed:2") for file in (HYBRID, path)]
    plain = make(path, lookahead="off").generate(PROMPTS, params)
    drafted = [llm.generate(PROMPTS, params) for llm in runs][1]
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    original, other = (llm.engine.stats.speculation.acceptance for llm in runs)
    assert original is not None and other == pytest.approx(original, abs=tolerance)


@needs_compiler
def test_the_head_of_a_gguf_file_drafts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As llama.cpp's converter writes it: one more layer, with `nextn` tensors."""
    stored_head, layers = {}, dict[str, Tensor]()
    tensors = load_file(HYBRID / "model.safetensors")
    for name in [name for name in tensors if name.startswith("mtp.")]:
        name, tensor = name.removeprefix("mtp."), tensors.pop(name)
        if name.startswith("layers.0"):
            layers[name.replace("layers.0", "model.layers.3")] = tensor
        else:
            stored_head[name] = tensor
    metadata, of_model = convert(write(tmp_path / "model", tensors), Q8_0)
    _, of_layer = convert(write(tmp_path / "layer", tensors | layers), Q8_0)
    last = {name: each for name, each in of_layer.items() if name.startswith("blk.3.")}
    of_model |= {name.replace("blk.3.", "blk.16."): each for name, each in last.items()}
    names = {"fc": "eh_proj", "norm": "shared_head_norm"}
    names |= {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
    for name, stem in names.items():
        tensor = stored_head[f"{name}.weight"].float()
        tensor = stored(tensor, Q8_0) if name == "fc" else stored(tensor + 1, F32)
        of_model[f"blk.16.nextn.{stem}.weight"] = tensor
    metadata |= {"qwen35.block_count": 17, "qwen35.nextn_predict_layers": 1}
    path = tmp_path / "hybrid.gguf"
    path.write_bytes(gguf_bytes(metadata, of_model))
    assert_drafts_like_the_hybrid(path, tolerance=0.08)
    assert "left out" not in caplog.text


def by_key_head(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([each.unflatten(0, (2, -1)) for each in parts], dim=1).flatten(0, 1)


def as_qwen3_next(folder: Path) -> Path:
    """Write the hybrid in the layout of Qwen3-Next. A layer's network becomes two equal experts of
    which one answers each token, and a shared one that adds nothing."""
    dense, tensors = load_file(HYBRID / "model.safetensors"), dict[str, Tensor]()
    for name, tensor in dense.items():
        layer, _, part = name.partition(".mlp.")
        mixer, _, projection = name.partition("in_proj_")
        if part:
            tensors |= {f"{layer}.mlp.experts.{i}.{part}": tensor.clone() for i in range(2)}
            tensors[f"{layer}.mlp.shared_expert.{part}"] = torch.zeros_like(tensor)
            tensors[f"{layer}.mlp.gate.weight"] = torch.zeros(2, 96)
            tensors[f"{layer}.mlp.shared_expert_gate.weight"] = torch.zeros(1, 96)
        elif projection == "qkv.weight":
            parts = *tensor.split([64, 64, 128]), dense[f"{mixer}in_proj_z.weight"]
            tensors[f"{mixer}in_proj_qkvz.weight"] = by_key_head(parts)
        elif projection == "b.weight":
            tensors[f"{mixer}in_proj_ba.weight"] = by_key_head(
                (tensor, dense[f"{mixer}in_proj_a.weight"])
            )
        elif not projection:
            tensors[name] = tensor
    folder.mkdir()
    config = json.loads((HYBRID / "config.json").read_text())
    config |= {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
    config |= {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 128}
    config |= {"shared_expert_intermediate_size": 128}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@needs_compiler
def test_the_head_of_qwen3_next_drafts(tmp_path: Path) -> None:
    """Its head has experts."""
    assert_drafts_like_the_hybrid(as_qwen3_next(tmp_path / "next"), tolerance=0.05)


@needs_compiler
def test_a_head_that_guesses_is_left_out_unless_it_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = load_file(HYBRID / "model.safetensors")
    tensors["mtp.fc.weight"] = torch.randn(tensors["mtp.fc.weight"].shape).bfloat16()
    folder = write(tmp_path / "model", tensors)
    llm = make(folder)
    assert llm.info.draft is None and llm.info.drafter == ()
    assert "always guessing the same token" in caplog.text and "it is left out" in caplog.text
    with pytest.raises(FieldError, match="draft: .*always guessing the same token"):
        make(folder, drafter=("mtp",))
    del tensors["mtp.norm.weight"]
    make(write(tmp_path / "cut", tensors))
    assert "mtp.norm.weight is missing" in caplog.text


@needs_compiler
def test_a_model_drafts_with_its_own_head_by_default() -> None:
    """Unless another drafter is named, or drafting is off."""
    assert make().info.draft == str(HYBRID)
    assert make(draft=HYBRID).info.draft == str(HYBRID)
    for options in ({"lookahead": "off"}, {"drafter": ("ngram",)}, {"random_weights_seed": 0}):
        assert make(**options).info.draft is None


@needs_compiler
@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3"])
def test_refusals_say_what_is_missing(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    transformers.AutoConfig.for_model(kind, num_hidden_layers=2).save_pretrained(tmp_path)
    with pytest.raises(FieldError, match=r"drafter: mtp: .* transformers' code; .* our own pass"):
        make(tmp_path, drafter=("mtp",))
    with pytest.raises(FieldError, match=r"drafter: mtp: .* has no MTP head \(tensor mtp.fc"):
        make(demo_paths()[0], drafter=("mtp",))
    with pytest.raises(FieldError, match="speculative_config: method 'mtp', but the draft is"):
        make(demo_paths()[0], draft=demo_head(), draft_method="mtp")
    with pytest.raises(FieldError, match="draft: a head .* needs a target like Llama"):
        make(draft=demo_head())
    target = load_model(HYBRID)
    with pytest.raises(FieldError, match="drafter: MTP heads are not supported on a GPU"):
        load_heads(HYBRID, target, HYBRID, {})
