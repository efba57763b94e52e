"""GGUF files: the same logits as their directories, and what cannot be served is named."""

from __future__ import annotations

import enum
import logging
import math
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from cbatch.runtime.cpu.decoder import load_model
from cbatch.runtime.cpu.invariance import probe_batch_invariance
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model import gguf_file
from cbatch.runtime.model.checkpoint import open_checkpoint
from cbatch.runtime.model.config import ModelError
from tests.gguf_files import BF16, F16, F32, Q8_0, Stored, convert, gguf_bytes, stored
from tests.runtime.hf_models import build, paged, run_all, tokens_of
from tests.runtime.marks import needs_compiler
from tests.runtime.test_gguf_blocks import blocks


def logits(model: str | Path, **options: Any) -> Tensor:
    loaded = load_model(model, **options)
    kv = KVCache(loaded.config, 20, 16, loaded.dtype, "cpu")
    return run_all(loaded, kv, paged(kv, [tokens_of(3, 150)]), [64])


def as_gguf(directory: Path, kind: int = F32, **metadata: Any) -> Path:
    path = directory / "model.gguf"
    values, tensors = convert(directory, kind)
    path.write_bytes(gguf_bytes(values | metadata, tensors))
    return path


@pytest.mark.parametrize(
    ("family", "rope", "changes"),
    [
        ("llama", "linear", {"tie_word_embeddings": False}),
        ("qwen2", "yarn", {"use_sliding_window": False}),
    ],
)
def test_scaled_positions(tmp_path: Path, family: str, rope: str, changes: dict[str, Any]) -> None:
    build(tmp_path, family, rope, **changes)
    path = as_gguf(tmp_path)
    one, other = open_checkpoint(path).config, open_checkpoint(tmp_path).config
    for field in ("family", "windows", "max_position_tokens", "tie_embeddings"):
        assert getattr(one, field) == getattr(other, field)
    torch.testing.assert_close(logits(path), logits(tmp_path), rtol=0, atol=1e-4)


def test_llama_3_scales_by_a_tensor(tmp_path: Path) -> None:
    build(tmp_path, "llama", "llama3")
    path = as_gguf(tmp_path)
    assert open_checkpoint(path).config.attention.rope.divisors[-1] == 8.0
    torch.testing.assert_close(logits(path), logits(tmp_path), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "auto", "close"),
    [(F16, torch.float16, 0.05), (BF16, torch.bfloat16, 0.4), (Q8_0, torch.bfloat16, 0.4)],
)
def test_stored_types(tmp_path: Path, kind: int, auto: torch.dtype, close: float) -> None:
    build(tmp_path, "llama")
    exact, path = logits(tmp_path), as_gguf(tmp_path, kind)
    assert load_model(path).dtype == auto
    rounded = logits(path, dtype="float32")
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=0, atol=close)


