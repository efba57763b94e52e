"""Coupled verification against a loop over the noise specification, and at its edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from cbatch.core import noise as specification
from triton_kernels import noise
from triton_kernels.verify import NoiseRows, coupled_verify, draw

VOCAB = 37


def batch(rng: np.random.Generator, count: int) -> tuple[NoiseRows, Tensor, Tensor, Tensor]:
    """Rows at scattered positions, ragged k in 0..5, target laws with zeros, and coupled drafts."""
    num_drafts = torch.from_numpy(rng.integers(0, 6, count))
    rows = NoiseRows(
        torch.from_numpy(rng.integers(0, 2**32, (count, 2))),
        torch.from_numpy(rng.integers(0, 3, count)),
        torch.from_numpy(rng.integers(0, 1000, count)),
    )
    total = int(num_drafts.sum()) + count
    logits = rng.normal(size=(total, VOCAB)) * 2
    logits[rng.random(logits.shape) < 0.3] = -np.inf
    other = logits + rng.normal(size=logits.shape) * 0.7
    target, draft = (torch.from_numpy(x).to(torch.float32).softmax(-1) for x in (logits, other))
    row = torch.repeat_interleave(num_drafts + 1)
    depth = torch.arange(total) - ((num_drafts + 1).cumsum(0) - num_drafts - 1)[row]
    each = NoiseRows(rows.keys[row], rows.choices[row], rows.positions[row] + depth)
    drafts = draw(draft, each, noise.COUPLED)[depth < num_drafts[row]]
    return rows, target, drafts, num_drafts


def slow_verdict(
    target: np.ndarray, drafts: list[int], key: np.ndarray, choice: int, position: int
) -> tuple[int, int]:
    """One row by the definition, with the noise of the specification."""
    for accepted in range(len(drafts) + 1):
        words = specification.token_words(
            key, position + accepted, choice, specification.Purpose.COUPLED, target.shape[1]
        )
        own = int((target[accepted] / specification.exponential(words[0])).argmax())
        if accepted == len(drafts) or drafts[accepted] != own:
            return accepted, own
    raise AssertionError


def test_every_row_is_what_the_definition_says() -> None:
    rows, target, drafts, num_drafts = batch(np.random.default_rng(0), 300)
    verdict = coupled_verify(target, drafts, num_drafts, rows)
    at = used = 0
    for i, k in enumerate(num_drafts.tolist()):
        want = slow_verdict(
            target[at : at + k + 1].numpy(),
            drafts[used : used + k].tolist(),
            rows.keys[i].numpy(),
            int(rows.choices[i]),
            int(rows.positions[i]),
        )
        assert (int(verdict.num_accepted[i]), int(verdict.next_tokens[i])) == want
        at, used = at + k + 1, used + k
    accepted = verdict.num_accepted
    assert (accepted[num_drafts > 1] == num_drafts[num_drafts > 1]).any() and (
        num_drafts == 0
    ).any()
    assert ((accepted > 0) & (accepted < num_drafts)).any() and (accepted == 0).any()


def test_the_tokens_do_not_depend_on_the_drafts() -> None:
    """Good, random and no drafts: each emits a prefix of the same tokens."""
    rows, target, drafts, num_drafts = batch(np.random.default_rng(1), 200)
    lens = num_drafts + 1
    starts = lens.cumsum(0) - lens
    row = torch.repeat_interleave(lens)
    depth = torch.arange(len(row)) - starts[row]
    each = NoiseRows(rows.keys[row], rows.choices[row], rows.positions[row] + depth)
    none = torch.zeros(0, dtype=torch.int64)
    plain = coupled_verify(target, none, torch.zeros_like(row), each).next_tokens
    guesses = torch.from_numpy(np.random.default_rng(2).integers(0, VOCAB, len(drafts)))
    total = []
    for tokens in (drafts, guesses):
        verdict = coupled_verify(target, tokens, num_drafts, rows)
        assert torch.equal(verdict.next_tokens, plain[starts + verdict.num_accepted])
        before = depth < verdict.num_accepted[row]
        assert torch.equal(plain[before], tokens[before[depth < num_drafts[row]]])
        total.append(int(verdict.num_accepted.sum()))
    assert total[0] > 5 * total[1] > 0


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rows, target, drafts, num_drafts = batch(np.random.default_rng(3), 64)
    together = coupled_verify(target, drafts, num_drafts, rows)
    starts = num_drafts.cumsum(0) - num_drafts
    for i, (k, s) in enumerate(zip(num_drafts.tolist(), starts.tolist(), strict=True)):
        alone = coupled_verify(
            target[s + i : s + i + k + 1],
            drafts[s : s + k],
            num_drafts[i : i + 1],
            NoiseRows(*(field[i : i + 1] for field in rows)),
        )
        assert alone.num_accepted[0] == together.num_accepted[i]
        assert alone.next_tokens[0] == together.next_tokens[i]


def test_ties_go_to_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal noise, equal chances: among the possible tokens the first one wins."""
    monkeypatch.setattr(
        noise, "token_words", lambda k, *_: torch.zeros(len(k), 4, dtype=torch.int64)
    )
    p = torch.tensor([[0.0, 0.25, 0.5, 0.5], [0.25, 0.25, 0.25, 0.25]])
    rows = NoiseRows(torch.zeros(1, 2, dtype=torch.int64), *torch.zeros(2, 1, dtype=torch.int64))
    verdict = coupled_verify(p, torch.tensor([2]), torch.tensor([1]), rows)
    assert verdict.num_accepted.tolist() == [1] and verdict.next_tokens.tolist() == [0]


def test_shapes_are_checked_by_name() -> None:
    p, ones = torch.full((2, 3), 1 / 3), torch.ones(1, dtype=torch.int64)
    rows = NoiseRows(torch.ones(1, 2, dtype=torch.int64), ones, ones)
    with pytest.raises(ValueError, match="target_probs"):
        coupled_verify(p[:1], ones, ones, rows)
    with pytest.raises(ValueError, match="draft_tokens"):
        coupled_verify(p, ones.to(torch.int32), ones, rows)
    with pytest.raises(ValueError, match=r"rows\.positions"):
        coupled_verify(p, ones, ones, rows._replace(positions=ones.repeat(2)))
