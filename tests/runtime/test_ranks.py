"""A model shared among ranks computes the same as the whole one, equally on every rank. The ranks
are threads here, joined as processes are."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from cbatch.core.request.errors import FieldError
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.cpu.decoder import Model, load_model
from cbatch.runtime.cpu.invariance import probe_batch_invariance
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.rank_group import RankGroup, join
from tests.gguf_files import gguf_bytes
from tests.runtime.hf_models import build
from tests.runtime.made_models import gguf_parts
from tests.runtime.marks import needs_compiler

T = TypeVar("T")
PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 89, 79, 32), (97, 1, 8), tuple(range(7, 90)))
# By family, fields with as many KV heads as four ranks need.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    "mistral": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "qwen2": {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 4},
}


def by_ranks(size: int, work: Callable[[RankGroup], T]) -> list[T]:
    """Run `call` on each rank; return the results."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(size) as threads:

        def run(rank: int) -> T:
            torch.set_num_threads(1)
            return work(join(rank, size, Path(folder)))

        return list(threads.map(run, range(size)))


def logits_of(model: Model) -> list[torch.Tensor]:
    """Return logits of every position of the prompts, in chunks of different sizes. The last step
    needs no logits of one sequence, and few of one with 83 rows."""
    kv = KVCache(model.config, 32, 16, model.dtype, "cpu")
    parts = []
    for start, lens in ((0, (7, 2, 80)), (7, (6, 1, 3))):
        at = [0 if start == 0 else done for done in (7, 2, 80)]
        chunks = [p[i : i + n] for p, i, n in zip(PROMPTS, at, lens, strict=True)]
        rows = sum(lens)
        rows_of_logits = torch.arange(rows) if start else torch.tensor([6, 8, rows - 1])
        batch = RaggedBatch(
            tokens=torch.tensor([t for chunk in chunks for t in chunk]),
            positions=torch.cat([torch.arange(i, i + n) for i, n in zip(at, lens, strict=True)]),
            query_lens=np.array(lens, dtype=np.int32),
            context_lens=np.array([i + n for i, n in zip(at, lens, strict=True)], dtype=np.int32),
            block_tables=np.arange(24, dtype=np.int32).reshape(3, 8),
            logits_index=rows_of_logits,
        )
        parts.append(model.forward(batch, kv))
    batch.logits_index = rows_of_logits[:0]
    assert model.forward(batch, kv).shape == (0, model.config.vocab_size)
    return parts


@pytest.mark.parametrize(
    ("family", "size", "decoder_pass"),
    [
        ("llama", 4, "compiled"),
        ("mistral", 2, "torch"),
        ("qwen2", 2, "compiled"),
        ("qwen3", 4, "torch"),
    ],
    indirect=["decoder_pass"],
)
def test_logits_are_those_of_one_rank(
    tmp_path: Path, decoder_pass: str, family: str, size: int
) -> None:
    build(tmp_path, family, **SHAPES[family])
    whole = logits_of(load_model(tmp_path))
    every = by_ranks(size, lambda ranks: logits_of(load_model(tmp_path, ranks=ranks)))
    for logits in every:
        for mine, first, expected in zip(logits, every[0], whole, strict=True):
            assert mine.shape == expected.shape and torch.equal(mine, first)
            assert (mine - expected).abs().max() < 1e-4
    assert any(not torch.equal(a, b) for a, b in zip(every[0], whole, strict=True)), "K is split"


@needs_compiler
def test_rows_keep_their_bits(tmp_path: Path) -> None:
    build(tmp_path, "llama", num_key_value_heads=4)
    reports = by_ranks(2, lambda r: probe_batch_invariance(load_model(tmp_path, ranks=r)))
    assert all(report.batch_invariant for report in reports)


def write_gguf(folder: Path, name: str) -> Path:
    path = folder / f"{name}.gguf"
    path.write_bytes(gguf_bytes(*gguf_parts(name)))
    return path


@needs_compiler
@pytest.mark.parametrize("name", ["fours", "fives"])
def test_blocks_are_shared_out_whole(tmp_path: Path, name: str) -> None:
    """One rank rounds rows 32 columns at a time, too, so its results are equal."""
    path = write_gguf(tmp_path, name)
    whole = load_model(path)
    shares = by_ranks(2, lambda ranks: (m := load_model(path, ranks=ranks), logits_of(m)))
    assert shares[0][0].head.compiled is not None and shares[0][0].head.compiled.block_types
    for _, logits in shares:
        for mine, expected in zip(logits, logits_of(whole), strict=True):
            assert (mine - expected).abs().max() < 1e-3 * expected.abs().max()


@needs_compiler
def test_blocks_are_not_cut(tmp_path: Path) -> None:
    path = write_gguf(tmp_path, "supers")
    with pytest.raises(
        FieldError, match="tensor_parallel_size: 2 gives 128 columns of model.layers.0.se"
    ):
        by_ranks(2, lambda ranks: load_model(path, ranks=ranks))
    widened = by_ranks(2, lambda ranks: logits_of(load_model(path, ranks=ranks, dtype="bfloat16")))
    assert torch.equal(widened[0][0], widened[1][0])


@pytest.mark.parametrize(
    "size, values, problem",
    [
        (3, {}, "3 does not divide the model's num_key_value_heads, 2; use 2, or leave it out"),
        (4, {}, "4 does not divide the model's num_key_value_heads, 2; use 2, or leave it out"),
        (2, {"num_key_value_heads": 1}, "num_key_value_heads, 1; leave it out"),
        (2, {"intermediate_size": 95}, "intermediate_size, 95; leave it out"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(
    tmp_path: Path, size: int, values: dict[str, int], problem: str
) -> None:
    build(tmp_path, "llama", **values)
    with pytest.raises(FieldError, match=problem):
        by_ranks(size, lambda ranks: load_model(tmp_path, ranks=ranks))
