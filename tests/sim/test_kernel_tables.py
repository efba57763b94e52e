"""Tables of kernels: steps by hand from kernels of known times, and an H100's compared with its
roofline.

Reading parquet needs pyarrow, of the extra `tables`; the tables themselves are tested without it.
"""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

import msgspec
import pytest

from cbatch.core.prices.step_work import StepWork
from cbatch.core.request.errors import FieldError
from sim.cost.kernel_tables import KernelCost, KernelTables, holds_kernel_tables, read_kernel_tables
from sim.cost.roofline import ModelShape, Roofline, RooflineConfig, gpu_within, load_gpu, load_shape
from tests.helpers import decoding, prefilling

H100 = Path(__file__).parents[3] / "shared" / "data" / "measured" / "h100_kernels"
SHAPE = ModelShape(
    hidden_size=96,
    intermediate_size=200,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    vocab_size=1000,
)
HEADS = (6, 2, 16)


def product_s(m: int, n: float, k: float) -> float:
    """Return a product's time: linear in n and in k, as interpolation is."""
    return 1e-6 * (1 + 0.01 * m) * n * k


def tables(*, attention: bool = True) -> KernelTables:
    widths = (32, 64, 128, 512)
    batches = (1, 4, 16)
    all_tables = KernelTables(
        device="NVIDIA H100 80GB HBM3",
        framework="made up",
        products={
            (n, k): {m: product_s(m, n, k) for m in (1, 8, 64)}
            for n, k in itertools.product(widths, widths)
        },
        # The larger the batch, the shorter are the measured contexts.
        decodes={HEADS: {(b, i // b): 1e-6 * (i // b) * b for b in batches for i in (64, 1024)}},
        prefills={HEADS: {(b, s): 1e-9 * b * s * s for b in batches for s in (8, 16, 64)}},
    )
    return all_tables if attention else msgspec.structs.replace(all_tables, decodes={}, prefills={})


def config(**changes: object) -> RooflineConfig:
    return RooflineConfig(gpu=load_gpu("H100"), shape=SHAPE, **changes)  # type: ignore[arg-type]


def layers_s(tokens: int, parts: int = 1) -> float:
    heads, kv_heads, inner = 6 // parts, 2 // parts, 200 / parts
    block = (
        ((heads + 2 * kv_heads) * 16, 96),
        (96, heads * 16),
        (2 * inner, 96),
        (96, inner),
    )
    return 3 * sum(product_s(tokens, n, k) for n, k in block)


def verifying(rows: int, context: int, k: int = 0) -> StepWork:
    return decoding(
        rows,
        rows * context,
        depth=k,
        decode_pairs=rows * context * (1 + k),
        draft_context_tokens=rows * context if k else 0,
    )


def test_steps_are_products_and_attention() -> None:
    cost, given = KernelCost(tables(), config()), config()
    assert cost.from_roofline == ["small kernels", "launches", "host"]
    draft_s, target_s, host_s = cost.step_s(verifying(4, 100))
    head_s = 2 * product_s(4, 500, 96)  # wider than all measured ones: two of half the width
    small_s, attention_s = 3 * given.layer_s, 3 * 1e-6 * 4 * 100
    assert target_s == pytest.approx(layers_s(4) + head_s + attention_s + small_s)
    assert (draft_s, host_s) == (0.0, given.step_host_s)
    # A chunk costs as the prompt with as many pairs; between 16 and 64 tokens the square is
    # interpolated by a chord.
    work = prefilling(4, 8, history=16)
    chord = 16**2 + (math.sqrt(2 * work.prefill_pairs / 4) - 16) / 48 * (64**2 - 16**2)
    expected_s = layers_s(32) + product_s(4, 1000, 96) + 3 * 4e-9 * chord + small_s
    assert cost.step_s(work)[1] == pytest.approx(expected_s)


def test_a_rank_has_its_part_of_the_products() -> None:
    whole, half = tables(), config(tensor_parallel_size=2)
    cost = KernelCost(whole, half)
    assert {"all-reduces", "attention of decodes"} < set(cost.from_roofline), "3 heads on 1"
    rates = half.rates(SHAPE)
    attention_s = max(rates.context_token_s * 400, rates.pair_s * 400)
    rest_s = rates.fixed_s + rates.exchange_token_s * 4 + attention_s
    expected = layers_s(4, parts=2) + product_s(4, 500, 96) + rest_s
    assert cost.step_s(verifying(4, 100))[1] == pytest.approx(expected)


def test_drafts_are_passes_of_the_draft() -> None:
    """Three passes at four rows each cost three plain decodes of that model, logits included."""
    cost = KernelCost(tables(), config(draft=SHAPE))
    drafted_s, target_s, _ = cost.step_s(verifying(4, 100, k=3))
    plain_s = cost.step_s(verifying(4, 100))[1]
    assert drafted_s == pytest.approx(3 * plain_s)
    assert plain_s < target_s < 4 * plain_s
    ingest = verifying(4, 100)
    ingest.ingested_tokens = 8
    # Ingesting without drafting is possible: products alone, no logits.
    assert cost.step_s(ingest)[0] == pytest.approx(layers_s(8) + 3 * config().layer_s)


def test_attention_that_was_not_measured_is_the_rooflines() -> None:
    cost, roofline = KernelCost(tables(attention=False), config()), Roofline(config())
    assert {"attention of decodes", "attention of prompts"} < set(cost.from_roofline)
    # The same products, and more context.
    for more, less in (
        (verifying(4, 200), verifying(4, 100)),
        (prefilling(4, 8, history=900), prefilling(4, 8)),
    ):
        by_tables, by_roofline = (c.step_s(more)[1] - c.step_s(less)[1] for c in (cost, roofline))
        assert by_tables == pytest.approx(by_roofline) and by_tables > 0


def test_a_product_that_is_missing_is_named() -> None:
    given = tables()
    fewer = {shape: by_m for shape, by_m in given.products.items() if shape != (128, 64)}
    with pytest.raises(FieldError, match="lacks n 128, k 64"):
        KernelCost(msgspec.structs.replace(given, products=fewer), config())


def test_devices_are_known_by_a_word() -> None:
    assert gpu_within("NVIDIA H100 80GB HBM3") == "H100"
    with pytest.raises(FieldError, match="'NVIDIA H1000' is unknown"):
        gpu_within("NVIDIA H1000")


# -- files


def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not holds_kernel_tables(tmp_path)
    (tmp_path / "gemm_perf.parquet").touch()
    assert holds_kernel_tables(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(FieldError, match=r"needs pyarrow; pip install 'cbatch\[tables\]'"):
        read_kernel_tables(tmp_path)


def test_files_that_cannot_be_right_are_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow, of the extra `tables`, is absent")
    from pyarrow import parquet

    path = tmp_path / "gemm_perf.parquet"
    path.write_bytes(b"no parquet")
    with pytest.raises(FieldError, match="is not a table of kernels"):
        read_kernel_tables(tmp_path)
    columns = {"device": "H100", "framework": "x", "version": "1", "gemm_dtype": "bfloat16"}
    numbers = {"m": 1, "n": 2, "k": 3, "latency": math.nan}
    row = {name: [value] for name, value in (columns | numbers).items()}
    parquet.write_table(pyarrow.table(row), path)
    with pytest.raises(FieldError, match="no positive latencies"):
        read_kernel_tables(tmp_path)
    parquet.write_table(pyarrow.table(row | {"latency": [2.0]}), path)
    assert read_kernel_tables(tmp_path).products == {(2, 3): {1: 2e-3}}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / path.name).write_bytes(path.read_bytes())
    with pytest.raises(FieldError, match="holds 2 of"):
        read_kernel_tables(tmp_path)


@pytest.mark.shared_data
def test_an_h100_is_near_its_roofline() -> None:
    """Steps of Llama-3.1-8B by two independent sources for the same device agree."""
    if not H100.is_dir():
        pytest.skip(f"{H100} is absent")
    pytest.importorskip("pyarrow", reason="pyarrow, of the extra `tables`, is absent")
    given = RooflineConfig(gpu=load_gpu("H100"), shape=load_shape("llama-3.1-8b"))
    cost, roofline = KernelCost(read_kernel_tables(H100), given), Roofline(given)
    works = [verifying(1, 1024), verifying(32, 1024), verifying(128, 4096), prefilling(1, 2048)]
    for work in (*works, prefilling(1, 2048, history=16_384)):
        assert cost.step_s(work)[1] == pytest.approx(roofline.step_s(work)[1], rel=0.15)
