"""Sampled speculation through a whole engine has the law of the target alone.

Chi-square over the joint law of three tokens (216 cells), computed exactly from the target by
teacher forcing and a slow filter. |z| < 5 fails by chance in 6 of 10 million; seeds are fixed. With
1200 samples the broken variants, those of `tests/test_known_flaws.py` too, have z of 17 to 30.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from cbatch.core.request.request import SamplingParams
from cbatch.runtime.cpu.drafters.draft_model import Drafting, DraftModel
from cbatch.runtime.drafting.contract import DraftRows, Proposal
from tests.chi_square import chi_square_z
from tests.runtime.engines import Run, make_request, run_engine
from tests.runtime.pairs import tiny_model
from tests.runtime.reference import joint_law
from tests.runtime.test_logits_processors import slow_shape

VOCAB, COUNT, PROMPT = 6, 1200, (1, 4, 2)
Z_BOUND = 5.0
FILTERS = (1.3, 5, 0.95, 0.03)


@functools.cache
def exact_law(temperature: float) -> np.ndarray:
    return joint_law(tiny_model(vocab_size=VOCAB), PROMPT, 3, (temperature, *FILTERS[1:]))


def sample(
    params: dict[str, Any] | None = None,
    *,
    count: int = COUNT,
    poison: int | None = None,
    **settings: Any,
) -> Run:
    """Return the first tokens of the outputs of requests with one prompt and different seeds."""
    temperature, top_k, top_p, min_p = FILTERS
    requests = [
        make_request(
            f"r{i}",
            PROMPT,
            max_tokens=6,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=i // 2,
            choice=i % 2,
            **(params or {}),
        )
        for i in range(count)
    ]
    return run_engine(
        requests,
        tiny_model(vocab_size=VOCAB),
        tiny_model(vocab_size=VOCAB, noise=0.15, poison=poison),
        max_num_seqs=96,
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
    counts = np.bincount(cells, minlength=VOCAB**3)
    return chi_square_z(counts, law)


@pytest.mark.parametrize("lookahead", ["off", "fixed:3", "ema:4"])
def test_joint_law_of_sampled_tokens(lookahead):
    run = sample({"verification": "rejection"}, lookahead=lookahead)
    assert abs(z_against(run, FILTERS[0])) < Z_BOUND
    assert z_against(run, 0.7 * FILTERS[0]) > 2 * Z_BOUND  # another temperature is noticed
    if lookahead != "off":
        assert 0.2 < run.acceptance < 0.95
        assert (run.accepted < run.drafted).any() and (run.accepted >= 2).any()


PENALTIES = {"repetition_penalty": 1.6, "presence_penalty": 0.5, "frequency_penalty": 0.4}


ALL = pytest.mark.parametrize("verification", ["rejection", "coupled"])


@ALL
def test_joint_law_under_penalties(verification):
    """Penalties depend on the output so far, drafts included, so the law is one over sequences."""
    shaping = PENALTIES | {"logit_bias": {0: 0.7}}
    slow = SamplingParams(**shaping)

    def law(past: int) -> np.ndarray:
        """Return the exact law. With `past` 0 penalties do not see the output."""

        def shape(logits: np.ndarray, output: list[int]) -> np.ndarray:
            return slow_shape(logits, slow, (), list(PROMPT), output[:past])

        return joint_law(tiny_model(vocab_size=VOCAB), PROMPT, 3, FILTERS, shape)

    run = sample(shaping | {"verification": verification}, lookahead="fixed:3")
    assert abs(z_of(run, law(3))) < Z_BOUND
    assert z_of(run, law(0)) > 2 * Z_BOUND
    assert 0.2 < run.acceptance < 0.95 and (run.accepted >= 2).any()


class _WrongQ(DraftModel):
    """Broken (a form of flaw A2): it reports another q than the drafts were drawn from."""

    def propose(self, rows: DraftRows) -> Proposal:
        proposal = super().propose(rows)
        assert proposal.probs is not None
        return proposal._replace(probs=proposal.probs**0.3)


def test_a_wrong_q_is_noticed(monkeypatch):
    monkeypatch.setattr("tests.runtime.engines.DraftModel", _WrongQ)
    run = sample({"verification": "rejection"}, lookahead="fixed:3")
    assert z_against(run, FILTERS[0]) > 2 * Z_BOUND


class _Certain(DraftModel):
    """A draft model that reports one-hot q (None), as n-gram and greedy drafts do."""

    def propose(self, rows: DraftRows) -> Proposal:
        return super().propose(rows)._replace(probs=None)


def test_drafts_chosen_with_certainty_keep_the_law(monkeypatch):
    monkeypatch.setattr("tests.runtime.engines.DraftModel", _Certain)
    run = sample({"verification": "rejection"}, lookahead="fixed:3")
    assert abs(z_against(run, FILTERS[0])) < Z_BOUND and run.acceptance > 0.1


CHOOSE = Drafting.choose


def drop_what_broke(drafting: Any, *args: Any) -> Any:
    """Broken: drafts are dropped because of what followed them."""
    chosen = CHOOSE(drafting, *args)
    drafting.depths[drafting.non_finite] = 0
    return chosen


@ALL
def test_a_draft_that_breaks_on_what_it_drew_keeps_the_law(verification, monkeypatch):
    """Non-finite numbers after a draft depend on the drawn tokens, so drafts before them remain
    offered. Token 3, which causes them, is in no prompt, and never first in an output."""
    sampling = {"params": {"verification": verification}, "count": 3 * COUNT, "poison": 3}
    run = sample(**sampling, lookahead="fixed:3")
    assert abs(z_against(run, FILTERS[0])) < Z_BOUND
    assert run.acceptance > 0.2
    if verification != "coupled":
        monkeypatch.setattr(Drafting, "choose", drop_what_broke)
        assert z_against(sample(**sampling, lookahead="fixed:3"), FILTERS[0]) > 2 * Z_BOUND
