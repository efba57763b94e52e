"""Sampled speculation through a whole engine has the law of the target alone, and flaws show.

Chi-square over the joint law of three tokens (216 cells), computed exactly from the target by
teacher forcing and a slow filter. |z| < 5 fails by chance in 6 of 10 million; seeds are fixed.
Flaws that earlier systems shipped, and others, are planted in the engine: z > 10.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cbatch.core.request.request import SamplingParams
from cbatch.runtime.cpu.drafters.draft_model import Drafting, DraftModel
from cbatch.runtime.cpu.executor import TorchExecutor
from cbatch.runtime.drafting.contract import DraftRows, Proposal
from cbatch.runtime.sampling import noise
from cbatch.runtime.sampling import rejection_sampler as sampler
from cbatch.runtime.sampling.rejection_sampler import NoiseRows
from tests.chi_square import chi_square_z
from tests.runtime.engines import Run, make_request, run_engine, tiny_model
from tests.runtime.reference import joint_law
from tests.runtime.test_logits_processors import slow_shape

VOCAB, COUNT, PROMPT = 6, 1200, (1, 4, 2)
Z_BOUND = 5.0
FILTERS = (1.3, 5, 0.95, 0.03)
MODES = pytest.mark.parametrize("verification", ["rejection", "coupled"])


@functools.cache
def exact_law(temperature: float) -> np.ndarray:
    return joint_law(tiny_model(vocab_size=VOCAB), PROMPT, 3, (temperature, *FILTERS[1:]))


def sample(
    params: dict[str, Any] | None = None,
    *,
    count: int = COUNT,
    poison: int | None = None,
    max_num_seqs: int = 96,
    **settings: Any,
) -> Run:
    """Return the first tokens of the outputs of requests with one prompt and different seeds."""
    fields = dict(zip(("temperature", "top_k", "top_p", "min_p"), FILTERS, strict=True))
    fields |= {"max_tokens": 6, "verification": "rejection"} | (params or {})
    requests = [
        make_request(f"r{i}", PROMPT, seed=i // 2, choice=i % 2, **fields) for i in range(count)
    ]
    return run_engine(
        requests,
        tiny_model(vocab_size=VOCAB),
        tiny_model(vocab_size=VOCAB, noise=0.15, poison=poison),
        max_num_seqs=max_num_seqs,
        num_blocks=512,
        max_num_batched_tokens=2048,
        check=False,
        **settings,
    )


def z_against(run: Run, temperature: float) -> float:
    return z_of(run, exact_law(temperature))


def z_of(run: Run, law: np.ndarray) -> float:
    tokens = np.array([output[:3] for output in run.outputs.values()])
    cells = tokens @ np.array([VOCAB * VOCAB, VOCAB, 1])
    return chi_square_z(np.bincount(cells, minlength=VOCAB**3), law)


def speculated(run: Run) -> None:
    """Check that drafts were accepted, rejected, and accepted several at a time."""
    assert 0.2 < run.acceptance < 0.95
    assert (run.accepted < run.drafted).any() and (run.accepted >= 2).any()


@MODES
@pytest.mark.parametrize("lookahead", ["off", "fixed:3", "ema:4", "adaptive:4"])
def test_joint_law_of_sampled_tokens(lookahead: str, verification: str) -> None:
    # With fewer rows a draft costs less than it saves, by the made-up durations.
    rows = 8 if lookahead == "adaptive:4" else 96
    run = sample({"verification": verification}, lookahead=lookahead, max_num_seqs=rows)
    assert abs(z_against(run, FILTERS[0])) < Z_BOUND
    assert z_against(run, 0.7 * FILTERS[0]) > 2 * Z_BOUND, "another temperature is noticed"
    if lookahead != "off":
        speculated(run)


@pytest.mark.statistics
@MODES
def test_joint_law_of_a_large_sample(verification: str) -> None:
    run = sample({"verification": verification}, count=50_000, lookahead="ema:4")
    assert abs(z_against(run, FILTERS[0])) < Z_BOUND
    assert z_against(run, 0.95 * FILTERS[0]) > 2 * Z_BOUND


@MODES
def test_joint_law_under_penalties(verification: str) -> None:
    """Penalties depend on the output so far, drafts included, so the law is one over sequences."""
    shaping: dict[str, Any] = {"repetition_penalty": 1.6, "presence_penalty": 0.5}
    shaping |= {"frequency_penalty": 0.4, "logit_bias": {0: 0.7}}
    slow = SamplingParams(**shaping)

    def law(past: int) -> np.ndarray:
        """Return the exact law. With `past` 0 penalties do not see the output."""

        def shape(logits: np.ndarray, output: list[int]) -> np.ndarray:
            return slow_shape(logits, slow, (), list(PROMPT), output[:past])

        return joint_law(tiny_model(vocab_size=VOCAB), PROMPT, 3, FILTERS, shape)

    run = sample(shaping | {"verification": verification}, lookahead="fixed:3")
    assert abs(z_of(run, law(3))) < Z_BOUND and z_of(run, law(0)) > 2 * Z_BOUND
    speculated(run)


class _Certain(DraftModel):
    """A draft model that reports one-hot q (None), as n-gram and greedy drafts do."""

    def propose(self, rows: DraftRows) -> Proposal:
        return super().propose(rows)._replace(probs=None)


def test_drafts_chosen_with_certainty_keep_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.runtime.engines.DraftModel", _Certain)
    run = sample(lookahead="fixed:3")
    assert abs(z_against(run, FILTERS[0])) < Z_BOUND and run.acceptance > 0.1


@MODES
def test_a_draft_that_breaks_on_what_it_drew_keeps_the_law(
    verification: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Non-finite numbers after a draft depend on the drawn tokens, so drafts before them remain
    offered. Token 3, which causes them, is in no prompt, and never first in an output."""
    sampling: dict[str, Any] = {"params": {"verification": verification}, "poison": 3}
    run = sample(**sampling, lookahead="fixed:3")
    assert abs(z_against(run, FILTERS[0])) < Z_BOUND
    assert run.acceptance > 0.2
    if verification == "rejection":
        monkeypatch.setattr(Drafting, "choose", drop_what_broke)
        broken = sample(**sampling, count=2 * COUNT, lookahead="fixed:3")
        assert z_against(broken, FILTERS[0]) > 2 * Z_BOUND


