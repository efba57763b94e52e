"""Batched rejection sampling: exact laws, Monte-Carlo laws, and broken variants that are caught.

Every z bound below is 5: by chance it is passed in 3 of 10 million tests; seeds are fixed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.chi_square import chi_square_z
from triton_kernels import noise, verify
from triton_kernels.verify import NoiseRows, draw, rejection_verify

Z_BOUND = 5.0


def rows_for(count: int, seed: int = 1, position: int = 0) -> NoiseRows:
    """`count` independent requests: seeds in the key, one position."""
    keys = torch.stack((torch.arange(count), torch.full((count,), seed)), dim=1)
    return NoiseRows(keys, torch.zeros(count, dtype=torch.int64), torch.full((count,), position))


def random_laws(rng: np.random.Generator, contexts: int, vocab: int, kind: str) -> np.ndarray:
    """fp32 [contexts, vocab] distributions; some kinds have zeros."""
    logits = rng.normal(size=(contexts, vocab)) * 1.5
    if kind == "zeros":
        logits[rng.random(logits.shape) < 0.4] = -np.inf
        logits[:, 0] = np.where(np.isfinite(logits).any(axis=1), logits[:, 0], 0.0)
    if kind == "one_hot":
        logits = np.where(np.eye(vocab)[rng.integers(0, vocab, contexts)] > 0, 0.0, -np.inf)
    return torch.from_numpy(logits).softmax(-1).to(torch.float32).numpy()


# --- T0: exact enumeration over drafts and branches ------------------------------------------


def accept_probabilities(
    monkeypatch: pytest.MonkeyPatch, p: Tensor, x: Tensor, q: Tensor | None
) -> np.ndarray:
    """Share of the 2**32 draws that accept each draft as implemented, by bisection."""
    low = torch.zeros(len(x), dtype=torch.int64)  # draws below `low` accept
    high = torch.full_like(low, 1 << 32)  # draws from `high` on reject
    ones, target = torch.ones_like(low), p.repeat_interleave(2, dim=0)  # a bonus row behind each
    while bool((low < high).any()):
        middle = (low + high) // 2
        monkeypatch.setattr(noise, "scalar_words", lambda *_, words=middle: words)
        accepted = rejection_verify(target, x, q, ones, rows_for(len(x))).num_accepted > 0
        low, high = torch.where(accepted, middle + 1, low), torch.where(accepted, high, middle)
    monkeypatch.undo()
    return low.double().numpy() / 2**32


def residual_laws(
    monkeypatch: pytest.MonkeyPatch, p: Tensor, x: Tensor, q: Tensor | None
) -> np.ndarray:
    """Normalised law from which the replacement of a rejected draft is drawn, as implemented."""
    seen: list[Tensor] = []

    def capture(weights: Tensor, rows: NoiseRows, purposes: Tensor) -> Tensor:
        seen.append(weights)
        return weights.argmax(dim=-1)

    monkeypatch.setattr(verify, "draw", capture)
    reject_all(monkeypatch)
    ones = torch.ones(len(x), dtype=torch.int64)
    rejection_verify(p.repeat_interleave(2, dim=0), x, q, ones, rows_for(len(x)))
    monkeypatch.undo()
    weights = seen[0].double().numpy()
    return weights / weights.sum(axis=1, keepdims=True)


def reject_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_count_accepted", lambda p, x, q, k, *_: torch.zeros_like(k))


@pytest.mark.parametrize("kind", ["dense", "zeros", "equal", "disjoint", "one_hot", "certain"])
def test_exact_joint_law(monkeypatch, kind):
    """Sum over every draft and branch: the law of the first 3 tokens is the target's (V = 4)."""
    rng = np.random.default_rng(3)
    vocab, length = 4, 3
    target = random_laws(rng, vocab, vocab, "zeros" if kind == "zeros" else "dense")
    draft = random_laws(rng, vocab, vocab, kind if kind in ("zeros", "one_hot") else "dense")
    if kind == "equal":
        draft = target.copy()
    if kind == "disjoint":
        target[:, :2], draft[:, 2:] = 0, 0
        target, draft = (a / a.sum(1, keepdims=True) for a in (target, draft))
    certain = kind == "certain"  # chosen with certainty: q is one-hot and not passed
    if certain:
        draft = np.eye(vocab, dtype=np.float32)[rng.integers(0, vocab, vocab)]
    p = torch.from_numpy(target).repeat_interleave(vocab, dim=0)
    q = None if certain else torch.from_numpy(draft).repeat_interleave(vocab, dim=0)
    x = torch.arange(vocab).repeat(vocab)
    accept = accept_probabilities(monkeypatch, p, x, q).reshape(vocab, vocab)
    replace = residual_laws(monkeypatch, p, x, q).reshape(vocab, vocab, vocab)
    t64, d64 = target.astype(np.float64), draft.astype(np.float64)
    t64, d64 = (a / a.sum(1, keepdims=True) for a in (t64, d64))
    one = np.einsum("cx,cx,xy->cxy", d64, accept, np.eye(vocab)).sum(1)
    one += np.einsum("cx,cx,cxy->cy", d64, 1 - accept, replace)
    assert np.abs(one - t64).max() < 2e-6
    for k in range(1, length + 1):
        law = joint_of_step(t64, d64, accept, replace, k, length)
        assert np.abs(law - chain(t64, length)).max() < 3e-6


