"""Products with blocks as a file stores them: their values, and that neither other rows nor threads
change a bit."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from torch import Tensor

from cbatch.runtime.compiled import Blocks, CompiledProduct, OutputRuns
from cbatch.runtime.compiled import product as product_module
from cbatch.runtime.model.gguf_blocks import dequantised
from cbatch.runtime.model.gguf_file import TYPES
from tests.runtime.marks import needs_compiler
from tests.runtime.test_gguf_blocks import blocks

pytestmark = needs_compiler
OUT, COLUMNS = 70, 512  # the last panel is not full


def stored(name: str, out: int = OUT) -> tuple[Blocks, Tensor]:
    """Return a stored matrix, and its values [out, COLUMNS]."""
    (kind,) = (each for each in TYPES.values() if each.name == name)
    raw = blocks(name, out * COLUMNS // kind.elements)
    values = dequantised(name, raw, torch.float32).view(out, COLUMNS)
    return Blocks(name, COLUMNS, raw.reshape(out, -1)), values


def whole(
    matrix: Blocks, bias: Tensor | None = None, scale: Tensor | None = None
) -> CompiledProduct:
    out = len(matrix.rows)
    return CompiledProduct.of_blocks([(matrix, OutputRuns(out, out, 0))], bias, scale)


def representable(rows: int) -> Tensor:
    """Return values that rounding to 127ths of a cell's largest leaves unchanged."""
    gen = torch.Generator().manual_seed(rows)
    x = torch.randint(-127, 128, (rows, COLUMNS // 32, 32), generator=gen).float()
    x[:, :, 3] = 127
    return (x * 2.0 ** torch.randint(-9, 3, (rows, COLUMNS // 32, 1), generator=gen)).flatten(1)


def assert_values(name: str) -> None:
    """Check values to the last bits where rows are not rounded, else within the error that rounding
    may cause."""
    matrix, values = stored(name)
    bias, scale = torch.linspace(-9, 9, OUT), 2.0 ** torch.arange(COLUMNS).div(32).floor().sub(7)
    plain, none, ones = whole(matrix), torch.zeros(OUT), torch.ones(COLUMNS)
    for product, more, by in ((plain, none, ones), (whole(matrix, bias, scale), bias, scale)):
        for rows in (1, 2, 3, 4, 5, 7, 8, 9, 23):
            x = representable(rows)
            expected = (x * by).double() @ values.double().T + more.double()
            size = (x * by).abs().double() @ values.abs().double().T
            assert ((product(x, rows) - expected).abs() <= 2e-6 * size + 1e-6).all()
    x = torch.randn(9, COLUMNS)
    step = x.view(9, -1, 32).abs().amax(2, keepdim=True).expand(9, -1, 32).flatten(1) / 127
    wrong = (plain(x, 9) - x.double() @ values.double().T).abs()
    bound = (step / 2).double() @ values.abs().double().T
    assert (wrong <= 1.01 * bound + 1e-5).all() and (wrong > 0).any()


@pytest.mark.parametrize(
    ("name", "threads"), [("Q4_K", 1), ("Q8_0", 2), ("Q6_K", 1), ("Q2_K", 1), ("Q5_1", 1)]
)
def test_company_changes_no_bit(name: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_module, "SINGLE_THREAD_BELOW", 0)
    product, x = whole(stored(name, 410)[0]), torch.randn(90, COLUMNS)
    torch.set_num_threads(3 - threads)
    expected = product(x, 90)
    torch.set_num_threads(threads)
    for start in (0, 5):
        for rows in (1, 2, 7, 8, 11, 12, 17, 33, 64, 79):
            some = x[start : start + rows].contiguous()
            assert torch.equal(product(some, rows), expected[start : start + rows])


def test_outputs_by_turns() -> None:
    """Queries, keys and values share the heads of a row; each part equals the part alone."""
    (first, _), (second, _) = stored("Q4_K", 96), stored("Q6_K", 48)
    parts = [(first, OutputRuns(32, 48, 0)), (second, OutputRuns(16, 48, 32))]
    x = torch.randn(5, COLUMNS)
    parts_together = CompiledProduct.of_blocks(parts, None, None)(x, 5).view(5, 3, 48)
    assert torch.equal(parts_together[..., :32].flatten(1), whole(first)(x, 5))
    assert torch.equal(parts_together[..., 32:].flatten(1), whole(second)(x, 5))


def test_what_is_no_number_stays_in_its_row() -> None:
    product, x = whole(stored("Q4_0")[0]), torch.randn(9, COLUMNS)
    expected = product(x, 9)
    for wrong in (float("nan"), float("inf")):
        x[4, 77] = wrong
        result = product(x, 9)
        assert result[4].isnan().all()
        others = torch.arange(9) != 4
        assert torch.equal(result[others], expected[others])


def test_rows_of_zeros() -> None:
    assert not whole(stored("Q5_1")[0])(torch.zeros(3, COLUMNS), 3).any()


# ---- threads -------------------------------------------------------------------------------------


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> tuple[CompiledProduct, Tensor, Tensor]:
    """Return a product shared by two threads, its rows, and the expected result."""
    monkeypatch.setattr(product_module, "SINGLE_THREAD_BELOW", 0)
    product, x = whole(stored("Q8_0", 999)[0]), torch.randn(20, COLUMNS)
    torch.set_num_threads(1)
    expected = product(x, 20)
    torch.set_num_threads(2)
    return product, x, expected


def test_callers_at_once(shared: tuple[CompiledProduct, Tensor, Tensor]) -> None:
    """One caller has the threads; the other computes without them."""
    product, x, expected = shared
    wrong: list[int] = []

    def call() -> None:
        torch.set_num_threads(2)
        wrong.extend(i for i in range(60) if not torch.equal(product(x, 20), expected))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


FORKED = """
import os, numpy as np, torch
from cbatch.runtime.compiled import Blocks, CompiledProduct, OutputRuns, product
product.SINGLE_THREAD_BELOW = 0
torch.set_num_threads(2)
rows = np.full((999, 544), 40, dtype=np.uint8)
made = CompiledProduct.of_blocks([(Blocks("Q8_0", 512, rows), OutputRuns(999, 999, 0))], None, None)
x = torch.arange(512.0).view(1, -1)
expected = made(x, 1)
child = os.fork()
same = torch.equal(made(x, 1), expected)
if not child:
    os._exit(0 if same else 1)
assert same and os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_process_has_threads_of_its_own() -> None:
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=60)


def test_rows_are_copied_where_they_are_not_side_by_side() -> None:
    matrix, _ = stored("Q4_1")
    apart = matrix._replace(rows=np.repeat(matrix.rows, 2, axis=0)[::2])
    x = torch.randn(2, COLUMNS)
    assert torch.equal(whole(apart)(x, 2), whole(matrix)(x, 2))