# --- flaws ----------------------------------------------------------------------------------------

ADVANCE, CHOOSE, DRAW = TorchExecutor.advance_rows, Drafting.choose, sampler.draw


def drop_what_broke(drafting: Any, *args: Any) -> Any:
    """Drop drafts because of what followed them."""
    chosen = CHOOSE(drafting, *args)
    drafting.depths[drafting.non_finite] = 0
    return chosen


def keeps_rejected(self: TorchExecutor, rows: Any, verified: Any) -> Any:
    """A1: after a rejection the history continues from the draft; the replacement is only
    emitted."""
    drafted = self.table.tokens[rows.slots].copy()
    tokens, counts, kv_lens = ADVANCE(self, rows, verified)
    if rows.wants.all():
        rejected = (counts <= rows.num_drafts).nonzero()[0]
        last = self.table.num_tokens[rows.slots[rejected]] - 1
        self.table.tokens[rows.slots[rejected], last] = drafted[rejected, last]
    return tokens, counts, kv_lens


class _WrongQ(DraftModel):
    """A2: it reports another q than the drafts were drawn from."""

    def propose(self, rows: DraftRows) -> Proposal:
        proposal = super().propose(rows)
        assert proposal.probs is not None
        return proposal._replace(probs=self.wrong(proposal.probs))

    @staticmethod
    def wrong(q: Tensor) -> Tensor:
        return q**0.3


class _MadeUpQ(_WrongQ):
    """C1: it reports that each draft was drawn with chance 1 / V."""

    @staticmethod
    def wrong(q: Tensor) -> Tensor:
        return torch.full_like(q, 1 / VOCAB)


