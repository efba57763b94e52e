"""A model with scripted output: after each token always the same next one, whatever came before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_tokens() -> Tokenizer:
    """Return a tokenizer with one token a byte, then control tokens, then an added token that is no
    control token."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={name: at for at, name in enumerate(names)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROLS])
    raw.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    return raw


def pieces() -> Tokenizer:
    """Return a tokenizer with pieces like SentencePiece's, byte fallback, and a decoder that drops
    the first space."""
    words = ["▁", *"abcdefghijklmnopqrstuvwxyz", "tr", "ue", "true", "▁true", "▁b"]
    vocab = {name: at for at, name in enumerate(["<unk>", "<s>", "</s>"])}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {name: 259 + at for at, name in enumerate(words)}
    merges = [("t", "r"), ("u", "e"), ("tr", "ue"), ("▁", "true"), ("▁", "b")]
    raw = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    raw.add_special_tokens(["<unk>", "<s>", "</s>"])
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    undo = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    raw.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)])
    return raw


def write_chained(
    folder: Path, raw: Tokenizer, *chains: Sequence[int], eos: int | None = None, **config: Any
) -> Path:
    """Write a model that follows each token of a chain with the next one. A token must not have two
    successors. `config` are fields of its config.json."""
    folder.mkdir(parents=True)
    raw.save(str(folder / "tokenizer.json"))
    vocab = raw.get_vocab_size()
    hidden = -(-vocab // 16) * 16
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": eos,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(shape | config))
    head, layer = torch.zeros(vocab, hidden), "model.layers.0."
    for chain in chains:
        for token, follower in zip(chain, chain[1:], strict=False):
            assert not head[:, token].any() or head[follower, token], "followed by two"
            head[follower, token] = 1.0
    tensors = {"model.embed_tokens.weight": torch.eye(vocab, hidden), "lm_head.weight": head}
    tensors |= {f"{layer}self_attn.{n}_proj.weight": torch.zeros(hidden, hidden) for n in "qkvo"}
    tensors |= {f"{layer}mlp.{n}_proj.weight": torch.zeros(16, hidden) for n in ("gate", "up")}
    tensors[f"{layer}mlp.down_proj.weight"] = torch.zeros(hidden, 16)
    norms = ("model.norm", f"{layer}input_layernorm", f"{layer}post_attention_layernorm")
    tensors |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder
