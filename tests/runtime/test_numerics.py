"""Bits of a row's logits do not depend on its company, the cut into chunks, or its blocks."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from cbatch.runtime import linear, numerics
from cbatch.runtime.config import load_config
from cbatch.runtime.kv import KVCache
from cbatch.runtime.linear import NO_PADDING, Linear, Plan
from cbatch.runtime.model import Model, load_model
from cbatch.runtime.numerics import probe_row_invariance, resolve_numerics
from cbatch.runtime.products import Kind, packing_available
from tests.runtime.hf_models import build, paged, run_all, step, tokens_of
from tests.runtime.marks import needs_compiler

DTYPES = ["float32", "bfloat16"]
# Head dims whose 1 / sqrt is and is not a power of two; one and several KV heads; windows.
SHAPES: dict[str, tuple[str, dict[str, int]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"head_dim": 64, "num_key_value_heads": 4}),
    "qwen2": ("qwen2", {"num_attention_heads": 4, "num_key_value_heads": 4}),
    "qwen3": ("qwen3", {"head_dim": 128}),
    "tiny_heads": ("llama", {"head_dim": 8}),
    "one_head": ("llama", {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}),
}
pytestmark = pytest.mark.skipif(
    not packing_available(), reason="no product known to be invariant in this build of torch"
)


def loaded(tmp_path: Path, shape: str, dtype: str) -> Model:
    family, changes = SHAPES[shape]
    build(tmp_path, family, "llama3", **changes)
    return load_model(tmp_path, dtype=dtype, numerics="invariant")


def cache(model: Model, block_size: int = 16) -> KVCache:
    return KVCache(model.config, 1500 // block_size, block_size, model.dtype, model.device)


@pytest.mark.usefixtures("decoder_pass")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_and_blocks(tmp_path: Path, shape: str, dtype: str) -> None:
    """Past a segment of values (256) and past windows (70 and 90); query lengths on both sides of
    every cut. Few tokens at a time, each sequence goes past some of them."""
    model = loaded(tmp_path, shape, dtype)
    sequences = [tokens_of(i, n) for i, n in enumerate((150, 37, 301))]
    expected: Tensor | None = None
    few = (60, 1, 240)
    sizes = [([301], ()), ([1], few), ([2, 3], few), ([33, 5, 8], ())]
    sizes += [([129, 31, 32], ()), ([64, 1, 1, 17], ())]
    for seed, (chunks, firsts) in enumerate(sizes):
        kv = cache(model)
        found = run_all(model, kv, paged(kv, sequences, seed), chunks, firsts)
        expected = found if expected is None else expected
        assert torch.equal(found, expected), f"chunks {chunks}"


@pytest.mark.usefixtures("decoder_pass")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["llama", "qwen3"])
def test_company(tmp_path: Path, shape: str, dtype: str, threads: int) -> None:
    """A row alone, then among 1 to 40 others that bring 1 to 12 tokens each, or a chunk."""
    torch.set_num_threads(threads)
    model = loaded(tmp_path, shape, dtype)
    rng = np.random.default_rng(zlib.crc32(shape.encode()))
    watched = tokens_of(0, 60)
    kv = cache(model)
    alone = run_all(model, kv, paged(kv, [watched]), [60])
    counts = [1, 2, 3, 5, 8, 13, 21, 40] if threads == 1 else [1, 7, 8, 40]
    totals = set()
    for others in counts:
        lengths = rng.integers(1, 13, others)
        if others % 2:
            lengths[:] = 1
        if others == 13:
            lengths[4] = 200
        sequences = [tokens_of(1 + i, 10 + n) for i, n in enumerate(lengths)]
        kv = cache(model)
        mine, *rest = paged(kv, [watched, *sequences], seed=others)
        step(model, kv, [(mine, 57), *((s, 10) for s in rest)])
        at = others // 2  # the watched row stands in the middle
        chunks = [(s, int(n)) for s, n in zip(rest, lengths, strict=True)]
        chunks.insert(at, (mine, 3))
        totals.add(sum(n for _, n in chunks))
        assert torch.equal(step(model, kv, chunks)[at], alone[57:]), f"{others} others"
    assert len(totals) > len(counts) // 2, "compositions had different numbers of rows"


@pytest.mark.usefixtures("decoder_pass")
def test_long_contexts_among_short_ones(tmp_path: Path) -> None:
    """Ragged contexts, so that groups of unlike width are formed and padded."""
    build(tmp_path, "llama", max_position_embeddings=1200)
    model = load_model(tmp_path, numerics="invariant")
    lengths = [1100, 3, 40, 600, 17, 257, 256, 255]
    sequences = [tokens_of(i, n) for i, n in enumerate(lengths)]
    kv = KVCache(model.config, 200, 16, model.dtype, model.device)
    rows = paged(kv, sequences)
    for row in rows:
        step(model, kv, [(row, len(row.tokens) - 1)])
    together = step(model, kv, [(row, 1) for row in rows])
    for row, logits in zip(rows, together, strict=True):
        row.done -= 1
        assert torch.equal(step(model, kv, [(row, 1)])[0], logits)


@pytest.mark.usefixtures("decoder_pass")
def test_the_probe_says_yes(tmp_path: Path) -> None:
    model = loaded(tmp_path, "llama", "float32")
    report = probe_row_invariance(model)
    assert report.row_invariant and str(report).startswith("row_invariant: yes")
    assert set(report.shapes) == set(numerics.weight_shapes(model.config))


class _Fickle(Linear):
    """A product that rounds differently when it is alone."""

    def __call__(self, x: Tensor) -> Tensor:
        y = super().__call__(x)
        return y if len(x) > 1 else y * (1 + 2.0**-22)


@pytest.mark.usefixtures("torch_pass")
def test_the_probe_catches_a_product_that_differs_by_row_count(tmp_path: Path) -> None:
    model = loaded(tmp_path, "llama", "float32")
    weight = torch.randn(model.layers[1].down.shape)
    model.layers[1].down = _Fickle(weight, None, None, Plan.of_one(Kind.NATIVE, NO_PADDING, True))
    model.layers[0].down = model.layers[2].down = model.layers[1].down
    report = probe_row_invariance(model)
    shape = model.layers[1].down.shape
    assert not report.row_invariant and not report.forward and not report.shapes[shape]
    assert "row_invariant: no" in str(report) and f"{shape[0]}x{shape[1]}" in str(report)


@pytest.fixture
def forgotten() -> Iterator[None]:
    """No plan is known of before, or remembered."""
    linear._measured_plan.cache_clear()
    yield
    linear._measured_plan.cache_clear()


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch, forgotten: None) -> None:
    """Products compete, also where our own would take all of them."""
    for module in (linear, numerics):
        monkeypatch.setattr(module, "is_compiled", lambda *args: False)


@pytest.mark.usefixtures("raced")
def test_auto_is_invariant_where_that_is_cheap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path, "llama")
    config, cpu = load_config(tmp_path), torch.device("cpu")
    for cost, mode in (({1: 0.04, 8: 0.0}, "invariant"), ({1: 0.0, 8: 0.2}, "fast"), ({}, "fast")):
        monkeypatch.setattr(numerics, "_invariance_cost", lambda *args, cost=cost: cost)
        assert resolve_numerics("auto", config, torch.float32, cpu).mode == mode
        assert resolve_numerics("invariant", config, torch.float32, cpu).mode == "invariant"
        assert resolve_numerics("fast", config, torch.float32, cpu).mode == "fast"


@needs_compiler
@pytest.mark.usefixtures("forgotten")
def test_auto_is_invariant_where_the_pass_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No timing has a say: it could come out otherwise after a restart, and bits with it. (Where a
    processor has instructions for bf16, their products compete.)"""
    monkeypatch.setattr(linear, "_race", None)
    monkeypatch.setattr(linear, "_has_bf16", lambda: False)
    build(tmp_path, "llama")
    for dtype in ("float32", "bfloat16"):
        for mode in ("auto", "invariant"):
            model = load_model(tmp_path, dtype=dtype, numerics=mode)
            assert (model.numerics, model.invariance_cost) == ("invariant", {})
            assert model._compiled is not None


@pytest.mark.usefixtures("raced")
def test_fast_computes_the_same_up_to_rounding(tmp_path: Path) -> None:
    build(tmp_path, "llama")
    found = []
    for mode in ("fast", "invariant"):
        model = load_model(tmp_path, numerics=mode)
        assert model.numerics == mode and set(model.invariance_cost) == {1, 2, 8, 32}
        kv = cache(model)
        found.append(run_all(model, kv, paged(kv, [tokens_of(0, 60)]), [50, 1]))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-3)
