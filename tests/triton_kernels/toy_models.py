"""Toy models: next-token distributions of target and draft after every prefix, and exact
distributions over sequences.

The prefixes that a pair of models distinguishes are numbered states. In a *chain* the distributions
depend on the last token only; in *shaped* models they depend on everything since the prompt,
because penalties do.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cbatch.runtime.sampling.filters import Filters, filtered_probs


class ToyModels:
    """A target and a draft, each fp32 [states, vocab]; the empty prefix is state 0."""

    def __init__(self, target: Tensor, draft: Tensor, *, has_history: bool = False) -> None:
        self.target, self.draft, self.has_history = target, draft, has_history
        self.vocab = target.shape[1]

    def after(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Return the states after `tokens`, broadcast against the states before them."""
        states, tokens = torch.broadcast_tensors(states, tokens)
        return states * self.vocab + 1 + tokens if self.has_history else tokens


def random_dists(rng: np.random.Generator, contexts: int, vocab: int, kind: str) -> Tensor:
    """Return distributions, fp32 [contexts, vocab]; `zeros` and `one_hot` ones have zeros."""
    logits = rng.normal(size=(contexts, vocab)) * 1.5
    if kind == "zeros":
        logits[rng.random(logits.shape) < 0.4] = -np.inf
        logits[:, 0] = np.where(np.isfinite(logits).any(axis=1), logits[:, 0], 0.0)
    if kind == "one_hot":
        logits = np.where(np.eye(vocab)[rng.integers(0, vocab, contexts)] > 0, 0.0, -np.inf)
    return torch.from_numpy(logits).softmax(-1).to(torch.float32)


def chain_models(vocab: int = 5, seed: int = 17) -> ToyModels:
    """Return a first-order chain whose draft is 0.4 of the target and 0.6 of another
    distribution."""
    rng = np.random.default_rng(seed)
    target, other = (random_dists(rng, vocab, vocab, "dense") for _ in range(2))
    return ToyModels(target, 0.4 * target + 0.6 * other)


class Shaping(NamedTuple):
    """Sampling parameters of shaped models, in the order in which they act."""

    banned: int = 5
    stop_id: int = 0  # also banned before `min_tokens`
    min_tokens: int = 1
    biased: tuple[int, float] = (2, 0.8)
    repetition: float = 1.4  # over prompt and output
    presence: float = 0.5  # over output
    frequency: float = 0.6
    temperature: float = 0.9
    top_k: int = 4
    top_p: float = 0.93
    min_p: float = 0.06


class ShapedModels(ToyModels):
    """First-order logits, shaped by all tokens before: every prefix has distributions of its own.

    `unfiltered_draft` is the draft's distribution without temperature, top-k, top-p and min-p.
    """

    PROMPT = (1, 3)

    def __init__(self, vocab: int = 6, depth: int = 5, seed: int = 23) -> None:
        rng = np.random.default_rng(seed)
        self.shaping = Shaping()
        self.target_logits = torch.from_numpy(rng.normal(size=(vocab, vocab)) * 1.2).float()
        noise = torch.from_numpy(rng.normal(size=(vocab, vocab)) * 0.6).float()
        self.draft_logits = self.target_logits + noise
        last, counts = [torch.tensor([self.PROMPT[-1]])], [torch.zeros(1, vocab)]
        for _ in range(depth):
            token = torch.arange(vocab).repeat(len(last[-1]))
            counts.append(counts[-1].repeat_interleave(vocab, dim=0) + torch.eye(vocab)[token])
            last.append(token)
        self.last, self.counts = torch.cat(last), torch.cat(counts)
        all_states = torch.arange(len(self.last))
        self.unfiltered_draft = self._shaped(self.draft_logits, all_states, all_states).softmax(-1)
        super().__init__(
            self.dists(self.target_logits, all_states, all_states),
            self.dists(self.draft_logits, all_states, all_states),
            has_history=True,
        )

    def dists(self, logits: Tensor, states: Tensor, history: Tensor) -> Tensor:
        """Return the distributions at `states` when penalties see the prefixes `history`
        (correctly: the same)."""
        shaping, shaped = self.shaping, self._shaped(logits, states, history)

        def all_rows(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((len(shaped),), value, dtype=dtype)

        filters = Filters(
            all_rows(shaping.temperature),
            all_rows(shaping.top_k, torch.int64),
            all_rows(shaping.top_p),
            all_rows(shaping.min_p),
        )
        return filtered_probs(shaped, filters)

    def _shaped(self, logits: Tensor, states: Tensor, history: Tensor) -> Tensor:
        shaping, counts = self.shaping, self.counts[history]
        x = logits[self.last[states]]
        x[:, shaping.banned] = -torch.inf
        x[counts.sum(dim=1) < shaping.min_tokens, shaping.stop_id] = -torch.inf
        x[:, shaping.biased[0]] += shaping.biased[1]
        seen = counts > 0
        in_prompt = torch.zeros(x.shape[1], dtype=torch.bool)
        in_prompt[list(self.PROMPT)] = True
        scaled = torch.where(x > 0, x / shaping.repetition, x * shaping.repetition)
        x = torch.where(seen | in_prompt, scaled, x)
        return x - shaping.presence * seen - shaping.frequency * counts


def exact_dists(dists: Tensor) -> np.ndarray:
    """Return distributions in float64, normalised."""
    wide = dists.double().numpy()
    normal: np.ndarray = wide / wide.sum(axis=-1, keepdims=True)
    return normal


def joint_dist(models: ToyModels, length: int, state: int = 0) -> np.ndarray:
    """Return the distribution of the next `length` tokens under the target: float64 [vocab] *
    length."""
    target = exact_dists(models.target)
    dist, states = np.ones(1), torch.tensor([state])
    for _ in range(length):
        dist = (dist[:, None] * target[states.numpy()]).ravel()
        states = models.after(states[:, None], torch.arange(models.vocab)).ravel()
    return dist.reshape((models.vocab,) * length)


def survival(models: ToyModels, overlap: np.ndarray, depth: int) -> np.ndarray:
    """Return P(the first j drafts of a step from state 0 are accepted), j = 0..depth: float64.

    `overlap` float64 [states, vocab]: chance that a token is drafted *and* accepted.
    """
    reached, states, survival_chances = np.ones(1), torch.zeros(1, dtype=torch.int64), [1.0]
    for _ in range(depth):
        reached = (reached[:, None] * overlap[states.numpy()]).ravel()
        states = models.after(states[:, None], torch.arange(models.vocab)).ravel()
        survival_chances.append(float(reached.sum()))
    return np.array(survival_chances)
