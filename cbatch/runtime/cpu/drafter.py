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


class StepStates(NamedTuple):
    """What the model's layers held at the positions that a step made valid: row i has `lens[i]` of
    them from `starts[i]` on. `hidden` fp32 [sum of lens, len(hidden_layers), hidden_size], row
    after row. No rejected draft is among them; the token behind each position is known."""

    slots: NDArray[np.integer]
    starts: I64
    lens: I64
    hidden: Tensor


class Drafter:
    """Contract of a drafter. All calls come from the executor, in the order of a step: `admit` and
    `release`, `propose`, then, with the model's pass behind it, `read_states`, `truncate` and
    `score`. What is written here is right for one that keeps nothing."""

    # The model's layers whose states it reads (see `Model.keep_hidden`); (): none.
    hidden_layers: tuple[int, ...] = ()

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

    def read_states(self, states: StepStates) -> None:
        """After every step, whoever drafted in it, for who has `hidden_layers`."""

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


class ModelDrafter(Drafter):
    """A drafter with a KV cache of the target's block ids. `kv_len` [slots]: valid positions in it;
    `context_tokens`: as far as its positions go."""

    context_tokens: int
    kv_len: I64

    def reset(self) -> None:
        self.kv_len[:] = 0

    def admit(self, admission: NewSequence) -> None:
        self.kv_len[admission.slot] = admission.draft_kv_len_tokens

    def release(self, slot: int) -> None:
        self.kv_len[slot] = 0

    def truncate(self, slots: NDArray[np.integer], kv_len_tokens: I64) -> None:
        self.kv_len[slots] = np.minimum(self.kv_len[slots], kv_len_tokens)
