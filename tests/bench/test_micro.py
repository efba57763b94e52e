"""Micro-benchmarks of single functions (`make bench`, by pytest-benchmark); without
`--benchmark-enable` each runs once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from cbatch import SamplingParams
from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.prices.step_costs import StepCosts
from cbatch.core.prices.step_work import StepSample, StepWork
from cbatch.core.scheduler.block_pool import ROOT, BlockPool
from cbatch.core.speculation.acceptance import survival
from cbatch.core.speculation.adaptive_policy import AdaptivePolicy
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.core.speculation.draft_allocation import decide
from cbatch.core.speculation.policy import PolicyLimits
from cbatch.demo import demo_paths, demo_prompts
from cbatch.runtime.cpu.verify import RowsToVerify, verify
from cbatch.runtime.input_batch import InputBatch
from cbatch.text import TextStream, load_tokenizer
from sim.cli.scenario import Scenario
from sim.cli.simulation import build
from sim.workload.arrivals import poisson
from sim.workload.generate import generate
from sim.workload.lengths import lognormal
from sim.workload.traces.reader import write_requests

# --- the decision of `adaptive` for 256 rows of up to 8 drafts. Profile `flat` is memory-bound at
# this load, `steep` compute-bound.

ROWS, DEPTH = 256, 8
TOKENS = ROWS * (1 + DEPTH)
PROFILES = {
    "flat": CostProfile(10e-3, 8e-6, 4.0, draft_pass_s=3e-4, draft_token_s=2e-6),
    "steep": CostProfile(10e-3, 200e-6, draft_pass_s=1e-3, draft_token_s=1e-5),
}

BLOCK_TOKENS, NUM_BLOCKS = 16, 65_536
VOCAB_SIZE, PEAK = 4096, 12.0  # PEAK: logit of a likeliest token
NUM_TOKENS = 256


def inputs(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return accepted drafts, trials and maximum depths of rows whose acceptance is about 2/3."""
    rng = np.random.default_rng(0)
    trials = rng.uniform(8, 25, rows)
    return rng.beta(6, 3, rows) * trials, trials, np.full(rows, DEPTH, np.int32)


class FakePlannedRows(NamedTuple):
    """Implements `policy.PlannedRows`."""

    rows: slice
    max_drafts: np.ndarray
    draft_kv_lag: np.ndarray
    remaining_tokens: np.ndarray
    budget_tokens: int = TOKENS
    context_tokens: int = 0
    num_prompts: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.max_drafts)


def planned_rows(rows: int) -> FakePlannedRows:
    zeros, ones = np.zeros(rows, np.int32), np.ones(rows, np.int32)
    return FakePlannedRows(slice(0, rows), inputs(rows)[2], zeros, ones)


def policy_of(kind: str, rows: int) -> AdaptivePolicy:
    policy = AdaptivePolicy(
        LookaheadConfig(policy="adaptive", k=DEPTH),
        PolicyLimits(rows, TOKENS, StepCosts(PROFILES[kind])),
    )
    policy.estimate[:] = inputs(rows)[:2]
    work = StepWork(rows=rows, target_tokens=rows, logit_tokens=rows)
    for _ in range(2):  # without these, the policy would first test the profile's prices
        policy.costs.observe(StepSample(work, *PROFILES[kind].step_s(work)))
    return policy


@pytest.mark.parametrize("kind", PROFILES)
def test_decide(benchmark, kind):
    accepted, trials, caps = inputs(ROWS)
    chances = survival(accepted, trials, DEPTH).T
    prices = StepCosts(PROFILES[kind]).prices(ROWS, 0, np.arange(ROWS * DEPTH + 1))
    before = None
    for _ in range(5):
        before = decide(chances, caps, prices, before)
    decision = benchmark(decide, chances, caps, prices, before)
    assert (decision.num_drafts.sum() > 0) == (kind != "steep")


@pytest.mark.parametrize("rows", [1, 32, 256])
def test_whole_choice(benchmark, rows):
    """Time `choose`, called again and again for the same rows. Most calls keep the last
    decision."""
    k = benchmark(policy_of("flat", rows).choose, planned_rows(rows))
    assert k is not None and k.any()


# --- the block pool. Each round restores it.


@pytest.mark.parametrize("count", [1, 256])
def test_allocate_and_release(benchmark, count):
    """Allocate and release private blocks: a step reserves them, a finished request frees them."""
    pool = BlockPool(NUM_BLOCKS, BLOCK_TOKENS)
    benchmark(lambda: pool.release(pool.allocate(count)))
    assert pool.num_free == NUM_BLOCKS


