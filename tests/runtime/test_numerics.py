"""Bits of a row's logits do not depend on other rows, the split into chunks, or its blocks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cbatch.runtime.compiled import build_name
from cbatch.runtime.cpu import linear
from cbatch.runtime.cpu.decoder import Model, load_model
from cbatch.runtime.cpu.invariance import probe_batch_invariance
from cbatch.runtime.cpu.linear import (
    NO_PADDING,
    Linear,
    Machine,
    ProductPlan,
    resolve_numerics,
)
from cbatch.runtime.cpu.products import Kind, packing_available
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.config_json import load_config
from cbatch.runtime.model.shapes import weight_shapes
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
pytestmark = pytest.mark.skipif(
    not packing_available(), reason="no product known to be invariant in this build of torch"
)


def loaded(tmp_path: Path, shape: str, dtype: str) -> Model:
    family, changes = SHAPES[shape]
    build(tmp_path, family, "llama3", **changes)
    return load_model(tmp_path, dtype=dtype, numerics="invariant")


def cache(model: Model, block_size: int = 16) -> KVCache:
    return KVCache(model.config, 1500 // block_size, block_size, model.dtype, model.device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_and_blocks(tmp_path: Path, shape: str, dtype: str, decoder_pass: str) -> None:
    """Sequences are longer than two segments of values (128) and windows (70 and 90); query lengths
    fall on both sides of every cut."""
    model = loaded(tmp_path, shape, dtype)
    sequences = [tokens_of(i, n) for i, n in enumerate((150, 37, 301))]
    expected: Tensor | None = None
    few = (60, 1, 240)
    sizes = [([301], ()), ([1], few), ([33, 5, 8], ()), ([129, 31, 32], ()), ([64, 1, 17], ())]
    for seed, (chunks, firsts) in enumerate(sizes):
        kv = cache(model)
        if decoder_pass == "compiled":
            kv.data[:, :, :, : kv.num_blocks] = float("nan")  # left over from an earlier owner
        logits = run_all(model, kv, paged(kv, sequences, seed), chunks, firsts)
        expected = logits if expected is None else expected
        assert torch.equal(logits, expected), f"chunks {chunks}"


@pytest.mark.usefixtures("decoder_pass")
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


@pytest.mark.usefixtures("decoder_pass")
def test_the_probe_says_yes(tmp_path: Path) -> None:
    model = loaded(tmp_path, "llama", "float32")
    report = probe_batch_invariance(model)
    computes = model.head.plan.kind.value
    kernels = f"; kernels: {build_name()}" if computes == "compiled" else ""
    line = f"batch_invariant: yes (numerics=invariant; products: {computes}{kernels})"
    assert report.batch_invariant and str(report) == line
    assert set(report.shapes) == set(weight_shapes(model.config))


class _Fickle(Linear):
    """A product that rounds differently when it has one row."""

    def __call__(self, x: Tensor) -> Tensor:
        y = super().__call__(x)
        return y if len(x) > 1 else y * (1 + 2.0**-22)


@pytest.mark.usefixtures("torch_pass")
def test_the_probe_catches_a_product_that_differs_by_row_count(tmp_path: Path) -> None:
    model = loaded(tmp_path, "llama", "float32")
    weight = torch.randn(model.layers[1].down.shape)
    model.layers[1].down = _Fickle(weight, None, None, ProductPlan(Kind.NATIVE, NO_PADDING, True))
    model.layers[0].down = model.layers[2].down = model.layers[1].down
    report = probe_batch_invariance(model)
    shape = model.layers[1].down.shape
    assert not report.batch_invariant and not report.forward and not report.shapes[shape]
    assert "batch_invariant: no" in str(report) and f"{shape[0]}x{shape[1]}" in str(report)


@pytest.fixture
def clockless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every call of a clock an error."""
    for clock in ("perf_counter", "monotonic", "process_time", "thread_time", "time"):
        for name in (clock, f"{clock}_ns"):
            monkeypatch.setattr(time, name, None)


NOBODY = Machine(compiles=False, packs=False, bf16=False, tiles=False)
MACHINES = {
    "ours": NOBODY._replace(compiles=True, packs=True, bf16=True),
    "tiles": NOBODY._replace(compiles=True, packs=True, bf16=True, tiles=True),
    "packed": NOBODY._replace(packs=True),
    "bare": NOBODY,
}


@needs_compiler
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("mode", "dtype"), [("auto", "float32"), ("invariant", "bfloat16"), ("fast", "bfloat16")]
)
def test_no_clock_has_a_say_in_what_computes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    machine: str,
    mode: str,
    dtype: str,
) -> None:
    """On any machine, all modes serve, with odd widths and without."""
    offered = MACHINES[machine]
    build(tmp_path, "llama", intermediate_size=47)
    monkeypatch.setattr(linear, "Machine", lambda **capabilities: offered)
    request.getfixturevalue("clockless")
    model = load_model(tmp_path, dtype=dtype, numerics=mode)
    native = mode == "fast" and machine == "tiles" and dtype == "bfloat16"
    kind = {"packed": "packed", "bare": "native"}.get(machine, "compiled")
    products = [linear for layer in model.layers for linear in layer.products()]
    computing = {product.plan.kind.value for product in (*products, model.head)}
    assert computing == {"native" if native else kind}
    if machine != "bare":
        assert model.numerics == ("invariant" if mode == "auto" else mode)
    kv = cache(model)
    logits = run_all(model, kv, paged(kv, [tokens_of(0, 60)]), [50, 1])
    assert logits.isfinite().all()


def test_auto_is_invariant_where_every_product_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path, "llama")
    config = load_config(tmp_path)
    invariant = dict.fromkeys(weight_shapes(config), True)

    def plan(shape: tuple[int, int], *where: object, **settings: object) -> ProductPlan:
        return ProductPlan(Kind.NATIVE, NO_PADDING, invariant[shape])

    monkeypatch.setattr(linear, "make_plan", plan)
    assert resolve_numerics("auto", config, torch.float32).mode == "invariant"
    invariant[min(invariant)] = False
    assert resolve_numerics("auto", config, torch.float32).mode == "fast"
    for mode in ("invariant", "fast"):
        assert resolve_numerics(mode, config, torch.float32).mode == mode
