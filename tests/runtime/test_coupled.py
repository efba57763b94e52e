"""Coupled verification: sampled tokens depend on the request alone, whatever the engine does.

The base of every comparison is one plain run: no speculation, one sequence at a time, no cache.
Each test also asserts that what it varies did happen.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from cbatch.core.request import Request
from cbatch.runtime.chain import ChainDrafter
from cbatch.runtime.drafter import DraftModel
from cbatch.runtime.lookup import LookupDrafter, NgramIndex
from cbatch.runtime.suffix import SuffixIndex
from tests.runtime.engines import (
    RecordingExecutor,
    Run,
    make_request,
    run_engine,
)
from tests.runtime.pairs import VOCAB, tiny_model
from triton_kernels import noise

NOISE = 0.08
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.05, "choice": 1},
    {"temperature": 0.9, "repetition_penalty": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "presence_penalty": 0.8, "frequency_penalty": 0.4, "top_k": 30},
    {"temperature": 0.7, "logit_bias": {3: 1.5}, "banned_token_ids": (4, 5), "min_tokens": 9},
    {"temperature": 1.1, "allowed_token_ids": tuple(range(4, 60, 3))},
    {"temperature": 0.0, "repetition_penalty": 1.2},
)


@functools.cache
def requests(verification: str = "coupled") -> tuple[Request, ...]:
    """Prompts of 3 to 60 tokens; the second four repeat the beginning of the first four."""
    rng = np.random.default_rng(4)
    first = [rng.integers(0, VOCAB, n).tolist() for n in (9, 26, 40, 60)]
    second = [prompt[:-3] + rng.integers(0, VOCAB, 5).tolist() for prompt in first]
    return tuple(
        make_request(
            f"r{i}",
            prompt,
            max_tokens=24 + i,
            seed=2**40 + i,
            verification=verification,
            **PARAMS[i],
        )
        for i, prompt in enumerate(first + second)
    )


@functools.cache
def plain() -> Run:
    return run_engine(requests(), tiny_model(), max_slots=1, prefix_cache=False)


def run_variant(*, lookahead: str = "off", noise: float = NOISE, **settings: Any) -> Run:
    draft = tiny_model(noise=noise) if lookahead != "off" else None
    run = run_engine(requests(), tiny_model(), draft, lookahead=lookahead, **settings)
    assert run.outputs == plain().outputs
    return run


def assert_speculated(run: Run, *, deep: bool = True, each: bool = True) -> None:
    full = (run.accepted == run.drafted) & (run.drafted > 0)
    assert full.any() and (run.accepted < run.drafted).any() and (run.drafted == 0).any()
    assert (run.drafted >= 2).any() == deep
    accepting = [any(a for _, _, a in rows) for rows in run.executor.row_of_request.values()]
    assert len(accepting) == len(PARAMS) and (all(accepting) or not each)


@pytest.mark.parametrize("k", range(1, 9))
def test_fixed_lookahead(k):
    run = run_variant(lookahead=f"fixed:{k}")
    assert_speculated(run, deep=k > 1)
    assert run.drafted.max() == k


def test_ema_lookahead():
    run = run_variant(lookahead="ema:6")
    assert_speculated(run)
    assert len(np.unique(run.drafted)) >= 3


def test_goodput_lookahead():
    run = run_variant(lookahead="goodput:6")
    assert_speculated(run, each=False)
    assert len(np.unique(run.drafted)) >= 3


def test_a_good_and_a_bad_draft():
    """Another draft proposes other tokens, and more or fewer of them are accepted."""
    good = run_variant(lookahead="fixed:3", noise=0.02)
    bad = run_variant(lookahead="fixed:3", noise=0.5)
    assert good.acceptance > 0.6 > 0.4 > bad.acceptance > 0.02


def test_any_drafter():
    """Guesses copied from the text, a draft model, and both in a chain of the request's choice."""
    lookups = {"ngram": LookupDrafter(NgramIndex), "suffix": LookupDrafter(SuffixIndex)}
    repeats = [r.prompt[:8] * 3 + r.prompt for r in requests()]
    ours = [
        structs.replace(r, prompt=repeats[i], params=structs.replace(r.params, temperature=0.25))
        for i, r in enumerate(requests())
    ]
    base = run_engine(ours, tiny_model())
    for default in (("ngram",), ("suffix",), ("suffix", "model")):
        draft = tiny_model(noise=NOISE)
        chain = ChainDrafter(model=DraftModel(draft), lookups=lookups, default=default)
        executor = RecordingExecutor(
            tiny_model(), drafter=chain, num_blocks=256, block_size_tokens=4, max_slots=8
        )
        run = run_engine(
            ours, tiny_model(), draft, lookahead="fixed:3", executor=executor, drafter=default
        )
        assert run.outputs == base.outputs, default
        assert (run.accepted > 0).sum() >= 3 and (run.accepted < run.drafted).any()


def test_shuffled_batches():
    order = np.random.default_rng(1).permutation(len(PARAMS))
    shuffled = [requests()[i] for i in order]
    arrivals = [0, 0, 3, 3, 8, 15, 15, 30]
    run = run_engine(
        shuffled,
        tiny_model(),
        tiny_model(noise=NOISE),
        lookahead="fixed:4",
        arrivals=arrivals,
        max_slots=3,
    )
    assert run.outputs == plain().outputs
    assert_speculated(run)
    assert {1, 2, 3} <= {len(step) for step in run.executor.drafted}


