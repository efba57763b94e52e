"""Verification from logits: exact distributions (T0), and the reference on given noise."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from cbatch.runtime.sampling import noise
from tests.triton_kernels.interpreter.batches import (
    SMALL,
    proposals_for,
    proposals_of,
    random_batch,
)
from tests.triton_kernels.reference_of_logits import verify_reference
from tests.triton_kernels.toy_models import ToyModels, exact_dists, joint_dist, random_dists
from triton_kernels.noise import device as noise_device
from triton_kernels.sampling import launch, order
from triton_kernels.sampling.inputs import (
    COUPLED,
    REJECTION,
    DraftTokens,
    LogitsBatch,
    Noise,
    Proposals,
    Requests,
    Rows,
    rows_of,
)
from triton_kernels.sampling.launch import CompileOptions, Tiling
from triton_kernels.verification import kernel as verify_logits
from triton_kernels.verification import residual
from triton_kernels.verification.kernel import VerifyOutput
from triton_kernels.verification.kernel import verify_logits as verify

pytestmark = [
    pytest.mark.usefixtures("device", "unchecked_sums"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]


def decide(batch: LogitsBatch, proposals: Proposals | None, tiling: Tiling = SMALL) -> VerifyOutput:
    """Verify without changing the logits."""
    batch = batch._replace(logits=batch.logits.clone())
    starts = rows_of(batch.drafts.counts.long(), len(batch.logits))[1]
    return verify(batch, starts, proposals, tiling, filtered=True)


def differing(batch: LogitsBatch, proposals: Proposals | None) -> int:
    """Return the number of requests whose verdict differs from the reference's."""
    return _differing(decide(batch, proposals), verify_reference(batch, proposals))


def _differing(verdict: Iterable[Tensor], reference: Iterable[Tensor]) -> int:
    pairs = zip(verdict, reference, strict=True)
    return int(torch.stack([mine != others for mine, others in pairs]).any(dim=0).sum())


# --- the reference --------------------------------------------------------------------------------


def test_hundreds_of_filtered_rows_are_those_of_the_reference() -> None:
    """With the same noise all tokens are equal; every outcome of a verdict occurs."""
    rng = np.random.default_rng(43)
    batch, _ = random_batch(rng, 200, 45, shaped=False)
    batch, proposals = proposals_for(rng, batch)
    assert len(batch.logits) >= 600
    verdict = decide(batch, proposals)
    for mine, reference in zip(verdict, verify_reference(batch, proposals), strict=True):
        assert torch.equal(mine.long(), reference)
    counts, accepted = batch.drafts.counts, verdict.num_accepted
    for mode in (COUPLED, REJECTION):
        for certain in (0, 1):
            of = (batch.requests.modes == mode) & (proposals.certain == certain)
            assert (of & (accepted == counts) & (counts > 1)).any() and (of & (counts == 0)).any()
            assert (of & (accepted > 0) & (accepted < counts)).any()
            assert (of & (accepted == 0) & (counts > 0)).any()


@pytest.mark.parametrize("proposed", [True, False])
def test_shaped_rows_are_those_of_the_reference(proposed: bool) -> None:
    rng = np.random.default_rng(21)
    batch, _ = random_batch(rng, 24, 30, dtype=torch.bfloat16)
    batch, proposals = proposals_for(rng, batch)
    assert differing(batch, proposals if proposed else None) == 0


def test_rows_that_are_not_finite_void_their_request_alone() -> None:
    rng = np.random.default_rng(22)
    batch, _ = random_batch(rng, 40, 30, filters=False, shaped=False)
    batch, proposals = proposals_for(rng, batch)
    before = decide(batch, proposals)
    row = int((batch.rows.depths == 2).nonzero()[0])
    hit = int(batch.rows.requests[row])
    batch.logits[row] = torch.nan
    after = decide(batch, proposals)
    others = torch.arange(40) != hit
    assert after.finite[hit] == 0 and (after.finite[others] == 1).all()
    for then, now in zip(before, after, strict=True):
        assert torch.equal(then[others], now[others])
    assert ((after.next_tokens >= 0) & (after.next_tokens < 30)).all()


