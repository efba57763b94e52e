"""Rows verified in different ways share a step: each has the same verdict as among its kind."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cbatch.core.scheduler.plan import RowStatus
from cbatch.runtime.cpu import verify as verification
from cbatch.runtime.cpu.verify import RowsToVerify, Verified, verify
from cbatch.runtime.input_batch import InputBatch
from cbatch.runtime.model.arrays import I64

ROWS, VOCAB = 240, 11
KINDS = ("greedy", "coupled", "rejects", "in_blocks")


def table() -> InputBatch:
    """Return a table whose row i is of kind i % 4, with filters and seeds of its own."""
    made, rows = InputBatch(ROWS, 16, VOCAB), np.arange(ROWS)
    made.keys[:] = np.stack((rows, rows + 1), axis=1)
    made.greedy[:] = rows % 4 == 0
    made.coupled[:] = rows % 4 == 1
    made.rejects[:] = rows % 4 > 1
    made.in_blocks[:] = rows % 4 == 3
    made.top_k[rows % 3 == 0] = 7
    made.top_p[rows % 5 == 0] = 0.9
    return made


class Step:
    """A step with ragged k in 0..4. In every third row drafts were chosen with certainty, elsewhere
    they are likely tokens of q. One row is NaN."""

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
                if row % 3 == 0:
                    self.q[start + depth] = torch.eye(VOCAB)[self.drafts[row, depth]]
        self.logits = torch.from_numpy(logits)
        self.broken = int(np.flatnonzero((self.k == 3) & (np.arange(ROWS) % 4 == 3))[0])
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
        rows = np.arange(kind, ROWS, 4)
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
    for kind in (2, 3):
        accepted, k = done.num_accepted[kind::4], step.k[kind::4]
        assert (k == 0).any() and ((accepted == k) & (k > 1)).any()
        assert ((accepted < k) & (accepted > 0)).any()


def test_drafts_weighed_with_the_q_of_another_row_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = verification.drafted_probs

    def shifted(rows_to_verify: RowsToVerify, at: I64, made: InputBatch) -> torch.Tensor | None:
        q = real(rows_to_verify, at, made)
        whole = q is None or rows_to_verify.probs is None or len(q) == len(rows_to_verify.probs)
        return q if whole else rows_to_verify.probs[: len(q)]

    monkeypatch.setattr(verification, "drafted_probs", shifted)
    assert "in_blocks" in differing(Step())


def test_a_block_is_not_verified_by_token() -> None:
    """The same rows are verified by token. With one draft verdicts agree to the bit, with more not
    always."""
    step, rows = Step(), np.arange(3, ROWS, 4)
    blocks = step.verify(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "verify_blocks", verification.verify_tokens)
        tokens = step.verify(rows)
    short = step.k[rows] <= 1
    assert np.array_equal(blocks.num_accepted[short], tokens.num_accepted[short])
    assert np.array_equal(blocks.tokens[short, :1], tokens.tokens[short, :1])
    assert not np.array_equal(blocks.num_accepted, tokens.num_accepted)