@pytest.mark.parametrize("prompt_tokens", [512, 8192])
def test_prefix_hit(benchmark, prompt_tokens):
    """Match, acquire and release a prompt that is cached whole."""
    pool = BlockPool(NUM_BLOCKS, BLOCK_TOKENS)
    tokens = np.random.default_rng(0).integers(0, 32_000, prompt_tokens).astype(np.int32)
    blocks = _cache(pool, tokens)

    def hit():
        match = pool.match(tokens, len(blocks))
        pool.acquire(match.blocks)
        pool.release(np.asarray(match.blocks))
        return match

    assert len(benchmark(hit).blocks) == prompt_tokens // BLOCK_TOKENS
    assert pool.num_cached == len(blocks)


def test_a_full_cache_gives_way(benchmark):
    """Take every block of a prompt of 512 tokens from another prompt, least recently used first."""
    pool = BlockPool(1024, BLOCK_TOKENS)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 32_000, 512).astype(np.int32) for _ in range(64)]
    at = 0

    def next_prompt():
        nonlocal at
        at += 1
        _cache(pool, prompts[at % len(prompts)])

    for _ in prompts:
        next_prompt()
    assert not pool.num_free
    benchmark(next_prompt)
    assert not pool.num_free and pool.num_cached == 1024
    pool.check()


def _cache(pool: BlockPool, tokens: np.ndarray) -> np.ndarray:
    blocks = pool.allocate(len(tokens) // BLOCK_TOKENS)
    pool.add_nodes(blocks, ROOT, tokens, 0)
    pool.mark_ready(blocks)
    pool.release(blocks)
    return blocks


# --- the rejection sampler, torch on the CPU, with the demo's vocabulary.


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("mode", ["greedy", "coupled", "rejects"])
def test_verify(benchmark, mode, rows, k):
    table = _table(mode, rows)
    generator = torch.Generator().manual_seed(0)
    drafts = torch.randint(0, VOCAB_SIZE, (rows, max(k, 1)), generator=generator)
    logits = torch.randn(rows, k + 1, VOCAB_SIZE, generator=generator)
    agreed = max(k - 1, 0)
    logits[:, :agreed].scatter_add_(
        2, drafts[:, :agreed, None], torch.full((rows, agreed, 1), PEAK)
    )
    logits = logits.flatten(0, 1)
    probs = torch.softmax(torch.randn(rows * k, VOCAB_SIZE, generator=generator), dim=-1)
    rows_to_verify = RowsToVerify(
        slots=np.arange(rows),
        known=np.full(rows, 64),
        num_drafted=np.full(rows, k),
        drafts=drafts.numpy() if k else None,
        probs=probs if k and mode == "rejects" else None,
    )
    verified = benchmark(verify, logits, rows_to_verify, table)
    assert not verified.status.any()
    assert (verified.num_accepted >= agreed).all()


def _table(mode: str, rows: int) -> InputBatch:
    table = InputBatch(rows, BLOCK_TOKENS, VOCAB_SIZE)
    table.keys[:] = np.arange(2 * rows).reshape(rows, 2)
    table.greedy[:] = False
    getattr(table, mode)[:] = True
    if mode != "greedy":
        table.temperature[:] = 0.8
        table.top_p[:] = 0.95
    return table


# --- detokenising one sequence of 256 tokens.


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(demo_paths()[0])


@pytest.mark.parametrize("stop", [(), ("</end>", "\n\n\n\n")], ids=["plain", "stop"])
@pytest.mark.parametrize("tokens_per_push", [1, 4])
def test_detokenise(benchmark, tokenizer, tokens_per_push, stop):
    ids = list(tokenizer.encode("\n".join(demo_prompts())))[:NUM_TOKENS]
    pushes = [ids[at : at + tokens_per_push] for at in range(0, len(ids), tokens_per_push)]

    def decode():
        stream = TextStream(tokenizer, SamplingParams(stop=stop))
        return "".join(stream.push(ids_pushed).text for ids_pushed in pushes) + stream.finish()

    assert len(ids) == NUM_TOKENS and benchmark(decode) == tokenizer.decode(ids)


# --- a replay with the options of `cbatch sim`: lengths and rate of Azure's conversations of 2023.


def test_replay(benchmark, tmp_path):
    lengths = lognormal(1155, 0.96, high=14_050), lognormal(211, 0.77, high=1_000)
    requests = generate(lambda rng: poisson(5.53, rng), *lengths, requests=50, seed=0)
    write_requests(tmp_path / "trace.jsonl", requests)
    scenario = Scenario(trace=str(tmp_path / "trace.jsonl"))
    assert benchmark(lambda: build(scenario).run()).requests == 50