def test_rows_of_padding_change_nothing() -> None:
    rng = np.random.default_rng(25)
    batch, _ = random_batch(rng, 30, 30, filters=False, shaped=False)
    count = len(batch.logits)
    rows, starts = rows_of(batch.drafts.counts.long(), count + 5)
    padded = torch.cat((batch.logits, torch.full((5, 30), torch.nan)))
    padded_batch = batch._replace(logits=padded, rows=rows)
    padded_verdict = verify(padded_batch, starts, None, SMALL, filtered=False)
    for mine, plain in zip(padded_verdict, decide(batch, None), strict=True):
        assert torch.equal(mine, plain)


def test_equal_distributions_leave_no_residual_and_still_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """p = q except for round-off, and a draft is rejected nevertheless: the distribution is p
    itself."""
    rng = np.random.default_rng(23)
    batch, _ = random_batch(rng, 60, 30, filters=False, shaped=False)
    batch, proposals = proposals_for(rng, batch)
    drafted = batch.rows.depths < batch.drafts.counts[batch.rows.requests.long()]
    rows = Rows(*(field[drafted] for field in batch.rows))
    dists = launch.draw(batch._replace(logits=batch.logits[drafted], rows=rows), noise.DRAFT, SMALL)
    proposals = Proposals(batch.logits[drafted], None, dists, proposals.certain)
    monkeypatch.setattr(verify_logits, "ratio_accepts", never)
    ratio = (batch.requests.modes == REJECTION) & (batch.drafts.counts > 0)
    ratio &= proposals.certain == 0
    tokens = decide(batch, proposals).next_tokens[ratio]
    plain = batch._replace(drafts=batch.drafts._replace(counts=0 * batch.drafts.counts))
    monkeypatch.setattr(order, "BONUS", order.RESIDUAL)
    starts = rows_of(batch.drafts.counts.long(), len(batch.logits))[1]
    drawn = verify(plain, starts, None, SMALL, filtered=False).next_tokens
    assert torch.equal(tokens, drawn[ratio])
    assert ratio.sum() > 5


# --- broken variants ------------------------------------------------------------------------------


@triton.jit
def never(threshold, p):
    return p < 0.0


@triton.jit
def accepts_forbidden(threshold, p):
    return threshold <= p


@triton.jit
def no_residual(p, q):
    return p


@triton.jit
def no_filter(requests, request, vocab):
    return vocab < 0


right_race_of = order.race_of


@triton.jit
def every_row_races(batch, certain_ptr, request, depth, purpose, drawn):
    """A certain draft that was rejected may come again."""
    raced, stream, excluded = right_race_of(batch, certain_ptr, request, depth, purpose, drawn)
    return raced, stream, excluded * 0 - 1


BROKEN = [
    (residual, "residual_of", no_residual),
    (residual, "RESIDUAL", verify_logits.ACCEPT),
    (order, "RESIDUAL", verify_logits.ACCEPT),
    (verify_logits, "ACCEPT", order.BONUS),
    (order, "is_filtered", no_filter),
]


@functools.cache
def weighed() -> tuple[LogitsBatch, Proposals, tuple[Tensor, ...]]:
    """Return requests by rejection, and the verdict of the reference."""
    rng = np.random.default_rng(24)
    batch, _ = random_batch(rng, 44, 24, shaped=False)
    modes = torch.full((44,), REJECTION, dtype=torch.int32)
    batch = batch._replace(requests=batch.requests._replace(modes=modes))
    batch, proposals = proposals_for(rng, batch)
    return batch, proposals, verify_reference(batch, proposals)


def test_unbroken_verification_is_right() -> None:
    batch, proposals, reference = weighed()
    assert _differing(decide(batch, proposals), reference) == 0


