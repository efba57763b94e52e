"""Exact laws of speculative decoding in a chain, where the next token's law depends on the last
token only, and how far a sample is from them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

F64 = NDArray[np.float64]


class MarkovChain(NamedTuple):
    """Laws by last token, float64 [V, V] each; a sequence begins behind token 0."""

    target: F64
    draft: F64

    @classmethod
    def make(cls, vocab: int, seed: int) -> MarkovChain:
        """A draft that is 0.4 of the target and 0.6 of something else."""
        rng = np.random.default_rng(seed)
        target, other = (_softmax(rng.normal(size=(vocab, vocab)) * 1.5) for _ in range(2))
        return cls(target, 0.4 * target + 0.6 * other)

    def joint(self, length: int) -> F64:
        """Law of the first `length` tokens, [V ** length], the first token most significant."""
        law, last = np.ones(1), np.zeros(1, dtype=np.int64)
        for _ in range(length):
            law = (law[:, None] * self.target[last]).ravel()
            last = np.tile(np.arange(len(self.target)), len(last))
        return law

    def accepted(self, coupled: bool, depth: int) -> F64:
        """P(exactly j of `depth` drafts are accepted), j = 0..depth."""
        overlap = (matches if coupled else np.minimum)(self.target, self.draft)
        state = np.zeros(len(overlap))
        state[0] = 1.0
        alive = [1.0]
        for _ in range(depth):
            state = state @ overlap
            alive.append(float(state.sum()))
        return np.append(-np.diff(alive), alive[-1])

    def moved(self, share: float) -> MarkovChain:
        """Another world: that much of every target law goes to token 0."""
        target = self.target * (1 - share)
        target[:, 0] += share
        return self._replace(target=target)


def _softmax(x: F64) -> F64:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    result: F64 = e / e.sum(axis=-1, keepdims=True)
    return result


def matches(p: F64, q: F64) -> F64:
    """Chance that one race is won by token i under p and under q: 1 / sum_j max(p_j / p_i,
    q_j / q_i) (Daliri, Musco, Suresh 2024, arXiv 2408.07978). All chances above 0."""
    ratios = np.maximum(p[..., None, :] / p[..., None], q[..., None, :] / q[..., None])
    result: F64 = 1 / ratios.sum(axis=-1)
    return result


def chi_square_z(counts: ArrayLike, law: ArrayLike) -> float:
    """Chi-square as a standard normal deviate (Wilson and Hilferty 1931), cells that expect fewer
    than 5 pooled. Beyond 5 by chance in 3 of 10 million samples."""
    found, p = (np.asarray(x, dtype=np.float64).ravel() for x in (counts, law))
    expected = p / p.sum() * found.sum()
    rare = expected < 5
    if rare.any():
        found = np.append(found[~rare], found[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    found, expected = found[expected > 0], expected[expected > 0]
    degrees = len(expected) - 1
    if degrees < 1:
        return 0.0
    spread = 2 / (9 * degrees)
    statistic = float(((found - expected) ** 2 / expected).sum())
    return float(((statistic / degrees) ** (1 / 3) - (1 - spread)) / spread**0.5)


def joint_z(tokens: NDArray[np.integer], chain: MarkovChain) -> float:
    """Of sequences [N, length] against the joint law."""
    vocab, length = len(chain.target), tokens.shape[1]
    cells = tokens.astype(np.int64) @ vocab ** np.arange(length)[::-1]
    return chi_square_z(np.bincount(cells, minlength=vocab**length), chain.joint(length))


def accept_z(drafted: NDArray[np.integer], accepted: NDArray[np.integer], law: F64) -> float:
    """The farthest deviate of accepts at each depth, among rows that reached it (binomial), and of
    the histogram of rows with the most drafts. `law` as `MarkovChain.accepted` of the deepest."""
    deepest = len(law) - 1
    alive = law[::-1].cumsum()[::-1]
    found = [
        abs(chi_square_z(np.bincount(accepted[drafted == deepest], minlength=deepest + 1), law))
    ]
    for depth in range(deepest):
        tried = (drafted > depth) & (accepted >= depth)
        chance, count = alive[depth + 1] / alive[depth], int(tried.sum())
        if count:
            hits = int((accepted[tried] > depth).sum())
            found.append(abs(hits - count * chance) / (count * chance * (1 - chance)) ** 0.5)
    return float(max(found))
