"""T1, T2, T3 with the kernels: distributions of emitted and accepted tokens.

On a device there are enough sequences for the statistics of `test_joint_distributions`. In the
interpreter, which is slow, a few sequences are compared with those of the CPU's verification.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cbatch.runtime.sampling import noise
from cbatch.runtime.sampling.rejection_sampler import NoiseRows, Verdict
from tests.triton_kernels.decoding import (
    DEEPEST,
    MODES,
    Z_BOUND,
    Decoded,
    Decoder,
    Step,
    acceptance_z,
    joint_z,
    survival_chances,
)
from tests.triton_kernels.interpreter.batches import SMALL
from tests.triton_kernels.interpreter.conftest import INTERPRETED
from tests.triton_kernels.toy_models import ToyModels, chain_models
from triton_kernels.sampling import launch
from triton_kernels.sampling.inputs import (
    COUPLED,
    REJECTION,
    Distributions,
    DraftTokens,
    LogitsBatch,
    Noise,
    Proposals,
    Requests,
    Rows,
    rows_of,
)
from triton_kernels.verification.kernel import verify_logits

TILING = SMALL if INTERPRETED else launch.TILING
CODES = {"coupled": COUPLED, "rejection": REJECTION}
COUNT = 40_000
ALL = pytest.mark.parametrize("mode", list(MODES))
needs_device = pytest.mark.skipif(INTERPRETED, reason="needs --device cuda: 40,000 sequences")

pytestmark = [
    pytest.mark.usefixtures("device", "unchecked_sums"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]


class KernelDecoder(Decoder):
    """A decoder whose tokens are drawn and verified by the kernels."""

    def __init__(self, models: ToyModels, mode: str) -> None:
        super().__init__(models, mode)
        self.code = CODES[mode]

    def step(self, at: Tensor, positions: Tensor, state: Tensor) -> Step:
        rows, k, count = self.noise_rows(at, positions), self.policy.choose(at), len(at)
        requests = self.requests(count)
        places = DEEPEST * torch.arange(count, dtype=torch.int32)
        tokens = torch.zeros(count * DEEPEST, dtype=torch.int32)
        dists = Distributions.allocate(count * DEEPEST, tokens.device)
        proposed, states = [], [state]
        for depth in range(DEEPEST):
            proposed.append(self.models.draft[states[-1]].log())
            drafts = DraftTokens(tokens, places, torch.full_like(places, depth))
            at_depth = Rows(torch.arange(count, dtype=torch.int32), torch.full_like(places, depth))
            batch = LogitsBatch(proposed[-1], at_depth, requests, Noise(*rows), drafts, None)
            launch.draw(batch, noise.DRAFT, TILING, dists=dists, first=depth, step=DEEPEST)
            tokens[depth::DEEPEST] = dists.tokens[depth::DEEPEST, 0]
            states.append(self.models.after(states[-1], tokens[depth::DEEPEST].long()))
        grid = torch.stack(states, dim=1)
        logits = torch.stack(proposed, dim=1).flatten(0, 1)
        proposals = Proposals(logits, None, dists, torch.zeros_like(places))
        drafts = DraftTokens(tokens, places, k.to(torch.int32))
        verdict = self.verify(grid, k, requests, rows, drafts, proposals)
        return Step(at, rows, k, grid, tokens.view(count, DEEPEST).long(), verdict)

    def verify(
        self,
        grid: Tensor,
        k: Tensor,
        requests: Requests,
        rows: NoiseRows,
        drafts: DraftTokens,
        proposals: Proposals,
    ) -> Verdict:
        of_rows, starts = rows_of(k, int((k + 1).sum()))
        logits = self.models.target[grid[of_rows.requests.long(), of_rows.depths.long()]].log()
        batch = LogitsBatch(logits, of_rows, requests, Noise(*rows), drafts, None)
        result = verify_logits(batch, starts, proposals, TILING, filtered=False)
        assert bool((result.finite == 1).all())
        return Verdict(result.num_accepted.long(), result.next_tokens.long())

    def requests(self, count: int) -> Requests:
        """Return requests without filters, at temperature 1."""
        ones, ids = torch.ones(count), torch.ones(count, dtype=torch.int32)
        return Requests(
            self.code * ids, ones, self.models.vocab * ids, torch.inf * ones, 0.0 * ones
        )


@ALL
def test_tokens_are_those_of_the_cpus_verification(mode: str) -> None:
    models = chain_models()
    mine, other = (make(models, mode).run(24, 3) for make in (KernelDecoder, Decoder))
    assert np.array_equal(mine.tokens, other.tokens)
    accepted = mine.steps[0].verdict.num_accepted
    assert torch.equal(accepted, other.steps[0].verdict.num_accepted)
    assert 0 < int(accepted.sum()) < int(mine.steps[0].num_drafts.sum())


@functools.cache
def decoded(mode: str) -> Decoded:
    return KernelDecoder(chain_models(), mode).run(COUNT, 3)


@needs_device
@pytest.mark.statistics
@ALL
def test_t1_one_token_of_32_in_a_million(mode: str) -> None:
    models, part = chain_models(vocab=32, seed=2), 100_000
    decoder = KernelDecoder(models, mode)
    tokens = np.concatenate([decoder.run(part, 1, seed=i).tokens for i in range(1, 11)])
    assert abs(joint_z(tokens, models)) < Z_BOUND


@needs_device
@pytest.mark.statistics
@ALL
def test_t2_joint_distribution_of_three_tokens(mode: str) -> None:
    """The distribution is right for each k. A target with 3 % of one token moved is noticed."""
    models, tokens = chain_models(), decoded(mode).tokens
    for k in range(DEEPEST + 1):
        assert abs(joint_z(tokens[k :: DEEPEST + 1], models)) < Z_BOUND, f"k = {k}"
    moved = models.target.clone()
    moved[:, 0] += 0.03
    assert joint_z(tokens, ToyModels(moved, moved)) > 2 * Z_BOUND


@needs_device
@pytest.mark.statistics
@ALL
def test_t3_acceptance_distribution(mode: str) -> None:
    """Accepted drafts at each depth are binomial with the exact chance. A chance that is a
    tenth lower is noticed."""
    chances = survival_chances(chain_models(), mode)
    assert max(map(abs, acceptance_z(decoded(mode), chances))) < Z_BOUND
    lower = chances * 0.9 ** np.arange(DEEPEST + 1)
    assert max(map(abs, acceptance_z(decoded(mode), lower))) > 2 * Z_BOUND


class _SameNoise(KernelDecoder):
    """Broken: every verification reads the noise of position 0."""

    def verify(
        self, grid: Tensor, k: Tensor, requests: Requests, rows: NoiseRows, *rest: Any
    ) -> Verdict:
        rows = rows._replace(positions=0 * rows.positions)
        return super().verify(grid, k, requests, rows, *rest)


@needs_device
@pytest.mark.statistics
@ALL
def test_noise_of_one_position_is_noticed(mode: str) -> None:
    models = chain_models()
    assert abs(joint_z(_SameNoise(models, mode).run(COUNT, 3).tokens, models)) > 2 * Z_BOUND
