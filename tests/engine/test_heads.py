"""Heads in an engine: the shipped head drafts. A head that guesses at random, or does not fit, is
rejected."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from cbatch import LLM, EngineOptions, FieldError, SamplingParams
from cbatch.demo import demo_head, demo_paths, demo_prompts
from cbatch.engine.build import load_engine
from cbatch.engine.model_files import load_tokenizers, tokenizer_of
from cbatch.runtime.cpu.decoder import load_model
from cbatch.runtime.cpu.drafters.eagle_head import EagleHead
from cbatch.runtime.cpu.drafters.kinds import HEADS
from cbatch.runtime.drafting.heads import trial as self_test
from cbatch.runtime.drafting.heads.loading import load_heads
from cbatch.runtime.drafting.heads.trial import best_reading
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.head_config import read_head
from cbatch.runtime.model.head_weights import HeadWeights
from tests.gguf_files import Q8_0, convert, gguf_bytes
from tests.runtime.made_heads import Cold
from tests.runtime.marks import needs_compiler

TARGET = demo_paths()[0]
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
PROMPTS = demo_prompts()[:6]


@needs_compiler
def test_the_shipped_head_drafts_and_changes_no_text(caplog):
    assert load_tokenizers(demo_paths()[0], demo_head(), EngineOptions()), "a head may have none"
    """This holds after a prefix hit, too."""
    caplog.set_level("INFO", logger="cbatch")
    plain = LLM(TARGET, lookahead="off", max_num_seqs=6).generate(PROMPTS, GREEDY)
    llm = LLM(TARGET, demo_head(), lookahead="fixed:3", max_num_seqs=6)
    assert "eagle3 head that reads the inputs of layers 2, 6, 9" in caplog.text
    cold = llm.generate(PROMPTS, GREEDY)
    assert llm.engine.scheduler.stats.prefix_hit_tokens == 0
    again = llm.generate(PROMPTS, GREEDY)
    assert llm.engine.scheduler.stats.prefix_hit_tokens > 0
    for completions in (cold, again):
        assert [c.token_ids for c in completions] == [c.token_ids for c in plain]
    for first, second in zip(cold, again, strict=True):
        assert first.speculation.accepted_tokens == second.speculation.accepted_tokens
    total = llm.engine.stats.speculation
    trials = total.accepted_tokens + total.rejections
    assert total.accepted_tokens / trials > 0.5


@needs_compiler
def test_heads_with_random_guesses_are_rejected(tmp_path):
    head = shutil.copytree(demo_head(), tmp_path / "head")
    tensors = load_file(head / "model.safetensors")
    tensors["fc.weight"] = torch.randn(tensors["fc.weight"].shape).bfloat16()
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(FieldError, match="no more than always guessing the same token"):
        load_engine(TARGET, head)
    with pytest.raises(FieldError, match=r"2 medusa heads; .*always guessing the same token"):
        load_engine(TARGET, medusa(tmp_path / "medusa", 0.3))


def medusa(folder: Path, scale: float) -> Path:
    """Write a folder of two Medusa heads. With a `scale` of 0, each predicts the model's own next
    token."""
    g = torch.Generator().manual_seed(0)
    blocks = [torch.randn(256, 256, generator=g) * scale for _ in range(2)]
    folder.mkdir()
    tensors = {f"{i}.0.linear.weight": block for i, block in enumerate(blocks)}
    tensors |= {f"{i}.0.linear.bias": torch.zeros(256) for i in range(2)}
    torch.save(tensors, folder / "medusa_lm_head.pt")
    fields = {"medusa_num_heads": 2, "medusa_num_layers": 1}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_medusa_heads_draft_and_change_no_text(tmp_path, monkeypatch):
    """The heads are untrained, so that hardly any draft is accepted, and their self-test would
    reject them."""
    monkeypatch.setattr(self_test.HeadTrial, "is_chance", False)
    plain = LLM(TARGET, lookahead="off", max_num_seqs=6).generate(PROMPTS, GREEDY)
    llm = LLM(TARGET, medusa(tmp_path / "heads", 0.0), lookahead="fixed:2", max_num_seqs=6)
    for _ in range(2):  # without, then with prefix hits
        completions = llm.generate(PROMPTS, GREEDY)
        assert [c.token_ids for c in completions] == [c.token_ids for c in plain]
    stats = llm.engine.stats.speculation
    assert stats.drafted_tokens > 0 and stats.rejections > 0


@needs_compiler
def test_the_reading_of_a_head_that_agrees_significantly_more_is_used():
    """The file does not state whether the residual is normed, and the first reading is wrong."""
    target = load_model(TARGET)
    right = read_head(demo_head(), target.config)[0]
    pair = structs.replace(right.layer.input, normed_residual=True)
    wrong = structs.replace(right, layer=structs.replace(right.layer, input=pair))
    weights = HeadWeights.of(demo_head())
    rows = load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"]
    heads = [EagleHead(each, weights, target, rows) for each in (wrong, right)]
    tokenizer = tokenizer_of(TARGET)
    texts = [tokenizer.encode(text) for text in demo_prompts()[:8]]
    assert best_reading(heads, target, texts).head is heads[1]
    assert best_reading(heads[::-1], target, texts).head is heads[1]
    assert best_reading([heads[1], heads[1]], target, texts).head is heads[1]


@needs_compiler
@torch.inference_mode()
def test_a_head_of_a_quantised_model_is_quantised(tmp_path):
    """Its drafts stay nearly the same, with half the bytes."""
    values, tensors = convert(TARGET, Q8_0)
    path = tmp_path / "target.gguf"
    path.write_bytes(gguf_bytes(values, tensors))
    plain, blocks = load_model(TARGET), load_model(path)
    whole, rounded = (
        load_heads(demo_head(), plain, TARGET, HEADS)[0],
        load_heads(demo_head(), blocks, path, HEADS)[0],
    )
    assert 0.5 < rounded.matrix_bytes / whole.matrix_bytes < 0.56
    tokens = tokenizer_of(TARGET).encode(demo_prompts()[0])[:60]
    plain.keep_hidden(whole.head.hidden_layers)
    hidden = plain.allocate_hidden(len(tokens))
    plain.forward(Cold.batch(tokens), KVCache(plain.config, 64, 4, plain.dtype, "cpu"), hidden)
    heads = [
        each.first_logits(
            Cold.batch(tokens), KVCache(each.config, 64, 4, each.dtype, "cpu"), hidden
        )[1:, each.vocabulary]
        for each in (whole, rounded)
    ]
    assert not torch.equal(*heads)
    assert (heads[0] - heads[1]).abs().mean() < 0.1 * heads[0].std()
    assert (heads[0].argmax(-1) == heads[1].argmax(-1)).float().mean() > 0.9
