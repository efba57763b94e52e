"""Small random Hugging Face models: the reference for our own passes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.cpu.decoder import Model
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.state_memory import pages_of_blocks

transformers.utils.logging.disable_progress_bar()

CONTEXT_TOKENS = 384

SHAPE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_TOKENS,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROPE: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 96},
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 96,
        "mscale": 0.7,
        "mscale_all_dim": 0.3,
        "truncate": False,
    },
}
# By family, the fields that distinguish it from the others.
FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 70, "head_dim": 32},
    "qwen2": {"use_sliding_window": True, "sliding_window": 90, "max_window_layers": 1},
    "qwen3": {"head_dim": 32, "num_key_value_heads": 1},
}
_CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def build(
    directory: Path, family: str, rope: str = "default", seed: int = 0, **overrides: Any
) -> transformers.PreTrainedModel:
    """Build a random model of `family` in fp32 with eager attention, and save it to `directory`.

    Every tensor is drawn, norms and biases too: with ones and zeros a swapped pair would go
    unnoticed.
    """
    name = _CLASSES[family]
    values = {**SHAPE, **FAMILY[family], **overrides}
    values["rope_parameters"] = {"rope_theta": 10000.0, **ROPE[rope]}
    config = getattr(transformers, f"{name}Config")(**values, attn_implementation="eager")
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if key.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * noise)
            else:
                parameter.copy_(0.15 * noise)
    model.save_pretrained(directory)
    return model


def use_old_rope_spelling(directory: Path) -> None:
    """Rewrite config.json with `rope_theta` and `rope_scaling`, as before transformers 5."""
    file = directory / "config.json"
    values = json.loads(file.read_text())
    rope = values.pop("rope_parameters")
    values["rope_theta"] = rope.pop("rope_theta")
    values["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    file.write_text(json.dumps(values))


def tokens_of(seed: int, length: int, vocab_size: int = SHAPE["vocab_size"]) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, vocab_size, length)


class PagedSequence:
    """A sequence's tokens, its progress, its blocks and the slot of its states."""

    def __init__(self, tokens: NDArray[np.int64], blocks: NDArray[np.int32], slot: int = 0) -> None:
        self.tokens, self.blocks, self.done, self.slot = tokens, blocks, 0, slot


def paged(kv: KVCache, sequences: list[NDArray[np.int64]], seed: int = 0) -> list[PagedSequence]:
    """Return sequences with blocks of `kv` in random order."""
    free = np.random.default_rng(seed).permutation(kv.num_blocks).astype(np.int32)
    paged_sequences = []
    for slot, tokens in enumerate(sequences):
        count = -(-len(tokens) // kv.block_size)
        paged_sequences.append(PagedSequence(tokens, free[:count], slot))
        free = free[count:]
    return paged_sequences


def step(model: Model, kv: KVCache, chunks: list[tuple[PagedSequence, int]]) -> list[Tensor]:
    """Run the next `n` tokens of each sequence in one pass; return the logits of all of them, [n,
    vocab]."""
    lens = np.array([n for _, n in chunks], dtype=np.int32)
    starts = [s.done for s, _ in chunks]
    width = max(len(s.blocks) for s, _ in chunks)
    tables = np.full((len(chunks), width), 10**6, dtype=np.int32)  # never read
    for row, (sequence, _) in zip(tables, chunks, strict=True):
        row[: len(sequence.blocks)] = sequence.blocks
    flat = [s.tokens[s.done : s.done + n] for s, n in chunks]
    positions = [np.arange(at, at + n) for at, n in zip(starts, lens, strict=True)]
    for sequence, n in chunks:
        sequence.done += n
    logits = model.forward(
        RaggedBatch(
            tokens=torch.from_numpy(np.concatenate(flat)),
            positions=torch.from_numpy(np.concatenate(positions)),
            query_lens=lens,
            context_lens=np.array([s.done for s, _ in chunks], dtype=np.int32),
            block_tables=tables,
            logits_index=torch.arange(int(lens.sum())),
            state_tables=pages_of_blocks(tables),
            state_slots=np.array([s.slot for s, _ in chunks], dtype=np.int32),
        ),
        kv,
    )
    return list(logits.split(lens.tolist()))


def run_all(
    model: Model,
    kv: KVCache,
    sequences: list[PagedSequence],
    sizes: list[int],
    firsts: Sequence[int] = (),
) -> Tensor:
    """Return the logits of whole sequences that are computed in ragged steps, [sum of lengths,
    vocab].

    Row i takes `sizes[i]`, `sizes[i + 1]`, ... tokens a step, cyclically, after `firsts[i]` in a
    step before. Sequences follow each other in the result.
    """
    parts_of: list[list[Tensor]] = [[] for _ in sequences]
    if firsts:
        begun = step(model, kv, list(zip(sequences, firsts, strict=True)))
        parts_of = [[logits] for logits in begun]
    turn = 0
    while any(s.done < len(s.tokens) for s in sequences):
        ids = [i for i, s in enumerate(sequences) if s.done < len(s.tokens)]
        chunks = [
            (s, min(sizes[(turn + i) % len(sizes)], len(s.tokens) - s.done))
            for i, s in ((i, sequences[i]) for i in ids)
        ]
        for i, logits in zip(ids, step(model, kv, chunks), strict=True):
            parts_of[i].append(logits)
        turn += 1
    return torch.cat([part for parts in parts_of for part in parts])