@pytest.mark.parametrize("budget", [12, 40])
def test_chunk_sizes(budget):
    run = run_variant(lookahead="fixed:2", step_budget_tokens=budget)
    assert_speculated(run, each=budget == 40)
    mixed = [rows for rows in run.executor.chunk_steps if rows[0] and rows[1]]
    assert len(mixed) >= (4 if budget == 12 else 1)


def test_forced_preemptions():
    run = run_variant(lookahead="fixed:3", num_blocks=34, prefix_cache=False)
    assert run.scheduler.stats.preemptions >= 2
    assert_speculated(run)


def test_prefix_hits():
    run = run_variant(lookahead="fixed:3", max_slots=4)
    assert run.scheduler.stats.prefix_hit_tokens >= 60
    assert_speculated(run)


def test_overlap():
    assert_speculated(run_variant(lookahead="fixed:3", depth=1))


def test_everything_at_once():
    run = run_variant(
        lookahead="ema:6",
        depth=1,
        num_blocks=40,
        step_budget_tokens=32,
        arrivals=[0, 2, 2, 2, 9, 9, 14, 20],
    )
    assert_speculated(run)
    stats = run.scheduler.stats
    assert stats.preemptions >= 1 and stats.prefix_hit_tokens > 0


# --- what would be noticed -----------------------------------------------------------------------


def test_rejection_has_the_power_to_differ():
    """The same requests in rejection mode: their tokens do depend on which drafts were offered."""
    ours = requests("rejection")
    off = run_engine(ours, tiny_model())
    run = run_engine(ours, tiny_model(), tiny_model(noise=NOISE), lookahead="fixed:3")
    sampled = [f"r{i}" for i in range(7)]
    assert all(run.outputs[name] != off.outputs[name] for name in sampled)
    assert run.outputs["r7"] == off.outputs["r7"]  # greedy
    assert all(off.outputs[name] != plain().outputs[name] for name in sampled)  # another stream


def test_noise_of_the_batch_row_is_noticed(monkeypatch):
    """The stream keyed by row instead of position: the base no longer agrees with a batch."""
    whole = noise.words_of, noise.token_words

    def by_row(which: int) -> Any:
        def words(keys: Any, positions: Any, *rest: Any) -> Any:
            return whole[which](keys, torch.arange(len(positions)) + positions[:1], *rest)

        return words

    monkeypatch.setattr(noise, "words_of", by_row(0))
    monkeypatch.setattr(noise, "token_words", by_row(1))
    run = run_engine(requests(), tiny_model(), tiny_model(noise=NOISE), lookahead="fixed:3")
    assert run.outputs != plain().outputs


def test_uncoupled_drafts_keep_the_tokens_but_are_accepted_less(monkeypatch):
    """Drafts drawn from another stream: the target decides alone, so nothing but speed is lost."""
    coupled = run_variant(lookahead="fixed:3")
    monkeypatch.setattr("cbatch.runtime.drafter.noise.COUPLED", noise.DRAFT)
    # The target's stream is read in another module under the same name: give it back its number.
    monkeypatch.setattr("triton_kernels.verify.noise", _Streams())
    run = run_variant(lookahead="fixed:3")
    assert run.acceptance < 0.8 * coupled.acceptance


class _Streams:
    """`triton_kernels.noise` with the right number of the coupled stream."""

    COUPLED = 4

    def __getattr__(self, name: str) -> Any:
        return getattr(noise, name)


def test_modes_share_a_step():
    """Greedy, coupled and rejection rows in one batch, each as if it were alone in its mode."""
    mixed = [(requests("rejection") if i % 3 == 0 else requests())[i] for i in range(len(PARAMS))]
    settings = {"lookahead": "fixed:4", "step_budget_tokens": 1024}  # never short of drafts
    run = run_engine(mixed, tiny_model(), tiny_model(noise=NOISE), **settings)
    assert_speculated(run)
    for i in (0, 3, 5, 7):
        alone = run_engine([mixed[i]], tiny_model(), tiny_model(noise=NOISE), **settings)
        assert run.outputs[f"r{i}"] == alone.outputs[f"r{i}"]


def test_a_seed_of_the_caller_couples(monkeypatch):
    """`auto`: the params of a caller with a seed carry it; others are verified by rejection."""
    rejected: list[int] = []
    real = DraftModel.propose

    def watch(self: DraftModel, rows: Any) -> Any:
        rejected.extend(self.table.rejects[rows.slots].tolist())
        return real(self, rows)

    monkeypatch.setattr(DraftModel, "propose", watch)
    base = requests()[0]
    fields = {f: getattr(base, f) for f in base.__struct_fields__}
    for seed in (None, base.seed):
        params = structs.replace(base.params, verification="auto", seed=seed)
        request = Request(**(fields | {"params": params}))
        run = run_engine([request], tiny_model(), tiny_model(noise=NOISE), lookahead="fixed:3")
        assert (run.outputs["r0"] == plain().outputs["r0"]) == (seed is not None)
        assert set(rejected) == {seed is None}
        rejected.clear()
