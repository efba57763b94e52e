"""Batched verification compared with a loop over the noise specification, and its edge cases."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.core.request import noise as specification
from cbatch.core.request.noise import Purpose
from cbatch.runtime.compiled.race import race_winners
from cbatch.runtime.sampling import noise, rejection_sampler
from cbatch.runtime.sampling.rejection_sampler import (
    NoiseRows,
    Verdict,
    coupled_verify,
    draw,
    expected_accepted,
    rejection_verify,
)

VOCAB = 37
PURPOSES = {"rejection": noise.DRAFT, "coupled": noise.COUPLED}


class Batch(NamedTuple):
    """Rows at scattered positions, ragged k in 0..5, distributions with zeros, and drafts as the
    mode needs them."""

    target: Tensor
    drafts: Tensor
    draft_probs: Tensor
    num_drafts: Tensor
    rows: NoiseRows

    def verify(self, mode: str) -> Verdict:
        if mode == "rejection":
            return rejection_verify(*self)
        return coupled_verify(self.target, self.drafts, *self[3:])

    def row(self, i: int) -> Batch:
        k, start = int(self.num_drafts[i]), int(self.num_drafts[:i].sum())
        return Batch(
            self.target[start + i : start + i + k + 1],
            self.drafts[start : start + k],
            self.draft_probs[start : start + k],
            self.num_drafts[i : i + 1],
            NoiseRows(*(field[i : i + 1] for field in self.rows)),
        )


def make_batch(mode: str, count: int, seed: int, certain: bool = False) -> Batch:
    """Return a batch. If `certain`, q is one-hot where the draft is."""
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
    row = torch.repeat_interleave(num_drafts + 1)
    depth = torch.arange(len(row)) - ((num_drafts + 1).cumsum(0) - num_drafts - 1)[row]
    keys, choices, positions = (field[row] for field in rows)
    drafted = depth < num_drafts[row]
    drafts = draw(draft, NoiseRows(keys, choices, positions + depth), PURPOSES[mode])[drafted]
    q = torch.eye(VOCAB)[drafts] if certain else draft[drafted]
    return Batch(target, drafts, q, num_drafts, rows)


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


@pytest.mark.parametrize(
    ("mode", "slow"), [("rejection", slow_rejection), ("coupled", slow_coupled)]
)
def test_every_row_is_what_the_definition_says(mode: str, slow: object) -> None:
    batch = make_batch(mode, 300, seed=0)
    accepted, following = batch.verify(mode)
    for i, pair in enumerate(zip(accepted.tolist(), following.tolist(), strict=True)):
        assert pair == slow(batch.row(i))  # type: ignore[operator]
    k = batch.num_drafts
    assert ((accepted == k) & (k > 1)).any() and (k == 0).any()
    assert ((accepted > 0) & (accepted < k)).any() and ((accepted == 0) & (k > 0)).any()


@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
def test_expected_accepted_is_the_overlap_up_to_and_including_the_first_rejection(
    certain: bool,
) -> None:
    """A position after it would tell of noise that is still to decide a token."""
    batch = make_batch("rejection", 60, 8, certain)
    accepted = batch.verify("rejection").num_accepted
    sums = expected_accepted(*batch[:4], accepted)
    for i in range(60):
        one, tried = batch.row(i), min(int(accepted[i]) + 1, int(batch.num_drafts[i]))
        overlap = torch.minimum(one.target[:-1], one.draft_probs)[:tried].double().sum()
        assert float(sums[i]) == pytest.approx(float(overlap), abs=1e-6)
    if certain:  # one-hot rows among others, or a step without any q, give the same number
        without = expected_accepted(*batch[:2], None, batch.num_drafts, accepted)
        assert torch.equal(without, sums)


def test_expected_accepted_is_never_more_than_was_tried() -> None:
    """Where p and q agree, round-off must not count as a draft."""
    batch = make_batch("rejection", 200, seed=9)
    same = [batch.row(i).target[:-1] for i in range(200)]
    batch = batch._replace(draft_probs=torch.cat(same))
    accepted = batch.verify("rejection").num_accepted
    sums = expected_accepted(*batch[:4], accepted)
    tried = torch.minimum(accepted + 1, batch.num_drafts)
    assert (sums <= tried).all() and (sums > tried - 1e-5).all()


# --- edge cases -----------------------------------------------------------------------------------


def rows_for(count: int) -> NoiseRows:
    zeros = torch.zeros(count, dtype=torch.int64)
    return NoiseRows(torch.stack((torch.arange(count), zeros + 1), dim=1), zeros, zeros)


def test_a_draft_with_p_of_zero_is_never_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known flaw A3: `u <= p / q` holds for u = 0 and p = 0, however small q is."""
    q = torch.tensor([[1e-38, 1.0], [0.5, 0.5], [1e-20, 1.0]])
    p = torch.tensor([[0.0, 1.0], [0.5, 0.5]]).repeat(3, 1)
    zeros = torch.zeros(3, dtype=torch.int64)
    monkeypatch.setattr(noise, "scalar_words", lambda *_: zeros)
    verdict = rejection_verify(p, zeros, q, zeros + 1, rows_for(3))
    assert verdict.num_accepted.tolist() == [0, 0, 0] and verdict.next_tokens.tolist() == [1, 1, 1]


