"""Batched verification compared with a loop over the noise specification, and its edge cases."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from cbatch.core.request import noise as specification
from cbatch.core.request.noise import Purpose
from cbatch.runtime.sampling.rejection_sampler import (
    NoiseRows,
    Verdict,
    coupled_verify,
    draw,
    rejection_verify,
)
from tests.triton_kernels.decoding import MODES
from triton_kernels.noise import host as noise

VOCAB = 37
ALL = pytest.mark.parametrize("mode", list(MODES))


class Batch(NamedTuple):
    """Rows at scattered positions, ragged k in 0..5, distributions with zeros, and drafts as the
    mode needs them."""

    target: Tensor
    drafts: Tensor
    draft_probs: Tensor
    num_drafts: Tensor
    rows: NoiseRows

    def verify(self, mode: str) -> Verdict:
        return MODES[mode].verify(*self)

    def row(self, i: int) -> Batch:
        k, start = int(self.num_drafts[i]), int(self.num_drafts[:i].sum())
        return Batch(
            self.target[start + i : start + i + k + 1],
            self.drafts[start : start + k],
            self.draft_probs[start : start + k],
            self.num_drafts[i : i + 1],
            NoiseRows(*(field[i : i + 1] for field in self.rows)),
        )

    def each(self) -> tuple[Tensor, Tensor, NoiseRows]:
        """Return row, depth and noise of every row of `target`."""
        row = torch.repeat_interleave(self.num_drafts + 1)
        starts = (self.num_drafts + 1).cumsum(0) - self.num_drafts - 1
        depth = torch.arange(len(row)) - starts[row]
        keys, choices, positions = (field[row] for field in self.rows)
        return row, depth, NoiseRows(keys, choices, positions + depth)


def make_batch(mode: str, count: int, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    num_drafts = torch.from_numpy(rng.integers(0, 6, count))
    rows = NoiseRows(
        torch.from_numpy(rng.integers(0, 2**32, (count, 2))),
        torch.from_numpy(rng.integers(0, 3, count)),
        torch.from_numpy(rng.integers(0, 1000, count)),
    )
    logits = rng.normal(size=(int(num_drafts.sum()) + count, VOCAB)) * 2
    logits[rng.random(logits.shape) < 0.3] = -np.inf
    other = logits + rng.normal(size=logits.shape) * 0.7
    target, draft = (torch.from_numpy(x).to(torch.float32).softmax(-1) for x in (logits, other))
    empty = torch.zeros(0, dtype=torch.int64)
    row, depth, noise_of_each = Batch(target, empty, draft, num_drafts, rows).each()
    drafted = depth < num_drafts[row]
    drafts = draw(draft, noise_of_each, MODES[mode].draft_purpose)[drafted]
    return Batch(target, drafts, draft[drafted], num_drafts, rows)


def race(dist: np.ndarray, one: Batch, depth: int, purpose: Purpose) -> int:
    """Draw by the specification."""
    key, choice, position = (field[0].numpy() for field in one.rows)
    words = specification.token_words(key, position + depth, choice, purpose, VOCAB)
    return int((dist / specification.exponential(words[0])).argmax())


def slow_coupled(one: Batch) -> tuple[int, int]:
    for depth, draft in enumerate([*one.drafts.tolist(), None]):
        own = race(one.target[depth].numpy(), one, depth, Purpose.COUPLED)
        if own != draft:
            return depth, own
    raise AssertionError


def slow_rejection(one: Batch) -> tuple[int, int]:
    key, choice, position = (field[0].numpy() for field in one.rows)
    for depth, draft in enumerate(one.drafts.tolist()):
        p, q = one.target[depth].numpy(), one.draft_probs[depth].numpy()
        words = specification.scalar_words(key, position + depth, choice, Purpose.ACCEPT)
        if not p[draft] > 0 or specification.uniform(words)[0] * q[draft] > p[draft]:
            return depth, race(np.maximum(p - q, 0), one, depth, Purpose.RESIDUAL)
    accepted = len(one.drafts)
    return accepted, race(one.target[accepted].numpy(), one, accepted, Purpose.BONUS)


@ALL
def test_every_row_is_what_the_definition_says(mode: str) -> None:
    slow = {"rejection": slow_rejection, "coupled": slow_coupled}[mode]
    batch = make_batch(mode, 300, seed=0)
    verdict = batch.verify(mode)
    verdicts = zip(*torch.stack(verdict).tolist(), strict=True)
    for i, pair in enumerate(verdicts):
        assert pair == slow(batch.row(i))
    accepted, k = verdict.num_accepted, batch.num_drafts
    assert ((accepted == k) & (k > 1)).any() and (k == 0).any()
    assert ((accepted > 0) & (accepted < k)).any() and ((accepted == 0) & (k > 0)).any()


# --- the draw -------------------------------------------------------------------------------------


def rows_for(count: int) -> NoiseRows:
    zeros = torch.zeros(count, dtype=torch.int64)
    return NoiseRows(torch.stack((torch.arange(count), zeros + 1), dim=1), zeros, zeros)


def test_ties_go_to_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal noise, equal chances: among the likeliest tokens the first one wins."""
    same = torch.zeros(2, 4, dtype=torch.int64)
    monkeypatch.setattr(noise, "token_words", lambda *_: same)
    p = torch.tensor([[0.0, 0.2, 0.4, 0.4], [0.25, 0.25, 0.25, 0.25]])
    verdict = coupled_verify(p, torch.tensor([2]), torch.tensor([1]), rows_for(1))
    assert verdict.num_accepted.tolist() == [1] and verdict.next_tokens.tolist() == [0]