def chain(laws: np.ndarray, length: int, context: int = 0) -> np.ndarray:
    """Joint law of `length` tokens of a first-order chain from `context`: [V] * length."""
    joint = laws[context]
    for _ in range(length - 1):
        joint = joint[..., None] * laws
    return joint


def joint_of_step(target, draft, accept, replace, k, length) -> np.ndarray:
    """Law of `length` tokens when one step drafts k and plain decoding goes on."""
    vocab = len(target)
    law = np.zeros((vocab,) * length)
    for tokens in itertools.product(range(vocab), repeat=length):
        context, alive, total = 0, 1.0, 0.0
        for depth, token in enumerate(tokens):
            tail = np.prod([target[a, b] for a, b in itertools.pairwise(tokens[depth:])])
            if depth == min(k, length):  # bonus
                total += alive * target[context, token] * tail
                break
            rejected = np.sum(draft[context] * (1 - accept[context]) * replace[context, :, token])
            total += alive * rejected * tail
            alive *= draft[context, token] * accept[context, token]
            context = token
        else:
            total += alive
        law[tokens] = total
    return law


# --- Monte Carlo with the real noise -----------------------------------------------------------


def simulate(
    target: Tensor,
    draft: Tensor,
    count: int,
    length: int,
    *,
    keep_rejected: bool = False,
    report_q: Callable[[Tensor], Tensor] | None = lambda q: q,
    seed: int = 1,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`count` sequences of a first-order chain from token 0, decoded with ragged k in 0..3.

    Returns tokens [count, length], and accepted and observed trials of each depth of first steps.
    `keep_rejected`: the next step sees the rejected draft in place of the replacement.
    """
    rng = np.random.default_rng(seed)
    out = torch.zeros((count, length + 4), dtype=torch.int64)
    have = torch.zeros(count, dtype=torch.int64)
    context = torch.zeros(count, dtype=torch.int64)
    hits, trials = np.zeros(3), np.zeros(3)
    first = True
    while int(have.min()) < length:
        at = (have < length).nonzero().squeeze(1)
        k = torch.from_numpy(rng.integers(0, 4, len(at)))
        rows = rows_for(count, seed)
        rows = NoiseRows(rows.keys[at], rows.choices[at], have[at])
        drafts, contexts = torch.zeros((len(at), 3), dtype=torch.int64), [context[at]]
        for depth in range(3):
            where = rows._replace(positions=rows.positions + depth)
            drafts[:, depth] = draw(draft[contexts[-1]], where, noise.DRAFT)
            contexts.append(drafts[:, depth])
        grid = torch.stack(contexts, dim=1)  # [B, 4]
        used, passed = torch.arange(3) < k[:, None], torch.arange(4) <= k[:, None]
        verdict = rejection_verify(
            target[grid[passed]],
            drafts[used],
            None if report_q is None else report_q(draft[grid[:, :3][used]]),
            k,
            rows,
        )
        accepted = verdict.num_accepted
        emitted = drafts.clone()
        emitted = torch.cat((emitted, emitted[:, :1]), dim=1)
        emitted[torch.arange(len(at)), accepted] = verdict.next_tokens
        for depth in range(4):
            live = (depth <= accepted) & (have[at] + depth < length + 4)
            out[at[live], have[at][live] + depth] = emitted[live, depth]
        if first:
            for depth in range(3):
                reached = (k > depth) & (accepted >= depth)
                trials[depth] += int(reached.sum())
                hits[depth] += int((reached & (accepted > depth)).sum())
            first = False
        have[at] += accepted + 1
        context[at] = verdict.next_tokens
        if keep_rejected:
            wrong = accepted < k
            context[at[wrong]] = drafts[wrong, accepted[wrong]]
    return out[:, :length].numpy(), hits, trials


@pytest.fixture(scope="module")
def laws() -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(17)
    target, other = (torch.from_numpy(random_laws(rng, 5, 5, "dense")) for _ in range(2))
    return target, 0.4 * target + 0.6 * other


def joint_z(tokens: np.ndarray, target: Tensor) -> float:
    cells = tokens @ np.array([25, 5, 1])
    want = chain(target.double().numpy(), 3).ravel()
    return chi_square_z(np.bincount(cells, minlength=125), want)


def test_joint_law_of_three_tokens(laws):
    """Chi-square over 125 cells, ragged k, context-dependent target."""
    tokens, _, _ = simulate(*laws, count=60_000, length=3)
    assert abs(joint_z(tokens, laws[0])) < Z_BOUND


def test_flaw_a1_rollback_that_keeps_the_rejected_token_is_caught(laws):
    """Known flaw A1: KV history ends in the rejected draft, the replacement never enters it."""
    tokens, _, _ = simulate(*laws, count=20_000, length=3, keep_rejected=True)
    assert joint_z(tokens, laws[0]) > 20


def test_missing_residual_is_caught(laws, monkeypatch):
    """A replacement drawn from p in place of norm(max(0, p - q))."""
    original = torch.Tensor.clamp_

    def no_residual(self, min=None, max=None):
        return self.zero_() if self.dtype == torch.float32 else original(self, min=min, max=max)

    monkeypatch.setattr(torch.Tensor, "clamp_", no_residual)
    tokens, _, _ = simulate(*laws, count=20_000, length=3)
    assert joint_z(tokens, laws[0]) > 20


def test_shared_accept_and_residual_noise_is_caught(laws, monkeypatch):
    """The replacement must not reuse the noise that rejected the draft."""
    monkeypatch.setattr(noise, "RESIDUAL", noise.ACCEPT)
    tokens, _, _ = simulate(*laws, count=60_000, length=3)
    assert joint_z(tokens, laws[0]) > 10


def test_wrong_q_is_caught(laws):
    """q must be what the draft was drawn from, not the same logits at another temperature."""
    tokens, _, _ = simulate(*laws, count=20_000, length=3, report_q=lambda q: q.sqrt())
    assert joint_z(tokens, laws[0]) > 10


def test_drafts_declared_certain_keep_the_law_and_accept_less(laws):
    """Given the draft, a one-hot q is a true statement, however the draft was drawn."""
    tokens, hits, trials = simulate(*laws, count=60_000, length=3, report_q=None)
    assert abs(joint_z(tokens, laws[0])) < Z_BOUND
    _, ratio_hits, ratio_trials = simulate(*laws, count=60_000, length=3)
    assert hits[0] / trials[0] < ratio_hits[0] / ratio_trials[0] - 0.05


def test_acceptance_law(laws):
    """P(accept at depth j | reached) is the mean of 1 - TV(p, q) over the contexts reached."""
    target, draft = laws
    _, hits, trials = simulate(target, draft, count=60_000, length=3)
    overlap = torch.minimum(target, draft).double()  # joint law of (context, accepted token)
    reach = torch.zeros(5, dtype=torch.float64)
    reach[0] = 1
    for depth in range(3):
        beta = float((reach @ overlap).sum() / reach.sum())
        z = (hits[depth] - trials[depth] * beta) / np.sqrt(trials[depth] * beta * (1 - beta))
        assert trials[depth] > 1000 and abs(z) < Z_BOUND
        wrong = (hits[depth] - trials[depth] * (beta + 0.03)) / np.sqrt(trials[depth] * 0.25)
        assert abs(wrong) > Z_BOUND or trials[depth] < 8_000  # the test has power
        reach = reach @ overlap


def test_chi_square_is_calibrated(laws):
    """z over many seeds is standard normal: neither too wide nor too good."""
    z = [joint_z(simulate(*laws, count=2_000, length=3, seed=s)[0], laws[0]) for s in range(2, 32)]
    assert abs(np.mean(z)) < 5 / np.sqrt(len(z)) and 0.6 < np.std(z) < 1.5


# --- Edges --------------------------------------------------------------------------------------


def test_forbidden_token_is_never_accepted_even_at_the_smallest_draw(monkeypatch):
    monkeypatch.setattr(noise, "scalar_words", lambda *_: torch.zeros(1, dtype=torch.int64))
    p = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    verdict = rejection_verify(
        p, torch.tensor([0]), torch.tensor([[1e-30, 1.0]]), torch.tensor([1]), rows_for(1)
    )
    assert verdict.num_accepted.tolist() == [0] and verdict.next_tokens.tolist() == [1]


def test_residual_without_mass_falls_back_to_the_target(monkeypatch):
    reject_all(monkeypatch)
    p = torch.tensor([[0.25, 0.75]]).repeat(4000, 1)
    ones = torch.ones(2000, dtype=torch.int64)
    verdict = rejection_verify(p, ones, p[:2000].clone(), ones, rows_for(2000))
    counts = np.bincount(verdict.next_tokens.numpy(), minlength=2)
    assert abs(chi_square_z(counts, [0.25, 0.75])) < Z_BOUND


def test_a_row_does_not_depend_on_its_neighbours(laws):
    target, draft = laws
    rng = np.random.default_rng(5)
    num_drafts = torch.from_numpy(rng.integers(0, 4, 64))
    total = int(num_drafts.sum())
    contexts = torch.from_numpy(rng.integers(0, 5, total + 64))
    tokens = torch.from_numpy(rng.integers(0, 5, total))
    q = draft[torch.from_numpy(rng.integers(0, 5, total))]
    rows = rows_for(64, seed=9, position=100)
    together = rejection_verify(target[contexts], tokens, q, num_drafts, rows)
    starts = num_drafts.cumsum(0) - num_drafts
    for i in range(64):
        k, s = int(num_drafts[i]), int(starts[i])
        alone = rejection_verify(
            target[contexts[s + i : s + i + k + 1]],
            tokens[s : s + k],
            q[s : s + k],
            num_drafts[i : i + 1],
            NoiseRows(*(field[i : i + 1] for field in rows)),
        )
        assert alone.num_accepted[0] == together.num_accepted[i]
        assert alone.next_tokens[0] == together.next_tokens[i]
    assert 0 < together.num_accepted.sum() < total


def test_a_sparse_law_draws_what_the_dense_way_would(monkeypatch):
    """Only the noise of possible tokens is computed; the winner is the same."""
    rng = np.random.default_rng(8)
    p = torch.from_numpy(rng.random((300, 512)).astype(np.float32))
    p[torch.from_numpy(rng.random((300, 512))) > 0.05] = 0
    p[0] = 0
    p[0, 77] = 1.0
    rows = rows_for(300)
    sparse = draw(p, rows, noise.BONUS)
    words = noise.token_words(
        rows.keys, rows.positions, rows.choices, torch.full((300,), noise.BONUS), 512
    )
    assert torch.equal(sparse, (p / noise.exponential(words)).argmax(dim=-1))
    monkeypatch.setattr(noise, "token_words", lambda *_: pytest.fail("computed all noise"))
    draw(p, rows, noise.BONUS)


def test_rows_of_nan_alone_draw_some_token():
    """Whoever asked marks them as broken; a draw must not fail the step."""
    tokens = draw(torch.full((2, 512), torch.nan), rows_for(2), noise.DRAFT)
    assert ((tokens >= 0) & (tokens < 512)).all()


def test_shapes_are_checked_by_name():
    p, ones = torch.full((2, 3), 1 / 3), torch.ones(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="target_probs"):
        rejection_verify(p[:1], ones, None, ones, rows_for(1))
    with pytest.raises(ValueError, match="draft_probs"):
        rejection_verify(p, ones, p[:, :2][:1], ones, rows_for(1))
    with pytest.raises(ValueError, match="draft_tokens"):
        rejection_verify(p, ones.to(torch.int32), None, ones, rows_for(1))
