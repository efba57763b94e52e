"""Rows verified in different ways share a step: each has the same verdict as among its kind."""

from __future__ import annotations

import numpy as np
import torch

from cbatch.core.scheduler.plan import RowStatus
from cbatch.runtime.cpu.verify import RowsToVerify, Verified, verify
from cbatch.runtime.input_batch import InputBatch
from cbatch.runtime.model.arrays import I64

ROWS, VOCAB = 240, 11
KINDS = ("greedy", "coupled", "rejects")


def table() -> InputBatch:
    """Return a table whose row i is of kind i % 3, with filters and seeds of its own."""
    made, rows = InputBatch(ROWS, 16, VOCAB), np.arange(ROWS)
    made.keys[:] = np.stack((rows, rows + 1), axis=1)
    for i, kind in enumerate((made.greedy, made.coupled, made.rejects)):
        kind[:] = rows % 3 == i
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


def differing(step: Step) -> list[str]:
    """Return the kinds with a row whose verdict among all differs from that among its own kind."""
    everybody, kinds = step.verify(np.arange(ROWS)), []
    for kind, name in enumerate(KINDS):
        rows = np.arange(kind, ROWS, 3)
        own = step.verify(rows)
        accepted = everybody.num_accepted[rows]
        emitted = np.arange(5) <= accepted[:, None]
        same = (
            np.array_equal(own.num_accepted, accepted)
            and np.array_equal(own.status, everybody.status[rows])
            and np.array_equal(own.tokens[emitted], everybody.tokens[rows][emitted])
        )
        assert everybody.expected_accepted is not None
        reported = accepted if own.expected_accepted is None else own.expected_accepted
        fine = own.status == RowStatus.OK
        same &= np.array_equal(reported[fine], everybody.expected_accepted[rows][fine])
        kinds += [] if same else [name]
    return kinds


def test_every_kind_is_verified_as_if_it_were_alone() -> None:
    step = Step()
    assert differing(step) == []
    done = step.verify(np.arange(ROWS))
    assert np.flatnonzero(done.status).tolist() == [step.broken]
    assert done.status[step.broken] == RowStatus.NON_FINITE
    accepted, k = done.num_accepted[2::3], step.k[2::3]
    assert (k == 0).any() and ((accepted == k) & (k > 1)).any()
    assert ((accepted < k) & (accepted > 0)).any()
