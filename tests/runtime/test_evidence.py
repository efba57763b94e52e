"""Reports of acceptance by the steps of an engine: `StepResult.expected_accepted`, row by row.

|z| < 5 fails by chance in 6 of 10 million; seeds are fixed.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from cbatch.core.request.request import Request
from cbatch.core.scheduler.plan import RowStatus, StepPlan, StepResult
from cbatch.runtime.cpu.drafters.draft_model import DraftModel
from cbatch.runtime.cpu.executor import TorchExecutor
from cbatch.runtime.drafting.contract import DraftRows, Proposal
from cbatch.runtime.drafting.lookup import LookupDrafter
from cbatch.runtime.drafting.lookups import NgramLookup
from tests.runtime.engines import RecordingExecutor, Run, make_request, run_engine
from tests.runtime.pairs import VOCAB, tiny_model
from tests.runtime.test_executor import SIZES, admit, make_plan

Z_BOUND = 5.0
NOISE = 0.08


class Telling(DraftModel):
    """A draft model that keeps the last proposal, and q of each row verified by rejection, by
    slot."""

    def propose(self, rows: DraftRows) -> Proposal:
        proposal = super().propose(rows)
        self.q: dict[int, np.ndarray] = {}
        start = 0
        for slot, count in zip(rows.slots.tolist(), proposal.num_drafted.tolist(), strict=True):
            if self.table.rejects[slot] and proposal.probs is not None:
                self.q[slot] = proposal.probs[start : start + count].double().numpy()
                start += count
        return proposal


class Checking(RecordingExecutor):
    """An executor that compares every report with one made from the logits that decided, and from
    q. It records differences instead of raising, since the loop would recover."""

    drafter: Telling
    reports = wrong = chunks = ended = 0

    def run(self, plan: StepPlan) -> StepResult:
        known = {s: int(self.table.num_tokens[s]) for s in plan.slots.tolist()}
        for a in plan.deltas.new_sequences:
            known[a.slot] = len(a.tokens)
        result = super().run(plan)
        drafted, accepted = result.num_drafted, result.num_accepted
        rejects = self.table.rejects[plan.slots] & (drafted > 0)
        if result.expected_accepted is None:
            self.wrong += bool(rejects.any())
            return result
        expected = accepted.astype(float)
        for i in np.flatnonzero(rejects).tolist():
            slot = int(plan.slots[i])
            tried = min(int(accepted[i]) + 1, int(drafted[i]))
            p = [self.bits[self.owner[slot], known[slot] + depth] for depth in range(tried)]
            p = torch.from_numpy(np.array([np.frombuffer(x, np.float32) for x in p]))
            law = p.double().softmax(dim=-1).numpy()
            expected[i] = np.minimum(law, self.drafter.q[slot][:tried]).sum()
        fits = rejects.any() and np.abs(result.expected_accepted - expected).max() < 1e-5
        self.wrong += not fits
        self.reports += 1
        self.chunks += int((~plan.wants_logits).sum())
        self.ended += int((np.diff(result.row_splits)[plan.wants_logits] == 0).sum())
        return result


@functools.cache
def requests() -> tuple[Request, ...]:
    """Return greedy, coupled and rejection rows with different numbers of drafts."""
    rng = np.random.default_rng(6)
    modes: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 1.0, "verification": "coupled"},
        *({"temperature": 1.0, "verification": "rejection", "max_lookahead": k} for k in (1, 3, 4)),
    )
    return tuple(
        make_request(
            f"r{i}",
            rng.integers(0, VOCAB, 6 + 7 * (i % 4)).tolist(),
            max_tokens=10 + 3 * i,
            seed=i,
            **modes[i % len(modes)],
        )
        for i in range(10)
    )


def run(depth: int, executor_type: type[RecordingExecutor] = Checking) -> Run:
    draft = tiny_model(noise=NOISE)
    settings = {"lookahead": "fixed:4", "depth": depth, "max_num_batched_tokens": 40}
    return run_engine(
        requests(),
        tiny_model(),
        draft,
        drafting=Telling(draft),
        kind=executor_type,
        **settings,
    )


@pytest.mark.parametrize("depth", [0, 1])
def test_rejection_rows_report_their_overlap_and_all_others_their_count(depth: int) -> None:
    executor = run(depth).executor
    assert isinstance(executor, Checking)
    assert executor.reports > 10 and executor.chunks > 0 and not executor.wrong
    # A plan in flight still has rows of finished requests.
    assert (executor.ended > 0) == (depth == 1)


def test_a_draft_chosen_with_certainty_reports_its_own_probability() -> None:
    drafter = LookupDrafter(NgramLookup())
    executor = TorchExecutor(tiny_model(), drafter=drafter, **SIZES)
    prompt = [3, 4, 5, 3, 4, 5, 3, 4]
    admitted = (admit(0, prompt, temperature=1.0),)
    executor.run(make_plan(0, [(0, 8, 0, 0, True)], admitted=admitted))
    known = 9
    executor.table.tokens[0, 8] = 5  # as if the target had continued the period
    result = executor.run(make_plan(1, [(0, 3, 2, 0, True)]))
    assert result.num_drafted.tolist() == [2]
    batch = executor.table.ragged(
        np.array([0]), np.array([0]), np.array([known + 2]), np.array([3])
    )
    drafts = torch.tensor([3, 4])
    batch.tokens[known:] = drafts
    p = executor.model.forward(batch, executor.kv).softmax(dim=-1)[[0, 1], drafts]
    tried = min(int(result.num_accepted[0]) + 1, 2)
    assert result.expected_accepted is not None
    assert float(result.expected_accepted[0]) == pytest.approx(float(p[:tried].sum()), abs=1e-5)


def test_a_row_whose_logits_were_not_finite_reports_nothing() -> None:
    """A NaN would stay in the fleet's prior for ever."""
    executor = TorchExecutor(tiny_model(), drafter=DraftModel(tiny_model(noise=NOISE)), **SIZES)
    sampled = {"temperature": 1.0, "verification": "rejection"}
    admitted = tuple(admit(slot, [1, 2, 3, 4 + slot], **sampled) for slot in (0, 1))
    executor.run(make_plan(0, [(s, 4, 0, 0, True) for s in (0, 1)], admitted=admitted))
    executor.kv.data[:, :, :, 0] = torch.nan
    result = executor.run(make_plan(1, [(s, 4, 3, 4, True) for s in (0, 1)]))
    assert result.status.tolist() == [RowStatus.NON_FINITE, RowStatus.OK]
    assert result.expected_accepted is not None
    assert result.expected_accepted[0] == 0 < result.expected_accepted[1] <= 3
