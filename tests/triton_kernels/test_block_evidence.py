"""Evidence of block verification for the estimator of acceptance: survival of j drafts, for any k.

|z| < 5 fails by chance in 6 of 10 million tests; seeds are fixed.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from cbatch.core.speculation import acceptance as estimator
from cbatch.core.speculation.acceptance import OverallAcceptance
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.runtime.sampling.block_verification import block_verify
from tests.triton_kernels.decoding import (
    DEEPEST,
    Z_BOUND,
    Decoder,
    Fixed,
    Policy,
    Step,
    survival_chances,
)
from tests.triton_kernels.test_policies import evidence_of
from tests.triton_kernels.test_verify import make_batch
from tests.triton_kernels.toy_models import ShapedModels, ToyModels, chain_models

COUNT = 30_000
CAUGHT = 2 * Z_BOUND


def block_evidence(step: Step, models: ToyModels) -> Tensor:
    depth = torch.arange(DEEPEST + 1)
    drafted = depth[:-1] < step.num_drafts[:, None]
    p = models.target[step.states[depth <= step.num_drafts[:, None]]]
    q = models.draft[step.states[:, :-1][drafted]]
    verdict = block_verify(p, step.drafts[drafted], q, step.num_drafts, step.rows)
    assert torch.equal(verdict.num_accepted, step.verdict.num_accepted)
    return verdict.expected_accepted


def gap(count: Tensor, total: Tensor) -> tuple[float, float]:
    """Return z of the mean of count less sum, and the ratio of their variances."""
    count, total = count.double(), total.double()
    difference = count - total
    z = difference.mean() / (difference.std() / len(count) ** 0.5)
    return float(z), float(total.var() / count.var())


@pytest.mark.parametrize("kind", ["chain", "shaped"])
@pytest.mark.parametrize("policy", [Policy, lambda: Fixed(1), lambda: Fixed(3)])
def test_the_mean_is_that_of_the_count_and_the_spread_less(policy: type[Policy], kind: str) -> None:
    models = chain_models() if kind == "chain" else ShapedModels()
    step = Decoder(models, "block", policy()).run(COUNT, 1).steps[0]
    z, ratio = gap(step.verdict.num_accepted, block_evidence(step, models))
    assert abs(z) < Z_BOUND
    assert ratio < 0.9


def test_overlaps_of_single_positions_are_too_little() -> None:
    """The sum of 1 - TV is right only where drafts are judged one by one."""
    models = chain_models()
    step = Decoder(models, "block", Fixed(DEEPEST)).run(COUNT, 1).steps[0]
    assert gap(step.verdict.num_accepted, evidence_of(step, models))[0] > CAUGHT


def test_certain_drafts_tell_the_same_with_a_one_hot_q_and_without() -> None:
    batch = make_batch("block", 300, seed=8)
    one_hot = torch.zeros_like(batch.draft_probs).scatter_(1, batch.drafts[:, None], 1.0)
    mixed = batch.draft_probs.clone()
    row = torch.repeat_interleave(batch.num_drafts)
    mixed[row % 2 == 0] = one_hot[row % 2 == 0]
    beside = block_verify(*batch._replace(draft_probs=mixed))
    alone = block_verify(*batch._replace(draft_probs=None))  # type: ignore[arg-type]
    drawn = batch.verify("block")
    even = torch.arange(300) % 2 == 0
    for actual, without in zip(beside, alone, strict=True):
        assert torch.equal(actual[even], without[even])
    for actual, with_q in zip(beside, drawn, strict=False):
        assert torch.equal(actual[~even], with_q[~even])
    assert (alone.num_accepted[even] > 0).any() and (alone.expected_accepted <= 5).all()


# --- the estimator --------------------------------------------------------------------------------

CONFIG = LookaheadConfig(policy="adaptive", k=8)
TO_SIX = LookaheadConfig(policy="adaptive", k=6)
ROWS = 3000


def estimated(
    survival: np.ndarray, k: int, steps: int = 120
) -> tuple[np.ndarray, OverallAcceptance]:
    """Return N and D of rows that drafted k in every step, and the correction by depth. j
    drafts survive with probability `survival[j]`."""
    rng, rows = np.random.default_rng(k), ROWS
    estimate = np.repeat([[4.2], [6.0]], rows, axis=1)
    drafted, depths = np.full(rows, k, np.int32), OverallAcceptance(TO_SIX)
    for _ in range(steps):
        runs = (rng.random(rows)[:, None] < survival[1 : k + 1]).sum(axis=1).astype(np.int32)
        depths.observe_depths(estimator.survival(*estimate, 6).T, drafted, runs)
        estimate = estimator.decayed(CONFIG.decay, estimate, runs + (runs < k), runs)
    return estimate, depths


@pytest.mark.parametrize(("k", "off"), [(2, 0.05), (4, 0.09), (6, 0.12)])
def test_estimated_survival_of_blocks(k: int, off: float) -> None:
    """N / D is accepted over tried, to 0.005. Later drafts of a block are accepted more often than
    the first (0.46, 0.55, 0.68, 0.77 in these models).

    Survival from N / D alone, as in `ema`, is therefore wrong by up to 0.11. The correction by
    depth, as in `adaptive`, relates depths to each other: the first one's error, of up to 0.1,
    remains.
    """
    dist = survival_chances(chain_models(), "block", 6)
    estimate, depths = estimated(dist, k)
    accepted, trials = estimate
    pooled = dist[1 : k + 1].sum() / dist[:k].sum()
    assert float((accepted / trials).mean()) == pytest.approx(pooled, abs=0.005)
    believed = estimator.survival(accepted, trials, k).T
    truth = dist[1 : k + 1]
    alone = believed.mean(axis=1)
    corrected = depths.corrected(believed).mean(axis=1)
    assert off - 0.03 < np.abs(alone - truth).max() < off
    profile = np.abs(corrected / corrected[0] - truth / truth[0])
    assert profile.max() < 0.03 < np.abs(alone / alone[0] - truth / truth[0]).max()
