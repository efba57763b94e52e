"""T4: policies choose k from decided tokens, never from noise that is still to decide a token.

In rejection mode a step may already have read a token's noise, beyond its first rejection. A k that
depends on it anticipates a draft, and the joint distribution over two steps shows it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from cbatch.core.prices.cost_model import StepPrices
from cbatch.core.speculation import acceptance as estimator
from cbatch.core.speculation import draft_allocation
from cbatch.core.speculation.build import build_policy
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.core.speculation.policy import PolicyLimits
from cbatch.runtime.sampling import noise
from cbatch.runtime.sampling.rejection_sampler import expected_accepted
from tests.helpers import DraftedRows, RowsToPlan
from tests.triton_kernels.decoding import DEEPEST, MODES, Z_BOUND, Decoder, Policy, Step, joint_z
from tests.triton_kernels.toy_models import ShapedModels, ToyModels, chain_models, exact_dists

COUNT = 60_000
CAUGHT = 2 * Z_BOUND


class Shipped(Policy):
    """The scheduler's own policy, with caps that differ between rows."""

    def __init__(self, policy: str) -> None:
        self.config = LookaheadConfig(
            policy=policy, k=DEEPEST, decay=0.7, prior_trials=2.0, min_survival=0.45
        )

    def begin(self, count: int, models: ToyModels) -> None:
        self.policy = build_policy(self.config, PolicyLimits(count, 1))
        for slot in range(count):
            self.policy.enter(slot, None)

    def choose(self, at: Tensor) -> Tensor:
        caps = (DEEPEST - (at % 5 == 0).to(torch.int64)).numpy().astype(np.int32)
        k = self.policy.choose(RowsToPlan(at.numpy(), caps))
        assert k is not None
        return torch.from_numpy(k.astype(np.int64))

    def observe(self, step: Step) -> None:
        counts = step.num_drafts, step.verdict.num_accepted
        drafted, accepted = (x.numpy().astype(np.int32) for x in counts)
        self.policy.observe(DraftedRows(step.at.numpy(), drafted, accepted))


class Adaptive(Policy):
    """The joint decision, in which a row's k also depends on acceptance in the others. Its evidence
    is what the estimator allows: 1 - TV up to and including the first rejection."""

    config = LookaheadConfig(policy="adaptive", k=DEEPEST, decay=0.7)

    def begin(self, count: int, models: ToyModels) -> None:
        self.estimate = np.full((2, count), 2.0)
        self.estimate[0] = np.resize([0.4, 1.0, 1.6], count)  # histories
        self.models = models

    def choose(self, at: Tensor) -> Tensor:
        survival = estimator.survival(*self.estimate[:, at.numpy()], DEEPEST).T
        prices = StepPrices(1.0 + 0.25 * np.arange(len(at) * DEEPEST + 1) / len(at), 0.02)
        decision = draft_allocation.decide(survival, np.full(len(at), DEEPEST, np.int32), prices)
        return torch.from_numpy(decision.num_drafts.astype(np.int64))

    def observe(self, step: Step) -> None:
        rows, accepted = step.at.numpy(), step.verdict.num_accepted
        evidence = evidence_of(step, self.models).numpy()
        drafted, accepted = (x.numpy().astype(np.int32) for x in (step.num_drafts, accepted))
        tried = accepted + (accepted < drafted)
        self.estimate[:, rows] = estimator.decayed(
            self.config.decay, self.estimate[:, rows], tried, evidence
        )


def evidence_of(step: Step, models: ToyModels, *, leak: bool = False) -> Tensor:
    """Return the verification's evidence of a step, fp32 [B]. With a `leak` it counts positions
    after the first rejection, too."""
    k, depth = step.num_drafts[:, None], torch.arange(DEEPEST + 1)
    drafted = depth[:-1] < k
    return expected_accepted(
        models.target[step.states[depth <= k]],
        step.drafts[drafted],
        models.draft[step.states[:, :-1][drafted]],
        step.num_drafts,
        step.num_drafts if leak else step.verdict.num_accepted,
    )


def overlap_by_state(models: ToyModels) -> Tensor:
    """Return 1 - TV(p, q) by state."""
    overlap = np.minimum(exact_dists(models.target), exact_dists(models.draft)).sum(axis=1)
    return torch.from_numpy(overlap)


class FollowsAccepts(Policy):
    """Adversarial but fair: it drafts 3 after a step that accepted and ended in an even token."""

    def begin(self, count: int, models: ToyModels) -> None:
        self.k = torch.full((count,), 2)

    def choose(self, at: Tensor) -> Tensor:
        return self.k[at]

    def observe(self, step: Step) -> None:
        accepted, last = step.verdict
        self.k[step.at] = torch.where((accepted > 0) & (last % 2 == 0), DEEPEST, 0)


