"""Speculative decoding with toy models, with the real noise and the real verification.

`Decoder` and `Policy` are correct; broken variants override one method.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cbatch.runtime.sampling import noise
from cbatch.runtime.sampling.rejection_sampler import (
    NoiseRows,
    Verdict,
    coupled_verify,
    draw,
    rejection_verify,
)
from tests.chi_square import chi_square_z
from tests.triton_kernels.toy_models import ToyModels, exact_dists, joint_dist, survival

DEEPEST = 3  # drafts a step
Z_BOUND = 5.0  # |z| beyond it by chance: 6 in 10 million tests; seeds are fixed


class Mode(NamedTuple):
    """A way to verify: the noise of drafts, the verdict, and the chance [states, vocab] that a
    token is drafted and accepted."""

    draft_purpose: int
    verify: Callable[[Tensor, Tensor, Tensor | None, Tensor, NoiseRows], Verdict]
    overlap: Callable[[np.ndarray, np.ndarray], np.ndarray]


def matches(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return the chance that one race picks token i under p and under q: 1 / sum_j max(p_j/p_i,
    q_j/q_i)."""
    both = (p > 0) & (q > 0)
    a, b = np.where(both, p, 1.0), np.where(both, q, 1.0)
    ratios = np.maximum(p[..., None, :] / a[..., None], q[..., None, :] / b[..., None])
    return np.where(both, 1 / ratios.sum(axis=-1), 0.0)


MODES = {
    "rejection": Mode(noise.DRAFT, rejection_verify, np.minimum),
    "coupled": Mode(noise.COUPLED, lambda p, x, _, k, rows: coupled_verify(p, x, k, rows), matches),
}


class Step(NamedTuple):
    """One step of B sequences; `states[:, j]` is the state after j drafts."""

    at: Tensor  # int64 [B]: the sequences
    rows: NoiseRows
    num_drafts: Tensor  # int64 [B]
    states: Tensor  # int64 [B, DEEPEST + 1]
    drafts: Tensor  # int64 [B, DEEPEST]
    verdict: Verdict


class Policy:
    """A policy for k: constant for a sequence, ragged in a batch."""

    def begin(self, count: int, models: ToyModels) -> None:
        self.count, self.models = count, models

    def choose(self, at: Tensor) -> Tensor:
        return at % (DEEPEST + 1)

    def trim(self, k: Tensor, drafts: Tensor, draft_probs: Tensor) -> Tensor:
        """Return k once the drafts are known; `draft_probs` [B, DEEPEST] are their probabilities
        under q."""
        return k

    def observe(self, step: Step) -> None:
        """Receive the results of a step before the next one."""


class Fixed(Policy):
    def __init__(self, k: int) -> None:
        self.k = k

    def choose(self, at: Tensor) -> Tensor:
        return torch.full_like(at, self.k)


class Decoded(NamedTuple):
    tokens: np.ndarray  # int64 [count, length]
    steps: list[Step]


class Decoder:
    """A decoder of many independent sequences of toy models, each with its own key."""

    def __init__(
        self, models: ToyModels, mode: str, policy: Policy | None = None, *, shuffle: bool = False
    ) -> None:
        self.models, self.mode = models, MODES[mode]
        self.policy = policy or Policy()
        self.shuffle = np.random.default_rng(5) if shuffle else None

    def noise_rows(self, at: Tensor, positions: Tensor) -> NoiseRows:
        """Return noise rows with keys by sequence, independent of batch rows."""
        keys = torch.stack((at, torch.full_like(at, self.seed)), dim=1)
        return NoiseRows(keys, torch.zeros_like(at), positions)

    def target_rows(self, states: Tensor, used: Tensor) -> Tensor:
        """Return p for `states[used]`."""
        return self.models.target[states[used]]

    def reported(self, states: Tensor) -> Tensor | None:
        """Return q for `states`, as reported to the verification."""
        return self.models.draft[states]

    def resume(self, step: Step) -> Tensor:
        """Return the state in which the next step begins."""
        kept = step.states.gather(1, step.verdict.num_accepted[:, None]).squeeze(1)
        return self.models.after(kept, step.verdict.next_tokens)

    def step(self, at: Tensor, positions: Tensor, state: Tensor) -> Step:
        rows = self.noise_rows(at, positions)
        k = self.policy.choose(at)
        states, drafts = [state], []
        for depth in range(DEEPEST):
            where = rows._replace(positions=positions + depth)
            drafts.append(draw(self.models.draft[states[-1]], where, self.mode.draft_purpose))
            states.append(self.models.after(states[-1], drafts[-1]))
        grid, tokens = torch.stack(states, dim=1), torch.stack(drafts, dim=1)
        own = self.models.draft[grid[:, :-1]].gather(2, tokens[..., None]).squeeze(2)
        k = self.policy.trim(k, tokens, own)
        used = torch.arange(DEEPEST) < k[:, None]
        verdict = self.mode.verify(
            self.target_rows(grid, torch.arange(DEEPEST + 1) <= k[:, None]),
            tokens[used],
            self.reported(grid[:, :-1][used]),
            k,
            rows,
        )
        return Step(at, rows, k, grid, tokens, verdict)

    def run(self, count: int, length: int, seed: int = 1) -> Decoded:
        """Return the first `length` tokens of `count` sequences, and every step."""
        self.seed = seed
        self.policy.begin(count, self.models)
        out = torch.zeros((count, length + DEEPEST), dtype=torch.int64)
        have, state = torch.zeros((2, count), dtype=torch.int64)
        steps = []
        while int(have.min()) < length:
            at = (have < length).nonzero().squeeze(1)
            if self.shuffle is not None:
                at = at[torch.from_numpy(self.shuffle.permutation(len(at)))]
            step = self.step(at, have[at], state[at])
            accepted, last = step.verdict
            for depth in range(DEEPEST + 1):
                drafted = step.drafts[:, min(depth, DEEPEST - 1)]
                token = torch.where(depth == accepted, last, drafted)
                live = depth <= accepted
                out[at[live], have[at][live] + depth] = token[live]
            have[at] += accepted + 1
            state[at] = self.resume(step)
            self.policy.observe(step)
            steps.append(step)
        return Decoded(out[:, :length].numpy(), steps)


def joint_z(tokens: np.ndarray, models: ToyModels) -> float:
    """Return z of whole sequences [count, length] against the target's joint distribution, by
    chi-square."""
    length = tokens.shape[1]
    cells = tokens @ models.vocab ** np.arange(length)[::-1]
    counts = np.bincount(cells, minlength=models.vocab**length)
    return chi_square_z(counts, joint_dist(models, length).ravel())


def survival_chances(models: ToyModels, mode: str, depth: int = DEEPEST) -> np.ndarray:
    """Return P(the first j drafts of a step from state 0 are accepted), j = 0..depth: float64."""
    overlap = MODES[mode].overlap(exact_dists(models.target), exact_dists(models.draft))
    return survival(models, overlap, depth)


def acceptance_z(run: Decoded, chances: np.ndarray) -> list[float]:
    """Return z of the accepted drafts at each depth, among the first drafts that reached it."""
    k, accepted = run.steps[0].num_drafts.numpy(), run.steps[0].verdict.num_accepted.numpy()
    z = []
    for depth in range(DEEPEST):
        tried = (k > depth) & (accepted >= depth)
        chance = chances[depth + 1] / chances[depth]
        expected, spread = tried.sum() * chance, tried.sum() * chance * (1 - chance)
        z.append(float((accepted[tried] > depth).sum() - expected) / math.sqrt(spread))
    return z