def test_a_sparse_draw_equals_the_dense_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the noise of possible tokens is computed; the winner is the same."""
    rng = np.random.default_rng(8)
    p = torch.from_numpy(rng.random((300, 512)).astype(np.float32))
    p[torch.from_numpy(rng.random((300, 512))) > 0.05] = 0
    p[0] = 0
    p[0, 77] = 1.0
    rows = rows_for(300)
    sparse = draw(p, rows, noise.BONUS)
    words = noise.token_words(
        rows.keys, rows.positions, rows.choices, torch.full((300,), noise.BONUS), 512
    )
    assert torch.equal(sparse, (p / noise.exponential(words)).argmax(dim=-1))
    monkeypatch.setattr(noise, "token_words", lambda *_: pytest.fail("computed all noise"))
    draw(p, rows, noise.BONUS)


def test_rows_of_nan_alone_draw_some_token() -> None:
    """The caller marks them as broken; a draw must not fail the step."""
    broken, k = torch.full((4, 512), torch.nan), torch.ones(2, dtype=torch.int64)
    verdict = coupled_verify(broken, k, k, rows_for(2))
    for tokens in (draw(broken, rows_for(4), noise.DRAFT), verdict.next_tokens):
        assert ((tokens >= 0) & (tokens < 512)).all()


def test_shapes_are_checked_by_name() -> None:
    p, ones, rows = torch.full((2, 3), 1 / 3), torch.ones(1, dtype=torch.int64), rows_for(1)
    with pytest.raises(ValueError, match="draft_probs"):
        rejection_verify(p, ones, p[:, :2][:1], ones, rows)
    for check in (lambda *a: rejection_verify(*a[:2], None, *a[2:]), coupled_verify):
        with pytest.raises(ValueError, match="target_probs"):
            check(p[:1], ones, ones, rows)
        with pytest.raises(ValueError, match="draft_tokens"):
            check(p, ones.to(torch.int32), ones, rows)
        with pytest.raises(ValueError, match=r"rows\.positions"):
            check(p, ones, ones, rows._replace(positions=ones.repeat(2)))


def test_a_draw_among_some_ids_is_that_among_all_where_the_rest_has_none() -> None:
    g = torch.Generator().manual_seed(4)
    ids = torch.randperm(600, generator=g)[:90].sort().values
    few = torch.rand(200, 90, generator=g)
    whole = torch.zeros(200, 600).index_copy_(1, ids, few)
    rows = rows_for(200)
    among = draw(few, rows, noise.DRAFT, ids)
    assert torch.equal(among, draw(whole, rows, noise.DRAFT))
    assert len(among.unique()) > 50 and torch.isin(among, ids).all()
