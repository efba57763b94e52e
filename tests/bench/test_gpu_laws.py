"""The exact laws that compiled kernels are held against, and the power of the tests."""

from __future__ import annotations

import numpy as np
import pytest

from bench.gpu.laws import MarkovChain, accept_z, joint_z, matches

COUNT = 60_000


def sampled(chain: MarkovChain, length: int, seed: int = 1) -> np.ndarray:
    """Sequences drawn from the target itself."""
    rng, last = np.random.default_rng(seed), np.zeros(COUNT, dtype=np.int64)
    tokens = []
    for _ in range(length):
        edges = chain.target.cumsum(axis=1)[last]
        last = (rng.random((COUNT, 1)) > edges).sum(axis=1).clip(max=len(chain.target) - 1)
        tokens.append(last)
    return np.stack(tokens, axis=1)


def test_laws_by_hand() -> None:
    """p = (1/4, 3/4), q = (1/2, 1/2): overlap 3/4; races match with 1/3 + 1/2."""
    target = np.array([[0.25, 0.75], [0.5, 0.5]])
    law = MarkovChain(target, target).joint(2)
    assert law.tolist() == [0.25 * 0.25, 0.25 * 0.75, 0.75 * 0.5, 0.75 * 0.5]
    p, q = np.array([[0.25, 0.75]] * 2), np.full((2, 2), 0.5)
    chain = MarkovChain(p, q)
    assert chain.accepted(False, 2).tolist() == [0.25, 0.75 * 0.25, 0.75 * 0.75]
    # 1 / (1 + max(3, 1)) and 1 / (max(1/3, 1) + 1).
    assert matches(p, q)[0] == pytest.approx([1 / 4, 1 / 2])
    assert chain.accepted(True, 1) == pytest.approx([0.25, 0.75])


def test_right_samples_pass_and_wrong_ones_do_not() -> None:
    """|z| beyond 5 by chance: 6 in 10 million; the seed is fixed."""
    chain = MarkovChain.make(5, seed=17)
    tokens = sampled(chain, 3)
    assert abs(joint_z(tokens, chain)) < 5
    assert joint_z(tokens, chain.moved(0.03)) > 10
    again = tokens.copy()
    again[:, 2] = again[:, 1]  # the marginals of a chain that stands still
    assert joint_z(again, chain) > 10
    law, rng = chain.accepted(False, 3), np.random.default_rng(3)
    drafted = np.arange(COUNT) % 4
    accepted = np.minimum(rng.choice(4, COUNT, p=law), drafted)
    assert accept_z(drafted, accepted, law) < 5
    cut = np.where((accepted == 3) & (rng.random(COUNT) < 0.1), 2, accepted)
    assert accept_z(drafted, cut, law) > 5
