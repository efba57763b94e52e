"""Bits of a row's logits do not depend on other rows, the split into chunks, or its blocks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cbatch.runtime.backend import LoadRequest
from cbatch.runtime.compiled import build_name
from cbatch.runtime.cpu.backend import CpuBackend
from cbatch.runtime.cpu.decoder import Model, load_model
from cbatch.runtime.cpu.invariance import probe_batch_invariance
from cbatch.runtime.kv_cache import KVCache
from tests.runtime.hf_models import build, paged, run_all, step, tokens_of
from tests.runtime.marks import needs_compiler

DTYPES = ["float32", "bfloat16"]
# Head dims whose 1 / sqrt is and is not a power of two; one and several KV heads; windows.
SHAPES: dict[str, tuple[str, dict[str, int]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"head_dim": 64, "num_key_value_heads": 4}),
    "qwen2": ("qwen2", {"num_attention_heads": 4, "num_key_value_heads": 4}),
    "narrow": ("mistral", {"sliding_window": 37}),
    "itself": ("mistral", {"sliding_window": 1, "head_dim": 8}),
    "qwen3": ("qwen3", {"head_dim": 128}),
    "one_head": ("llama", {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}),
}
pytestmark = needs_compiler


def loaded(tmp_path: Path, shape: str, dtype: str) -> Model:
    family, changes = SHAPES[shape]
    build(tmp_path, family, "llama3", **changes)
    return load_model(tmp_path, dtype=dtype, numerics="invariant")


def cache(model: Model, block_size: int = 16) -> KVCache:
    return KVCache(model.config, 1500 // block_size, block_size, model.dtype, model.device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_and_blocks(tmp_path: Path, shape: str, dtype: str) -> None:
    """Sequences are longer than two segments of values (128) and windows (70 and 90); query lengths
    fall on both sides of every cut."""
    model = loaded(tmp_path, shape, dtype)
    sequences = [tokens_of(i, n) for i, n in enumerate((150, 37, 301))]
    expected: Tensor | None = None
    few = (60, 1, 240)
    sizes = [([301], ()), ([1], few), ([33, 5, 8], ()), ([129, 31, 32], ()), ([64, 1, 17], ())]
    for seed, (chunks, firsts) in enumerate(sizes):
        kv = cache(model)
        kv.data[:, :, :, : kv.num_blocks] = float("nan")  # left over from an earlier owner
        logits = run_all(model, kv, paged(kv, sequences, seed), chunks, firsts)
        expected = logits if expected is None else expected
        assert torch.equal(logits, expected), f"chunks {chunks}"


def test_long_contexts_among_short_ones(tmp_path: Path) -> None:
    """Contexts are ragged, so that groups of unequal width are formed and padded."""
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


def test_the_probe_says_yes(tmp_path: Path) -> None:
    report = probe_batch_invariance(loaded(tmp_path, "llama", "float32"))
    line = f"batch_invariant: yes (numerics=invariant; products: compiled; kernels: {build_name()})"
    assert report.batch_invariant and str(report) == line


@pytest.mark.usefixtures("torch_pass")
def test_torch_promises_nothing(tmp_path: Path) -> None:
    report = probe_batch_invariance(loaded(tmp_path, "llama", "float32"))
    assert str(report) == "batch_invariant: no (numerics=invariant; products: torch)"


def test_no_clock_has_a_say_in_what_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(tmp_path, "llama", "bfloat16")
    for clock in ("perf_counter", "monotonic", "process_time", "thread_time", "time"):
        for name in (clock, f"{clock}_ns"):
            monkeypatch.setattr(time, name, None)
    for mode in ("auto", "invariant", "fast"):
        model = load_model(tmp_path, dtype="bfloat16", numerics=mode)
        assert {linear.description for linear in model.linears()} == {"compiled"}
        kv = cache(model)
        logits = run_all(model, kv, paged(kv, [tokens_of(0, 60)]), [50, 1])
        assert logits.isfinite().all()


def test_invariant_text_does_not_need_an_invariant_draft(tmp_path: Path) -> None:
    folders = tmp_path / "target", tmp_path / "draft"
    for folder, dtype in zip(folders, (torch.float32, torch.float16), strict=True):
        build(folder, "llama").to(dtype).save_pretrained(folder)
    impls = "own", "own"
    request = LoadRequest("cpu", *folders, impls, (), "auto", "invariant", "auto", None)
    models = CpuBackend().load(request)
    assert models.target.numerics == "invariant"
    assert models.draft is not None and models.draft.numerics == "fast"