class ReadsEvidence(Policy):
    """It drafts 3 at first; then 2, or none if the position `beyond` the first rejection looked
    bad.

    `beyond` = 0 is the rejected position itself, whose noise is spent. `signal` is the accept coin
    of that position, or the overlap 1 - TV there.
    """

    def __init__(self, signal: str, beyond: int) -> None:
        self.signal, self.beyond = signal, beyond

    def begin(self, count: int, models: ToyModels) -> None:
        self.k = torch.full((count,), DEEPEST)
        self.overlap = overlap_by_state(models)
        self.models, self.switched = models, 0

    def choose(self, at: Tensor) -> Tensor:
        return self.k[at]

    def observe(self, step: Step) -> None:
        depth = step.verdict.num_accepted + self.beyond
        seen = depth < step.num_drafts
        clipped = depth.clamp(max=DEEPEST - 1)[:, None]
        state, draft = (x.gather(1, clipped).squeeze(1) for x in (step.states, step.drafts))
        if self.signal == "coin":
            where = step.rows.positions + depth
            words = noise.scalar_words(
                step.rows.keys, where, step.rows.choices, torch.full_like(where, noise.ACCEPT)
            )
            p, q = self.models.target[state, draft], self.models.draft[state, draft]
            good = noise.uniform(words) * q <= p
        else:
            good = self.overlap[state] > self.overlap.median()
        self.k[step.at] = torch.where(seen & ~good, 0, 2)
        self.switched += int((seen & ~good).sum())


class FollowsField(Policy):
    """It drafts 3 at first; then 2 or none by the digits of `StepResult.expected_accepted`: k knows
    all that the field knows."""

    def __init__(self, *, leak: bool) -> None:
        self.leak = leak

    def begin(self, count: int, models: ToyModels) -> None:
        self.k = torch.full((count,), DEEPEST)
        self.models, self.switched = models, 0

    def choose(self, at: Tensor) -> Tensor:
        return self.k[at]

    def observe(self, step: Step) -> None:
        field = evidence_of(step, self.models, leak=self.leak)
        self.k[step.at] = torch.where((32 * field).long() % 2 == 0, 2, 0)
        self.switched += int((self.k[step.at] == 0).sum())


class DropsUnlikely(Policy):
    """Broken: it looks at the drafts of the same step."""

    def trim(self, k: Tensor, drafts: Tensor, draft_probs: Tensor) -> Tensor:
        return torch.where(draft_probs[:, 0] < 0.3, 0, k)


FAIR = {
    "fixed": lambda: Shipped("fixed"),
    "ema": lambda: Shipped("ema"),
    "adaptive": Adaptive,
    "follows accepts": FollowsAccepts,
    "overlap of the rejected position": lambda: ReadsEvidence("overlap", beyond=0),
    "the reported field": lambda: FollowsField(leak=False),
}
AFTER = {
    "coin after the rejection": lambda: ReadsEvidence("coin", beyond=1),
    "overlap after the rejection": lambda: ReadsEvidence("overlap", beyond=2),
    "a reported field that goes on after it": lambda: FollowsField(leak=True),
}
UNFAIR = AFTER | {"own low probability": DropsUnlikely}


def lookaheads(
    policy: Policy, models: ToyModels, until: int
) -> tuple[list[Tensor], Tensor, list[Step]]:
    """Return k of each sequence in steps 0..until, and the position where step `until` begins."""
    steps = Decoder(models, "rejection", policy).run(200, until * (DEEPEST + 1) + 1).steps
    return [s.num_drafts for s in steps[: until + 1]], steps[until].rows.positions, steps


def anticipates(make: object, until: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return True if any k up to step `until` changes when all noise from the beginning of that
    step on is drawn again. That noise decides its drafts and tokens."""
    models = chain_models()
    before, cut, steps = lookaheads(make(), models, until)  # type: ignore[operator]
    original = noise.philox_blocks

    def afresh(keys: Tensor, positions: Tensor, choices: Tensor, *rest: Tensor) -> Tensor:
        return original(keys, positions, choices + (positions >= cut[keys[:, 0]]), *rest)

    with monkeypatch.context() as patch:
        patch.setattr(noise, "philox_blocks", afresh)
        after, _, others = lookaheads(make(), models, until)  # type: ignore[operator]
    assert not torch.equal(steps[until].drafts, others[until].drafts)
    return any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("until", [0, 1, 3])
@pytest.mark.parametrize("name", FAIR)
def test_k_does_not_depend_on_noise_that_is_still_to_decide(
    monkeypatch: pytest.MonkeyPatch, name: str, until: int
) -> None:
    assert not anticipates(FAIR[name], until, monkeypatch)


@pytest.mark.parametrize("name", UNFAIR)
def test_policies_that_anticipate_are_found_out(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert anticipates(UNFAIR[name], 1, monkeypatch)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("kind", ["chain", "shaped"])
@pytest.mark.parametrize("name", FAIR)
def test_fair_policies_keep_the_joint_distribution(name: str, kind: str, mode: str) -> None:
    models = chain_models() if kind == "chain" else ShapedModels()
    run = Decoder(models, mode, FAIR[name]()).run(COUNT // 6, 3)
    assert abs(joint_z(run.tokens, models)) < Z_BOUND
    if name != "fixed":
        assert any(len(step.num_drafts.unique()) > 1 for step in run.steps[1:])


@pytest.mark.parametrize("name", AFTER)
def test_post_rejection_evidence_fed_to_k_is_caught(name: str) -> None:
    """The joint distribution over two steps fails in rejection mode; in coupled mode no token
    changes."""
    models, policy = chain_models(), AFTER[name]()
    rejection = Decoder(models, "rejection", policy).run(COUNT, 3)
    assert policy.switched > 0.05 * COUNT
    assert joint_z(rejection.tokens, models) > CAUGHT
    coupled = Decoder(models, "coupled", policy).run(4000, 3).tokens
    assert np.array_equal(coupled, Decoder(models, "coupled").run(4000, 3).tokens)