@pytest.mark.parametrize(("module", "name", "broken"), BROKEN)
def test_broken_verification_is_caught(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str, broken: object
) -> None:
    batch, proposals, reference = weighed()
    monkeypatch.setattr(module, name, broken)
    assert _differing(decide(batch, proposals), reference) > 0


def test_a_rejected_draft_that_may_come_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, _ = random_batch(np.random.default_rng(27), 16, 12, filters=False, shaped=False)
    assert differing(batch, None) == 0
    monkeypatch.setattr(order, "race_of", every_row_races)
    assert differing(batch, None) > 0


def test_a_forbidden_draft_is_refused_whatever_its_own_chance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """p = 0, and q * u rounds to 0 as well."""
    logits = torch.tensor([[0.0, 300.0], [0.0, 0.0]])
    batch = plain_batch(logits, torch.tensor([0]), torch.tensor([1]), torch.zeros(1, 2).long())
    zeros = torch.zeros(1, dtype=torch.int32)
    proposals = proposals_of(batch, logits[:1], Rows(zeros, zeros), zeros)
    assert decide(batch, proposals).num_accepted.tolist() == [0]
    monkeypatch.setattr(verify_logits, "ratio_accepts", accepts_forbidden)
    assert decide(batch, proposals).num_accepted.tolist() == [1]


# --- T0 -------------------------------------------------------------------------------------------

VOCAB, LENGTH = 3, 3


def plain_batch(
    logits: Tensor, tokens: Tensor, counts: Tensor, keys: Tensor, mode: int = REJECTION
) -> LogitsBatch:
    """Return a batch with logits, drafts and keys only."""
    size = len(counts)
    ones = torch.ones(size)
    requests = Requests(
        torch.full((size,), mode, dtype=torch.int32),
        ones,
        torch.full((size,), logits.shape[1], dtype=torch.int32),
        ones * torch.inf,
        ones * 0,
    )
    zeros = torch.zeros(size, dtype=torch.int64)
    starts = counts.cumsum(0) - counts
    drafts = DraftTokens(*(x.to(torch.int32) for x in (tokens, starts, counts)))
    rows, _ = rows_of(counts, len(logits))
    return LogitsBatch(logits, rows, requests, Noise(keys, zeros, zeros), drafts, None)


@triton.jit
def given_words(seeds, positions, choices, purposes):
    """Return the low word of a seed as the random word.

    With `choices` a draft is sure to pass at every position before `choices - 1`, and sure to fail
    there unless its chance is 1.
    """
    forced = tl.where(positions == choices - 1, 0xFFFFFFFF, 0).to(tl.uint32)
    return tl.where(choices > 0, forced, (seeds & 0xFFFFFFFF).to(tl.uint32))


