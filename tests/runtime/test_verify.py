"""Rows verified in different ways share a step: each has the same verdict as among its kind."""

from __future__ import annotations

import numpy as np
import torch

from cbatch.core.scheduler.plan import RowStatus
from cbatch.runtime.cpu.drafters.draft_model import DraftModel
from cbatch.runtime.cpu.executor import TorchExecutor
from cbatch.runtime.cpu.verify import RowsToVerify, Verified, verify
from cbatch.runtime.input_batch import InputBatch
from cbatch.runtime.model.arrays import I64
from tests.runtime.engines import tiny_model
from tests.runtime.test_executor import SIZES, admit, make_plan

ROWS, VOCAB = 240, 11
KINDS = ("greedy", "coupled", "rejects")


def table() -> InputBatch:
    """Return a table whose row i is of kind i % 3, with filters and seeds of its own."""
    made, rows = InputBatch(ROWS, 16, VOCAB), np.arange(ROWS)
    made.keys[:] = np.stack((rows, rows + 1), axis=1)
    for kind, name in enumerate(KINDS):
        getattr(made, name)[:] = rows % 3 == kind
    made.top_k[rows % 4 == 0] = 7
    made.top_p[rows % 5 == 0] = 0.9
    return made


class Step:
    """A step with ragged k in 0..4. In every fourth row drafts were chosen with certainty,
    elsewhere they are likely tokens of q. One row is NaN."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        self.k = rng.integers(0, 5, ROWS)
        self.starts = (self.k + 1).cumsum() - self.k - 1
        logits = rng.normal(size=(int((self.k + 1).sum()), VOCAB)).astype(np.float32) * 1.5
        near = logits + rng.normal(size=logits.shape).astype(np.float32) * 0.5
        self.q = torch.from_numpy(near).softmax(dim=-1)
        self.drafts = np.zeros((ROWS, 4), dtype=np.int64)
        for row, (k, start) in enumerate(zip(self.k, self.starts, strict=True)):
            for depth in range(k):
                law = self.q[start + depth].double().numpy()
                self.drafts[row, depth] = rng.choice(VOCAB, p=law / law.sum())
                if row % 4 == 0:
                    self.q[start + depth] = torch.eye(VOCAB)[self.drafts[row, depth]]
        self.logits = torch.from_numpy(logits)
        self.broken = int(np.flatnonzero((self.k == 3) & (np.arange(ROWS) % 3 == 2))[0])
        self.logits[self.starts[self.broken] + 1] = torch.nan

    def verify(self, rows: I64) -> Verified:
        made, q = table(), []
        for row in rows[made.rejects[rows]].tolist():
            q.append(self.q[self.starts[row] : self.starts[row] + self.k[row]])
        flat = np.concatenate([self.starts[r] + np.arange(self.k[r] + 1) for r in rows.tolist()])
        rows_to_verify = RowsToVerify(
            slots=rows,
            known=20 + rows,
            num_drafted=self.k[rows],
            drafts=self.drafts[rows],
            probs=torch.cat(q) if q else None,
        )
        return verify(self.logits[torch.from_numpy(flat)], rows_to_verify, made)


def test_every_kind_is_verified_as_if_it_were_alone() -> None:
    step = Step()
    done = step.verify(np.arange(ROWS))
    assert np.flatnonzero(done.status).tolist() == [step.broken]
    assert done.status[step.broken] == RowStatus.NON_FINITE
    for kind, name in enumerate(KINDS):
        rows = np.arange(kind, ROWS, 3)
        alone, accepted, k = step.verify(rows), done.num_accepted[rows], step.k[rows]
        assert np.array_equal(alone.num_accepted, accepted), name
        emitted = np.arange(5) <= accepted[:, None]
        assert np.array_equal(alone.tokens[emitted], done.tokens[rows][emitted]), name
        assert (k == 0).any() and (accepted < k).any() and (accepted > 0).any()
        assert name != "rejects" or ((accepted == k) & (k > 1)).any(), name


def test_rejection_rows_report_their_overlap_and_all_others_their_count() -> None:
    """`rejection_sampler.expected_accepted` has a test of its own. A NaN would stay in the fleet's
    prior for ever."""
    step = Step()
    done = step.verify(np.arange(ROWS))
    report, of_rejection = done.expected_accepted, np.arange(ROWS) % 3 == 2
    assert report is not None and report[step.broken] == 0
    assert np.array_equal(report[~of_rejection], done.num_accepted[~of_rejection])
    others = of_rejection & (np.arange(ROWS) != step.broken)
    alone = step.verify(np.flatnonzero(others)).expected_accepted
    assert alone is not None and np.array_equal(report[others], alone)
    tried = np.minimum(done.num_accepted + 1, step.k)[others]
    assert (report[others] <= tried).all() and (report[others] % 1 > 0).any()
    assert step.verify(np.arange(0, ROWS, 3)).expected_accepted is None


def test_reports_of_a_step_are_in_the_order_of_its_rows() -> None:
    """A chunk, a greedy row and one of rejection share a step."""
    executor = TorchExecutor(tiny_model(), drafter=DraftModel(tiny_model(noise=0.08)), **SIZES)
    sampled = {"temperature": 1.0, "verification": "rejection"}
    admitted = (admit(0, [1, 2, 3, 4]), admit(1, [1, 2, 3, 5], **sampled), admit(2, range(3, 12)))
    executor.run(make_plan(0, [(s, 4, 0, 0, True) for s in (0, 1)], admitted=admitted))
    rows = [(2, 6, 0, 0, False), (1, 4, 3, 4, True), (0, 4, 3, 4, True)]
    result = executor.run(make_plan(1, rows))
    assert result.expected_accepted is not None
    chunk, rejection, greedy = result.expected_accepted.tolist()
    assert chunk == 0 and greedy == result.num_accepted[2] and rejection % 1 > 0
