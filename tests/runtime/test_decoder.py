"""The whole pass in C: blocks of any size, what it refuses, and that broken orders of sums are
noticed."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.compiled import build, build_name
from cbatch.runtime.compiled import product as product_module
from cbatch.runtime.cpu import compiled_pass as decoder_module
from cbatch.runtime.cpu.decoder import Model, load_model
from cbatch.runtime.cpu.invariance import probe_batch_invariance
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.config_json import load_config
from cbatch.runtime.model.weight_files import Safetensors
from tests.runtime.hf_models import build as build_model
from tests.runtime.hf_models import paged, run_all, tokens_of
from tests.runtime.marks import needs_compiler

pytestmark = needs_compiler


def cache(model: Model, num_blocks: int = 90, block_size: int = 16) -> KVCache:
    return KVCache(model.config, num_blocks, block_size, model.dtype, model.device)


def batch(tokens: list[int], tables: list[list[int]], logits_at: list[int]) -> RaggedBatch:
    """Return a batch of one sequence from its start."""
    count = np.array([len(tokens)], dtype=np.int32)
    positions, index = torch.arange(len(tokens)), torch.tensor(logits_at)
    blocks = np.array(tables, dtype=np.int32)
    return RaggedBatch(torch.tensor(tokens), positions, count, count, blocks, index)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("float32", torch.float32), ("float32", torch.bfloat16), ("bfloat16", torch.bfloat16)],
)
@pytest.mark.parametrize(("dim", "block_size"), [(10, 1), (64, 7), (10, 100)])
def test_blocks_of_any_size_hold_the_same(
    tmp_path: Path, block_size: int, dim: int, dtype: str, kv_dtype: torch.dtype
) -> None:
    """Heads of 10 dimensions in groups of 3 fill no vector, and those of 64 fill whole tiles;
    contexts span more than two chunks of keys."""
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": dim}
    build_model(tmp_path, "llama", hidden_size=48, **heads)
    model = load_model(tmp_path, numerics="invariant", dtype=dtype)
    sequences = [tokens_of(i, n) for i, n in enumerate((150, 37))]
    logits = []
    for size in (16, block_size):
        kv = KVCache(model.config, 2 + 200 // size, size, kv_dtype, "cpu")
        logits.append(run_all(model, kv, paged(kv, sequences), [33, 5, 1]))
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("tokens", "tables", "logits_at", "field"),
    [
        ([5, 199], [[0]], [1], "tokens"),
        ([-1], [[0]], [0], "tokens"),
        ([5] * 17, [[0]], [0], "block_tables"),
        ([5], [[91]], [0], "block_tables"),
        ([5], [[-1]], [0], "block_tables"),
        ([5], [[0]], [1], "logits_index"),
    ],
)
@pytest.mark.usefixtures("decoder_pass")
def test_numbers_that_point_nowhere(
    tmp_path: Path, tokens: list[int], tables: list[list[int]], logits_at: list[int], field: str
) -> None:
    build_model(tmp_path, "llama")
    model = load_model(tmp_path, numerics="invariant")
    kv = cache(model)
    with pytest.raises(IndexError, match=field):
        model.forward(batch(tokens, tables, logits_at), kv)
    assert not kv.data.any(), "nothing is written"


BREAKS = {
    "none": [],
    # Broken: a row that is alone starts its sums with another value.
    "product": [
        ("product.h", "sums[r][p] = (vec){0};", "sums[r][p] = all(rows == 1);"),
        ("product.h", "row + r, sums[r][p]);", "row + r, sums[r][p] - all(rows == 1));"),
    ],
    # Broken: chunks of keys start elsewhere for each number of rows in a tile.
    "attention": [
        (
            "attention.h",
            "long chunk = begin / KEYS * KEYS;",
            "long chunk = begin / KEYS * KEYS - of->rows;",
        )
    ],
    # Broken: weights are rounded relative to the highest score of keys that any row of a tile sees.
    "pairs": [("attention.h", "highest, seen >> k, (__m512)load", "highest, ~0, (__m512)load")],
}
MULTIPLIES_PAIRS = (build_name() or "none") in ("amx", "avx512_bf16")


@pytest.mark.parametrize("broken", BREAKS)
def test_an_order_of_sums_that_depends_on_the_rows_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """The probe notices it, in kernels that are compiled without optimisation in 2 s."""
    if broken == "pairs" and not MULTIPLIES_PAIRS:
        pytest.skip("this processor multiplies no pairs of bf16")
    source = tmp_path / "source"
    shutil.copytree(build.SOURCE.parent, source)
    for name, old, new in BREAKS[broken]:
        text = (source / name).read_text()
        assert text.count(old) == 1
        (source / name).write_text(text.replace(old, new))
    monkeypatch.setattr(build, "SOURCE", source / "library.c")
    flags = [flag for flag in build.FLAGS if not flag.startswith("-O")]
    monkeypatch.setattr(build, "FLAGS", ("-O0", *flags))
    kernel = build.library.__wrapped__()
    for module in (product_module, decoder_module):
        monkeypatch.setattr(module, "library", lambda: kernel)
    build_model(tmp_path, "llama")
    config, source_of = load_config(tmp_path), Safetensors(tmp_path)
    dtype = torch.bfloat16 if broken == "pairs" else torch.float32
    model = Model(config, source_of, dtype, "invariant")
    assert model.compiled
    assert probe_batch_invariance(model).forward is (broken == "none")


def test_memory_of_logits_is_reused_once_no_reference_remains(tmp_path: Path) -> None:
    """Memory is not reused while any reference to logits, or to a part of them, remains."""
    build_model(tmp_path, "llama", vocab_size=12)
    decoder = load_model(tmp_path, numerics="invariant")._pass
    assert isinstance(decoder, decoder_module.CompiledDecoder)
    first = decoder.logits(4)
    address, part = first.data_ptr(), first[1:3]
    del first
    second = decoder.logits(4)
    assert second.data_ptr() != address
    del part
    address = second.data_ptr()
    del second
    assert decoder.logits(2).data_ptr() == address
    assert decoder.logits(0).shape == (0, 12)
    for rows in range(1, 40):  # a few more than fit
        assert decoder.logits(rows).shape == (rows, 12)