class _DropsUnlikely(DraftModel):
    """It looks at its own drafts of the same step: p = (.7, .3), q = (.6, .4), drop if q(x) < .5:
    the output would be (.88, .12)."""

    def propose(self, rows: DraftRows) -> Proposal:
        proposal = super().propose(rows)
        assert proposal.probs is not None
        kept, probs, start = proposal.num_drafted.copy(), [], 0
        for i, count in enumerate(proposal.num_drafted.tolist()):
            q = proposal.probs[start : start + count]
            own = q[torch.arange(count), torch.from_numpy(proposal.tokens[i, :count])]
            kept[i] = int((own >= 0.3).long().cumprod(0).sum())
            probs.append(q[: kept[i]])
            start += count
        return proposal._replace(num_drafted=kept, probs=torch.cat(probs))


def each_draft(
    accepts: Any, p: Tensor, x: Tensor, q: Tensor, k: Tensor, rows: NoiseRows, starts: Tensor,
    firsts: Tensor,
) -> Tensor:  # fmt: skip
    """Accept the leading drafts for which `accepts(p, x, q, noise)`, each [drafts, ..]."""
    row = torch.repeat_interleave(k)
    depth = torch.arange(len(x)) - firsts[row]
    where = NoiseRows(rows.keys[row], rows.choices[row], rows.positions[row] + depth)
    accepted = accepts(p[starts[row] + depth], x[:, None], q, where)
    return sampler.leading_run(accepted, row, depth, k)


def above_threshold(p: Tensor, x: Tensor, q: Tensor, where: NoiseRows) -> Tensor:
    """B1: no coin. A draft is accepted if p(y) / q(x) > 0.5, where y is a draw of the target's
    own."""
    own = sampler.draw(p, where, noise.BONUS)[:, None]
    return (p.gather(1, own) / q.gather(1, x) > 0.5).squeeze(1)


def best_or_none(p: Tensor, x: Tensor, q: Tensor, where: NoiseRows) -> Tensor:
    """D1: a draft is accepted if it is the target's likeliest token."""
    return p.argmax(dim=1) == x.squeeze(1)


def zero_in_place_of_a_bonus(weights: Tensor, rows: NoiseRows, purpose: Any) -> Tensor:
    """D1: if no draft is left to check, the emitted token is number 0."""
    drawn: Tensor = DRAW(weights, rows, purpose)
    return torch.where(torch.as_tensor(purpose) == noise.BONUS, 0, drawn)


SAMPLER, MODEL = "cbatch.runtime.sampling.rejection_sampler", "tests.runtime.engines.DraftModel"
FROM_P = (f"{SAMPLER}.residual_of", lambda p, q, rejected: p)
FLAWS: dict[str, tuple[tuple[str, Any], ...]] = {
    "A1 rollback keeps the rejected token": (
        ("cbatch.runtime.cpu.executor.TorchExecutor.advance_rows", keeps_rejected),
    ),
    "A2 another q": ((MODEL, _WrongQ),),
    "B1 threshold for a coin, p for the residual": (
        (f"{SAMPLER}.count_accepted", functools.partial(each_draft, above_threshold)),
        FROM_P,
    ),
    "p for the residual": (FROM_P,),
    "C1 q of 1 / V": ((MODEL, _MadeUpQ),),
    "D1 argmax match": (
        (f"{SAMPLER}.count_accepted", functools.partial(each_draft, best_or_none)),
    ),
    "D1 token 0": ((f"{SAMPLER}.draw", zero_in_place_of_a_bonus),),
    "drafts dropped by their own low probability": ((MODEL, _DropsUnlikely),),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_flaws_are_caught_by_the_joint_law(flaw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A3 (p = 0, residual without mass) is in test_rejection_sampler."""
    for name, broken in FLAWS[flaw]:
        monkeypatch.setattr(name, broken)
    run = sample(lookahead="fixed:3")
    assert (run.accepted < run.drafted).any() and run.accepted.any()
    assert z_against(run, FILTERS[0]) > 2 * Z_BOUND
