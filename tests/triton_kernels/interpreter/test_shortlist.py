"""Filtered rows through their shortlists, and the same rows walked whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.triton_kernels.interpreter.batches import kept_by, random_batch
from triton_kernels.sampling import launch, shortlist, tiles
from triton_kernels.sampling.inputs import REJECTION, LogitsBatch
from triton_kernels.sampling.launch import Reduced, Tiling
from triton_kernels.sampling.reference import shaped_logits

VOCAB = 45
LISTS = Tiling(256, 64, 32, 2, 24)  # two tiles, the last of them not full
WALKS = LISTS._replace(list_tokens=1)
MARGIN = 1 << 14  # more than a block of rows could write beyond a buffer

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.fixture(scope="module")
def batch() -> LogitsBatch:
    return random_batch(np.random.default_rng(12), 60, VOCAB, shaped=False)[0]


def reduce_with_lens(batch: LogitsBatch, tiling: Tiling) -> tuple[Reduced, Tensor]:
    """And the lengths of the lists that were made."""
    seen: list[Tensor] = []
    original = launch.launch

    def spy(kernel: Any, grid: tuple[int, ...], values: dict[str, Any]) -> None:
        original(kernel, grid, values)
        if values.get("LISTED") is False:
            seen.append(values["short_lens_ptr"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "launch", spy)
        reduced = launch.reduce_tiles(batch, None, tiling)
    return reduced, seen[0]


@pytest.fixture(scope="module")
def listed(batch: LogitsBatch) -> tuple[Reduced, Tensor]:
    return reduce_with_lens(batch, LISTS)


def kept_sets(batch: LogitsBatch, result: Reduced) -> Tensor:
    """What rows of the ratio test keep, bool [N, V]; nothing elsewhere."""
    x = shaped_logits(batch.logits, batch.rows, batch.drafts, batch.shaping)
    ratio = batch.requests.modes[batch.rows.requests.long()] == REJECTION
    return kept_by(result, batch, x)[1] & ratio[:, None]


def test_lists_and_walks_agree(batch: LogitsBatch, listed: tuple[Reduced, Tensor]) -> None:
    """Tokens, kept sets and maxima to the bit; masses are summed in another order, within 1e-6."""
    found, lens = listed
    walked, no_lens = reduce_with_lens(batch, WALKS)
    assert torch.equal(found.ids[:, 0], walked.ids[:, 0])
    assert torch.equal(kept_sets(batch, found), kept_sets(batch, walked))
    assert torch.equal(found.floats[:, 0], walked.floats[:, 0])
    torch.testing.assert_close(found.floats[:, 1], walked.floats[:, 1], rtol=1e-6, atol=0)
    assert (lens > 1).sum() > 50 and not (no_lens > 1).any()
    assert (lens == 0).sum() > 20  # not filtered, or a list would be too long


def test_lists_hold_what_is_kept(batch: LogitsBatch, listed: tuple[Reduced, Tensor]) -> None:
    """And no shorter ones would: some are exactly as long."""
    found, lens = listed
    kept = kept_sets(batch, found).sum(dim=1)
    held = (lens > 0) & (kept > 0)
    assert (kept[held] <= lens[held]).all() and (kept == lens)[held].any()


@triton.jit
def first_end(counts, masses, limits, mass):
    return counts > 0.0


@triton.jit
def one_place(measured_ptr, at, asks, limits, mass, SHARES: tl.constexpr, LIST: tl.constexpr):
    end, count, place = right_choice(measured_ptr, at, asks, limits, mass, SHARES, LIST)
    return end, count, place * 0


right_choice = shortlist._choose


@pytest.mark.parametrize("name, broken", [("_decides", first_end), ("_choose", one_place)])
def test_broken_lists_are_seen(
    batch: LogitsBatch,
    listed: tuple[Reduced, Tensor],
    name: str,
    broken: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shortlist, name, broken)
    found = launch.reduce_tiles(batch, None, LISTS)
    assert not torch.equal(kept_sets(batch, found), kept_sets(batch, listed[0]))


def test_memory_holds_poison_before_and_margins_stay(
    batch: LogitsBatch, listed: tuple[Reduced, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = []

    def poisoned(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        poison = torch.nan if dtype.is_floating_point else -(1 << 30)
        count = int(np.prod(shape))
        buffers.append(torch.full((count + 2 * MARGIN,), poison, dtype=dtype, device=device))
        return buffers[-1][MARGIN:-MARGIN].view(shape)

    with monkeypatch.context() as patch:
        patch.setattr(launch.torch, "empty", poisoned)
        found = launch.reduce_tiles(batch, None, LISTS)
    assert all(torch.equal(mine, wanted) for mine, wanted in zip(found, listed[0], strict=True))
    margins = torch.cat([torch.cat((b[:MARGIN], b[-MARGIN:])).double() for b in buffers])
    assert (margins.isnan() | (margins == -(1 << 30))).all()


def test_ends_ascend() -> None:
    keys = shortlist.END_KEYS.value
    assert list(keys) == sorted(keys) and len(keys) == shortlist.ENDS.value
    assert keys[-1] < tiles.FORBIDDEN.value
