"""The exact laws that compiled kernels are held against, and the power of the tests."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.gpu.laws import Chain, accept_z, chi_square_z, joint_z, matches
from tests import chi_square
from tests.triton_kernels import decoding
from tests.triton_kernels.worlds import World, joint, survival

COUNT = 60_000


def sampled(chain: Chain, length: int, seed: int = 1) -> np.ndarray:
    """Sequences drawn from the target itself."""
    rng, last = np.random.default_rng(seed), np.zeros(COUNT, dtype=np.int64)
    tokens = []
    for _ in range(length):
        edges = chain.target.cumsum(axis=1)[last]
        last = (rng.random((COUNT, 1)) > edges).sum(axis=1).clip(max=len(chain.target) - 1)
        tokens.append(last)
    return np.stack(tokens, axis=1)


def as_world(chain: Chain) -> World:
    return World(*(torch.from_numpy(law).float() for law in chain))


def test_joint_law_by_hand() -> None:
    target = np.array([[0.25, 0.75], [0.5, 0.5]])
    law = Chain(target, target).joint(2)
    assert law.tolist() == [0.25 * 0.25, 0.25 * 0.75, 0.75 * 0.5, 0.75 * 0.5]


def test_acceptance_by_hand() -> None:
    """p = (1/4, 3/4), q = (1/2, 1/2): overlap 3/4; races match with 1/3 + 1/2."""
    p, q = np.array([[0.25, 0.75]] * 2), np.full((2, 2), 0.5)
    chain = Chain(p, q)
    assert chain.accepted(False, 2).tolist() == [0.25, 0.75 * 0.25, 0.75 * 0.75]
    # 1 / (1 + max(3, 1)) and 1 / (max(1/3, 1) + 1).
    assert matches(p, q)[0] == pytest.approx([1 / 4, 1 / 2])
    assert chain.accepted(True, 1) == pytest.approx([0.25, 0.75])


@pytest.mark.parametrize("mode", ["rejection", "coupled"])
def test_laws_are_those_of_the_reference_tests(mode: str) -> None:
    """Two ways to the same figures."""
    chain = Chain.make(5, seed=17)
    world = as_world(chain)
    assert chain.joint(3) == pytest.approx(joint(world, 3).ravel(), rel=1e-5)
    alive = survival(world, decoding.overlap_of(world, mode), 3)
    law = np.append(alive[:-1] - alive[1:], alive[-1])
    assert chain.accepted(mode == "coupled", 3) == pytest.approx(law, rel=1e-4)


def test_the_deviate_is_that_of_the_reference_tests() -> None:
    rng = np.random.default_rng(0)
    law = rng.dirichlet(np.full(40, 0.3))
    counts = rng.multinomial(5000, law)
    assert chi_square_z(counts, law) == pytest.approx(chi_square.chi_square_z(counts, law))


def test_right_samples_pass_and_wrong_ones_do_not() -> None:
    """|z| beyond 5 by chance: 6 in 10 million; the seed is fixed."""
    chain = Chain.make(5, seed=17)
    tokens = sampled(chain, 3)
    assert abs(joint_z(tokens, chain)) < 5
    assert joint_z(tokens, chain.moved(0.03)) > 10
    again = tokens.copy()
    again[:, 2] = again[:, 1]  # the marginals of a chain that stands still
    assert joint_z(again, chain) > 10


def test_acceptance_that_is_off_is_seen() -> None:
    chain = Chain.make(5, seed=17)
    law = chain.accepted(False, 3)
    rng = np.random.default_rng(3)
    drafted = np.arange(COUNT) % 4
    accepted = np.minimum(rng.choice(4, COUNT, p=law), drafted)
    assert accept_z(drafted, accepted, law) < 5
    cut = np.where((accepted == 3) & (rng.random(COUNT) < 0.1), 2, accepted)
    assert accept_z(drafted, cut, law) > 5
