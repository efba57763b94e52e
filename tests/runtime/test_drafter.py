"""The draft model: its KV after every kind of lag, vocabularies, contexts, broken numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cbatch.core.speculation.policies import FixedPolicy
from cbatch.runtime.cpu.decoder import Model
from cbatch.runtime.cpu.drafters.draft_model import DraftModel
from cbatch.runtime.drafting.contract import DraftRows, Proposal
from tests.runtime.engines import (
    VOCAB,
    RecordingExecutor,
    Run,
    make_request,
    run_engine,
    tiny_model,
)

NOISE = 0.08


class CheckedDraftModel(DraftModel):
    """A draft model that compares every proposal with that of a new one with an empty cache."""

    def __init__(self, model: Model, fresh: Model) -> None:
        super().__init__(model)
        self.fresh = fresh
        self.lags: list[int] = []

    def propose(self, rows: DraftRows) -> Proposal:
        lag = rows.num_tokens - 1 - self.kv_len[rows.slots]
        self.lags += lag[rows.num_drafts > 0].tolist()
        proposal = super().propose(rows)
        cold = DraftModel(self.fresh)
        cold.bind(self.table, self.kv.num_blocks)
        patient = rows._replace(catch_up=rows.num_tokens.astype(np.int32))
        expected = cold.propose(patient._replace(num_drafts=proposal.num_drafted))
        # The cold one drafts more in rows where a slice only catches up.
        assert np.array_equal(expected.num_drafted, proposal.num_drafted)
        depth = np.arange(proposal.tokens.shape[1]) < proposal.num_drafted[:, None]
        width = expected.tokens.shape[1]
        assert np.array_equal(
            proposal.tokens[:, :width][depth[:, :width]], expected.tokens[depth[:, :width]]
        )
        return proposal


def checked_run(requests: Any, *, draft: Model | None = None, **settings: Any) -> Run:
    """Run an engine; compare all drafts with those of a cold draft model."""
    draft = draft or tiny_model(noise=NOISE, dtype=torch.bfloat16)
    drafter = CheckedDraftModel(draft, tiny_model(noise=NOISE, dtype=torch.bfloat16))
    return run_engine(
        requests, tiny_model(dtype=torch.bfloat16), draft, drafting=drafter, **settings
    )


def prompts(count: int, seed: int = 1, low: int = 2, high: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(low, high)).tolist() for _ in range(count)]


def test_drafts_equal_those_of_a_cold_draft_whatever_its_kv_went_through(monkeypatch):
    """k varies by step and row; there are preemptions, prefix hits, full acceptances and slices."""
    rng = np.random.default_rng(3)
    monkeypatch.setattr(
        FixedPolicy,
        "choose",
        lambda self, step: np.minimum(
            step.max_drafts, rng.integers(0, 5, step.num_rows).astype(np.int32)
        ),
    )
    shared = prompts(1, seed=9, low=24, high=25)[0]
    requests = [
        make_request(f"r{i}", (shared if i % 2 else []) + p, max_tokens=40)
        for i, p in enumerate(prompts(8))
    ]
    run = checked_run(
        requests, lookahead="fixed:4", num_blocks=48, max_num_batched_tokens=40, max_num_seqs=6
    )
    drafter = run.executor.drafter
    assert isinstance(drafter, CheckedDraftModel)
    assert {0, 1} <= set(drafter.lags) and max(drafter.lags) > 4
    assert run.scheduler.stats.preemptions > 0 and run.scheduler.stats.prefix_hit_tokens > 0
    assert (run.accepted[run.drafted >= 2] == run.drafted[run.drafted >= 2]).any()


def test_acceptance_is_the_same_in_every_slot():
    """Trap 10 (a slot whose index is wrong drafts garbage)."""
    prompt = prompts(1, seed=6)[0]
    requests = [make_request(f"r{i}", prompt, max_tokens=60) for i in range(8)]
    run = checked_run(requests, lookahead="fixed:3", enable_prefix_caching=False)
    rows = [run.executor.row_of_request[f"r{i}"] for i in range(8)]
    assert sorted({slot for row in rows for slot, _, _ in row}) == list(range(8))
    assert all([r[1:] for r in row] == [r[1:] for r in rows[0]] for row in rows)
    assert run.acceptance > 0.2


@pytest.mark.parametrize("vocab_size", [VOCAB - 8, VOCAB + 8])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_vocabularies_of_one_tokenizer_may_be_padded_differently(vocab_size, temperature):
    target = tiny_model()
    draft = tiny_model(noise=NOISE, vocab_size=vocab_size)
    requests = [make_request(f"r{i}", p, temperature=temperature) for i, p in enumerate(prompts(4))]
    run = run_engine(requests, target, draft, lookahead="fixed:3")
    assert run.acceptance > 0.15
    outputs = np.concatenate(list(run.outputs.values()))
    assert outputs.max() < VOCAB
    if vocab_size < VOCAB:  # ids that the draft does not know do occur
        prompt_ids = np.concatenate(prompts(4))
        assert max(prompt_ids.max(), outputs.max()) >= vocab_size
    if temperature == 0:
        assert run.outputs == run_engine(requests, target).outputs


def test_no_drafts_past_the_context_of_the_draft():
    target = tiny_model()
    requests = [make_request("r", prompts(1)[0], max_tokens=80)]
    run = run_engine(requests, target, tiny_model(noise=NOISE, context=48), lookahead="fixed:4")
    assert run.outputs == run_engine(requests, target).outputs
    known = len(requests[0].prompt)
    for _, drafted, accepted in run.executor.row_of_request["r"][1:]:
        assert known - 1 + drafted <= 48 or drafted == 0
        known += accepted + 1
    drafted = [row[1] for row in run.executor.row_of_request["r"]]
    assert any(drafted) and not any(drafted[-10:])


class _PoisonDraft(RecordingExecutor):
    """An executor that writes NaN into the draft's KV of one slot before one step."""

    poisoned_step = 12

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.statuses = []

    def run(self, plan):
        if plan.step_id == self.poisoned_step:
            block = int(self.table.blocks[1, 0])
            self.drafter.kv.data[:, :, :, block] = torch.nan
        result = super().run(plan)
        self.statuses.append(result.status.tolist())
        return result


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_draft_row_costs_its_drafts_of_that_step_only(temperature):
    target, draft = tiny_model(), tiny_model(noise=NOISE)
    requests = [
        make_request(f"r{i}", p, max_tokens=60, temperature=temperature)
        for i, p in enumerate(prompts(3))
    ]
    run = run_engine(requests, target, draft, lookahead="fixed:3", kind=_PoisonDraft)
    executor = run.executor
    if temperature == 0:
        assert run.outputs == run_engine(requests, target).outputs
    assert all(len(tokens) == 60 for tokens in run.outputs.values())
    broken = [i for i, statuses in enumerate(executor.statuses) if any(statuses)]
    assert broken == [12] and executor.statuses[12] == [0, 2, 0]
    assert executor.drafted[12][1] == 0 and executor.drafted[12][0] > 0
    later = executor.row_of_request["r1"][14:]
    assert sum(accepted for _, _, accepted in later) > 0
