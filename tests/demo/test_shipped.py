"""The stored pair, its prompts and its card."""

from __future__ import annotations

import json
import re

import pytest
import torch

from cbatch.demo import demo_paths, demo_prompts, edit_prompts
from cbatch.demo.checkpoint import load_pretrained
from cbatch.demo.data import HELD_OUT_MODULES
from cbatch.demo.evaluate import agreements, folder_bytes
from cbatch.demo.sample import cut_at, generate
from cbatch.demo.tokenizer import VOCAB_SIZE, load_tokenizer

TARGET_FOLDER, DRAFT_FOLDER = demo_paths()


@pytest.fixture(scope="module")
def pair():
    return load_pretrained(TARGET_FOLDER), load_pretrained(DRAFT_FOLDER)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TARGET_FOLDER)


def test_sizes(pair):
    target, draft = (sum(p.numel() for p in net.parameters()) for net in pair)
    assert 5_000_000 <= target <= 10_000_000
    assert draft < 1_000_000
    assert folder_bytes(TARGET_FOLDER, DRAFT_FOLDER) <= 16_000_000


def test_both_models_share_one_tokenizer(pair, tokenizer):
    files = [(folder / "tokenizer.json").read_bytes() for folder in demo_paths()]
    assert files[0] == files[1]
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert {net.config.vocab_size for net in pair} == {VOCAB_SIZE}


@pytest.mark.parametrize("text", ["def f(x):\n    return x\n", "naïve 東京 🦀\t\r\n", "\x00 \n\n "])
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_target_equals_transformers(pair, tokenizer):
    transformers = pytest.importorskip("transformers")
    ids = torch.tensor([tokenizer.encode(demo_prompts()[0]).ids])
    for folder, net in zip(demo_paths(), pair, strict=True):
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.inference_mode():
            expected, got = reference(ids).logits, net(ids)
        assert (got - expected).abs().max() < 1e-4 * expected.std()


def test_the_draft_is_accepted_on_held_out_prompts(pair, tokenizer):
    prompts = [encoding.ids for encoding in tokenizer.encode_batch(demo_prompts()[::2])]
    hits, _ = agreements(*pair, prompts, tokenizer.token_to_id("<|endoftext|>"))
    flat = [hit for row in hits for hit in row]
    assert len(flat) > 500
    assert sum(flat) / len(flat) >= 0.55


def test_the_target_writes_python(pair, tokenizer):
    """A plain function head is continued by an indented body with a return."""
    prompt = 'def get_name(self):\n    """Return the name."""'
    new = generate(pair[0], [tokenizer.encode(prompt).ids], 24)[0]
    text = tokenizer.decode(cut_at(new, 0))
    assert text.startswith("\n    ")
    assert "return" in text


def test_prompts_come_from_held_out_modules():
    assert len(demo_prompts()) >= 24
    assert len(edit_prompts()) >= 8
    assert all(prompt.startswith(("def ", "async def ")) for prompt in demo_prompts())
    assert any("heap" in prompt for prompt in demo_prompts())


def test_the_card_names_the_held_out_modules_and_the_figures():
    card = (TARGET_FOLDER.parent / "README.md").read_text()
    assert all(f"`{name}`" in card for name in HELD_OUT_MODULES)
    total = next(line for line in card.splitlines() if line.startswith("| **total** |"))
    acceptance = float(total.split("|")[6])
    assert acceptance >= 0.6
    assert 0 < float(total.split("|")[7]) < acceptance + 0.1
    assert re.search(r"c =\s[0-9.]+", card)


def test_configs_are_llama():
    for folder in demo_paths():
        config = json.loads((folder / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert config["max_position_embeddings"] == 1024
        assert config["tie_word_embeddings"] is True