@triton.jit
def named_token(
    seed, groups, position, choice, purpose, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Return 1 for the token that the seed names."""
    ids = tl.reshape(groups[:, :, None] * 4 + tl.arange(0, 4)[None, None, :], [ROWS, WIDTH])
    return (ids == (seed & 0xFFFFFFFF)).to(tl.int32)


@triton.jit
def only_that(words):
    """Let only the named token win, with its own weight as score."""
    return tl.where(words == 1, 1.0, float("inf"))


def make_models(kind: str) -> ToyModels:
    rng = np.random.default_rng(5)
    target = random_dists(rng, VOCAB, VOCAB, "zeros" if kind == "zeros" else "dense")
    draft = random_dists(rng, VOCAB, VOCAB, "zeros" if kind == "zeros" else "dense")
    if kind == "equal":
        draft = target.clone()
    if kind == "certain":
        draft = torch.eye(VOCAB)[torch.from_numpy(rng.integers(0, VOCAB, VOCAB))]
    return ToyModels(target, draft)


def logits_of(dists: Tensor) -> Tensor:
    return dists.log().clamp(min=-1e30)  # finite, but without weight


def accept_chances(monkeypatch: pytest.MonkeyPatch, models: ToyModels, certain: bool) -> np.ndarray:
    """Return the implemented chances of acceptance, [states, VOCAB]: the ratio rule to 4e-6, tested
    on both sides of its edge."""
    states = len(models.target)
    p, q = exact_dists(models.target), exact_dists(models.draft)
    expected = np.minimum(1, np.divide(p, q, out=np.zeros_like(p), where=q > 0))
    words = np.concatenate([expected - 4e-6, expected + 4e-6]).clip(0, 1) * 2.0**32
    words = torch.from_numpy(words.astype(np.int64).clip(0, 2**32 - 1)).flatten()
    monkeypatch.setattr(noise_device, "scalar_words", given_words)
    state = torch.arange(2 * states * VOCAB) // VOCAB % states
    tokens = torch.arange(VOCAB).repeat(2 * states)
    counts = torch.ones_like(tokens)
    batch = plain_batch(
        logits_of(models.target)[state].repeat_interleave(2, dim=0),
        tokens,
        counts,
        torch.stack((words, 0 * words), dim=1),
    )
    proposals = None
    if not certain:
        zeros = 0 * state.to(torch.int32)
        rows = Rows(torch.arange(len(state), dtype=torch.int32), zeros)
        proposals = proposals_of(batch, logits_of(models.draft)[state], rows, zeros)
    accepted = decide(batch, proposals, TINY).num_accepted.reshape(2, states, VOCAB).numpy()
    monkeypatch.undo()
    drafted = q > 0
    assert (accepted[0] == (expected > 4e-6))[drafted].all()
    assert (accepted[1] == (expected > 1 - 4e-6))[drafted].all()
    return expected


TINY = Tiling(pieces=1, piece=32, chunk=1, list_tokens=32)
Branch = tuple[tuple[int, ...], int]  # drafts, and the number of accepted ones


def branch_dists(
    monkeypatch: pytest.MonkeyPatch, models: ToyModels, branches: list[Branch], certain: bool
) -> np.ndarray:
    """Return the distribution of the token after each branch, computed in one ragged batch:
    [branches, VOCAB]."""
    weights: list[Tensor] = []
    original = launch.launch

    def spy(kernel: Any, grid: Any, values: dict[str, Any], build: CompileOptions) -> None:
        original(kernel, grid, values, build)
        if kernel is verify_logits.decide_kernel:
            seen.append(values)

    p, q, x = [], [], []
    for drafts, _ in branches:
        states = [torch.tensor(0), *torch.tensor(drafts, dtype=torch.int64)]
        states = [s if i == 0 else models.after(states[i - 1], s) for i, s in enumerate(states)]
        p += [models.target[s] for s in states for _ in range(1)]
        q += [models.draft[s] for s in states[:-1]]
        x += drafts
    counts = torch.tensor([len(drafts) for drafts, _ in branches])
    stops = torch.tensor([accepted + 1 for _, accepted in branches])
    for token in range(VOCAB):
        keys = torch.tensor([[token, 0]]).repeat(len(branches), 1)
        batch = plain_batch(logits_of(torch.stack(p)), torch.tensor(x), counts, keys)
        batch = batch._replace(noise=batch.noise._replace(choices=stops))
        of, depths = batch.rows
        drafted = depths < counts[of.long()]
        rows, zeros = Rows(of[drafted], depths[drafted]), 0 * counts.to(torch.int32)
        drawn_from = proposals_of(batch, logits_of(torch.stack(q)), rows, zeros)
        seen: list[dict[str, Any]] = []
        with monkeypatch.context() as patch:
            patch.setattr(noise_device, "scalar_words", given_words)
            patch.setattr(noise_device, "run_words", named_token)
            patch.setattr(noise_device, "exponential", only_that)
            patch.setattr(launch, "launch", spy)
            accepted = decide(batch, None if certain else drawn_from, TINY).num_accepted
        scores = 1 / bits_of(seen[0]["scanned"].winners[:, 0] >> 32)[starts_of(counts) + accepted]
        if not certain:
            replaced = bits_of(seen[0]["keys_ptr"][:, 0] >> 31 & 0x7FFFFFFF)
            scores = torch.where(accepted < counts, replaced, scores)
        weights.append(scores)
    # A draft whose chance is 1 cannot be rejected: that branch has no mass.
    reached = accepted == stops - 1
    return exact_dists(torch.stack(weights, dim=1)) * reached[:, None].numpy()


def bits_of(words: Tensor) -> Tensor:
    return words.int().view(torch.float32)


def starts_of(counts: Tensor) -> Tensor:
    return (counts + 1).cumsum(0) - counts - 1


@pytest.mark.parametrize("kind", ["dense", "zeros", "equal", "certain"])
def test_every_draft_and_branch_sum_to_the_joint_distribution(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The distribution of the first 3 tokens is right when a step drafts k in 0..2 and plain
    decoding follows."""
    models, certain = make_models(kind), kind == "certain"
    assert (
        np.abs(joint_dists(monkeypatch, models, certain) - joint_dist(models, LENGTH)).max() < 2e-5
    )


def test_the_joint_distribution_shows_a_missing_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    models = make_models("dense")
    monkeypatch.setattr(residual, "residual_of", no_residual)
    dists = joint_dists(pytest.MonkeyPatch(), models, certain=False)
    assert np.abs(dists - joint_dist(models, LENGTH)).max() > 1e-3


def joint_dists(monkeypatch: pytest.MonkeyPatch, models: ToyModels, certain: bool) -> np.ndarray:
    accept, draft = accept_chances(monkeypatch, models, certain), exact_dists(models.draft)
    branches = [
        (drafts, accepted)
        for k in range(LENGTH)
        for drafts in itertools.product(range(VOCAB), repeat=k)
        for accepted in range(k + 1)
    ]
    dists = np.zeros((LENGTH, *(VOCAB,) * LENGTH))
    replace = branch_dists(monkeypatch, models, branches, certain)
    for (drafts, accepted), dist in zip(branches, replace, strict=True):
        state, chance = 0, 1.0
        for depth, token in enumerate(drafts):
            agreed = accept[state, token] if depth < accepted else 1.0
            refused = 1 - accept[state, token] if depth == accepted else 1.0
            chance *= draft[state, token] * agreed * refused
            state = token
        for token in range(VOCAB) if chance else ():
            tail = joint_dist(models, LENGTH - accepted - 1, token)
            dists[len(drafts)][(*drafts[:accepted], token)] += chance * dist[token] * tail
    return dists


def test_no_draft_moves_a_coupled_token() -> None:
    """Every draft of every k in 0..2, in one ragged batch, is compared with plain decoding."""
    models = make_models("zeros")
    drafts = [x for k in range(LENGTH) for x in itertools.product(range(VOCAB), repeat=k)]
    counts = torch.tensor([len(x) for x in drafts])
    states = [s for x in drafts for s in (0, *x)]
    logits, tokens = logits_of(models.target)[states], [t for x in drafts for t in x]
    seen = set()
    for seed in range(6):
        keys = torch.tensor([[seed, 1]]).repeat(len(drafts), 1)
        verdicts = decide(
            plain_batch(logits, torch.tensor(tokens), counts, keys, COUPLED), None, TINY
        )
        pairs = list(zip(*(field.tolist() for field in verdicts[:2]), strict=True))
        plain: tuple[int, ...] = ()
        for _ in range(LENGTH):  # drafts that agree with all known tokens
            accepted, following = pairs[drafts.index(plain)]
            assert accepted == len(plain)
            plain += (following,)
        seen.add(plain)
        for x, (accepted, following) in zip(drafts, pairs, strict=True):
            assert (*x[:accepted], following) == plain[: accepted + 1]
    assert len(seen) > 2
