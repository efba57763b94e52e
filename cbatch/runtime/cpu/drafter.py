"""What the executor asks of whoever drafts, and what it is told."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cbatch.core.scheduler.plan import NewSequence, ShadowEvidence
from cbatch.runtime.cpu.input_batch import InputBatch
from cbatch.runtime.model.arrays import I64


class DraftRows(NamedTuple):
    """Rows that a drafter works for: each has `num_drafts` >= 1, or a slice to catch up."""

    slots: NDArray[np.integer]
    num_tokens: I64  # known tokens; the first draft stands at this position
    num_drafts: I64
    # With drafts: the most unseen tokens beyond the last known one that the plan paid for.
    # Without: a slice of a long catch-up; exactly that many tokens are to be ingested now.
    catch_up: NDArray[np.integer]


class Proposal(NamedTuple):
    """`tokens[i, :num_drafted[i]]` are the drafts of row i.

    `probs` fp32 [sum of num_drafted over rows that are verified by rejection (`table.rejects`), V],
    row after row: the distributions they were drawn from. None: every draft was chosen with
    certainty.
    """

    tokens: I64  # [R, max k]
    num_drafted: I64  # [R], <= num_drafts
    probs: Tensor | None
    # [R]: the draft's own numbers broke behind these drafts. They count: to drop them for what they
    # led to would move the law of what is emitted. None of its KV does.
    non_finite: NDArray[np.bool_]


class Drafter:
    """Contract of a drafter. All calls come from the executor, in the order of a step. What is
    written here is right for one that keeps nothing."""

    def bind(self, table: InputBatch, num_blocks: int) -> None:
        """Called once, before anything else: the slots and the block pool it shares."""
        self.table = table

    def reset(self) -> None:
        """Forget every slot."""

    def zero_blocks(self, block_ids: NDArray[np.int32]) -> None:
        """Blocks that held non-finite values; zero what it keeps in them."""

    def report_progress(self, counter: NDArray[np.int64]) -> None:
        """`TorchExecutor.report_progress`, for a model of its own."""

    def admit(self, admission: NewSequence) -> None:
        """A sequence entered a slot; the drafter's KV holds its first `draft_kv_len_tokens`."""

    def release(self, slot: int) -> None:
        """The slot is empty: what was kept for it can go."""

    def propose(self, rows: DraftRows) -> Proposal:
        """Draft for `rows`, each as deep as its own `num_drafts`."""
        raise NotImplementedError

    def truncate(self, slots: NDArray[np.integer], kv_len_tokens: I64) -> None:
        """After verification: only the first `kv_len_tokens[i]` positions of a slot are valid."""

    def kv_lens(self, slots: NDArray[np.integer]) -> I64 | None:
        """How many positions of the draft model's KV are valid; None: as many as follow from what
        was planned and drafted."""
        return None

    def score(self, slots: NDArray[np.integer], num_drafted: I64 | None) -> ShadowEvidence | None:
        """After a step in which `slots` drafted so many tokens (None: nobody any): how drafts of
        rows without would have done, by row of `slots`. Not every step, and not every row."""
        return None