def test_a_residual_of_zero_mass_falls_back_to_p(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known flaw A3: round-off rejects a draft though p equals q. z < 5."""
    count = 4000
    zeros = torch.zeros(count, dtype=torch.int64)
    p = torch.tensor([[0.25, 0.75]]).repeat(2 * count, 1)
    monkeypatch.setattr(
        "cbatch.runtime.sampling.rejection_sampler.count_accepted", lambda *_: zeros
    )
    tokens = rejection_verify(p, zeros + 1, p[:count].clone(), zeros + 1, rows_for(count))[1]
    assert abs(float(tokens.double().mean()) - 0.75) < 5 * (0.75 * 0.25 / count) ** 0.5


def specified_noise(rows: NoiseRows, vocab: int) -> NDArray[np.float32]:
    coordinates = (each.numpy() for each in (rows.keys, rows.positions, rows.choices))
    words = specification.token_words(*coordinates, noise.BONUS, vocab)
    return specification.exponential(words)


@pytest.mark.parametrize("compiled", [True, False])
def test_draws_are_the_specified_ones(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever only few tokens are possible, and where equal scores go to the lowest id."""
    if not compiled:
        monkeypatch.setattr(rejection_sampler, "race_winners", lambda *_: None)
    elif race_winners(torch.ones(1, 4), torch.ones(1, 5, dtype=torch.int64)) is not None:
        for shape, dtype in (((1, 4), torch.bfloat16), ((2, 4), torch.float32)):
            with pytest.raises(ValueError, match="needs"):
                race_winners(torch.ones(shape, dtype=dtype), torch.ones(1, 5, dtype=torch.int64))
    rng, rows = np.random.default_rng(8), rows_for(200)
    for vocab in (1, 3, 127, 512, 2000):
        drawn = specified_noise(rows, vocab)
        p = rng.exponential(size=drawn.shape).astype(np.float32) ** 4
        ties = np.where(rng.random(p.shape) < 0.5, drawn, drawn / 2)
        few = np.where(rng.random(p.shape) < 0.05, p, 0)
        few[:, -1] = 1e-3
        for chances in (p, few, p * np.float32(1e-39), ties, drawn, np.ones_like(p)):
            winners = draw(torch.from_numpy(chances), rows, noise.BONUS)
            assert winners.tolist() == specification.race(chances, drawn).tolist()


def test_only_the_noise_of_possible_tokens_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection_sampler, "race_winners", lambda *_: None)
    monkeypatch.setattr(noise, "token_words", lambda *_: pytest.fail("computed all noise"))
    p = torch.zeros(2, 512).index_fill_(1, torch.arange(20), 0.05)
    draw(p, rows_for(2), noise.BONUS)


def test_a_draw_among_some_ids_is_that_among_all_where_the_rest_has_none() -> None:
    g = torch.Generator().manual_seed(4)
    ids = torch.randperm(600, generator=g)[:90].sort().values
    few = torch.rand(200, 90, generator=g)
    whole = torch.zeros(200, 600).index_copy_(1, ids, few)
    among = draw(few, rows_for(200), noise.DRAFT, ids)
    assert torch.equal(among, draw(whole, rows_for(200), noise.DRAFT))
    assert len(among.unique()) > 50 and torch.isin(among, ids).all()


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