@needs_compiler
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}], ids=["tied", "untied"])
def test_blocks_are_multiplied_with_as_they_are(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Rows are rounded to 8 bits, each independently of the others."""
    build(tmp_path, "llama", **changes)
    path = as_gguf(tmp_path, Q8_0)
    model = load_model(path)
    assert model.head.compiled is not None and model.head.compiled.types == {8}
    assert probe_batch_invariance(model).batch_invariant
    widened = logits(path, dtype="float32")
    far = (logits(path) - widened).norm() / widened.norm()
    assert 1e-5 < far < 0.06  # KV is in bf16, too


def test_types_that_are_widened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path, "llama", hidden_size=256)
    values, tensors = convert(tmp_path)
    name, kind = "blk.1.ffn_gate.weight", "IQ3_S"
    matrix = tensors[name]
    raw = blocks(kind, math.prod(matrix.shape) // 256)
    number = gguf.GGMLQuantizationType[kind]
    wide = torch.from_numpy(gguf.dequantize(raw, number)).view(matrix.shape)
    both = tmp_path / "few-bits.gguf", tmp_path / "wide.gguf"
    few_bits = Stored(number, matrix.shape, raw.tobytes())
    for path, tensor in zip(both, (few_bits, stored(wide)), strict=True):
        path.write_bytes(gguf_bytes(values, tensors | {name: tensor}))
    with caplog.at_level(logging.WARNING):
        assert torch.equal(*map(logits, both))
    megabytes = [wide.numel() * bits / 8e6 for bits in (3.4375, 32)]
    expected = "1 tensors of IQ3_S are widened while loading: {:.1f} MB become {:.1f} MB"
    assert expected.format(*megabytes) in caplog.text
    problem = rf"tensor {name}: type IQ3_S needs the package gguf, or a newer one: pip"
    old = enum.Enum("old", ["Q8_0"])
    absent = (gguf, "GGMLQuantizationType", old), (gguf_file, "find_spec", lambda name: None)
    for place, attribute, value in absent:
        with monkeypatch.context() as patch, pytest.raises(ModelError, match=problem):
            patch.setattr(place, attribute, value)
            gguf_file.read_parts(both[0])


def test_a_split_model(tmp_path: Path) -> None:
    build(tmp_path, "llama")
    whole = logits(as_gguf(tmp_path))
    values, tensors = convert(tmp_path)
    names = [tmp_path / f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    shares = [dict(list(tensors.items())[i::3]) for i in range(3)]
    for number, (path, share) in enumerate(zip(names, shares, strict=True)):
        part = {"split.no": number, "split.count": 3}
        path.write_bytes(gguf_bytes(part if number else values | part, share))
    assert torch.equal(logits(names[0]), whole)

    with pytest.raises(ModelError, match=r"00002-of.*split.no: .*name the first, model-00001-of-0"):
        open_checkpoint(names[1])
    odd = names[0].rename(tmp_path / "odd.gguf")
    with pytest.raises(ModelError, match="odd.gguf: split.count: 3 does not match the file's"):
        open_checkpoint(odd)
    odd.rename(names[0])
    names[2].write_bytes(gguf_bytes({"split.no": 2, "split.count": 3}, shares[1]))
    with pytest.raises(ModelError, match="00003-of.*: tensor .* is in an earlier part already"):
        open_checkpoint(names[0])
    names[1].write_bytes(names[2].read_bytes())
    with pytest.raises(ModelError, match="00002-of-00003.gguf: split.no: must be 1, got 2"):
        open_checkpoint(names[0])
    names[1].unlink()
    with pytest.raises(ModelError, match="00002-of-00003.gguf: cannot be read"):
        open_checkpoint(names[0])


def test_end_tokens(tmp_path: Path) -> None:
    """End tokens are those named by a field, and control tokens recognised by their text. A
    user-defined token with the same text is none."""
    build(tmp_path, "llama")
    tokens = ["a", "<|endoftext|>", "b", "<|im_end|>", "</s>", "<|eot_id|>"]
    path = as_gguf(
        tmp_path,
        **{
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1, 3, 1, 3, 1, 3],
            "tokenizer.ggml.eot_token_id": 0,
        },
    )
    assert open_checkpoint(path).config.eos_token_ids == (2, 0, 1, 3, 5)
    tokens = ["a", "<|return|>", "<|end|>", "<|call|>"]  # <|end|> ends a message of gpt-oss
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1, 3, 3, 3]}
    metadata["tokenizer.ggml.eos_token_id"] = 1
    assert open_checkpoint(as_gguf(tmp_path, **metadata)).config.eos_token_ids == (1, 3)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("general.architecture", "bert", "general.architecture: 'bert' is not supported"),
        ("llama.block_count", 4, r"tensor blk\.3\.attn_norm\.weight: is missing"),
        ("llama.block_count", 2, r"tensor blk\.2\.\S+: is not a tensor of a llama model"),
        ("llama.block_count", 2**31 - 1, "llama.block_count: 2147483647 for 29 tensors"),
        ("llama.block_count", 0, "llama.block_count: must be a positive integer"),
        ("llama.embedding_length", 65, r"tensor token_embd.weight: has shape \[199, 64\]"),
        ("llama.embedding_length", "64", "llama.embedding_length: must be a positive integer"),
        ("llama.attention.head_count", 3, "llama.attention.head_count_kv: 2 does not divide 3"),
        ("llama.attention.head_count_kv", [2, 2, 1], "head_count_kv: an array of 3 values"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "must be a positive"),
        ("llama.attention.value_length", 8, "llama.attention.value_length: 8 is not supported"),
        ("llama.rope.dimension_count", 8, "llama.rope.dimension_count: 8 is not supported"),
        ("llama.rope.freq_base", float("nan"), "llama.rope.freq_base: must be a positive number"),
        ("llama.rope.scaling.type", "longrope", "tensor rope_factors_short.weight: must be 8"),
        ("llama.rope.scaling.factor", -1.0, "llama.rope.scaling.factor: must be a positive number"),
        ("llama.expert_count", 8, "llama.expert_used_count: missing"),
        ("llama.attention.causal", False, "llama.attention.causal: False is not supported"),
        ("tokenizer.ggml.eos_token_id", -1, "tokenizer.ggml.eos_token_id: must be a token id"),
        (
            "tokenizer.ggml.eos_token_id",
            199,
            "tokenizer.ggml.eos_token_id: 199 is not a token of 199",
        ),
        ("tokenizer.ggml.tokens", "all", "tokenizer.ggml.tokens: must be an array"),
        ("tokenizer.ggml.tokens", ["x"] * 200, "tokens: 200 tokens, but token_embd.weight has 199"),
        ("llama.context_length", 2**31, "llama.context_length: must be at most 1073741824"),
        ("llama.attention.sliding_window", 2**31, "attention.sliding_window: must be at most"),
        ("llama.attention.head_count", 2**14, "attention.head_count: must be at most 4096"),
        ("general.alignment", 33, "general.alignment: must be a power of 2 and at least 8, got 33"),
    ],
)
def test_metadata_that_cannot_be_served_are_named(
    tmp_path: Path, key: str, value: Any, words: str
) -> None:
    build(tmp_path, "llama")
    with pytest.raises(ModelError, match=rf"model\.gguf: .*{words}"):
        open_checkpoint(as_gguf(tmp_path, **{key: value}))


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("blk.1.ffn_up.weight", None, "is missing"),
        ("token_embd.weight", None, "is missing"),
        ("blk.1.attn_k_norm.weight", stored(torch.ones(64)), "is not a tensor of a llama model"),
        ("blk.1.ffn_up.weight", stored(torch.ones(64, 96)), r"has shape \[64, 96\]"),
        (
            "blk.1.ffn_norm.weight",
            Stored(Q8_0, (64,), bytes(68)),
            "type Q8_0 is supported for matrices",
        ),
        ("rope_freqs.weight", stored(torch.zeros(8)), "must hold 8 positive numbers"),
        ("rope_freqs.weight", stored(torch.ones(9)), "must hold 8 positive numbers"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, name: str, tensor: Stored | None, words: str
) -> None:
    build(tmp_path, "llama")
    path = tmp_path / "model.gguf"
    values, tensors = convert(tmp_path)
    tensors = {n: t for n, t in (tensors | {name: tensor}).items() if t is not None}
    path.write_bytes(gguf_bytes(values, tensors))
    with pytest.raises(ModelError, match=rf"model\.gguf: tensor {name}: {words}"):
        open_checkpoint(path)


def test_random_weights_need_no_more_than_the_metadata(tmp_path: Path) -> None:
    build(tmp_path, "qwen3")  # of a Llama file, the rows of heads have another order
    path = as_gguf(tmp_path)
    assert not torch.equal(logits(path, random_weights_seed=1), logits(path))
    assert torch.equal(logits(path, random_weights_seed=1), logits(tmp_path, random_weights_seed=1))
