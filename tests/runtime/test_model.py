"""The KV and the logits that a pass writes, and rotary tables. Logits of all families are compared
in test_every_family.py."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.cpu.decoder import Model, load_model
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.config_json import load_config
from cbatch.runtime.model.records import Rope
from cbatch.runtime.model.rope import RotaryTable, inverse_frequencies
from tests.runtime.hf_models import (
    CONTEXT_TOKENS,
    ROPE,
    build,
    paged,
    run_all,
    step,
    tokens_of,
)

BLOCK = 16


def cache(model: Model, num_blocks: int = 64, block_size: int = BLOCK) -> KVCache:
    return KVCache(model.config, num_blocks, block_size, model.dtype, model.device)


@pytest.mark.usefixtures("decoder_pass")
def test_only_the_wanted_logits_come_back(tmp_path: Path) -> None:
    build(tmp_path, "llama")
    model = load_model(tmp_path, numerics="invariant")
    kv = cache(model)
    sequence = paged(kv, [tokens_of(0, 12)])[0]
    whole = step(model, kv, [(sequence, 12)])[0]
    batch = RaggedBatch(
        tokens=torch.from_numpy(sequence.tokens),
        positions=torch.arange(12),
        query_lens=np.array([12], dtype=np.int32),
        context_lens=np.array([12], dtype=np.int32),
        block_tables=sequence.blocks[None],
        logits_index=torch.tensor([11, 3]),
    )
    torch.testing.assert_close(model.forward(batch, kv), whole[[11, 3]])
    kv.data.zero_()
    batch.logits_index = torch.tensor([], dtype=torch.int64)
    assert model.forward(batch, kv).shape == (0, model.config.vocab_size)
    assert (kv.data[:, :, :, sequence.blocks].abs().amax((1, 2, 3, 4, 5)) > 0).all(), (
        "KV is written"
    )


@pytest.mark.usefixtures("decoder_pass")
def test_a_pass_writes_its_own_blocks_only(tmp_path: Path) -> None:
    build(tmp_path, "mistral")
    model = load_model(tmp_path, numerics="invariant")
    kv = cache(model)
    kv.data.fill_(7.0)
    sequences = paged(kv, [tokens_of(i, n) for i, n in enumerate((20, 100))])
    run_all(model, kv, sequences, [9, 3])
    own = {int(b) for s in sequences for b in s.blocks}
    others = [b for b in range(kv.num_blocks) if b not in own]
    assert len(own) == 2 + 7 and (kv.data[:, :, :, others] == 7.0).all()


@pytest.mark.usefixtures("decoder_pass")
def test_zeroed_blocks_are_safe_for_the_next_owner(tmp_path: Path) -> None:
    build(tmp_path, "llama")
    model = load_model(tmp_path, numerics="invariant")
    kv = cache(model)
    clean = run_all(model, kv, paged(kv, [tokens_of(0, 20)]), [7])
    kv.data.fill_(float("nan"))
    kv.data[:, :, :, kv.scratch_block] = 0
    dirty = run_all(model, kv, paged(kv, [tokens_of(0, 20)]), [7])
    assert torch.equal(dirty, clean)
    kv.data[:, :, :, : kv.num_blocks] = float("nan")
    kv.zero_blocks(paged(kv, [tokens_of(0, 20)])[0].blocks)
    assert torch.equal(run_all(model, kv, paged(kv, [tokens_of(0, 20)]), [7]), clean)


@pytest.mark.usefixtures("decoder_pass")
def test_a_broken_sequence_leaves_its_neighbours_alone(tmp_path: Path) -> None:
    build(tmp_path, "llama")
    model = load_model(tmp_path, numerics="invariant")
    kv = cache(model)
    sequences = paged(kv, [tokens_of(0, 20), tokens_of(1, 20)])
    alone = run_all(model, kv, sequences[:1], [20])
    for s in sequences:
        s.done = 0
    step(model, kv, [(s, 10) for s in sequences])
    kv.data[0, :, :, sequences[1].blocks[0]] = float("nan")
    first, second = step(model, kv, [(s, 10) for s in sequences])
    torch.testing.assert_close(first, alone[10:])
    assert second.isnan().all()


def test_a_context_beyond_the_models_is_refused(tmp_path: Path) -> None:
    build(tmp_path, "llama")
    model = load_model(tmp_path, numerics="invariant")
    kv = cache(model)
    sequence = paged(kv, [tokens_of(0, CONTEXT_TOKENS + 1)])[0]
    with pytest.raises(ValueError, match=f"context_lens: {CONTEXT_TOKENS + 1} tokens exceed"):
        step(model, kv, [(sequence, CONTEXT_TOKENS + 1)])


def test_block_bytes_is_what_a_block_takes(tmp_path: Path) -> None:
    build(tmp_path, "qwen3")
    model = load_model(tmp_path, dtype="bfloat16", numerics="invariant")
    kv = cache(model, num_blocks=9)
    taken = kv.data.numel() * kv.data.element_size()
    assert KVCache.block_bytes(model.config, BLOCK, model.dtype) * (9 + 1) == taken
    with pytest.raises(ValueError, match=r"block ids must lie in 0\.\.8"):
        kv.zero_blocks([9])


# --- rope -----------------------------------------------------------------------------------------

FAR = 100_000


@pytest.mark.parametrize("rope", ROPE)
def test_cos_and_sin_are_those_of_transformers_at_far_positions(tmp_path: Path, rope: str) -> None:
    build(tmp_path, "llama", rope, num_hidden_layers=1, head_dim=64)
    config = load_config(tmp_path)
    reference = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    positions = torch.tensor([0, 1, 77, 255, 256, 4000, FAR])
    cos, sin = reference(torch.zeros(1, 1, 1), positions[None])
    factors = RotaryTable(config.attention.rope, 64, "cpu").cos_sin(FAR + 1)[positions]
    torch.testing.assert_close(factors[..., 0], cos[0, :, :32], rtol=0, atol=1e-6)
    torch.testing.assert_close(factors[..., 1], sin[0, :, :32], rtol=0, atol=1e-6)


@pytest.mark.parametrize("grown_to", [256, 300, 3000])
def test_factors_are_rounded_to_the_nearest_at_every_position(grown_to: int) -> None:
    """Factors are rounded to the nearest. A library's fp32 cosine is not, and where it is not
    depends on threads."""
    rope = Rope()
    table = RotaryTable(rope, 64, "cpu")
    table.cos_sin(grown_to)
    factors = table.cos_sin(2000).numpy()
    angles = np.arange(2000, dtype=np.float32)[:, None] * inverse_frequencies(rope, 64).numpy()
    exact = np.vectorize(math.cos)(angles), np.vectorize(math.sin)(angles)
    assert (factors[..., 0] == exact[0].astype(np.float32)).all()
    assert (factors[..., 1] == exact[1].astype(np.float32)).all()
    assert (torch.from_numpy(angles).cos().numpy() != factors[..., 0]).any()
