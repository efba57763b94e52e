"""Greedy tokens and logit bits do not depend on how the engine came to them.

Each variant runs the same requests as one plain run (no speculation, one sequence at a time, whole
prompts, no cache) and must give the same tokens, from the same bits of logits at every position.
Each test also asserts that what it varies did happen.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from cbatch.core.request import Request
from tests.runtime.engines import Run, make_request, run_engine
from tests.runtime.pairs import VOCAB, tiny_model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DRAFT_NOISE = 0.08  # moves the draft's weights so far that about half of its tokens are accepted


@functools.cache
def requests() -> tuple[Request, ...]:
    """Prompts of 3 to 70 tokens; two pairs share their first 24."""
    rng = np.random.default_rng(4)
    shared = [rng.integers(0, VOCAB, 24).tolist() for _ in range(2)]
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (3, 9, 17, 70)]
    for prefix in shared:
        prompts += [prefix + rng.integers(0, VOCAB, n).tolist() for n in (2, 6)]
    return tuple(
        make_request(f"r{i}", prompt, max_tokens=28 + i) for i, prompt in enumerate(prompts)
    )


@functools.cache
def plain(dtype: str, decoder_pass: str) -> Run:
    return run_engine(requests(), tiny_model(dtype=DTYPES[dtype]), max_slots=1, prefix_cache=False)


def assert_same(run: Run, base: Run) -> None:
    assert run.outputs == base.outputs
    ours, theirs = run.executor.bits, base.executor.bits
    assert theirs.keys() <= ours.keys()
    differing = [key for key, bits in theirs.items() if ours[key] != bits]
    assert differing == []


@pytest.fixture
def base(dtype: str, decoder_pass: str) -> Run:
    return plain(dtype, decoder_pass)


def run_variant(dtype: str, base: Run, *, lookahead: str = "off", **settings: Any) -> Run:
    target = tiny_model(dtype=DTYPES[dtype])
    draft = tiny_model(noise=DRAFT_NOISE, dtype=DTYPES[dtype]) if lookahead != "off" else None
    run = run_engine(requests(), target, draft, lookahead=lookahead, **settings)
    assert_same(run, base)
    return run


def assert_speculated(run: Run) -> None:
    full = (run.accepted == run.drafted) & (run.drafted > 0)
    assert 0.2 <= run.acceptance <= 0.95
    assert full.any() and (run.accepted < run.drafted).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_composition(dtype, base):
    together = run_variant(dtype, base)
    assert max(len(step) for step in together.executor.drafted) == len(requests())
    staggered = run_variant(dtype, base, max_slots=3, arrivals=[0, 0, 5, 9, 9, 30, 31, 60])
    sizes = {len(step) for step in staggered.executor.drafted}
    assert {1, 2, 3} <= sizes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", range(1, 9))
def test_fixed_lookahead(dtype, base, k):
    run = run_variant(dtype, base, lookahead=f"fixed:{k}")
    assert_speculated(run)
    assert run.drafted.max() == k and (run.drafted == 0).any()  # k = 0: prompts and last tokens


@pytest.mark.parametrize("dtype", DTYPES)
def test_ema_lookahead(dtype, base):
    run = run_variant(dtype, base, lookahead="ema:6")
    assert_speculated(run)
    assert (run.drafted >= 2).any() and (run.drafted == 0).any()
    assert len(np.unique(run.drafted)) >= 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_goodput_lookahead(dtype, base):
    run = run_variant(dtype, base, lookahead="goodput:6")
    assert_speculated(run)
    assert (run.drafted >= 2).any() and (run.drafted == 0).any()
    assert len(np.unique(run.drafted)) >= 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("budget", [11, 20, 40])
def test_chunk_sizes(dtype, base, budget):
    run = run_variant(dtype, base, lookahead="fixed:2", step_budget_tokens=budget)
    assert_speculated(run)
    # Steps in which a chunk that was not the last ran beside rows that decoded.
    steps = [rows for rows in run.executor.chunk_steps if rows[0] and rows[1]]
    assert len(steps) >= (4 if budget < 40 else 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lookahead", ["off", "fixed:3"])
def test_prefix_hits(dtype, base, lookahead):
    run = run_variant(dtype, base, lookahead=lookahead, max_slots=2)
    assert run.scheduler.stats.prefix_hit_tokens >= 2 * 24
    if lookahead != "off":
        assert_speculated(run)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lookahead", ["off", "fixed:3"])
def test_forced_preemptions(dtype, base, lookahead):
    run = run_variant(dtype, base, lookahead=lookahead, num_blocks=40, prefix_cache=False)
    assert run.scheduler.stats.preemptions >= 2
    if lookahead != "off":
        assert_speculated(run)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lookahead", ["off", "fixed:3", "ema:6"])
def test_overlap(dtype, base, lookahead):
    run = run_variant(dtype, base, lookahead=lookahead, depth=1)
    if lookahead != "off":
        assert_speculated(run)


@pytest.mark.parametrize("dtype", DTYPES)
def test_everything_at_once(dtype, base):
    run = run_variant(
        dtype,
        base,
        lookahead="ema:6",
        depth=1,
        num_blocks=36,
        step_budget_tokens=24,
        arrivals=[0, 2, 2, 2, 9, 9, 14, 20],
    )
    assert_speculated(run)
    stats = run.scheduler.stats
    assert stats.preemptions >= 1 and stats.prefix_hit_tokens > 0
    assert (run.drafted >= 2).any() and (run.drafted == 0).any()


@pytest.mark.parametrize("dtype", ["fp32"])
def test_a_wrong_bit_is_noticed(base):
    """The comparison has power: another model's run differs in bits, a shifted one in tokens."""
    other = run_engine(requests(), tiny_model(noise=1e-4), max_slots=1, prefix_cache=False)
    with pytest.raises(AssertionError):
        assert_same(other, base)
